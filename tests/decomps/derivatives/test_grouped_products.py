"""Products of matrices in groups: the kernel has float32 and halves alone."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.testing import assert_close

from normpass.decomps.registry import rules
from normpass.decomps.table.binding import vjp

if TYPE_CHECKING:
    from torch import Tensor

rules()  # the operators exist once the rules are loaded
ops, op = torch.ops.normpass, torch.ops.aten._grouped_mm.default
OFFS = torch.tensor([8, 8, 24], dtype=torch.int32)
# Matrices of rows in groups, of an inner axis in groups, of columns in groups; batches.
SHAPES = {
    "rows": ((24, 8), (3, 8, 16)),
    "inner": ((8, 24), (24, 16)),
    "columns": ((3, 8, 16), (16, 24)),
    "batches": ((3, 4, 8), (3, 8, 16)),
}


def groups(x: Tensor, axis: int) -> list[Tensor]:
    """The parts of an axis, or a batch."""
    if x.dim() == 3:
        return list(x.unbind(0))
    return [x.narrow(axis, a, b - a) for a, b in pairwise([0, *OFFS.tolist()])]


def by_groups(a: Tensor, b: Tensor, name: str) -> Tensor:
    rows = -1 if name == "inner" else 0
    columns = 0 if name == "inner" else 1
    parts = [x @ y for x, y in zip(groups(a, rows), groups(b, columns), strict=True)]
    return (
        torch.cat(parts, {"rows": 0, "columns": 1}[name])
        if name in ("rows", "columns")
        else (torch.stack(parts))
    )


def stored(x: Tensor, by_columns: bool) -> Tensor:
    return (x.mT.contiguous().mT if by_columns else x).requires_grad_()


@pytest.mark.parametrize("expanded", [False, True], ids=["", "expanded"])
@pytest.mark.parametrize("by_columns", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_the_gradients_are_those_of_each_group(
    name: str, by_columns: tuple[Any, Any], expanded: bool
) -> None:
    """To second order; of a gradient that is one number repeated too, which PyTorch refuses."""
    a, b = (stored(torch.randn(s), c) for s, c in zip(SHAPES[name], by_columns, strict=True))
    offs = None if name == "batches" else OFFS
    y, right = op(a, b, offs), by_groups(a, b, name)
    assert_close(y, right)
    g = torch.randn(()).expand(y.shape) if expanded else torch.randn_like(y)
    g = g.detach().requires_grad_()
    found = list(vjp(op)((g,), (a, b, offs), y, ["self", "mat2"]).values())
    expected = torch.autograd.grad(right, (a, b), g, create_graph=True)
    assert_close(found, list(expected))
    assert [v.stride() for v in found] == [a.stride(), b.stride()]
    steps = [torch.randn_like(v) for v in found]
    again = torch.autograd.grad(found, (a, b, g), steps)
    assert_close(again, torch.autograd.grad(expected, (a, b, g), steps))


def test_a_factor() -> None:
    a, b = torch.randn(24, 8), torch.randn(3, 8, 16)
    g = torch.randn(24, 16)
    one, two = (
        (
            ops._grouped_mm_mat1_backward(g, b, a.shape, a.stride(), torch.strided, OFFS, alpha),
            ops._grouped_mm_mat2_backward(g, a, b.shape, b.stride(), torch.strided, OFFS, alpha),
        )
        for alpha in (1, 2)
    )
    assert_close([2 * v for v in one], list(two))
    rest: Any = (a.shape, a.stride(), torch.strided, OFFS, 1)
    assert ops._grouped_mm_mat1_backward(None, b, *rest) is None
    assert ops._grouped_mm_mat2_backward(None, a, *rest) is None
