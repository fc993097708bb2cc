"""Operators as what they are made of, in a graph that was not decomposed.

Under torch.compile a graph is decomposed while it is traced. Graphs that others trace have norms
and their derivatives whole: native_layer_norm, _softmax_backward_data, silu, mean's in-place
neighbours. Here each becomes the nodes of its decomposition, traced with the example values that
the graph has. Who calls this finds out which of them a region took in, and leaves the others as
they were.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from normpass.passes import faults
from normpass.passes.noops import remove_noops
from normpass.passes.regions import mutates
from normpass.passes.vocabulary import FLOATS, Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch.fx import Graph

# What a decomposition says by itself; all else a node was traced with holds for its parts too.
OF_ONE_NODE = frozenset({"val", "tensor_meta", "example_value", "eager_input_vals"})


def out_of_place(graph: Graph) -> None:
    """Turns `x.add_(y)` into `x = x + y` where x is nobody else's memory, as in the formulas of
    composite operators: after their writes in place nothing could be moved.
    """
    for node in list(graph.nodes):
        functional = _functional(node)
        if functional is None or not _is_own(node.args[0], node):
            continue
        written = node.args[0]
        place = {other: k for k, other in enumerate(graph.nodes)}
        node.target = functional
        later = [user for user in written.users if place[user] > place[node]]
        written.replace_all_uses_with(node, delete_user_cb=later.__contains__)


def _functional(node: Node) -> Any:
    """The operator that computes what this one writes into its first argument, or None."""
    name = getattr(node.target, "__name__", "")
    if not mutates(node) or "_." not in name or getattr(node.target, "namespace", "") != "aten":
        return None
    packet, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, packet.removesuffix("_"), None), overload, None)
    if found is None or not node.args or not isinstance(node.args[0], Node):
        return None
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    same = isinstance(before, torch.Tensor) and _layout(before) == _layout(after)
    return found if same else None


def _is_own(x: Any, writer: Node) -> bool:
    """Whether nothing but x shows its memory: it is the result of an operator that makes one, and
    no view of it is taken, nor is it written to by another.
    """
    shown = [x, *(user for user in x.users if user is not writer)]
    return all(_makes_memory(node) for node in shown)


def _makes_memory(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.is_mutable:
        return False
    return not any(result.alias_info for result in schema.returns)


class Expander:
    """Expands operators of one graph, or of copies of it: what they are made of is traced once."""

    def __init__(self, table: Mapping[Any, Callable[..., Any]]) -> None:
        self.table = table
        self.known: dict[Any, GraphModule | None] = {}

    def candidates(self, graph: Graph) -> set[str]:
        """The names of the nodes that a region could take in if they were expanded."""
        return {node.name for node in graph.nodes if self._is_candidate(node)}

    def _is_candidate(self, node: Node) -> bool:
        if node.op != "call_function" or kind_of(node) is not Kind.OTHER or mutates(node):
            return False
        drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if drawn or node.target not in self.table:
            return False
        return any(isinstance(x, torch.Tensor) and x.dtype in FLOATS for x in _values(node))

    def expand(self, graph: Graph, names: Collection[str]) -> dict[str, list[Node]]:
        """Puts what they are made of in place of the nodes with these names; returns it, by those
        names. What cannot be expanded stays, and is not there.
        """
        made = {}
        for node in list(graph.nodes):
            if node.name not in names:
                continue
            subject = f"{node.target} ({node.name})"
            with faults.survived("decomposing", subject, "It is not fused"):
                if parts := self._in_place_of(node, graph):
                    made[node.name] = parts
        return made

    def _in_place_of(self, node: Node, graph: Graph) -> list[Node]:
        leaves = list(dict.fromkeys(node.all_input_nodes))
        traced = self._traced(node, leaves)
        if traced is None:
            return []
        placeholders = traced.graph.find_nodes(op="placeholder")
        inside: dict[Node, Node] = dict(zip(placeholders, leaves, strict=True))
        (output,) = traced.graph.find_nodes(op="output")
        results = output.args[0] if isinstance(output.args[0], tuple | list) else [output.args[0]]
        if not _fits(node, results):
            return []
        kept = {key: value for key, value in node.meta.items() if key not in OF_ONE_NODE}
        kept.setdefault("original_aten", node.target)
        parts = []
        with graph.inserting_before(node):
            for part in traced.graph.nodes:
                if part.op == "call_function":
                    inside[part] = graph.node_copy(part, inside.__getitem__)
                    inside[part].meta = {**kept, "val": part.meta.get("val")}
                    parts.append(inside[part])
        _replace(node, [inside.get(result) for result in results])
        for part in reversed(parts):
            if not part.users:
                graph.erase_node(part)
        left = set(graph.nodes)
        return [part for part in parts if part in left]

    def _traced(self, node: Node, leaves: list[Node]) -> GraphModule | None:
        """The decomposition as a graph of these inputs; None if it is none of operators alone."""
        values = [leaf.meta.get("val") for leaf in leaves]
        places = {leaf: k for k, leaf in enumerate(leaves)}
        arguments = map_arg((node.args, node.kwargs), lambda leaf: f"%{places[leaf]}")
        key = node.target, repr(arguments), tuple(map(_layout, values))
        if key not in self.known:
            self.known[key] = self._trace(node, places, values)
        return self.known[key]

    def _trace(self, node: Node, places: Mapping[Node, int], values: list[Any]) -> Any:
        def function(*given: Any) -> Any:
            args, kwargs = map_arg((node.args, node.kwargs), lambda leaf: given[places[leaf]])
            result = self.table[node.target](*args, **kwargs)
            if result is NotImplemented:  # for these arguments, says the decomposition
                raise NotImplementedError
            return result

        symbolic = any(_is_symbolic(value) for value in values)
        mode: Literal["symbolic", "fake"] = "symbolic" if symbolic else "fake"
        modes = {id(m): m for v in values if (m := getattr(v, "fake_mode", None)) is not None}
        if None in values or len(modes) != 1:
            return None
        (fake_mode,) = modes.values()
        try:
            with fake_mode, torch.no_grad():
                traced = make_fx(function, {**self.table}, tracing_mode=mode)(*values)
        except NotImplementedError:
            return None
        if any(part.op == "get_attr" for part in traced.graph.nodes):
            return None
        traced.graph.eliminate_dead_code()
        remove_noops(traced.graph)  # or their disappearance would look as if a region had them
        kinds = {kind_of(part) for part in traced.graph.nodes}
        return None if kinds == {Kind.OTHER} else traced


def _values(node: Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, tuple | list) else [value]


def _layout(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return value.dtype, value.device, str(value.shape), str(value.stride())


def _is_symbolic(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))


def _fits(node: Node, results: Sequence[Any]) -> bool:
    """Whether results can stand for a node's, laid out as they were: what reads them was traced
    with those strides.
    """
    single = not isinstance(node.meta.get("val"), tuple | list)
    items = [user for user in node.users if user.target is operator.getitem]
    if single:
        needed = {0}
    elif len(items) < len(node.users):
        return False
    else:
        needed = {item.args[1] for item in items if item.users}  # type: ignore[misc]
    expected = _values(node)
    return len(results) == len(expected) and all(
        isinstance(results[k], Node) and _alike(expected[k], results[k].meta.get("val"))
        for k in needed
    )


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    shapes = [[str(shape) for shape in x.shape] for x in (one, other)]
    if one.dtype is not other.dtype or shapes[0] != shapes[1]:
        return False
    steps = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(str(size) == "1" or str(old) == str(new) for size, old, new in steps)


def _replace(node: Node, results: list[Node | None]) -> None:
    """Gives the readers of a node the results, and takes it out."""
    for user in list(node.users):
        if isinstance(node.meta.get("val"), tuple | list):
            result = results[user.args[1]]  # type: ignore[index]
            if result is not None:
                user.replace_all_uses_with(result)
            user.graph.erase_node(user)
    if node.users:
        (result,) = results
        assert result is not None
        node.replace_all_uses_with(result)
    node.graph.erase_node(node)
