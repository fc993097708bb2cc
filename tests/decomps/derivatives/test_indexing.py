"""Places that are read once, often, from the end, or never; words that are padding."""

from __future__ import annotations

import pytest
import table_calls
import torch
from torch.testing import assert_close

from normpass.decomps.table.binding import vjp

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("shape", "index"),
    [
        ((2, 3), [[0, 5, -1], [2, 2, -6]]),
        ((2, 3), 4),
        ((), [0, 0, -1]),
        ((), 0),
        ((2, 3), []),
        ((0,), []),
    ],
    ids=str,
)
def test_what_is_taken(shape: tuple[int, ...], index: list[int] | int) -> None:
    args = {"self": torch.randn(shape, dtype=torch.float64)}
    call = table_calls.Call(
        aten.take.default, {**args, "index": torch.tensor(index, dtype=torch.int64)}
    )
    assert table_calls.check_vjp(call) == table_calls.RIGHT


@pytest.mark.parametrize("indices", [[[1, 0, 1], [3, 1, 4]], 2], ids=str)
@pytest.mark.parametrize("padding", [-1, 1])
def test_the_gradient_of_words(indices: list[int] | int, padding: int) -> None:
    words = torch.tensor(indices, dtype=torch.int64)
    grad = torch.randn(*words.shape, 3, dtype=torch.float64)
    args = {"grad_output": grad, "indices": words, "num_weights": 5, "padding_idx": padding}
    call = table_calls.Call(
        aten.embedding_dense_backward.default, {**args, "scale_grad_by_freq": False}
    )
    assert table_calls.check_vjp(call) == table_calls.RIGHT


def test_no_words() -> None:
    """PyTorch cannot tell their shape."""
    for shape in ((0,), (2, 0)):
        args = (torch.zeros(shape, dtype=torch.int64), 5, 1, False)
        grad, op = torch.randn(*shape, 3), aten.embedding_dense_backward
        y = op(grad, *args)
        found = vjp(op)((torch.ones_like(y),), (grad, *args), y)["grad_output"]
        assert found.shape == grad.shape


def test_the_gradient_of_words_scaled_by_how_often_they_are() -> None:
    """PyTorch's own leaves the scale out: it is not the transpose of what scales."""
    words = torch.tensor([1, 1, 2])
    grad, step = torch.randn(2, 3, 4, dtype=torch.float64)
    args = (words, 5, -1, True)
    op = aten.embedding_dense_backward
    y = op(grad, *args)
    g = torch.randn_like(y)
    found = vjp(op)((g,), (grad, *args), y)["grad_output"]
    assert_close((found * step).sum(), (op(step, *args) * g).sum())
    leaf = grad.clone().requires_grad_()
    (stock,) = torch.autograd.grad(op(leaf, *args), leaf, g)
    assert not torch.allclose(stock, found)
