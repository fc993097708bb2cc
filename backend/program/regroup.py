"""Lanes for groups that are short pieces of memory: group norm's channels in channels_last.

A group's statistics reduce pixels p and the few channels c of a group q, which are neighbours in
memory for all groups: x[r p (q c)]. Lanes along c would be mostly idle. Here they run along
k = (q c), all channels of a pixel, and only what is left after the pixels is looked at by group:

    far   = sum[p](x)               r k
    near  = regroup[q c k](far)     r q c     the same numbers, by other axes
    s     = sum[c](near)            r q

The other way round, what a group knows goes to each of its channels, once for all pixels:

    each  = expand[c](mean)         r q c
    lanes = regroup[q c k](each)    r k

`expand` and `regroup` exist in plans only. What is regrouped stands in an array.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import sympy

from normpass.backend.program.axes import local_axes
from normpass.backend.program.pointwise import truth_values
from normpass.backend.program.tree import Access, LoopAxis
from normpass.passes.region import EXPAND, REGROUP, Op, Output, Region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from normpass.passes.region import Arg, Buffer

# Pieces of this many elements are lanes enough.
SHORT_PIECE = 256
# The arrays of all channels are to stay in a core's first-level cache.
MOST_LANES = 4096


@dataclass(frozen=True)
class Regrouped:
    """A region whose lanes run along `vector`, and its axes: those of whole tensors, and after them
    group and member, over which nothing but statistics is looked at.
    """

    region: Region
    axes: tuple[LoopAxis, ...]
    small: tuple[LoopAxis, LoopAxis]
    accesses: dict[str, Access]
    vector: str


def regroup(
    region: Region, axes: Sequence[LoopAxis], accesses: Mapping[str, Access], vector: str
) -> Regrouped | None:
    """A coalesced region with its lanes along groups and members together; None if its pieces are
    long enough, its tensors are not laid out so, groups are looked at pixel by pixel, or two values
    would have one name.
    """
    (member,) = (axis for axis in axes if axis.name == vector)
    local = local_axes(region)
    if member.hint >= SHORT_PIECE or vector not in local or len(local) == 1:
        return None
    for group in axes:
        fits = group.name not in local and group.hint * member.hint <= MOST_LANES
        if fits and _is_group_of(group, member, region, accesses):
            break
    else:
        return None
    lanes = LoopAxis(
        f"{group.name}_{member.name}",
        group.extent * member.extent,
        group.parts + member.parts,
        _product(group.most, member.most),
        group.multiple * member.multiple,
    )
    rewriting = _Rewriting(region, group.name, member.name, lanes.name)
    rewritten = rewriting.run()
    if truth_values(region) & rewriting.through_arrays:
        return None  # arrays hold numbers
    names = [*(buffer.name for buffer in region.inputs), *(op.name for op in rewritten.ops)]
    if len(set(names)) < len(names):
        return None  # a value has a name that a part of a sum would get
    looked_at = [str(op.args[0]) for op in rewritten.ops if op.fn == REGROUP]
    if any(rewritten.varies[value] & local - {vector} for value in looked_at):
        return None  # pixel by pixel there is nothing to gain
    large = tuple(axis for axis in axes if axis not in (group, member))
    return Regrouped(
        rewritten,
        (*large, lanes),
        (group, member),
        {name: rewriting.access(access) for name, access in accesses.items()},
        lanes.name,
    )


def _product(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other


def _is_group_of(
    group: LoopAxis, member: LoopAxis, region: Region, accesses: Mapping[str, Access]
) -> bool:
    """Whether members lie side by side, group after group, and no reduction takes groups alone."""
    q, c = group.name, member.name
    if any(c in axes and q not in axes for axes in region.varies.values()):
        return False
    for access in accesses.values():
        steps = access.strides
        if c in steps and (
            q not in steps or sympy.expand(steps[q] - steps[c] * member.extent) != 0
        ):
            return False
    return not any(
        op.is_reduction
        and q in op.axes
        and c not in op.axes
        and c in region.varies[str(op.args[0])]
        for op in region.ops
    )


@dataclass
class _Rewriting:
    """Writes a region over lanes instead of group and member.

    through_arrays: the region's values that are looked at by other axes.
    """

    region: Region
    group: str
    member: str
    lanes: str
    ops: list[Op] = field(default_factory=list)
    spread: dict[str, str] = field(default_factory=dict)
    through_arrays: set[str] = field(default_factory=set)

    def run(self) -> Region:
        for op in self.region.ops:
            if op.is_reduction:
                self.reduction(op)
            else:
                wide = self.member in self.region.varies[op.name]
                args = tuple(self.on_lanes(arg) if wide else arg for arg in op.args)
                self.ops.append(replace(op, args=args))
        outputs = tuple(
            Output(
                self.buffer(output.buffer),
                str(self.on_lanes(output.value))
                if self.member in output.buffer.axes
                else output.value,
            )
            for output in self.region.outputs
        )
        inputs = tuple(map(self.buffer, self.region.inputs))
        return replace(self.region, inputs=inputs, ops=tuple(self.ops), outputs=outputs)

    def reduction(self, op: Op) -> None:
        """A sum over a group: over everything else first, then over its members."""
        value = str(op.args[0])
        if self.member not in self.region.varies[value] or self.member not in op.axes:
            self.ops.append(op)
        elif self.group in op.axes:
            rest = (axis for axis in op.axes if axis not in (self.group, self.member))
            self.ops.append(replace(op, axes=(*rest, self.lanes)))
        else:
            far = tuple(axis for axis in op.axes if axis != self.member)
            if far:
                self.ops.append(Op(f"{op.name}_{'_'.join(far)}", op.fn, op.args, far))
                value = self.ops[-1].name
            else:
                self.through_arrays.add(value)
                if value not in self.region.producer:  # only what is computed is kept in an array
                    self.ops.append(Op(f"{op.name}_{self.lanes}", EXPAND, (value,)))
                    value = self.ops[-1].name
            self.ops.append(self.regrouped(f"{op.name}_{self.member}", value))
            self.ops.append(Op(op.name, op.fn, (self.ops[-1].name,), (self.member,)))

    def on_lanes(self, arg: Arg) -> Arg:
        """A value as all channels see it."""
        if not isinstance(arg, str):
            return arg
        varies = self.region.varies[arg]
        if self.group not in varies or self.member in varies:
            return arg
        if arg not in self.spread:
            self.through_arrays.add(arg)
            each = Op(f"{arg}_each", EXPAND, (arg,), (self.member,))
            self.ops += [each, self.regrouped(f"{arg}_{self.lanes}", each.name)]
            self.spread[arg] = self.ops[-1].name
        return self.spread[arg]

    def regrouped(self, name: str, value: str) -> Op:
        return Op(name, REGROUP, (value,), (self.group, self.member, self.lanes))

    def buffer(self, buffer: Buffer) -> Buffer:
        if self.member not in buffer.axes:
            return buffer
        rest = tuple(dim for dim in buffer.dims if dim not in ((self.group,), (self.member,)))
        return replace(buffer, dims=(*rest, (self.lanes,)))

    def access(self, access: Access) -> Access:
        steps = dict(access.strides)
        if self.member in steps:
            steps[self.lanes] = steps.pop(self.member)
            del steps[self.group]
        return replace(access, strides=steps)
