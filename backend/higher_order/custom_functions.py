"""Derivatives of a backward that a user has written: autograd.Function, as Dynamo traces it.

Dynamo makes one operator of a Function's forward and backward. That operator's own backward stops
the tape: it runs without gradients, on values that have lost what they were. Eager mode derives a
backward by what it does with its cotangents and with what was saved: inputs and outputs are those
of the call, anything else is constant.

Private, checked on torch 2.11, 2.13 and 2.15: the operator autograd_function_apply with its
arguments, and that Dynamo puts each of the two bodies between two calls of _set_grad_enabled.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

_APPLY = "autograd_function_apply"


def differentiable(module: GraphModule) -> GraphModule:
    """A graph whose autograd.Functions have backwards that can be differentiated; the same graph
    if it has none.
    """
    children = {
        name: differentiable(child)
        for name, child in module.named_children()
        if isinstance(child, GraphModule)
    }
    mine = [node for node in module.graph.nodes if _is_apply(node.target)]
    if not mine and all(child is getattr(module, name) for name, child in children.items()):
        return module
    copied = GraphModule(module, copy.deepcopy(module.graph))
    for name, child in children.items():
        setattr(copied, name, child)
    for node in copied.graph.nodes:
        if _is_apply(node.target):
            node.target = apply
    copied.recompile()
    return copied


def _is_apply(target: Any) -> bool:
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() == _APPLY


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: GraphModule, backward: GraphModule, marks: dict[str, Any], *args: Any
    ) -> Any:
        output, saved = Interpreter(forward).run(*args)
        ctx.set_materialize_grads(True)
        outputs = output if isinstance(output, tuple | list) else [output]
        ctx.mark_dirty(*(outputs[i] for i in marks.get("dirty_idx", ())))
        ctx.mark_non_differentiable(*(outputs[i] for i in marks["non_differentiable_idx"]))
        ctx.save_for_backward(*(x for x in saved if isinstance(x, Tensor)))
        ctx.others = [None if isinstance(x, Tensor) else x for x in saved]
        ctx.is_tensor = [isinstance(x, Tensor) for x in saved]
        ctx.body = backward
        return tuple(output) if isinstance(output, list) else output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensors = iter(ctx.saved_tensors)
        saved = [
            next(tensors) if is_tensor else other
            for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
        ]
        found = _WithTape(ctx.body).run(*gradients, *saved)
        found = found if isinstance(found, tuple | list) else (found,)
        return (None, None, None, *found)


class _WithTape(Interpreter):
    """Runs a backward's body without the two calls around it that switch gradients off and on."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        calls = [n for n in module.graph.nodes if n.op == "call_function"]
        switches = [n for n in calls if n.target is torch._C._set_grad_enabled]
        self.around = {
            n for n in switches if (n is calls[0] and n.args == (False,)) or n is calls[-1]
        }

    def run_node(self, n: Any) -> Any:
        return None if n in self.around else super().run_node(n)


def apply(forward: GraphModule, backward: GraphModule, *args: Any, **marks: Any) -> Any:
    """In place of the operator, with its arguments."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return torch.ops.higher_order.autograd_function_apply(forward, backward, *args, **marks)
    return _Apply.apply(forward, backward, marks, *args)
