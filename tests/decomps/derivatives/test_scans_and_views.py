"""The derivatives of cumprod, cat, split, blocks and indexing, against autograd's own."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.testing import assert_close

from normpass.decomps.registry import derivative, rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

rules()  # the operators exist once the rules are loaded
ops = torch.ops.normpass
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
by_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex128], ids=["real", "complex"]
)


def cumulative(x: Tensor, dim: int) -> Tensor:
    """cumprod by multiplications"""
    if x.dim() == 0:
        return x * 1
    y, parts = torch.ones_like(x.sum(dim)), []
    for part in x.unbind(dim):
        y = y * part
        parts.append(y)
    return torch.stack(parts, dim)


@by_dtype
@pytest.mark.parametrize("zeros", [(), (1,), (0, 2), (1, 2, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((4,), 0), ((2, 4), -1), ((4, 2), 0), ((), 0)], ids=str)
def test_cumprod_backward_is_right_to_second_order(
    shape: tuple[int, ...], dim: int, zeros: tuple[int, ...], dtype: torch.dtype
) -> None:
    """With zeros anywhere; of multiplications, and autograd's own."""
    x = torch.randn(shape, dtype=dtype)
    if shape:
        x.index_fill_(dim, torch.tensor(zeros, dtype=torch.int64), 0)
    x.requires_grad_()
    y = cumulative(x, dim)
    g, v = torch.randn_like(y).requires_grad_(), torch.randn_like(x)
    first = torch.autograd.grad(y, x, g, create_graph=True)[0]
    second = torch.autograd.grad(first, (x, g), v, allow_unused=True, materialize_grads=True)
    found = ops.cumprod_backward(g, x, dim, y.detach())
    assert_close(found, first, **TIGHT)
    own = x.cumprod(dim)
    assert_close(found, torch.autograd.grad(own, x, g)[0], **TIGHT)
    assert_close(torch.autograd.grad(found, (x, g), v, materialize_grads=True), second, **TIGHT)
    assert ops.cumprod_backward(None, x, dim, y) is None


# --- views ---------------------------------------------------------------------------------------


def cat_case(case: str, dtype: torch.dtype) -> tuple[list[Tensor], int]:
    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    return {
        "rows": ([normal(2, 3), normal(1, 3), normal(4, 3)], 0),
        "columns": ([normal(2, 3), normal(2, 1)], -1),
        "an empty tensor of one axis": ([normal(0), normal(2, 3), normal(0), normal(2, 1)], 1),
        "empty rows": ([normal(0, 3), normal(2, 3)], -2),
        "vectors": ([normal(3), normal(0), normal(2)], 0),
        "one": ([normal(3, 2)], 0),
        "real and complex": ([normal(2), normal(3, dtype=torch.complex128)], 0),
    }[case]


CASES = ["rows", "columns", "an empty tensor of one axis", "empty rows", "vectors", "one"]


@by_dtype
@pytest.mark.parametrize("case", [*CASES, "real and complex"])
def test_cat_tensors_backward_is_autograds_own(case: str, dtype: torch.dtype) -> None:
    tensors, dim = cat_case(case, dtype)
    leaves = [v.requires_grad_() for v in tensors]
    y = torch.cat(leaves, dim)
    g = torch.randn_like(y)
    sizes, dtypes = [list(v.shape) for v in leaves], [v.dtype for v in leaves]
    found = ops.cat_tensors_backward(g, sizes, dtypes, dim)
    expected = torch.autograd.grad(y, leaves, g)
    assert_close(found, list(expected), rtol=0, atol=0)
    for part in found:
        assert part.untyped_storage().data_ptr() != g.untyped_storage().data_ptr()
    assert derivative("cat_tensors_backward")(None, sizes, dtypes, dim) == [None] * len(leaves)


