"""Derivatives of whole graphs by the table alone: FX in, FX out, without autograd's engine.

functional graph    flat_graphs.py: nothing but operators of ATen, none of which writes to what
                    has a derivative
reverse, forward    `_Reverse`, `_Forward`: what a derivative does when it runs: the operators
                    one after another, and the vjp or the jvp of each
traced              flat_graphs.py again: that, as a graph
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from normpass.decomps.activation.torch_internals import OpOverload, tree_leaves
from normpass.decomps.registry import UnknownRule, by_op
from normpass.decomps.table.binding import jvp, vjp
from normpass.decomps.table.flat_graphs import Flat
from normpass.decomps.table.formulas import is_number
from normpass.decomps.table.rows import Row, row_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


def grad_graph(gm: fx.GraphModule, wrt: Sequence[str] | None = None) -> fx.GraphModule:
    """The graph of a graph's results and gradients.

    gm   a graph whose placeholders have their tensors in meta["val"], as make_fx, torch.export and
         AOTAutograd leave them
    wrt  the placeholders, and by their qualified names the parameters and buffers of gm, whose
         gradients are asked for; by default all placeholders of a floating or complex dtype

    Returns a graph that takes the inputs of gm, then a gradient for each output of a floating or
    complex dtype, and returns (outputs of gm, [gradients in the order of wrt]). Where the only
    such output is a number without axes, its gradient is one, and no input. A gradient that is zero
    whatever the inputs is a tensor of zeros.

    From torch 2.14 on make_fx records detach() as a view, which has a derivative, where it is given
    no decomposition_table: an empty one will do. This goes for what this function returns, too.

    Raises ValueError for a name that gm does not have or whose dtype has no gradients, or where a
    placeholder has no "val"; UnknownRule for an operator that no row and no rule knows;
    NotImplementedError for one that has no derivative.
    """
    flat = Flat(gm, _has_gradient)
    wanted = flat.chosen(wrt)
    ends = [k for k, y in enumerate(flat.outputs) if is_number(y)]
    given = [] if [flat.outputs[k].dim() for k in ends] == [0] else ends

    def derivative(*args: Any) -> Any:
        inputs, cotangents = args[: len(flat.inputs)], args[len(flat.inputs) :]
        run = _Reverse(flat.graph, inputs, {flat.inputs.index(name) for name in wanted})
        grads: dict[int, Any] = dict(zip(given, cotangents, strict=True))
        if ends and not given:
            grads = {ends[0]: torch.ones_like(run.outputs[ends[0]])}
        found = run.gradients([grads.get(k) for k in range(len(run.outputs))])
        asked = [(found[k], inputs[k]) for k in (flat.inputs.index(name) for name in wanted)]
        return run.outputs, [torch.zeros_like(x) if g is None else g for g, x in asked]

    return flat.traced(derivative, [(f"grad_{k}", flat.outputs[k]) for k in given])


def jvp_graph(gm: fx.GraphModule, wrt: Sequence[str] | None = None) -> fx.GraphModule:
    """The graph of a graph's results and tangents.

    gm and wrt as for `grad_graph`: the inputs that have tangents. Returns a graph that takes the
    inputs of gm, then a tangent for each of wrt, and returns (outputs of gm, [tangents]): one for
    each output of a floating or complex dtype. Raises what `grad_graph` raises.
    """
    flat = Flat(gm, _has_tangent)
    wanted = flat.chosen(wrt)

    def derivative(*args: Any) -> Any:
        inputs = args[: len(flat.inputs)]
        moved = dict(zip(wanted, args[len(flat.inputs) :], strict=True))
        run = _Forward(flat.graph, inputs, [moved.get(name) for name in flat.inputs])
        pairs = zip(run.outputs, run.tangents, strict=True)
        return run.outputs, [
            torch.zeros_like(y) if t is None else t for y, t in pairs if is_number(y)
        ]

    return flat.traced(derivative, [(f"tangent_{name}", flat.value(name)) for name in wanted])


class _Run:
    """A graph of operators run node by node. outputs: what it returned."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.gm, left = gm, iter(inputs)
        self.values: dict[fx.Node, Any] = {}
        self.outputs: list[Any] = []
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(left)
            elif node.op == "get_attr":
                self.values[node] = getattr(gm, node.target)
            elif node.op == "call_function":
                self.values[node] = node.target(*self.of(node.args), **self.of(node.kwargs))
                self.after(node)
            else:
                self.output = node.args[0]
                self.outputs = self.of(self.output)

    def after(self, node: fx.Node) -> None:
        """What is to be done after an operator."""

    def of(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, self.values.__getitem__)

    def named(self, node: fx.Node) -> dict[str, Any]:
        """The arguments of an operator by name: nodes where there are nodes."""
        names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _has_gradient(op: OpOverload) -> bool:
    return _is_constant(op) or _row(op) is not None


def _has_tangent(op: OpOverload) -> bool:
    """Norms have not: to their tangents the statistics are constants, so that the next derivative
    would be wrong. What they are made of is differentiated instead.
    """
    if op in by_op("autograd") or "_functional" in op._schema.name:
        return False
    row = _row(op)
    return _is_constant(op) or (row is not None and bool(row.tangents or not row.gradients))


def _row(op: OpOverload) -> Row | None:
    try:
        return row_of(op)
    except UnknownRule:
        return None


