"""Derivatives of whole graphs by the table alone: FX in, FX out, without autograd's engine.

    functional graph    `_flat`: nothing but operators of ATen, none of which writes to what has a
                        derivative
    reverse, forward    `_Reverse`, `_Forward`: what a derivative does when it runs: the operators
                        one after another, and the vjp or the jvp of each
    traced              `_traced`: that, as a graph
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from normpass.decomps.registry import UnknownRule
from normpass.decomps.table.binding import Row, jvp, row_of, vjp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor


def grad_graph(gm: fx.GraphModule, wrt: Sequence[str] | None = None) -> fx.GraphModule:
    """The graph of a graph's results and gradients.

    gm   a graph whose placeholders have their tensors in meta["val"], as make_fx, torch.export and
         AOTAutograd leave them
    wrt  the placeholders, and by their qualified names the parameters and buffers of gm, whose
         gradients are asked for; all placeholders of a floating or complex dtype, if it is not given

    Returns a graph that takes the inputs of gm, then a gradient for each output of a floating or
    complex dtype, and returns (outputs of gm, [gradients in the order of wrt]). Where the only
    such output is a number without axes, its gradient is one, and no input. A gradient that is zero
    whatever the inputs is a tensor of zeros.

    Raises ValueError for a name that gm does not have or whose dtype has no gradients, or where a
    placeholder has no "val"; UnknownRule for an operator that no row and no rule knows;
    NotImplementedError for one that has no derivative.
    """
    flat = _Flat(gm, _has_gradient)
    wanted = flat.chosen(wrt)
    ends = [k for k, y in enumerate(flat.outputs) if _is_number(y)]
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
    flat = _Flat(gm, _has_tangent)
    wanted = flat.chosen(wrt)

    def derivative(*args: Any) -> Any:
        inputs = args[: len(flat.inputs)]
        moved = dict(zip(wanted, args[len(flat.inputs) :], strict=True))
        run = _Forward(flat.graph, inputs, [moved.get(name) for name in flat.inputs])
        pairs = zip(run.outputs, run.tangents, strict=True)
        return run.outputs, [
            torch.zeros_like(y) if t is None else t for y, t in pairs if _is_number(y)
        ]

    return flat.traced(derivative, [(f"tangent_{name}", flat.value(name)) for name in wanted])


# --- graphs -------------------------------------------------------------------------------------


class _Flat:
    """A graph made of operators alone, its parameters and buffers among its inputs.

    inputs   their names: placeholders first, then parameters and buffers of gm
    values   fake tensors for them, and symbols
    outputs  fake tensors of the results, in the order of the leaves of what gm returns
    """

    def __init__(self, gm: fx.GraphModule, has_derivative: Callable[[OpOverload], bool]) -> None:
        self.gm = gm
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.held = dict([*gm.named_parameters(), *gm.named_buffers()])
        self.inputs = [*(node.name for node in placeholders), *self.held]
        self.count = len(placeholders)
        self.mode = _mode(placeholders)
        self.values = [self._faked(node) for node in placeholders]
        self.values += [self.mode.from_tensor(t.detach()) for t in self.held.values()]

        def run(*args: Any) -> Any:
            held = {f"gm.{n}": t for n, t in zip(self.held, args[self.count :], strict=True)}
            return tree_leaves(torch.func.functional_call(_Nodes(gm), held, args[: self.count]))

        self.graph = self._made(functionalize(run), self.values)
        while table := _decompositions(self.graph, has_derivative):
            self.graph = self._made(fx.Interpreter(self.graph).run, self.values, table)
        (output,) = (node for node in self.graph.graph.nodes if node.op == "output")
        self.outputs = [v.meta["val"] if isinstance(v, fx.Node) else v for v in output.args[0]]

    def _faked(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if value is None:
            raise ValueError(
                f'expected placeholder {node.name} to have its tensor in meta["val"], as make_fx '
                "and torch.export leave it; found none"
            )
        if not isinstance(value, torch.Tensor) or getattr(value, "fake_mode", None) is self.mode:
            return value
        with self.mode:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )

    def _made(
        self,
        function: Callable[..., Any],
        values: Sequence[Any],
        table: Mapping[OpOverload, Callable[..., Any]] | None = None,
    ) -> fx.GraphModule:
        tracing = "symbolic" if self.mode.shape_env is not None else "fake"
        trace = make_fx(function, table, tracing_mode=tracing, _allow_non_fake_inputs=True)
        with self.mode, torch.no_grad():
            return trace(*values)

    def value(self, name: str) -> Any:
        return self.values[self.inputs.index(name)]

    def chosen(self, wrt: Sequence[str] | None) -> list[str]:
        """The inputs asked for, checked."""
        if wrt is None:
            names = self.inputs[: self.count]
            return [name for name in names if _is_number(self.value(name))]
        if unknown := [name for name in wrt if name not in self.inputs]:
            raise ValueError(
                f"expected wrt among {', '.join(self.inputs)}; found {', '.join(unknown)}"
            )
        if others := [name for name in wrt if not _is_number(self.value(name))]:
            raise ValueError(
                f"expected wrt of a floating or complex dtype; found {', '.join(others)}"
            )
        return list(wrt)

    def traced(
        self, function: Callable[..., Any], more: Sequence[tuple[str, Tensor]]
    ) -> fx.GraphModule:
        """The graph of a function of the inputs and of more tensors, each like another; parameters
        and buffers are attributes again.
        """
        with self.mode:
            likes = [torch.empty_like(value) for _, value in more]
        found = self._made(function, [*self.values, *likes])
        placeholders = [node for node in found.graph.nodes if node.op == "placeholder"]
        names = [*self.inputs, *(name for name, _ in more)]
        root: dict[str, Any] = {
            node.target: getattr(found, node.target)
            for node in found.graph.nodes
            if node.op == "get_attr"
        }
        for name, node in zip(names, placeholders, strict=True):
            if name in self.held:
                with found.graph.inserting_before(node):
                    held = found.graph.get_attr(name)
                held.meta = node.meta
                node.replace_all_uses_with(held)
                found.graph.erase_node(node)
                root[name] = self.held[name]
            else:
                node.target = name
                node._rename(name)
        found.graph.eliminate_dead_code()
        used = {node.target for node in found.graph.nodes if node.op == "get_attr"}
        made = fx.GraphModule({name: root[name] for name in root if name in used}, found.graph)
        made.graph.lint()
        return made


class _Nodes(torch.nn.Module):
    """The nodes of a graph, whatever its code makes of the caller's arguments."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__()
        self.gm = gm

    def forward(self, *args: Any) -> Any:
        return fx.Interpreter(self.gm).run(*args, enable_io_processing=False)


