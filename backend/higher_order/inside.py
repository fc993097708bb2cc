"""Graphs that transform functions themselves: torch.autograd.grad or torch.func inside of what is
compiled. Their norms have to be ours while AOTAutograd traces them: torch's are wrong from the
third order on, and the gradient of a loss on second derivatives is one. Under vmap so are what has
a batching rule of ours, which copies less. And cuDNN's batch norm where it is called by its name:
what it asks of its arguments, and the dtype of what it saves, are in the rules alone.

Private, checked on torch 2.11, 2.13 and 2.15: the names of what Dynamo writes into a graph where
torch.func.grad, torch.func.jvp and torch.vmap begin.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule

from normpass.decomps.activation import registered
from normpass.decomps.norms.cudnn_checks import CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch.fx import Node

# As Dynamo finds them in what it traces: the operator with or without its overload.
_OF_CUDNN = {*CHECKS, *(op.overloadpacket for op in CHECKS)}
_BEGINNINGS = ("_grad_increment_nesting", "_jvp_increment_nesting", "_vmap_increment_nesting")


def rules_if_asked_for(graph: GraphModule) -> AbstractContextManager[None]:
    """A block in which the rules are registered, for a graph of Dynamo's with transforms in it or
    operators of cuDNN.
    """
    asked = transforms(graph) or calls_cudnn(graph)
    return registered() if asked else contextlib.nullcontext()


def calls_cudnn(graph: GraphModule) -> bool:
    """Whether it calls an operator, by its name, whose arguments cuDNN's wrapper would check."""
    return any(node.target in _OF_CUDNN for node in _nodes(graph))


def transforms(graph: GraphModule) -> bool:
    """Whether it takes derivatives or maps over a batch, or what it calls does, a checkpoint's body
    for instance.
    """
    return any(
        node.target is torch.autograd.grad or getattr(node.target, "__name__", None) in _BEGINNINGS
        for node in _nodes(graph)
    )


def _nodes(graph: GraphModule) -> Iterator[Node]:
    """The calls of functions, in graphs within it too."""
    for part in graph.modules():
        if isinstance(part, GraphModule):
            yield from (node for node in part.graph.nodes if node.op == "call_function")
