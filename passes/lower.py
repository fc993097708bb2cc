"""From graph nodes and their domain to a region: views disappear, and what the nodes compute is
written as the region's ops (writer.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from normpass.passes.axis_names import locally_reduced, name_axes, reduced_axes
from normpass.passes.domain import NotExpressible, extent_of, step_of
from normpass.passes.escapes import outputs_of
from normpass.passes.one_hot import INTEGERS, are_positions, holds_integers, is_iota
from normpass.passes.region import Arg, Axis, Buffer, Output, Region, Stride, verify
from normpass.passes.value_names import with_names
from normpass.passes.vocabulary import (
    ADDITIONS,
    COMPOSED,
    CONSTANTS,
    DTYPES,
    FUNCTIONS,
    IDENTITY,
    QUANTIZED,
    REDUCTIONS,
    ROUNDINGS,
    Kind,
    argument,
    kind_of,
    step_of_sum,
)
from normpass.passes.writer import OpWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from normpass.passes.domain import Domain


@dataclass(frozen=True)
class Lowered:
    """A region and the nodes it stands for.

    inputs, outputs: nodes, in the order of the region's; an input of another dtype is converted.
    sizes: the expressions of its run-time sizes, in order.
    repeated: (node, output) for nodes whose result is that of an output.
    has_one_hot_sum: whether what is zero but at one position was summed without adding up.
    """

    region: Region
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    sizes: tuple[sympy.Expr, ...]
    repeated: tuple[tuple[Node, Node], ...] = ()
    has_one_hot_sum: bool = False

    @property
    def device(self) -> str:
        """Where its tensors lie: "cpu", "cuda", ..."""
        kind: str = self.inputs[0].meta["val"].device.type
        return kind


class NotLowered(Exception):
    """A set of nodes that no region expresses; the message is the reason. node: the one at fault,
    of them or what they read, if it is one.
    """

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.node = node


def lower(name: str, nodes: Sequence[Node], domain: Domain, *, rounded: bool = False) -> Lowered:
    """The region of these nodes, given in the graph's order.

    rounded: whether results in half precision are rounded where they arise, as in eager mode, or
    only where they are stored.

    Raises:
        NotLowered: with the reason.
    """
    return _Lowering(name, nodes, domain, rounded=rounded).run()


class _Lowering:
    def __init__(
        self, name: str, nodes: Sequence[Node], domain: Domain, *, rounded: bool = False
    ) -> None:
        self.name = name
        self.rounded = rounded
        self.nodes = nodes
        self.inside = set(nodes)
        self.domain = domain
        self.values: dict[Node, Arg | tuple[Arg, ...]] = {}
        self.sizes: dict[sympy.Expr, str] = {}
        self.axis_names = name_axes(nodes, domain)
        self.local = locally_reduced(nodes, domain)
        self.writer = OpWriter(domain, self.axis_names)

    def run(self) -> Lowered:
        inputs = self.outside_tensors()
        buffers = [self.input(node) for node in inputs]
        for node in self.nodes:
            self.node(node)
        outputs = outputs_of(self.nodes)
        if not outputs:
            raise NotLowered("nothing outside needs its results")
        outputs, repeated = self.distinct([self.as_read(node) for node in outputs])
        results = [self.output(k, node) for k, node in enumerate(outputs)]
        axes = tuple(
            Axis(name, int(extent) if extent.is_Integer else None)
            for axis, name in self.axis_names.items()
            for extent in [self.domain.extent(axis)]
        )
        dynamic = [
            self.domain.extent(axis)
            for axis in self.axis_names
            if not self.domain.extent(axis).is_Integer
        ]
        ops = self.writer.live(results)
        # What is computed again outside may have been all that read an input.
        read = {arg for op in ops for arg in op.args} | {output.value for output in results}
        inputs = [node for node in inputs if self.values[node] in read]
        region = Region(
            self.name,
            axes,
            tuple(buffer for buffer in buffers if buffer.name in read),
            ops,
            tuple(results),
            tuple(self.sizes.values()),
        )
        verify(region)
        self.check_precision(region)
        sizes = (*dynamic, *self.sizes)
        return Lowered(
            with_names(region),
            tuple(inputs),
            tuple(outputs),
            sizes,
            tuple(repeated),
            self.writer.has_one_hot_sum,
        )

    def as_read(self, node: Node) -> Node:
        """The view through which alone a result is read, if it splits a dimension of the result's:
        only so can the parts lie apart (n and c of an instance norm's [1, n c, h w]).
        """
        seen = node
        while len(seen.users) == 1 and (user := next(iter(seen.users))) in self.inside:
            if kind_of(user) is not Kind.VIEW or not self.has_same_elements(user, seen):
                break
            seen = user
        return seen if self.longest_dim(seen) < self.longest_dim(node) else node

    def longest_dim(self, node: Node) -> int:
        """The most axes that a dimension of a node is made of."""
        return max((len(self.domain.resolve(dim)) for dim in self.domain.dims[node]), default=0)

    def has_same_elements(self, view: Node, source: Node) -> bool:
        axes = (set(self.domain.axes(node)) for node in (view, source))
        return next(axes) == next(axes)

    def distinct(self, outputs: Sequence[Node]) -> tuple[list[Node], list[tuple[Node, Node]]]:
        """Outputs that differ, and those that repeat one (the same value, dtype and layout). What a
        graph returns stays apart: its callers may write into each result.
        """
        first: dict[tuple[Any, ...], Node] = {}
        repeated: list[tuple[Node, Node]] = []
        for node in outputs:
            tensor = node.meta["val"]
            layout = tuple(extent_of(size) for size in (*tensor.shape, *tensor.stride()))
            key = (self.values[node], tensor.dtype, layout)
            returned = any(user.op == "output" for user in node.users)
            if key in first and not returned:
                repeated.append((node, first[key]))
            else:
                first.setdefault((*key, node) if key in first else key, node)
        return list(first.values()), repeated

    def check_precision(self, region: Region) -> None:
        """A region computes in float64 only where one of its tensors is float64."""
        if region.compute_dtype is torch.float64:
            return
        for node in self.nodes:
            value = node.meta["val"]
            tensors = value if isinstance(value, tuple | list) else (value,)
            if node.target not in CONSTANTS and tensors[0].dtype is torch.float64:
                reason = f"{node.name} is float64 among tensors of less precision"
                raise NotLowered(reason, node)

    # ---- tensors

    def outside_tensors(self) -> list[Node]:
        """Tensors from outside, in the order in which they are first used."""
        found: dict[Node, None] = {}
        for node in self.nodes:
            for arg in node.all_input_nodes:
                if arg not in self.inside and isinstance(arg.meta.get("val"), torch.Tensor):
                    found[arg] = None
        return list(found)

    def buffer(self, name: str, node: Node, dtypes: AbstractSet[torch.dtype] = DTYPES) -> Buffer:
        tensor = node.meta["val"]
        if tensor.dtype not in dtypes:
            reason = f"{node.name} is {tensor.dtype}; regions hold floats, truth values and bytes"
            raise NotLowered(reason, node)
        dims = tuple(
            tuple(self.axis_names[axis] for axis in self.domain.resolve(dim))
            for dim in self.domain.dims[node]
        )
        return Buffer(name, tensor.dtype, dims, self.strides(tensor))

    def strides(self, tensor: torch.Tensor) -> tuple[Stride, ...] | None:
        """None for a contiguous tensor; else numbers, or names of sizes known at run time."""
        contiguous: sympy.Expr = sympy.Integer(1)
        same = True
        for size, stride in reversed(list(zip(tensor.shape, tensor.stride(), strict=True))):
            extent = extent_of(size)
            gap = sympy.expand(step_of(stride) - contiguous)
            same = same and (extent == 1 or gap == 0)
            contiguous = contiguous * extent
        return None if same else tuple(self.stride(step_of(s)) for s in tensor.stride())

    def stride(self, step: sympy.Expr) -> Stride:
        """A stride as a number, or as the name of a size that is known at run time."""
        if step.is_Integer:
            return int(step)
        return self.sizes.setdefault(step, f"t{len(self.sizes)}")

    def input(self, node: Node) -> Buffer:
        axes = set(self.domain.axes(node))
        if holds_integers(node):
            stem = "i"
        elif "tangents" in node.name:
            stem = "g"
        elif axes and not axes & self.local:
            stem = "s"  # a statistic: one number a row
        elif axes and axes <= self.local:
            stem = "w"  # a weight
        else:
            stem = "x"
        strides = node.meta["val"].stride()
        varies = (
            axis
            for dim, stride in zip(self.domain.dims[node], strides, strict=True)
            if stride != 0
            for axis in self.domain.resolve(dim)
        )
        name = self.writer.input(stem, varies)
        self.values[node] = name
        buffer = self.buffer(name, node, DTYPES | INTEGERS)
        if are_positions(node):
            self.writer.positions.add(name)
            if is_iota(node):  # half as long to read, for every row
                buffer = replace(buffer, dtype=torch.int32)
        return buffer

    def output(self, k: int, node: Node) -> Output:
        value = self.value(node)
        if not isinstance(value, str):
            raise NotLowered(f"{node.name} is the constant {value}", node)
        buffer = self.buffer(f"y{k}", node)
        op = self.writer.written(value)
        if op and op.fn == QUANTIZED.get(buffer.dtype):  # which it is when it is written
            value = str(op.args[0])
        return Output(buffer, value)

    # ---- values

    def value(self, node: Node) -> Arg:
        """The one value that a node stands for."""
        value = self.values[node]
        assert not isinstance(value, tuple)
        return value

    def arg(self, arg: Any) -> Any:
        if isinstance(arg, Node) and arg not in self.values:
            return self.number(arg)
        return self.values[arg] if isinstance(arg, Node) else arg

    def number(self, node: Node) -> Arg:
        """A number of the graph as a value."""
        try:
            return self.writer.number(self.domain.express(node))
        except NotExpressible as error:
            raise NotLowered(str(error), node) from error

    def node(self, node: Node) -> None:
        kind = kind_of(node)
        if kind is Kind.VIEW:
            self.values[node] = self.values[node.all_input_nodes[0]]
        elif kind is Kind.ITEM:
            source, k = node.args
            results = self.values[source]  # type: ignore[index]
            assert isinstance(results, tuple)
            self.values[node] = results[k]  # type: ignore[index]
        elif kind is Kind.REDUCTION:
            if not step_of_sum(node, self.inside):
                self.values[node] = self.reduction(node)
                self.round(node)
        else:
            self.values[node] = self.pointwise(node)
            self.round(node)

    def round(self, node: Node) -> None:
        """Rounds a node's results to its half precision, where that was asked for."""
        tensors, values = node.meta["val"], self.values[node]
        if not self.rounded:
            return
        if isinstance(values, tuple):
            pairs = zip(values, tensors, strict=True)
            self.values[node] = tuple(self.rounding(value, t.dtype) for value, t in pairs)
        else:
            self.values[node] = self.rounding(values, tensors.dtype)

    def quantized(self, value: Arg, dtype: torch.dtype) -> Arg:
        return self.writer.emit(QUANTIZED[dtype], value) if dtype in QUANTIZED else value

    def rounding(self, value: Arg, dtype: torch.dtype) -> Arg:
        return self.writer.emit(ROUNDINGS[dtype], value) if dtype in ROUNDINGS else value

    def pointwise(self, node: Node) -> Arg:
        dtype = node.meta["val"].dtype
        target = node.target
        if dtype not in DTYPES or (dtype in QUANTIZED and target not in IDENTITY):
            reason = f"{node.name} is {dtype}; regions compute in floats and truth values"
            raise NotLowered(reason, node)
        if target in CONSTANTS:
            return self.constant(node)
        args = [self.arg(arg) for arg in node.args]
        if target in IDENTITY:
            k = IDENTITY[target]
            if dtype is torch.bool and node.args[k].meta["val"].dtype is not torch.bool:  # type: ignore[union-attr]
                return self.writer.emit("ne", args[k], 0.0)
            return self.quantized(args[k], dtype)
        if target in COMPOSED:
            kwargs = {key: self.arg(value) for key, value in node.kwargs.items()}
            value = COMPOSED[target](self.writer, *args, **kwargs)
        elif node.kwargs:
            raise NotLowered(f"{node.target} with {', '.join(node.kwargs)}", node)
        else:
            value = self.writer.emit(FUNCTIONS[target], *args)
        if dtype is torch.bool and target in ADDITIONS:  # one or the other, not how many
            return self.writer.emit("ne", value, 0.0)
        return value

    def constant(self, node: Node) -> Arg:
        value = argument(node, CONSTANTS[node.target], None)
        return self.number(value) if isinstance(value, Node) else value

    def reduction(self, node: Node) -> Arg | tuple[Arg, ...]:
        fn = REDUCTIONS[node.target]
        source, axes = node.all_input_nodes[0], reduced_axes(node, self.domain)
        while source in self.inside and step_of_sum(source, self.inside):
            axes += reduced_axes(source, self.domain)
            source = source.all_input_nodes[0]
        value = self.value(source)
        axes = tuple(axis for axis in self.domain.axes(source) if axis in axes)
        if fn == "mean":
            return self.writer.mean(value, axes)
        if fn in ("var", "var_mean"):
            both = self.writer.variance(value, axes, argument(node, "correction", 1))
            return both if fn == "var_mean" else both[0]
        if fn == "prod" and self.writer.constant(value, axes):
            raise NotLowered("a product over an axis along which nothing changes", node)
        return self.writer.reduce(fn, value, axes)