@by_dtype
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("given", list(product([True, False], repeat=3)), ids=str)
def test_split_with_sizes_backward_is_autograds_own(
    given: tuple[bool, ...], dim: int, dtype: torch.dtype
) -> None:
    """With every choice of the gradients."""
    x = torch.randn(6, 6, 6, dtype=dtype).requires_grad_()
    sizes = [1, 3, 2]
    parts = x.split_with_sizes(sizes, dim)
    g = [torch.randn_like(v) if there else None for v, there in zip(parts, given, strict=True)]
    rule = derivative("split_with_sizes_backward")
    found = rule(g, sizes, dim, x.shape, dtype=dtype, device=x.device)
    if not any(given):
        assert found is None
        return
    ys, gs = zip(*((y, v) for y, v in zip(parts, g, strict=True) if v is not None), strict=True)
    (expected,) = torch.autograd.grad(ys, x, gs)
    op = ops.split_with_sizes_backward
    assert torch.equal(found, expected)
    assert torch.equal(op(g, sizes, dim, x.shape), expected), "the options are optional"
    assert torch.equal(op(g, sizes, dim, x.shape, dtype=dtype, layout=x.layout), expected)


@pytest.mark.parametrize("size", [1, 4, 5, 7])
@pytest.mark.parametrize("dim", [0, -1])
def test_split_backward_is_autograds_own(size: int, dim: int) -> None:
    """With each of the gradients missing."""
    x = torch.randn(7, 7, dtype=torch.float64).requires_grad_()
    parts = x.split(size, dim)
    for missing in range(-1, len(parts)):
        g = [None if k == missing else torch.randn_like(v) for k, v in enumerate(parts)]
        zeros = [torch.zeros_like(v) if h is None else h for v, h in zip(parts, g, strict=True)]
        found = ops.split_backward(g, size, dim, x.shape, dtype=x.dtype, device=x.device)
        expected = torch.autograd.grad(parts, x, zeros, retain_graph=True)[0]
        assert torch.equal(torch.zeros_like(x) if found is None else found, expected)


BLOCKS = [(2, 3), (), (2,), (0, 2), (1, 1), (3, 0)]


def test_an_empty_vector_is_an_empty_row_of_blocks() -> None:
    """PyTorch's gradient of what comes after it is that of the row before."""
    leaf = torch.ones(1, 1, requires_grad=True)
    y, g = torch.block_diag(torch.ones(0), leaf), torch.tensor([[5.0], [7.0]])
    assert_close(y, torch.tensor([[0.0], [1.0]]))
    found = ops.block_diag_backward(g, [[0], [1, 1]], [g.dtype] * 2)
    assert [v.tolist() for v in found] == [[], [[7.0]]]
    assert torch.autograd.grad(y, leaf, g)[0].tolist() == [[5.0]]


@by_dtype
def test_block_diag_backward_is_autograds_own(dtype: torch.dtype) -> None:
    """Of matrices, vectors, numbers and nothing, real among complex ones."""
    leaves = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in BLOCKS]
    leaves.append(torch.randn(2, 2, dtype=torch.float64).requires_grad_())
    y = torch.block_diag(*leaves)
    g = torch.randn_like(y)
    sizes, dtypes = [list(v.shape) for v in leaves], [v.dtype for v in leaves]
    found = ops.block_diag_backward(g, sizes, dtypes)
    assert_close(found, list(torch.autograd.grad(y, leaves, g)), rtol=0, atol=0)
    assert derivative("block_diag_backward")(None, sizes, dtypes) == [None] * len(leaves)


JOINED: dict[str, Callable[..., Tensor]] = {
    "cat_jvp": torch.cat,
    "stack_jvp": torch.stack,
    "block_diag_jvp": lambda tensors: torch.block_diag(*tensors),
}


@by_dtype
@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_tangent_among_others_is_zeros(
    name: str, missing: int, dtype: torch.dtype
) -> None:
    tensors = [torch.randn(2, 3, dtype=dtype), torch.randn(2, 3, dtype=torch.float64)]
    tangents: list[Any] = [torch.randn_like(v) for v in tensors]
    filled = [t * (k != missing) for k, t in enumerate(tangents)]
    tangents[missing] = None
    dim = () if name == "block_diag_jvp" else (1,)
    found = getattr(ops, name)(tensors, tangents, *dim)
    assert_close(found, JOINED[name](filled, *dim), rtol=0, atol=0)
    assert found.dtype == dtype


