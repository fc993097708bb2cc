"""What a region is called, and which module of the user's it came from.

Only labels: nothing in the engine depends on a name.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from normpass.passes.sizes import hint
from normpass.passes.vocabulary import Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import Graph, Node

# Ops that say by themselves what was computed.
NORM_OPS = re.compile(
    r"(?:_native_|native_|cudnn_|miopen_|_fused_|_safe_|_)?"
    r"(layer_norm|group_norm|batch_norm|instance_norm|rms_norm|log_softmax|softmax|weight_norm)"
)
# Calls in a graph of Dynamo's that take a derivative: torch.autograd.grad and torch.func's.
GRADIENTS = re.compile(r"(_autograd_)?grad(_\d+)?$")
# Lines of torch's, and of ours that call the user's function, are not the user's.
NOT_THE_USERS = tuple(
    f"{folder}/" for folder in (*torch.__path__, Path(__file__).parents[1] / "backend")
)


def phase(nodes: Sequence[Node]) -> str:
    """ "forward" or "backward", from what AOTAutograd's reductions remember (pointwise nodes of
    one graph may have been computed for the other).
    """
    reductions = [node for node in nodes if kind_of(node) is Kind.REDUCTION]
    return "backward" if any(_is_backward(node) for node in reductions) else "forward"


def is_backward(graph: Graph) -> bool:
    """Whether this is a graph that AOTAutograd made for a backward: it takes tangents."""
    return any("tangents" in node.name for node in graph.nodes if node.op == "placeholder")


def _is_backward(node: Node) -> bool:
    return (
        node.meta.get("partitioner_tag") == "is_backward"
        or "backward" in _original(node)
        or bool(GRADIENTS.match(_called(node)))
    )


def _original(node: Node) -> str:
    op = node.meta.get("original_aten")
    return getattr(op, "__name__", "").split(".")[0]


def _called(node: Node) -> str:
    """The call in Dynamo's graph that a node was traced in: of a norm that was taken apart, its
    function.
    """
    stack = node.meta.get("source_fn_stack")
    return stack[-1][0] if stack else ""


def inner_reductions(nodes: Iterable[Node]) -> list[Node]:
    """The reductions among these nodes (in the graph's order) whose result meets something larger
    again on a path of views, reductions and pointwise ops: those make a norm. A neighbour's sum
    that only leaves, such as a bias gradient, is none.
    """
    behind: dict[Node, frozenset[Node]] = {}
    inner: dict[Node, None] = {}
    for node in nodes:
        kind = kind_of(node)
        if kind is Kind.OTHER:
            continue
        above = frozenset().union(*(behind.get(arg, ()) for arg in node.all_input_nodes))
        if kind is Kind.POINTWISE:
            size = _elements(node)
            inner.update(dict.fromkeys(found for found in above if _elements(found) < size))
        behind[node] = above | {node} if kind is Kind.REDUCTION else above
    return sorted(inner, key=list(behind).index)


def _elements(node: Node) -> int:
    """How many; an empty axis counts as one, so that the others still tell large from small."""
    value = node.meta["val"]
    tensor = value[0] if isinstance(value, tuple | list) else value
    return (
        math.prod(max(1, hint(n)) for n in tensor.shape) if isinstance(tensor, torch.Tensor) else 1
    )


def telling(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that say what a region is about: its inner reductions, or what reductions it
    has.
    """
    return inner_reductions(nodes) or [n for n in nodes if kind_of(n) is Kind.REDUCTION]


def name(nodes: Sequence[Node]) -> str:
    """The norm's name: the op that was decomposed, or the class of the module it stands in."""
    suffix = "_backward" if phase(nodes) == "backward" else ""
    told = telling(nodes)
    classes = [snake_case(stack[-1][1]) for node in told if (stack := _modules(node))]
    named = [
        *_ops(told),
        *(kind for kind in classes if "norm" in kind),
        *_ops(nodes),  # pointwise neighbours may come from anywhere
        *(match[1] for node in told if (match := NORM_OPS.match(_called(node)))),
        *classes,
        "norm",
    ]
    return named[0] + suffix


def _ops(nodes: Sequence[Node]) -> list[str]:
    return [match[1] for node in nodes if (match := NORM_OPS.match(_original(node)))]


def _modules(node: Node) -> list[tuple[str, str]]:
    """(path, class name) of the modules a node was traced in, outermost first."""
    stack: dict[str, Any] = (
        node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    )
    found = []
    for path, module in stack.values():
        kind = module if isinstance(module, str) else getattr(module, "__name__", "")
        found.append((path, kind.rsplit(".", 1)[-1]))
    return found


def snake_case(text: str) -> str:
    words = re.findall(r"[A-Z]+\d*(?=[A-Z][a-z]|$)|[A-Z]?[a-z]+(?:\d+d?)?|[A-Z]\d*", text)
    joined = "_".join(word.lower() for word in words)
    return joined.replace("rmsnorm", "rms_norm").replace("layernorm", "layer_norm") or "norm"


def module(nodes: Sequence[Node]) -> str:
    """Where a region's inner reductions come from: dotted paths as in named_modules(), or
    file:line.
    """
    told = telling(nodes)
    paths = dict.fromkeys(path for node in told if (path := innermost(node)))
    return ", ".join(paths) or next((line for node in (*told, *nodes) if (line := _line(node))), "")


def innermost(node: Node) -> str:
    """The dotted path of the innermost module a node was traced in; "" in the root or in none."""
    stack = _modules(node)
    return dotted(stack[-1][0]) if stack else ""


def place(node: Node) -> str:
    """Where one node comes from: its module's path, or file:line."""
    return innermost(node) or _line(node)


def dotted(path: str) -> str:
    """ "L['self'].layers[0]._modules['norm']" -> "layers.0.norm" """
    path = re.sub(r"^[LG]\[['\"]\w+['\"]\]", "", path)
    path = re.sub(r"^\.__closure__\[\d+\]\.cell_contents", "", path)
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    path = re.sub(r"\.(__dict__|_modules|__getitem__)\b", "", path)
    return re.sub(r"\((\w+)\)", r".\1", path).strip(".")


def _line(node: Node) -> str:
    """The user's line: the innermost frame outside torch of the stack trace kept with a node."""
    trace = node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+)', trace)
    users = [frame for frame in found if not frame[0].startswith(NOT_THE_USERS)]
    return f"{users[-1][0]}:{users[-1][1]}" if users else ""
