"""The derivatives of variances, standard deviations and group norm's statistics.

Against primitives, and against autograd's own.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import oracles
import pytest
import torch
from torch.testing import assert_close

from normpass.decomps.registry import rules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# What is asked for here on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning")

rules()  # the operators exist once the rules are loaded
ops = torch.ops.normpass
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
EPS = 0.25
MASK = [True] * 3
GROUPS = 2

SHAPES_AND_DIMS: list[tuple[tuple[int, ...], list[int] | None]] = [
    ((5,), None),
    ((5,), [0]),
    ((3, 4), None),
    ((3, 4), []),
    ((3, 4), [0]),
    ((3, 4), [-1]),
    ((2, 3, 4), [2, 0]),
    ((2, 3, 4), [0, 1, -1]),
    ((2, 3, 4), [1]),
]
EVERY_CHOICE = list(itertools.product((True, False), repeat=3))
by_given = pytest.mark.parametrize("given", EVERY_CHOICE, ids=str)
affine = pytest.mark.parametrize("affine", [True, False], ids=["weight", "no weight"])
by_dim = pytest.mark.parametrize(
    ("shape", "dim"), SHAPES_AND_DIMS, ids=[f"{s} over {d}" for s, d in SHAPES_AND_DIMS]
)
by_correction = pytest.mark.parametrize("correction", [None, 0, 1, 0.5, 2])
by_keepdim = pytest.mark.parametrize("keepdim", [False, True], ids=["reduced", "keepdim"])
by_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex128], ids=["real", "complex"]
)


def leaf(v: Tensor | None) -> Tensor | None:
    return None if v is None else v.detach().requires_grad_()


def some(given: Sequence[bool], *values: Tensor) -> list[Tensor | None]:
    return [v if there else None for there, v in zip(given, values, strict=True)]


def assert_same(found: Any, expected: Any) -> None:
    """Equal, where None stands for zeros."""
    there = [v for v in (found, expected) if v is not None]
    if there:
        found, expected = (
            torch.zeros_like(there[0]) if v is None else v for v in (found, expected)
        )
        assert_close(found, expected, **TIGHT)


def moments(x: Tensor, dim: Sequence[int] | None, correction: float | None, keepdim: bool) -> Any:
    """var, std and mean from primitives"""
    axes = list(dim or range(x.dim()))
    n = torch.ones_like(x.real).sum(axes, keepdim=keepdim)
    mean = x.sum(axes, keepdim=True) / torch.ones_like(x.real).sum(axes, keepdim=True)
    d = x - mean
    var = (d * d.conj()).real.sum(axes, keepdim=keepdim) / (
        n - (1 if correction is None else correction)
    )
    return var, var.sqrt(), x.sum(axes, keepdim=keepdim) / n


def backwards(
    x: Tensor, gvar: Tensor | None, gstd: Tensor | None, gmean: Tensor | None, *rest: Any
) -> dict[str, tuple[Tensor, list[tuple[int, Tensor | None]]]]:
    """Each formula's result, and the gradients it was given, by their place in `moments`."""
    std = torch.std(x, rest[0], correction=1 if rest[1] is None else rest[1], keepdim=rest[2])
    return {
        "var": (ops.var_backward(gvar, x, *rest), [(0, gvar)]),
        "std": (ops.std_backward(std, gstd, x, *rest), [(1, gstd)]),
        "var_mean": (ops.var_mean_backward(gvar, gmean, x, *rest), [(0, gvar), (2, gmean)]),
        "std_mean": (ops.std_mean_backward(gstd, gmean, x, std, *rest), [(1, gstd), (2, gmean)]),
    }