def test_a_cast_backward() -> None:
    g = torch.randn(3, dtype=torch.complex128)
    found = ops._to_copy_backward(g, dtype=torch.float32, device=g.device)
    assert_close(found, g.real.float(), rtol=0, atol=0)
    same = ops._to_copy_backward(g, dtype=g.dtype, device=g.device)
    assert torch.equal(same, g)
    assert same.data_ptr() != g.data_ptr()


MANY, TWO = torch.tensor([[0, 2], [2, -1]]), torch.tensor([1, 1])
INDICES: dict[str, list[Any]] = {
    "rows": [MANY],
    "columns": [None, TWO],
    "pairs": [MANY, TWO],
    "not next to each other": [TWO, None, TWO],
    "a mask": [torch.tensor([True, False, True])],
    "a mask of two axes": [torch.eye(3, 4, dtype=torch.bool)],
    "nothing": [torch.zeros(0, dtype=torch.int64)],
}


@by_dtype
@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
def test_index_backward_is_autograds_own(indices: list[Any], dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 2, dtype=dtype).requires_grad_()
    y = torch.ops.aten.index.Tensor(x, indices)
    g = torch.randn_like(y)
    zeros = torch.zeros_like(x).detach()
    found = ops.index_backward(zeros, indices, g)
    assert_close(found, torch.autograd.grad(y, x, g)[0], **TIGHT)
    assert not zeros.any()
    assert ops.index_backward(zeros, indices, None) is None


def test_halves_of_one_place_are_summed_in_float32() -> None:
    zeros, g = torch.zeros(2).bfloat16(), torch.full((1000,), 1.0).bfloat16()
    found = ops.index_backward(zeros, [torch.zeros(1000, dtype=torch.int64)], g)
    assert torch.equal(found, torch.tensor([1000.0, 0.0]).bfloat16())


def pulled(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient of y, and autograd's of x for it."""
    g = torch.randn_like(y)
    return g, torch.autograd.grad(y, x, g)[0]


@pytest.mark.parametrize("repeats", [(2, 1, 3), (1, 2), (0, 2), (3, 0, 1), (1, 1)], ids=str)
def test_repeat_backward_is_autograds_own(repeats: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    g, expected = pulled(x.repeat(repeats), x)
    assert_close(ops.repeat_backward(g, repeats, x.shape), expected)


@pytest.mark.parametrize("of", [(None, None, 1), (1, None, 2), (None, -1, 1), (-2, 7, 1)], ids=str)
def test_slice_backward_is_autograds_own(of: tuple[int | None, int | None, int]) -> None:
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    g, expected = pulled(torch.ops.aten.slice(x, 1, *of), x)
    assert_close(ops.slice_backward_wrapper(g, x.shape, 1, *of), expected)


@pytest.mark.parametrize("there", range(3))
def test_what_was_unbound_without_some_gradients(there: int) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    g, expected = pulled(x.unbind(1)[there], x)
    assert_close(ops.unbind_backward([g if k == there else None for k in range(3)], 1), expected)


def test_results_are_no_views_of_the_gradient() -> None:
    g, dtypes = torch.rand(2, 3), [torch.float32] * 2
    found = [
        ops.permute_backwards(g, [1, 0]),
        *ops.cat_tensors_backward(g, [[1, 3], [1, 3]], dtypes, 0),
        *ops.stack_tensors_backward(g, 0, dtypes),
        *ops.block_diag_backward(g, [[1, 1], [1, 2]], dtypes),
        ops.sum_backward(g, [2, 3], [0], True),
    ]
    memory = g.untyped_storage().data_ptr()
    assert all(x.untyped_storage().data_ptr() != memory for x in found)