def _decompositions(
    gm: fx.GraphModule, has_derivative: Callable[[OpOverload], bool]
) -> dict[OpOverload, Callable[..., Any]]:
    """torch's decompositions of those operators of a graph that have no derivative themselves."""
    return {
        node.target: decomposition_table[node.target]
        for node in gm.graph.nodes
        if node.target in decomposition_table and not has_derivative(node.target)
    }


def _mode(placeholders: Sequence[fx.Node]) -> FakeTensorMode:
    """The mode of the fake tensors of a graph, if they have one in common: it has the symbols."""
    values = [node.meta.get("val") for node in placeholders]
    modes = {id(v.fake_mode): v.fake_mode for v in values if isinstance(v, FakeTensor)}
    return next(iter(modes.values())) if len(modes) == 1 else FakeTensorMode()


# --- derivatives ----------------------------------------------------------------------------------


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
    return op in _CONSTANT or _row(op) is not None


def _has_tangent(op: OpOverload) -> bool:
    row = _row(op)
    return op in _CONSTANT or (row is not None and bool(row.tangents or not row.gradients))


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
    if node.target in _CONSTANT:
        return False
    if any(_is_number(v) for v in tree_leaves(node.meta.get("val"))):
        row_of(node.target)  # or says that there is none
        return True
    return False


# What autograd has as the end of a derivative, without a row; and what functionalization leaves of
# a write to an input: the result is another node.
_CONSTANT = {torch.ops.aten.detach.default, torch.ops.aten.copy_.default}


class _Reverse(_Run):
    """active: the nodes that depend on the inputs whose gradients are asked for."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], wanted: set[int]) -> None:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.placeholders = placeholders
        self.active = {node for k, node in enumerate(placeholders) if k in wanted}
        super().__init__(gm, inputs)

    def after(self, node: fx.Node) -> None:
        if _differentiable(node, self.active):
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
            parts[index] = _sum(parts[index], grad)  # type: ignore[index]
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
            for n, g in zip(given[name], gradients, strict=True) if listed else [(given[name], gradients)]:
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
                name: fx.node.map_arg(given[name], self.moved.get)
                for name in derivative.row.differentiable
                if name in given
            }
            found = list(derivative(tangents, self.of(given), self.values[node]))
            found = found if isinstance(self.values[node], tuple | list) else found[0]
            if derivative.row.is_list:
                found = found[0]
        if any(t is not None for t in tree_leaves(found)):
            self.moved[node] = found


def _nodes(value: Any) -> Iterator[fx.Node]:
    values = value if isinstance(value, list | tuple) else [value]
    return (v for v in values if isinstance(v, fx.Node))


def _sum(first: Any, second: Any) -> Any:
    if isinstance(first, list):
        return [_sum(a, b) for a, b in zip(first, second, strict=True)]
    return second if first is None else first if second is None else first + second


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