def _differentiable(node: fx.Node, active: dict[fx.Node, Any] | set[fx.Node]) -> bool:
    """Whether a call has a derivative in what is active. Raises where nothing says which."""
    if not any(n in active for n in node.all_input_nodes):
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        raise NotImplementedError(
            f"expected a graph of operators; found {node.target} in {node.format_node()}"
        )
    if _is_constant(node.target):
        return False
    if any(is_number(v) for v in tree_leaves(node.meta.get("val"))):
        row_of(node.target)  # or says that there is none
        return True
    return False


# Operators without a row that autograd takes for constants, though their results are numbers:
# those that make tensors as large as another, and the end of a derivative. And what
# functionalization leaves of a write to an input: the result is another node.
_CONSTANT = {"detach", "copy_", "new_empty", "new_empty_strided", "new_full", "new_ones"}
_CONSTANT |= {"new_zeros", "empty_like", "full_like", "ones_like", "rand_like", "randn_like"}
_CONSTANT |= {"randint_like", "zeros_like"}


def _is_constant(op: OpOverload) -> bool:
    return op.namespace == "aten" and op._schema.name.removeprefix("aten::") in _CONSTANT


class _Reverse(_Run):
    """active: the nodes that depend on the inputs whose gradients are asked for."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], wanted: set[int]) -> None:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.placeholders = placeholders
        self.active = {node for k, node in enumerate(placeholders) if k in wanted}
        self.constant: dict[fx.Node, tuple[bool, ...]] = {}
        super().__init__(gm, inputs)

    def after(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            whole, index = node.args
            if whole in self.active and not self.constant[whole][index]:  # type: ignore[index]
                self.active.add(node)
        elif _differentiable(node, self.active):
            row, of = row_of(node.target), self.of(self.named(node))  # type: ignore[arg-type]
            self.constant[node] = row.is_constant(row.known(of, self.values[node]))
            if row.is_list:
                self.constant[node] *= len(self.values[node])
            if not all(self.constant[node]):
                self.active.add(node)

    def gradients(self, of_outputs: Sequence[Tensor | None]) -> list[Any]:
        """For each input its gradient or None."""
        self.found: dict[fx.Node, Any] = {}
        for node, grad in zip(self.output, of_outputs, strict=True):
            self._add(node, grad)
        for node in reversed(self.gm.graph.nodes):
            if node.op == "call_function" and node in self.active and node in self.found:
                self._back(node, self.found.pop(node))
        return [self.found.get(node) for node in self.placeholders]

    def _back(self, node: fx.Node, grad: Any) -> None:
        if node.target is operator.getitem:
            whole, index = node.args
            parts = self.found.setdefault(whole, [None] * len(self.values[whole]))  # type: ignore[arg-type,index]
            parts[index] = _sum(parts[index], grad)
            return
        derivative, given = vjp(node.target), self.named(node)  # type: ignore[arg-type]
        needs = [
            name
            for name in derivative.row.differentiable
            if any(n in self.active for n in _nodes(given.get(name)))
        ]
        grads = [grad] if derivative.row.is_list or not isinstance(grad, list) else grad
        found = derivative(grads, self.of(given), self.values[node], needs)
        for name, gradients in found.items():
            listed = isinstance(given[name], list | tuple)
            for n, g in (
                zip(given[name], gradients, strict=True) if listed else [(given[name], gradients)]
            ):
                self._add(n, g)

    def _add(self, node: Any, grad: Any) -> None:
        if grad is not None and node in self.active:
            self.found[node] = _sum(self.found.get(node), grad)


class _Forward(_Run):
    """tangents: for each output its tangent, or None."""

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], tangents: Sequence[Tensor | None]
    ) -> None:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        pairs = zip(placeholders, tangents, strict=True)
        self.moved: dict[fx.Node, Any] = {node: t for node, t in pairs if t is not None}
        super().__init__(gm, inputs)
        self.tangents = [
            self.moved.get(node) if isinstance(node, fx.Node) else None for node in self.output
        ]

    def after(self, node: fx.Node) -> None:
        if not _differentiable(node, self.moved):
            return
        if node.target is operator.getitem:
            whole, index = node.args
            found = self.moved[whole][index]  # type: ignore[index]
        else:
            derivative, given = jvp(node.target), self.named(node)  # type: ignore[arg-type]
            tangents = {
                name: self._moved(given[name])
                for name in derivative.row.differentiable
                if name in given
            }
            found = list(derivative(tangents, self.of(given), self.values[node]))
            found = found if isinstance(self.values[node], tuple | list) else found[0]
            if derivative.row.is_list:
                found = found[0]
        if any(t is not None for t in tree_leaves(found)):
            self.moved[node] = found

    def _moved(self, value: Any) -> Any:
        """The tangents of an argument: None for what is no node, a number say, or has none."""
        if isinstance(value, list | tuple):
            return [self._moved(one) for one in value]
        return self.moved.get(value) if isinstance(value, fx.Node) else None


def _nodes(value: Any) -> Iterator[fx.Node]:
    values = value if isinstance(value, list | tuple) else [value]
    return (v for v in values if isinstance(v, fx.Node))


def _sum(first: Any, second: Any) -> Any:
    if isinstance(first, list):
        return [_sum(a, b) for a, b in zip(first, second, strict=True)]
    return second if first is None else first if second is None else first + second
