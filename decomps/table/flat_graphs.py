"""A graph made of functional operators of ATen alone, and graphs of functions of its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from normpass.decomps.activation.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    decomposition_table,
    tree_leaves,
)
from normpass.decomps.registry import by_op, decompositions
from normpass.decomps.table.formulas import is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor
    from torch._ops import OpOverload


class Flat:
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
        tried: set[OpOverload] = set()  # what is made of itself, as sym_numel, is taken as it is
        while table := _decompositions(self.graph, has_derivative, tried):
            self.graph = self._made(_Decomposed(self.graph).run, self.values, table)
            tried |= table.keys()
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
        mode: Literal["symbolic", "fake"] = (
            "symbolic" if self.mode.shape_env is not None else "fake"
        )
        # Without a table torch 2.14 records detach as a view, which has a derivative.
        trace = make_fx(function, {**(table or {})}, tracing_mode=mode, _allow_non_fake_inputs=True)
        with self.mode, torch.no_grad():
            return trace(*values)

    def value(self, name: str) -> Any:
        return self.values[self.inputs.index(name)]

    def chosen(self, wrt: Sequence[str] | None) -> list[str]:
        """The inputs asked for, checked."""
        if wrt is None:
            names = self.inputs[: self.count]
            return [name for name in names if is_number(self.value(name))]
        if unknown := [name for name in wrt if name not in self.inputs]:
            raise ValueError(
                f"expected wrt among {', '.join(self.inputs)}; found {', '.join(unknown)}"
            )
        if others := [name for name in wrt if not is_number(self.value(name))]:
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
        # Our formulas are operators too: what they are made of is what others know.
        formulas = {op: f for op, f in decompositions().items() if op.namespace == "normpass"}
        found = self._made(function, [*self.values, *likes], formulas)
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
                    held = found.graph.create_node("get_attr", name)
                held.meta = node.meta
                node.replace_all_uses_with(held)
                found.graph.erase_node(node)
                root[name] = self.held[name]
            else:
                node.target = name
                node._rename(name)
        made = fx.GraphModule(root, found.graph)
        made.graph.eliminate_dead_code()
        made.delete_all_unused_submodules()
        made.recompile()
        return made


class _Nodes(torch.nn.Module):
    """The nodes of a graph, whatever its code makes of the caller's arguments."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__()
        self.gm = gm

    def forward(self, *args: Any) -> Any:
        return fx.Interpreter(self.gm).run(*args, enable_io_processing=False)


# What is left where nobody asks for a derivative, and the operator that has one.
_FOR_DERIVATIVES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._embedding_bag_forward_only.default: torch.ops.aten._embedding_bag.default
}


class _Decomposed(fx.Interpreter):
    """A graph in which some results have other strides than when it was traced."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        reshaped = target is torch.ops.aten.view.default
        return super().call_function(torch.reshape if reshaped else target, args, kwargs)


def _decompositions(
    gm: fx.GraphModule,
    has_derivative: Callable[[OpOverload], bool],
    tried: Collection[OpOverload],
) -> dict[OpOverload, Callable[..., Any]]:
    """What those operators of a graph are made of that have no derivative themselves."""
    table: dict[Any, Callable[..., Any]] = {**decomposition_table}
    table |= {**by_op("autograd"), **_FOR_DERIVATIVES}
    return {
        node.target: table[node.target]
        for node in gm.graph.nodes
        if node.target in table and node.target not in tried and not has_derivative(node.target)
    }


def _mode(placeholders: Sequence[fx.Node]) -> FakeTensorMode:
    """The mode of the fake tensors of a graph, if they have one in common: it has the symbols."""
    values = [node.meta.get("val") for node in placeholders]
    modes = {id(v.fake_mode): v.fake_mode for v in values if isinstance(v, FakeTensor)}
    return next(iter(modes.values())) if len(modes) == 1 else FakeTensorMode()
