"""What a compiled forward hands over to its further derivatives: results of products, convolutions.

A program for further derivatives runs the graph once more, and its own derivative is one more
backward through it. Where somebody has asked for one, the graph is compiled again, as a forward
that returns what is expensive in it too, on the tape:

    inputs -> outputs, handed               instead of the first code, from then on
    inputs, handed, cotangents -> gradients     computes what is cheap, and no more

What a loss on those gradients makes of `handed` is a cotangent for the forward, whose backward runs
once for all: as in eager mode, nothing is computed twice.

Private, checked on torch 2.11, 2.13 and 2.15: flop_registry of torch.utils.flop_counter, and
torch.utils._python_dispatch.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from normpass.passes.sizes import hint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch.fx import Node

    from normpass.backend.higher_order.program import Layout

HANDED = "normpass_handed"
# A number that takes fewer operations is computed again: a product's with 8 terms takes less than
# to write it and to read it. A convolution's of 3 x 3 pixels takes longer than its operations say,
# and what is before it is differentiated twice where it is not handed over.
LEAST_OPERATIONS = 16


class Handed:
    """What a forward hands over: its last outputs.

    names: of its nodes. is_attached: whether a compiled forward does, and can be differentiated
    again.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.is_attached = False

    def __len__(self) -> int:
        return len(self.names)


def handing_over(
    module: GraphModule, examples: Sequence[Any], written: Collection[int]
) -> GraphModule | None:
    """The graph that hands over what is expensive, and under HANDED in its `meta` what that is;
    None if nothing is. examples: fake tensors. written: those that it writes to.
    """
    run = _Counted(module)
    outputs = run.on_tape(examples, written)
    returned = {_memory(y) for y in outputs if isinstance(y, Tensor)}
    names = [
        name
        for name, (value, version) in run.expensive.items()
        # What is written to later is not what comes of the node; what is returned has a name.
        if value._version == version and _memory(value) not in returned
    ]
    if not names:
        return None
    found = _with_outputs(module, names)
    images = [name for name in names if _is_image(run.expensive[name][0])]
    if images and (other := _channels_last(found, images)):
        now = _Counted(other).on_tape(examples, written)
        if _lie_as_before(other, outputs, now):
            found = other
    (output,) = found.graph.find_nodes(op="output")
    last: Any = output.args[0][len(outputs) :]
    found.meta[HANDED] = Handed([node.name for node in last])
    return found


def _with_outputs(module: GraphModule, names: Sequence[str]) -> GraphModule:
    graph = copy.deepcopy(module.graph)
    nodes = {node.name: node for node in graph.nodes}
    (output,) = graph.find_nodes(op="output")
    outputs: Any = output.args[0]
    output.args = ((*outputs, *(nodes[name] for name in names)),)
    return GraphModule(module, graph)


def _is_image(value: Tensor) -> bool:
    return value.ndim == 4 and value.device.type == "cpu" and value.is_contiguous()


def _channels_last(module: GraphModule, names: Sequence[str]) -> GraphModule:
    """The same with what convolutions return in channels_last, as Inductor's write on CPUs: it
    would copy what it returns otherwise.
    """
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        if node.name in names and getattr(node.target, "__name__", "") == "conv2d":
            with graph.inserting_after(node):
                last = graph.call_method("contiguous", (node,))
            node.replace_all_uses_with(last)
            last.args, last.kwargs = (node,), {"memory_format": torch.channels_last}
    return GraphModule(module, graph)


def _lie_as_before(module: GraphModule, outputs: Sequence[Any], now: Sequence[Any]) -> bool:
    """Has a graph return what lies otherwise now as before; whether it can."""
    (output,) = module.graph.find_nodes(op="output")
    returned: Any = list(output.args[0])
    for i, (y, other) in enumerate(zip(outputs, now, strict=False)):
        if isinstance(y, Tensor) and y.stride() != other.stride():
            if not y.is_contiguous() or y._is_view():
                return False
            with module.graph.inserting_before(output):
                returned[i] = module.graph.call_method("contiguous", (returned[i],))
    output.args = (tuple(returned),)
    module.recompile()
    return True


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class _Operations(TorchDispatchMode):
    """Counts them, of this thread alone: FlopCounterMode puts hooks at the modules of all threads,
    and at the tensors that they are called with.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.count: Any = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):
            return NotImplemented
        value = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            self.count += formula(*args, **(kwargs or {}), out_val=value)
        return value


class _Counted(Interpreter):
    """A run of a graph that counts the operations of its nodes."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.counter = _Operations()
        self.expensive: dict[str, tuple[Tensor, int]] = {}

    def on_tape(self, examples: Sequence[Any], written: Collection[int]) -> Sequence[Any]:
        """Runs it; what it writes to is copied."""
        with self.counter, torch.enable_grad():
            inputs = [x.clone() if i in written else x for i, x in enumerate(examples)]
            outputs: Sequence[Any] = self.run(*inputs)
            return outputs

    def run_node(self, n: Node) -> Any:
        before = self.counter.count
        value = super().run_node(n)
        count = hint(self.counter.count - before)
        if (
            count
            and isinstance(value, Tensor)
            and value.requires_grad
            and not value._is_view()
            and count >= LEAST_OPERATIONS * hint(value.numel())
        ):
            self.expensive[n.name] = value, value._version
        return value


class Phase:
    """Where a program of gradients is: inside, a block in which it takes them, or outside, when
    somebody takes those of its results.
    """

    inside = False

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *_: object) -> None:
        self.inside = False


class _Given(torch.autograd.Function):
    """A value that is given, in place of the same one that is computed.

    Inside, it is a result of the graph: gradients go to where it is computed. Outside, an input:
    what was computed is not used.
    """

    @staticmethod
    def forward(ctx: Any, computed: Tensor, given: Tensor, phase: Phase) -> Tensor:
        ctx.phase = phase
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return (gradient, None, None) if ctx.phase.inside else (None, gradient, None)


class WithGiven(Interpreter):
    """Runs a graph with what it has handed over."""

    def __init__(self, module: GraphModule, given: Mapping[str, Tensor], phase: Phase) -> None:
        super().__init__(module)
        self.given, self.phase = given, phase

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.name not in self.given:
            return value
        apply: Callable[..., Any] = _Given.apply
        return apply(value, self.given[n.name], self.phase)


def hand_over(
    forward: Callable[..., Any], backward: Callable[..., Any], layout: Layout
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A compiled function's forward, which saves what it hands over as its results, so on the tape;
    and its backward, which does not know of that.
    """
    places = [layout.results[k].place for k in layout.handed]

    def forward_that_saves(ctx: Any, *inputs: Any) -> Any:
        found = forward(ctx, *inputs)
        ctx.save_for_backward(*ctx.to_save, *(found[i] for i in places))
        ctx.set_materialize_grads(False)
        return found

    def stock_backward(ctx: Any, *gradients: Any) -> Any:
        return backward(_Stock(ctx, len(places)), *gradients)

    return forward_that_saves, stock_backward


class _Stock:
    """A context as the compiled backward knows it: without the last tensors that are saved."""

    def __init__(self, ctx: Any, more: int) -> None:
        self.ctx, self.more = ctx, more

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    @property
    def saved_tensors(self) -> Any:
        return self.ctx.saved_tensors[: -self.more]
