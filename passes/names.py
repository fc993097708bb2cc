"""What a region is called, and which module of the user's it came from.

Only labels: nothing in the engine depends on a name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from normpass.passes.vocabulary import Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

# Ops that say by themselves what was computed.
NORM_OPS = re.compile(
    r"(?:_native_|native_|cudnn_|miopen_|_fused_|_)?"
    r"(layer_norm|group_norm|batch_norm|instance_norm|rms_norm|log_softmax|softmax|weight_norm)"
)


def phase(nodes: Sequence[Node]) -> str:
    """ "forward" or "backward", from what AOTAutograd's reductions remember (pointwise nodes of one graph may
    have been computed for the other)."""
    reductions = [node for node in nodes if kind_of(node) is Kind.REDUCTION]
    return "backward" if any(_is_backward(node) for node in reductions) else "forward"


def _is_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward" or "backward" in _original(node)


def _original(node: Node) -> str:
    op = node.meta.get("original_aten")
    return getattr(op, "__name__", "").split(".")[0]


def name(nodes: Sequence[Node]) -> str:
    """The norm's name: the op that was decomposed, or the class of the module it stands in."""
    suffix = "_backward" if phase(nodes) == "backward" else ""
    # Reductions tell best what a region is about; pointwise neighbours may come from anywhere.
    for node in sorted(nodes, key=lambda node: kind_of(node) is not Kind.REDUCTION):
        if match := NORM_OPS.match(_original(node)):
            return match[1] + suffix
    for node in nodes:
        if kind_of(node) is Kind.REDUCTION and (stack := _modules(node)):
            return _snake_case(stack[-1][1]) + suffix
    return "norm" + suffix


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


def _snake_case(text: str) -> str:
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z]|$|\d)|[A-Z]?[a-z]+|\d+", text)
    joined = "_".join(word.lower() for word in words)
    return joined.replace("rmsnorm", "rms_norm").replace("layernorm", "layer_norm") or "norm"


def module(nodes: Sequence[Node]) -> str:
    """Where the reductions of these nodes come from: dotted paths as in named_modules(), or file:line."""
    paths: dict[str, None] = {}
    for node in nodes:
        if kind_of(node) is Kind.REDUCTION and (stack := _modules(node)):
            paths[dotted(stack[-1][0])] = None
    if not any(paths):
        return next((place for node in nodes if (place := _source(node))), "")
    return ", ".join(path for path in paths if path)


def dotted(path: str) -> str:
    """ "L['self'].layers[0]._modules['norm']" -> "layers.0.norm" """
    path = re.sub(r"^L\[['\"]\w+['\"]\]", "", path)
    path = path.replace("._modules", "").replace(".__getitem__", "")
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    return re.sub(r"\((\w+)\)", r".\1", path).strip(".")


def _source(node: Node) -> str:
    """The user's line: the last frame outside torch of the stack trace kept with a node."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    users = [frame for frame in found if "/torch/" not in frame[0]] or found
    return f"{users[-1][0]}:{users[-1][1]}" if users else ""
