"""Graphs that transform functions themselves: torch.autograd.grad or torch.func inside of what is
compiled. Their norms have to be ours while AOTAutograd traces them: torch's are wrong from the
third order on, and the gradient of a loss on second derivatives is one. Under vmap so are what has
a batching rule of ours, which copies less.

Private, checked on torch 2.11, 2.13 and 2.15: the names of what Dynamo writes into a graph where
torch.func.grad, torch.func.jvp and torch.vmap begin.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule

from normpass.decomps.activation import registered

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_BEGINNINGS = ("_grad_increment_nesting", "_jvp_increment_nesting", "_vmap_increment_nesting")


def rules_if_asked_for(graph: GraphModule) -> AbstractContextManager[None]:
    """A block in which the rules are registered, for a graph of Dynamo's with transforms in it."""
    return registered() if transforms(graph) else contextlib.nullcontext()


def transforms(graph: GraphModule) -> bool:
    """Whether it takes derivatives or maps over a batch, or what it calls does, a checkpoint's body
    for instance.
    """
    return any(
        node.op == "call_function"
        and (
            node.target is torch.autograd.grad
            or getattr(node.target, "__name__", None) in _BEGINNINGS
        )
        for part in graph.modules()
        if isinstance(part, GraphModule)
        for node in part.graph.nodes
    )
