"""A graph as lines to read: `name: dtype[shape] = op(arguments)`, and where each comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg

from normpass.passes import names
from normpass.passes.region import DTYPE_NAMES
from normpass.passes.regions import fusable
from normpass.passes.sizes import nbytes
from normpass.passes.vocabulary import Kind, kind_of, without_views

if TYPE_CHECKING:
    from torch.fx import Graph, Node

LONGEST_TEXT = 60


@dataclass(frozen=True)
class Line:
    """One node.

    place: its module's dotted path, or file:line. op: the name of what it calls, "" for what is no
    call. reduction: whether it is one. fusable: whether a region may hold it at all. inner: for a
    reduction, whether its result meets something larger again, as in every norm. kind: the node's,
    as fx has it. type: dtype[shape]. reads: the names of the nodes that it reads. base: of a view,
    what it shows, else itself. nbytes: of a tensor.
    """

    name: str
    text: str
    place: str
    op: str = ""
    dtype: str = ""
    reduction: bool = False
    fusable: bool = False
    inner: bool = False
    kind: str = "call_function"
    type: str = ""
    reads: tuple[str, ...] = ()
    base: str = ""
    nbytes: int = 0


def listing(graph: Graph) -> tuple[Line, ...]:
    """The lines of a graph, in its order."""
    inner = set(names.inner_reductions(graph.nodes))
    return tuple(_line(node, node in inner) for node in graph.nodes)


def _line(node: Node, inner: bool) -> Line:
    value = node.meta.get("val")
    typed = "" if value is None else _type(value)
    graph: dict[str, Any] = {
        "kind": node.op,
        "type": typed,
        "reads": tuple(arg.name for arg in node.all_input_nodes),
        "base": without_views(node).name,
        "nbytes": nbytes(node) if isinstance(value, torch.Tensor) else 0,
    }
    kind = f": {typed}" if typed else ""
    if node.op == "placeholder":
        return Line(node.name, f"input   {node.name}{kind}", "", **graph)
    if node.op == "output":
        return Line(node.name, f"output  {_argument(node.args[0])}", "", **graph)
    op = _op(node)
    arguments = [
        *map(_argument, node.args),
        *(f"{key}={_argument(arg)}" for key, arg in node.kwargs.items()),
    ]
    return Line(
        node.name,
        f"{node.name}{kind} = {op}({', '.join(arguments)})",
        names.place(node),
        op,
        _dtype(node),
        kind_of(node) is Kind.REDUCTION,
        fusable(node),
        inner,
        **graph,
    )


def _op(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        space, _, name = str(target).partition(".")
        name = name.removesuffix(".default")
        return name if space in ("aten", "prims") else f"{space}.{name}"
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _dtype(node: Node) -> str:
    """The dtype of what a node reads first, which a reduction is bound by; "" where there is no
    tensor.
    """
    for tensor in (arg.meta.get("val") for arg in node.all_input_nodes):
        if isinstance(tensor, torch.Tensor):
            return str(tensor.dtype).removeprefix("torch.")
    return ""


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        name = DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{name}[{' '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_type, value))})"
    return type(value).__name__


def _argument(value: Any) -> str:
    """An argument as it reads best; a region's text is only its name here."""
    if isinstance(value, str):
        first = value.splitlines()[0] if value else ""
        return repr(first if len(first) <= LONGEST_TEXT else first[:LONGEST_TEXT] + "...")
    return str(map_arg(value, lambda node: node)).replace("torch.", "")
