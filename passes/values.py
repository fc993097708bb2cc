"""What each node of a region computes, as the region's ops: views disappear, parts and what is put
together of such are values for each piece (pieces.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from normpass.passes.axis_table import NotExpressible
from normpass.passes.pieces import Pieces, Value, values_of
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
    reduced_dims,
    step_of_sum,
)

if TYPE_CHECKING:
    from collections.abc import Container
    from collections.abc import Set as AbstractSet

    from normpass.passes.axis_table import Axes
    from normpass.passes.domain import Domain
    from normpass.passes.region import Arg
    from normpass.passes.writer import OpWriter


class NotLowered(Exception):
    """A set of nodes that no region expresses; the message is the reason. node: the one at fault,
    of them or what they read, if it is one.
    """

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.node = node


class Values:
    """What nodes stand for: those that a region reads, and those that it computes, one after the
    other.

    inside: the region's nodes. rounded: whether results in half precision are rounded where they
    arise.
    """

    def __init__(
        self, domain: Domain, writer: OpWriter, inside: Container[Node], *, rounded: bool
    ) -> None:
        self.domain = domain
        self.writer = writer
        self.inside = inside
        self.rounded = rounded
        self.of: dict[Node, Value | tuple[Value, ...]] = {}

    def value(self, node: Node) -> Arg:
        """The one value that a node stands for."""
        value = self.of[node]
        assert not isinstance(value, tuple | Pieces)
        return value

    def arg(self, arg: Any, piece: int) -> Any:
        """An argument, or a piece of it where it has some."""
        if not isinstance(arg, Node):
            return arg
        value = self.of[arg] if arg in self.of else self.number(arg)
        return value.values[piece] if isinstance(value, Pieces) else value

    def number(self, node: Node) -> Arg:
        """A number of the graph as a value."""
        try:
            return self.writer.number(self.domain.express(node))
        except NotExpressible as error:
            raise NotLowered(str(error), node) from error

    def add(self, node: Node) -> None:
        """Writes what a node computes."""
        kind = kind_of(node)
        if kind is Kind.VIEW:
            self.of[node] = self.of[node.all_input_nodes[0]]
        elif kind is Kind.ITEM:
            source, k = node.args
            results = self.of[source]  # type: ignore[index]
            assert isinstance(results, tuple)
            self.of[node] = results[k]  # type: ignore[index]
        elif kind is Kind.REDUCTION:
            if not step_of_sum(node, self.inside):
                self.of[node] = self.reduction(node)
                self.round(node)
        elif kind is Kind.PART:
            self.of[node] = self.part(node)
        elif kind is Kind.JOIN:
            self.of[node] = self.join(node)
        else:
            self.of[node] = self.pointwise(node)
            self.round(node)

    def round(self, node: Node) -> None:
        """Rounds a node's results to its half precision, where that was asked for."""
        tensors, values = node.meta["val"], self.of[node]
        if not self.rounded:
            return
        if isinstance(values, tuple):
            pairs = zip(values, tensors, strict=True)
            self.of[node] = tuple(self.rounding(value, t.dtype) for value, t in pairs)
        else:
            self.of[node] = self.rounding(values, tensors.dtype)

    def quantized(self, value: Arg, dtype: torch.dtype) -> Arg:
        return self.writer.emit(QUANTIZED[dtype], value) if dtype in QUANTIZED else value

    def rounding(self, value: Value, dtype: torch.dtype) -> Value:
        if isinstance(value, Pieces):
            return Pieces(tuple(self.rounding(each, dtype) for each in value.values))  # type: ignore[misc]
        return self.writer.emit(ROUNDINGS[dtype], value) if dtype in ROUNDINGS else value

    def part(self, node: Node) -> Value:
        source = node.all_input_nodes[0]
        value = self.of[source]
        if not isinstance(value, Pieces):
            return value  # type: ignore[return-value]
        cut = self.domain.cut_out(source, node)
        part = value.values[cut.first : cut.last]
        return part[0] if len(part) == 1 else Pieces(part)

    def join(self, node: Node) -> Value:
        """The values of tensors side by side, or of one in place of a part of another."""
        if len({x.meta["val"].dtype is torch.bool for x in node.all_input_nodes}) > 1:
            raise NotLowered(f"{node.name} joins truth values with numbers", node)
        _, _, sides = self.domain.sides(node)
        found: list[Arg] = []
        for side in sides:
            found += values_of(self.of[side.node], len(side.pieces))[side.some]  # type: ignore[arg-type]
        return Pieces(tuple(found))

    def pointwise(self, node: Node) -> Value:
        values = [self.of[arg] for arg in node.all_input_nodes if arg in self.of]
        pieces = next((len(each.values) for each in values if isinstance(each, Pieces)), None)
        if pieces is None:
            return self.pointwise_piece(node, 0)
        return Pieces(tuple(self.pointwise_piece(node, k) for k in range(pieces)))

    def pointwise_piece(self, node: Node, piece: int) -> Arg:
        dtype = node.meta["val"].dtype
        target = node.target
        if dtype not in DTYPES or (dtype in QUANTIZED and target not in IDENTITY):
            reason = f"{node.name} is {dtype}; regions compute in floats and truth values"
            raise NotLowered(reason, node)
        if target in CONSTANTS:
            return self.constant(node)
        args = [self.arg(arg, piece) for arg in node.args]
        if target in IDENTITY:
            k = IDENTITY[target]
            if dtype is torch.bool and node.args[k].meta["val"].dtype is not torch.bool:  # type: ignore[union-attr]
                return self.writer.emit("ne", args[k], 0.0)
            return self.quantized(args[k], dtype)
        if target in COMPOSED:
            kwargs = {key: self.arg(value, piece) for key, value in node.kwargs.items()}
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

    def reduction(self, node: Node) -> Value | tuple[Value, ...]:
        source, dims = node.all_input_nodes[0], reduced_dims(node)[0]
        axes = self.axes_in(source, dims)
        while source in self.inside and step_of_sum(source, self.inside):
            dims, source = reduced_dims(source)[0], source.all_input_nodes[0]
            axes += self.axes_in(source, dims)
        axes = tuple(axis for axis in self.domain.whole_axes(source) if axis in axes)
        value = self.of[source]
        if isinstance(value, Pieces) and not any(map(self.domain.is_joined, axes)):
            each = [self.reduced(node, piece, axes) for piece in value.values]
            if isinstance(each[0], tuple):
                return tuple(map(Pieces, zip(*each, strict=True)))
            return Pieces(tuple(each))  # type: ignore[arg-type]
        return self.reduced(node, value, axes)  # type: ignore[arg-type]

    def axes_in(self, node: Node, dims: AbstractSet[int]) -> Axes:
        """The axes in some of a node's dimensions."""
        every = enumerate(self.domain.dims[node])
        return tuple(axis for k, dim in every if k in dims for axis in self.domain.resolve(dim))

    def reduced(self, node: Node, value: Value, axes: Axes) -> Arg | tuple[Arg, ...]:
        fn = REDUCTIONS[node.target]
        if fn == "mean":
            return self.writer.mean(value, axes)
        if fn in ("var", "var_mean"):
            both = self.writer.variance(value, axes, argument(node, "correction", 1))
            return both if fn == "var_mean" else both[0]
        if fn == "prod" and self.writer.is_constant(value, axes):
            raise NotLowered("a product over an axis along which nothing changes", node)
        return self.writer.reduce(fn, value, axes)
