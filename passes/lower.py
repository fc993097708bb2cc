"""From graph nodes and their domain to a region: views disappear, values get names, equal ones are
written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx import Node

from normpass.passes.domain import NotExpressible, extent_of, step_of
from normpass.passes.numbers import Call, Count
from normpass.passes.region import (
    Arg,
    Axis,
    Buffer,
    Op,
    Output,
    Region,
    Stride,
    format_arg,
    product,
    verify,
)
from normpass.passes.vocabulary import (
    ADDITIONS,
    COMPOSED,
    CONSTANTS,
    DTYPES,
    FUNCTIONS,
    IDENTITY,
    REDUCTIONS,
    Kind,
    argument,
    kind_of,
    reduced_dims,
    step_of_sum,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.passes.domain import Domain
    from normpass.passes.numbers import Number

LOCAL_NAMES = ("c", "d", "e", "f")  # axes that inner reductions reduce
PARALLEL_NAMES = ("r", "q", "n", "m")


@dataclass(frozen=True)
class Lowered:
    """A region and the nodes it stands for.

    inputs, outputs: nodes, in the order of the region's.
    sizes: the expressions of its run-time sizes, in order.
    repeated: (node, output) for nodes whose result is that of an output.
    """

    region: Region
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    sizes: tuple[sympy.Expr, ...]
    repeated: tuple[tuple[Node, Node], ...] = ()


class NotLowered(Exception):
    """A set of nodes that no region expresses; the message is the reason."""


def lower(name: str, nodes: Sequence[Node], domain: Domain) -> Lowered:
    """The region of these nodes, given in the graph's order.

    Raises:
        NotLowered: with the reason.
    """
    return _Lowering(name, nodes, domain).run()


def outputs_of(nodes: Sequence[Node]) -> list[Node]:
    """The nodes whose results are needed outside; a view's result is its source's, looked at
    outside.
    """
    inside = set(nodes)
    return [
        node
        for node in nodes
        if kind_of(node) is not Kind.VIEW
        and isinstance(node.meta["val"], torch.Tensor)
        and any(
            isinstance(arg.meta.get("val"), torch.Tensor | tuple) for arg in node.all_input_nodes
        )
        and _escapes(node, inside)
    ]


def _escapes(node: Node, inside: set[Node]) -> bool:
    """Whether somebody outside reads a node, directly or through a view (views are free to repeat
    outside).
    """
    return any(
        user not in inside or (kind_of(user) is Kind.VIEW and _escapes(user, inside))
        for user in node.users
    )


class _Lowering:
    def __init__(self, name: str, nodes: Sequence[Node], domain: Domain) -> None:
        self.name = name
        self.nodes = nodes
        self.inside = set(nodes)
        self.domain = domain
        self.ops: dict[tuple[Any, ...], Op] = {}
        self.values: dict[Node, Arg | tuple[Arg, ...]] = {}
        self.used: dict[str, int] = {}
        self.varies: dict[str, frozenset[int]] = {}
        self.sizes: dict[sympy.Expr, str] = {}
        self.axis_names: dict[int, str] = {}

    def run(self) -> Lowered:
        inputs = self.outside_tensors()
        self.name_axes()
        buffers = [self.input(node) for node in inputs]
        for node in self.nodes:
            self.node(node)
        outputs = outputs_of(self.nodes)
        if not outputs:
            raise NotLowered("nothing outside needs its results")
        outputs, repeated = self.distinct(outputs)
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
        region = Region(
            self.name,
            axes,
            tuple(buffers),
            self.live_ops(results),
            tuple(results),
            tuple(self.sizes.values()),
        )
        verify(region)
        self.check_precision(region)
        sizes = (*dynamic, *self.sizes)
        return Lowered(region, tuple(inputs), tuple(outputs), sizes, tuple(repeated))

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
                raise NotLowered(f"{node.name} is float64 among tensors of less precision")

    # ---- tensors

    def outside_tensors(self) -> list[Node]:
        """Tensors from outside, in the order in which they are first used."""
        found: dict[Node, None] = {}
        for node in self.nodes:
            for arg in node.all_input_nodes:
                if arg not in self.inside and isinstance(arg.meta.get("val"), torch.Tensor):
                    found[arg] = None
        return list(found)

    def name_axes(self) -> None:
        """Single letters: local axes, parallel axes, in the order of the largest tensor."""
        largest = max(self.nodes, key=lambda node: len(self.domain.axes(node)))
        order = list(self.domain.axes(largest))
        for node in self.domain.dims:
            order += [axis for axis in self.domain.axes(node) if axis not in order]
        needed = {
            axis
            for node in (*self.nodes, *(a for n in self.nodes for a in n.all_input_nodes))
            if node in self.domain.dims
            for axis in self.domain.axes(node)
        }
        reduced_inside = self.locally_reduced()
        pools = {True: iter(LOCAL_NAMES), False: iter(PARALLEL_NAMES)}
        for axis in (axis for axis in order if axis in needed):
            name = next(pools[axis in reduced_inside], None)
            self.axis_names[axis] = name or f"k{len(self.axis_names)}"

    def locally_reduced(self) -> set[int]:
        """Axes of reductions whose result is broadcast over them again."""
        behind: dict[Node, set[int]] = {}
        local: set[int] = set()
        for node in self.nodes:
            reached = set().union(*(behind.get(arg, set()) for arg in node.all_input_nodes))
            if kind_of(node) is Kind.REDUCTION:
                reached = reached | set(self.reduced_axes(node))
            else:
                local |= reached & set(self.domain.axes(node))
            behind[node] = reached
        return local

    def reduced_axes(self, node: Node) -> tuple[int, ...]:
        source = node.all_input_nodes[0]
        dims, _ = reduced_dims(node)
        return tuple(
            axis
            for k, dim in enumerate(self.domain.dims[source])
            if k in dims
            for axis in self.domain.resolve(dim)
        )

    def buffer(self, name: str, node: Node) -> Buffer:
        tensor = node.meta["val"]
        if tensor.dtype not in DTYPES:
            raise NotLowered(f"{node.name} is {tensor.dtype}; regions hold floats and truth values")
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
        local = {axis for axis, name in self.axis_names.items() if name in LOCAL_NAMES}
        if "tangents" in node.name:
            stem = "g"
        elif axes and not axes & local:
            stem = "s"  # a statistic: one number a row
        elif axes and axes <= local:
            stem = "w"  # a weight
        else:
            stem = "x"
        buffer = self.buffer(self.fresh(stem), node)
        self.values[node] = buffer.name
        strides = node.meta["val"].stride()
        self.varies[buffer.name] = frozenset(
            axis
            for dim, stride in zip(self.domain.dims[node], strides, strict=True)
            if stride != 0
            for axis in self.domain.resolve(dim)
        )
        return buffer

    def output(self, k: int, node: Node) -> Output:
        value = self.value(node)
        if not isinstance(value, str):
            raise NotLowered(f"{node.name} is the constant {value}")
        return Output(self.buffer(f"y{k}", node), value)

    # ---- values

    def value(self, node: Node) -> Arg:
        """The one value that a node stands for."""
        value = self.values[node]
        assert not isinstance(value, tuple)
        return value

    def fresh(self, stem: str) -> str:
        count = self.used.get(stem, 0)
        self.used[stem] = count + 1
        return f"{stem}_{count}" if count else stem

    def emit(self, fn: str, *args: Arg, axes: tuple[int, ...] = ()) -> Arg:
        """A value; the one there is, where it was written before."""
        if fn == "mul" and 1.0 in args:
            return next((arg for arg in args if arg != 1.0), 1.0)
        args = tuple(a if isinstance(a, str | bool) else float(a) for a in args)
        key = (fn, *map(format_arg, args), axes)  # as text, where -0.0 is not 0.0
        if key not in self.ops:
            name = self.fresh(fn)
            self.ops[key] = Op(name, fn, args, tuple(self.axis_names[axis] for axis in axes))
            varies = frozenset().union(*(self.varies[a] for a in args if isinstance(a, str)))
            self.varies[name] = varies - set(axes)
        return self.ops[key].name

    def live_ops(self, outputs: Sequence[Output]) -> tuple[Op, ...]:
        """The ops that outputs need (a variance nobody asks for is not computed)."""
        wanted = {output.value for output in outputs}
        live: list[Op] = []
        for op in reversed(list(self.ops.values())):
            if op.name in wanted:
                wanted.update(arg for arg in op.args if isinstance(arg, str))
                live.append(op)
        return tuple(reversed(live))

    def arg(self, arg: Any) -> Any:
        if isinstance(arg, Node) and arg not in self.values:
            return self.number(arg)
        return self.values[arg] if isinstance(arg, Node) else arg

    def number(self, node: Node) -> Arg:
        """A number of the graph as a value."""
        try:
            return self.write(self.domain.express(node))
        except NotExpressible as error:
            raise NotLowered(str(error)) from error

    def write(self, number: Number) -> Arg:
        if isinstance(number, Count):
            return self.count(number.axes)
        if isinstance(number, Call):
            return self.emit(number.fn, *map(self.write, number.args))
        return number

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
        else:
            self.values[node] = self.pointwise(node)

    def pointwise(self, node: Node) -> Arg:
        dtype = node.meta["val"].dtype
        if dtype not in DTYPES:
            raise NotLowered(f"{node.name} is {dtype}; regions hold floats and truth values")
        target = node.target
        if target in CONSTANTS:
            return self.constant(node)
        args = [self.arg(arg) for arg in node.args]
        if target in IDENTITY:
            k = IDENTITY[target]
            if dtype is torch.bool and node.args[k].meta["val"].dtype is not torch.bool:  # type: ignore[union-attr]
                return self.emit("ne", args[k], 0.0)
            return args[k]
        if target in COMPOSED:
            kwargs = {key: self.arg(value) for key, value in node.kwargs.items()}
            value = COMPOSED[target](self, *args, **kwargs)
        elif node.kwargs:
            raise NotLowered(f"{node.target} with {', '.join(node.kwargs)}")
        else:
            value = self.emit(FUNCTIONS[target], *args)
        if dtype is torch.bool and target in ADDITIONS:  # one or the other, not how many
            return self.emit("ne", value, 0.0)
        return value

    def constant(self, node: Node) -> Arg:
        value = argument(node, CONSTANTS[node.target], None)
        return self.number(value) if isinstance(value, Node) else value

    def reduction(self, node: Node) -> Arg | tuple[Arg, ...]:
        fn = REDUCTIONS[node.target]
        source, axes = node.all_input_nodes[0], self.reduced_axes(node)
        while source in self.inside and step_of_sum(source, self.inside):
            axes += self.reduced_axes(source)
            source = source.all_input_nodes[0]
        value = self.value(source)
        axes = tuple(axis for axis in self.domain.axes(source) if axis in axes)
        if fn == "mean":
            return self.mean(value, axes)
        if fn in ("var", "var_mean"):
            mean = self.mean(value, axes)
            centred = self.emit("sub", value, mean)
            total = self.reduce("sum", self.emit("mul", centred, centred), axes)
            correction = argument(node, "correction", 1)
            variance = self.emit("div", total, self.degrees(axes, correction))
            return (variance, mean) if fn == "var_mean" else variance
        return self.reduce(fn, value, axes)

    def reduce(self, fn: str, value: Arg, axes: tuple[int, ...]) -> Arg:
        """A reduction; where a value does not change along an axis, what that comes to."""
        varies = self.varies[value] if isinstance(value, str) else frozenset()
        constant = tuple(axis for axis in axes if axis not in varies)
        changing = tuple(axis for axis in axes if axis in varies)
        if constant and fn == "prod":
            raise NotLowered("a product over an axis along which nothing changes")
        if changing:
            value = self.emit(fn, value, axes=changing)
        if constant and fn == "sum":
            value = self.emit("mul", value, self.count(constant))
        return value

    def count(self, axes: tuple[int, ...]) -> Arg:
        """The number of elements that axes span: a number, or a value where it is known only at run
        time.
        """
        total = self.count_expression(axes)
        return float(total) if total.is_Integer else self.emit("numel", axes=axes)

    def count_expression(self, axes: tuple[int, ...]) -> sympy.Expr:
        return sympy.sympify(product(self.domain.extent(axis) for axis in axes))

    def mean(self, value: Arg, axes: tuple[int, ...]) -> Arg:
        return self.emit("div", self.reduce("sum", value, axes), self.count(axes))

    def degrees(self, axes: tuple[int, ...], correction: float | None) -> Arg:
        """Degrees of freedom of a variance; never negative."""
        count = self.count(axes)
        correction = 1 if correction is None else correction
        if correction == 0:
            return count
        if isinstance(count, float):
            return max(count - correction, 0.0)
        return self.emit("maximum", self.emit("sub", count, float(correction)), 0.0)