@by_dim
@by_correction
@by_keepdim
@by_dtype
def test_the_backwards_are_the_derivatives_of_primitives(
    shape: tuple[int, ...],
    dim: list[int] | None,
    correction: float | None,
    keepdim: bool,
    dtype: torch.dtype,
) -> None:
    """With every choice of the gradients. Autograd's own is infinite where dim is []."""
    x = torch.randn(shape, dtype=dtype)
    leaf = x.clone().requires_grad_()
    outputs = moments(leaf, dim, correction, keepdim)
    gradients = [torch.randn_like(y) for y in outputs]
    for given in EVERY_CHOICE:
        for found, pairs in backwards(
            x, *some(given, *gradients), dim, correction, keepdim
        ).values():
            wanted = [(outputs[i], g) for i, g in pairs if g is not None]
            if not wanted:
                assert found is None
                continue
            ys, gs = zip(*wanted, strict=True)
            (expected,) = torch.autograd.grad(ys, leaf, gs, retain_graph=True)
            assert_close(found, expected, **TIGHT)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3,), (1, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("dim", [None, [0], [-1]], ids=str)
@pytest.mark.parametrize("correction", [0, 1, 2, 3.5])
@pytest.mark.parametrize("constant", [False, True], ids=["varied", "constant"])
def test_without_degrees_of_freedom_the_backwards_are_autograds_own(
    shape: tuple[int, ...], dim: list[int] | None, correction: float, constant: bool
) -> None:
    """0-d tensors, and fewer elements than the correction: infinite and NaN where eager is."""
    x = torch.full(shape, 2.0).double() if constant else torch.randn(shape).double()
    x.requires_grad_()
    keywords = {"dim": dim, "correction": correction, "keepdim": False}
    var, mean = torch.var_mean(x, **keywords)
    std = torch.std(x, **keywords)
    gvar, gstd, gmean = (torch.randn_like(y) for y in (var, std, mean))
    found = backwards(x.detach(), gvar, gstd, gmean, dim, correction, False)
    stds, means = torch.std_mean(x, **keywords)
    for name, outputs in {
        "var": ((var, gvar),),
        "std": ((std, gstd),),
        "var_mean": ((var, gvar), (mean, gmean)),
        "std_mean": ((stds, gstd), (means, gmean)),
    }.items():
        ys, gs = zip(*outputs, strict=True)
        (expected,) = torch.autograd.grad(ys, x, gs, retain_graph=True)
        assert_close(found[name][0], expected, equal_nan=True, **TIGHT)


def test_a_zero_deviation_has_a_zero_gradient_of_every_order() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    g = torch.ones((), dtype=torch.float64, requires_grad=True)
    std = torch.zeros((), dtype=torch.float64, requires_grad=True)
    first = ops.std_backward(std, g, x, None, 1, False)
    second = torch.autograd.grad(first, (x, g, std), torch.arange(3.0).double())
    for v in (first, *second):
        assert not v.any()


# --- group norm's statistics: through its backward, and forward ----------------------------------


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def group_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """mean and rstd as functions of x"""
    rows = x.reshape(x.shape[0], GROUPS, -1)
    return rows.mean(2), (rows.var(2, correction=0) + EPS) ** -0.5


def group_backward(x: Tensor, w: Tensor | None, *gradients: Tensor | None) -> tuple[Any, ...]:
    n, c = x.shape[:2]
    sizes = (n, c, x[:1].numel() // c if n else 1, GROUPS)
    op = ops.infinitely_differentiable_native_group_norm_backward
    return op(*gradients, x, *group_statistics(x), w, *sizes, EPS, MASK)


by_group_shape = pytest.mark.parametrize("shape", [(2, 6, 3), (3, 8), (2, 4, 2, 3)], ids=str)


@by_group_shape
@affine
@by_given
def test_group_norms_backward_takes_gradients_of_its_statistics(
    shape: tuple[int, ...], affine: bool, given: tuple[bool, ...]
) -> None:
    """Each alone too, where autograd's own drops that of mean or rstd."""
    x = leaf(normal(*shape))
    w, b = (leaf(normal(shape[1])) if affine else None for _ in range(2))
    outputs = oracles.group_norm(x, GROUPS, w, b, EPS), *group_statistics(x)
    gradients = some(given, *(torch.randn_like(y) for y in outputs))
    found = group_backward(x.detach(), None if w is None else w.detach(), *gradients)
    total = 0 * x.sum() + sum(
        (y * g).sum() for y, g in zip(outputs, gradients, strict=True) if g is not None
    )
    leaves = [v for v in (x, w, b) if v is not None]
    expected = torch.autograd.grad(total, leaves, allow_unused=True)
    for ours, theirs in zip(found, expected, strict=False):
        assert_same(ours, theirs)
    assert found[1] is None or affine
    assert (found[2] is None) == (gradients[0] is None), "a bias may be there without a weight"


@by_group_shape
def test_group_norms_backward_is_autograds_own(shape: tuple[int, ...]) -> None:
    x, w = leaf(normal(*shape)), leaf(normal(shape[1]))
    sizes = (shape[0], shape[1], x[0, 0].numel(), GROUPS)
    outputs = torch.native_group_norm(x, w, torch.zeros_like(w), *sizes, EPS)
    gradients = [torch.randn_like(y) for y in outputs]
    expected = torch.autograd.grad(outputs, (x, w), gradients)
    found = group_backward(x.detach(), w.detach(), *gradients)
    assert_close(found[:2], expected, **TIGHT)


@by_group_shape
def test_the_statistics_of_group_norm_have_tangents(shape: tuple[int, ...]) -> None:
    x, t, s = (normal(*shape) for _ in range(3))

    def ours(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, rstd = group_statistics(x)
        rstd_t = ops.group_norm_invstd_jvp(x, t, mean, rstd, GROUPS)
        return ops.group_norm_mean_jvp(t, mean, GROUPS), rstd_t

    def primitives(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(group_statistics, (x,), (t,))[1]

    assert_close(ours(x), primitives(x), **TIGHT)
    assert_close(*(torch.func.jvp(f, (x,), (s,))[1] for f in (ours, primitives)), **TIGHT)
    mean, rstd = group_statistics(x)
    assert ops.group_norm_mean_jvp(None, mean, GROUPS) is None
    assert ops.group_norm_invstd_jvp(x, None, mean, rstd, GROUPS) is None


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0)], ids=str)
def test_group_norms_backward_of_an_empty_tensor(shape: tuple[int, ...]) -> None:
    x, w, saved = normal(*shape), normal(4), normal(shape[0], GROUPS)
    op = ops.infinitely_differentiable_native_group_norm_backward
    dx, *parameters = op(x, saved, saved, x, saved, saved, w, *shape, GROUPS, EPS, MASK)
    assert [v.shape for v in (dx, *parameters)] == [x.shape, w.shape, w.shape]
    assert not any(v.any() for v in parameters)
    assert ops.group_norm_mean_jvp(x, saved, GROUPS).shape == saved.shape


def test_channels_last_is_read_in_place_and_kept() -> None:
    x, t = (normal(2, 4, 3, 3).contiguous(memory_format=torch.channels_last) for _ in range(2))
    w = normal(4)
    mean, rstd = group_statistics(x)
    y_t = ops.group_norm_jvp(x, t, w, w, None, w, mean, rstd, GROUPS)
    dense = ops.group_norm_jvp(x.contiguous(), t.contiguous(), w, w, None, w, mean, rstd, GROUPS)
    assert y_t.is_contiguous(memory_format=torch.channels_last)
    assert_close(y_t, dense, **TIGHT)
