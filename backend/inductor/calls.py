"""New calls in a graph, on behalf of a node that they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx.node import map_arg

if TYPE_CHECKING:
    from torch.fx import Graph, Node

# What is known of a node's value, not of where it comes from.
OF_A_VALUE = ("val", "tensor_meta", "eager_input_vals")


def call(graph: Graph, meant: Node, op: Any, *arguments: Any) -> Node:
    """A call where the graph inserts; it comes from where `meant` does. It has no example yet."""
    node = graph.call_function(op, arguments)
    node.meta = {name: value for name, value in meant.meta.items() if name not in OF_A_VALUE}
    return node


def computed(graph: Graph, meant: Node, op: Any, *arguments: Any) -> Node:
    """The same, with the example that the operator makes of its arguments'."""
    node = call(graph, meant, op, *arguments)
    node.meta["val"] = op(*map_arg(arguments, lambda operand: operand.meta["val"]))
    return node
