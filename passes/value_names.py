"""What the values of a region are called: by what they are in a norm where that can be seen, else
by the function that makes them. Layers that compute the same have the same names, and one kernel.

    mean, var, rstd     of a norm's statistics, whether they are computed or come from outside
    x_hat               what is normalized
    gw                  a gradient times a weight
    dx, dw, db          gradients that leave: of every element, sums of products, and plain sums
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from normpass.passes.region import Op, Output, Region

if TYPE_CHECKING:
    from collections.abc import Iterator

    from normpass.passes.region import Arg


def with_names(region: Region) -> Region:
    """The same region, its inputs and values renamed."""
    stems = _Stems(region).found
    used: dict[str, int] = {}
    names: dict[Arg, str] = {}
    for value in (*(buffer.name for buffer in region.inputs), *region.producer):
        stem = stems.get(value, re.sub(r"_\d+$", "", value))
        count = used[stem] = used.get(stem, -1) + 1
        names[value] = f"{stem}_{count}" if count else stem
    return replace(
        region,
        inputs=tuple(replace(buffer, name=names[buffer.name]) for buffer in region.inputs),
        ops=tuple(
            Op(names[op.name], op.fn, tuple(names.get(arg, arg) for arg in op.args), op.axes)
            for op in region.ops
        ),
        outputs=tuple(Output(output.buffer, names[output.value]) for output in region.outputs),
    )


@dataclass(frozen=True)
class _Stems:
    """Finds what values are, by their names before."""

    region: Region

    @property
    def found(self) -> dict[str, str]:
        """The later ones of these know better what a value is."""
        return {
            value: stem
            for find in (self.gradients, self.statistics, self.normalized)
            for value, stem in find()
        }

    def made(self, value: Arg | None, *fns: str) -> Op | None:
        """How a value is made, if it is by one of these functions."""
        op = self.region.producer.get(value) if isinstance(value, str) else None
        return op if op and op.fn in fns else None

    def is_input(self, value: Arg, stem: str) -> bool:
        """Whether a value comes from outside and has a name of this kind."""
        outside = isinstance(value, str) and value not in self.region.producer
        return outside and re.sub(r"_\d+$", "", str(value)) == stem

    def of_a_row(self, value: Arg, whole: Arg) -> bool:
        """Whether a value stays the same along some axes of another one."""
        varies = self.region.varies
        return (
            isinstance(value, str)
            and isinstance(whole, str)
            and bool(varies[value])
            and varies[value] < varies[whole]
        )

    # ---- gradients that leave

    def gradients(self) -> Iterator[tuple[str, str]]:
        if not self.region.name.endswith("_backward"):
            return
        for op in self.region.ops:
            if op.fn == "mul" and any(self.is_input(arg, "g") for arg in op.args):
                yield from ((op.name, "gw") for arg in op.args if self.is_input(arg, "w"))
        everywhere = {axis.name for axis in self.region.axes}
        for output in self.region.outputs:
            if self.region.varies[output.value] == everywhere:
                yield output.value, "dx"
            elif sum_ := self.made(output.value, "sum"):
                yield output.value, "dw" if self.made(sum_.args[0], "mul") else "db"

    # ---- statistics

    def statistics(self) -> Iterator[tuple[str, str]]:
        for op in self.region.ops:
            if op.fn == "rsqrt":
                yield op.name, "rstd"
            elif op.fn == "sub" and self.is_mean(op):
                yield str(op.args[1]), "mean"
            elif self.averaged(op) and (square := self.made(self.averaged(op), "mul")):
                one, other = square.args
                centred = self.made(one, "sub") if one == other else None
                if centred and self.is_mean(centred):
                    yield op.name, "var"
            if centred := self.centred(op):
                yield from ((str(arg), "rstd") for arg in op.args if arg != centred.name)

    def averaged(self, op: Op | None) -> Arg | None:
        """Of what a value is a sum, divided by a number."""
        if op is None or op.fn not in ("div", "mul"):
            return None
        sum_ = self.made(op.args[0], "sum")
        return sum_.args[0] if sum_ and self.is_number(op.args[1]) else None

    def is_number(self, value: Arg) -> bool:
        return not isinstance(value, str) or self.made(value, "numel") is not None

    def is_mean(self, difference: Op) -> bool:
        """Whether a difference is one to the mean, which is computed or taken off before something
        of a row scales it.
        """
        value, mean = difference.args
        if self.made(mean, "div", "mul"):
            return self.averaged(self.region.producer[str(mean)]) == value
        scaled = any(self.centred(op) == difference for op in self.region.ops)
        return self.is_input(mean, "s") and self.of_a_row(mean, value) and scaled

    def centred(self, op: Op) -> Op | None:
        """The difference to something of a row that a product scales by an input of a row."""
        if op.fn != "mul":
            return None
        for one, other in (op.args, reversed(op.args)):
            difference = self.made(one, "sub")
            if difference and self.is_input(other, "s") and self.of_a_row(other, one):
                value, taken = difference.args
                if self.is_input(taken, "s") and self.of_a_row(taken, value):
                    return difference
        return None

    # ---- what is normalized

    def normalized(self) -> Iterator[tuple[str, str]]:
        for op in self.region.ops:
            if op.fn != "mul":
                continue
            if self.centred(op):
                yield op.name, "x_hat"
            for one, other in (op.args, reversed(op.args)):
                difference = self.made(one, "sub")
                is_centred = bool(difference and self.is_mean(difference))
                if self.made(other, "rsqrt") and (is_centred or self.is_input(one, "x")):
                    yield op.name, "x_hat"
