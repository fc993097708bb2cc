"""How large a graph's tensors are, in the example that it was traced with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.fx import Node


def hint(size: int | torch.SymInt) -> int:
    """A size's value, or its example's where it is symbolic."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.hint is not None else 1024


def nbytes(node: Node) -> int:
    """The bytes of a node's tensor that memory holds (an expanded one repeats some)."""
    itemsize: int = node.meta["val"].dtype.itemsize
    return itemsize * elements(node)


def elements(node: Node) -> int:
    """The elements of a node's tensor that memory holds."""
    tensor, count = node.meta["val"], 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if not (isinstance(stride, int) and stride == 0):
            count *= hint(size)
    return count


def human(count: int) -> str:
    """Bytes with three digits: 17.2 kB, 16.8 MB."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if unit != "B" else f"{count} B"
