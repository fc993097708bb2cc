"""The derivative formulas of the norms, against norms written in primitives and against autograd.

The primitives are differentiated with mean and rstd as the functions of x that they are: that is
what the formulas mean, which take them as arguments.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import oracles
import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.nn import functional
from torch.testing import assert_close

from normpass.decomps.registry import rules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

rules()  # the operators exist once the rules are loaded
ops = torch.ops.normpass
EPS = 0.25
MASK = [True] * 3
GROUPS = 2
EVERY_CHOICE = list(itertools.product((True, False), repeat=3))
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def statistics(x: Tensor, axes: Sequence[int], keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """mean and rstd as functions of x"""
    mean = x.mean(list(axes), keepdim=True)
    rstd = (((x - mean) ** 2).mean(list(axes), keepdim=True) + EPS) ** -0.5
    return (mean, rstd) if keepdim else (mean.reshape(-1), rstd.reshape(-1))


def group_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, rstd = statistics(x.reshape(x.shape[0], GROUPS, -1), [2])
    return mean.reshape(x.shape[0], GROUPS), rstd.reshape(x.shape[0], GROUPS)


RUNNING = {
    "running_mean": torch.tensor([0.5, -1.0, 2.0]).double(),
    "running_var": torch.tensor([0.3, 1.0, 2.5]).double(),
}


class Norm(NamedTuple):
    """A norm as a function of x, weight and bias, and how its formulas are called."""

    shape: tuple[int, ...]
    affine: tuple[int, ...]
    function: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    statistics: Callable[[Tensor], tuple[Tensor, ...]]
    jvp: Callable[..., Tensor]  # (x, t, w, wt, bt, mean, rstd)
    twice: Callable[..., Any] | None = None  # (x, w, v, vw, vb, g, mean, rstd, mask)


def layer(shape: tuple[int, ...], inner: int) -> Norm:
    d = shape[-inner:]
    return Norm(
        shape,
        d,
        lambda x, w, b: oracles.layer_norm(x, d, w, b, EPS),
        lambda x, w, b: functional.layer_norm(x, d, w, b, EPS),
        lambda x: statistics(x, range(-inner, 0), keepdim=True),
        lambda x, t, w, wt, bt, *saved: ops.layer_norm_jvp(x, t, w, wt, None, bt, *saved, d),
        lambda *given: ops.layer_norm_double_backward(*given[:-1], d, given[-1]),
    )


def batch(shape: tuple[int, ...], train: bool) -> Norm:
    axes = [i for i in range(len(shape)) if i != 1]
    running = dict.fromkeys(RUNNING) if train else RUNNING

    def places(mean: Tensor, second: Tensor) -> tuple[list[Any], list[Any]]:
        return ([None, None], [mean, second])[:: 1 if train else -1]

    def jvp(x: Tensor, t: Tensor, w: Tensor, wt: Tensor, bt: Tensor, *both: Tensor) -> Tensor:
        kept, saved = places(*both)
        return ops.batch_norm_jvp(x, t, w, wt, None, bt, *kept, *saved, train, EPS)

    def twice(*given: Any) -> Any:
        kept, saved = places(*given[6:8])
        return ops.batchnorm_double_backward(*given[:6], *kept, train, EPS, *saved, given[8])

    return Norm(
        shape,
        shape[1:2],
        lambda x, w, b: oracles.batch_norm(x, w, b, EPS, **running),
        lambda x, w, b: functional.batch_norm(x, *running.values(), w, b, train, 0.0, EPS),
        lambda x: statistics(x, axes) if train else tuple(v.clone() for v in RUNNING.values()),
        jvp,
        twice,
    )


def group(shape: tuple[int, ...]) -> Norm:
    return Norm(
        shape,
        shape[1:2],
        lambda x, w, b: oracles.group_norm(x, GROUPS, w, b, EPS),
        lambda x, w, b: functional.group_norm(x, GROUPS, w, b, EPS),
        group_statistics,
        lambda x, t, w, wt, bt, *saved: ops.group_norm_jvp(x, t, w, wt, None, bt, *saved, GROUPS),
    )


NORMS = {
    "layer": layer((3, 4, 5), 1),
    "layer over two axes": layer((3, 4, 5), 2),
    "layer over all axes": layer((7,), 1),
    "batch": batch((4, 3, 5), train=True),
    "batch without space": batch((6, 3), train=True),
    "batch in eval mode": batch((4, 3, 2, 3), train=False),
    "batch in eval mode without space": batch((6, 3), train=False),
    "group": group((2, 6, 3)),
    "group without space": group((3, 8)),
    "group of an image": group((2, 4, 2, 3)),
}
TWICE = {name: norm for name, norm in NORMS.items() if norm.twice is not None}

by_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
by_twice = pytest.mark.parametrize("norm", TWICE.values(), ids=TWICE)
by_given = pytest.mark.parametrize("given", EVERY_CHOICE, ids=str)
affine = pytest.mark.parametrize("affine", [True, False], ids=["weight", "no weight"])


def leaf(v: Tensor | None) -> Tensor | None:
    return None if v is None else v.detach().requires_grad_()


def some(given: Sequence[bool], *values: Tensor) -> list[Tensor | None]:
    return [v if there else None for there, v in zip(given, values, strict=True)]


def normal_arguments(norm: Norm, n: int | None = None) -> list[Tensor]:
    """x, g, then v, vw, vb, and w of a double backward, of a batch of n"""
    shape = norm.shape if n is None else (n, *norm.shape[1:])
    return [normal(*s) for s in (*(shape,) * 3, *(norm.affine,) * 3)]


def assert_same(found: Any, expected: Any) -> None:
    """Equal, where None stands for zeros."""
    there = [v for v in (found, expected) if v is not None]
    if there:
        found, expected = (
            torch.zeros_like(there[0]) if v is None else v for v in (found, expected)
        )
        assert_close(found, expected, **TIGHT)


def second_derivatives(
    function: Callable[..., Tensor],
    x: Tensor,
    w: Tensor | None,
    g: Tensor,
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of x, w and g from those of dx, dw and db, through the backward of a norm."""
    x, w, g, b = leaf(x), leaf(w), leaf(g), leaf(w)
    inputs = [v for v in (x, w, b) if v is not None]
    first = torch.autograd.grad(function(x, w, b), inputs, g, create_graph=True)
    total = 0 * x.sum() + sum(
        (r * v).sum() for r, v in zip(first, gradients, strict=False) if v is not None
    )
    leaves = [v for v in (x, w, g) if v is not None]
    found = iter(torch.autograd.grad(total, leaves, allow_unused=True))
    return [None if v is None else next(found) for v in (x, w, g)]


@by_twice
@affine
@by_given
def test_a_double_backward_is_the_derivative_of_the_backward(
    norm: Norm, affine: bool, given: tuple[bool, ...]
) -> None:
    """Of primitives, and of the operator with autograd's own formula."""
    x, g, *values, w = normal_arguments(norm)
    w = w if affine else None
    gradients = some([u and (affine or i == 0) for i, u in enumerate(given)], *values)
    found = norm.twice(x, w, *gradients, g, *norm.statistics(x), MASK)
    for function in (norm.function, norm.eager):
        expected = second_derivatives(function, x, w, g, gradients)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)
    if not any(given):
        assert found == (None, None, None)


@by_twice
def test_a_double_backward_of_statistics_that_depend_on_x_has_the_right_derivative(
    norm: Norm,
) -> None:
    """The third of the norm, where autograd's own layer and batch norm are wrong."""
    x, g, *gradients, w = normal_arguments(norm)
    h = normal(*norm.shape), normal(*norm.affine), normal(*norm.shape)

    def ours(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        found = norm.twice(x, w, *gradients, g, *norm.statistics(x), MASK)
        return sum((u * v).sum() for u, v in zip(found, h, strict=True))

    def primitives(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        def backward(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
            return torch.func.vjp(norm.function, x, w, torch.zeros_like(w))[1](g)

        found = torch.func.vjp(backward, x, w, g)[1](tuple(gradients))
        return sum((u * v).sum() for u, v in zip(found, h, strict=True))

    for order in (torch.func.grad, torch.func.jacfwd):
        found, expected = (order(f, argnums=(0, 1, 2))(x, w, g) for f in (ours, primitives))
        assert_close(found, expected, **TIGHT)


@by_twice
@pytest.mark.parametrize("mask", EVERY_CHOICE, ids=str)
def test_a_mask_leaves_out_what_is_not_wanted(norm: Norm, mask: tuple[bool, ...]) -> None:
    x, g, *values, w = normal_arguments(norm)
    rest = (x, w, *values, g, *norm.statistics(x))
    masked, whole = norm.twice(*rest, mask), norm.twice(*rest, MASK)
    for wanted, m, all_of_it in zip(mask, masked, whole, strict=True):
        assert (m is None) is not wanted
        assert not wanted or torch.equal(m, all_of_it)


@by_norm
@affine
@by_given
def test_a_jvp_is_the_forward_derivative(norm: Norm, affine: bool, given: tuple[bool, ...]) -> None:
    """Of primitives, and of the operator with autograd's own formula."""
    x, b, *values, w = normal_arguments(norm)
    w, b = (w, torch.zeros_like(w)) if affine else (None, None)
    tangents = some([u and (affine or i == 0) for i, u in enumerate(given)], *values)
    found = norm.jvp(x, tangents[0], w, *tangents[1:], *norm.statistics(x))
    for function in (norm.function, norm.eager):
        with fwAD.dual_level():
            pairs = zip((x, w, b), tangents, strict=True)
            duals = [p if t is None else fwAD.make_dual(p, t) for p, t in pairs]
            assert_same(found, fwAD.unpack_dual(function(*duals)).tangent)


@by_norm
def test_a_jvp_of_statistics_that_depend_on_x_is_right_to_the_next_order(norm: Norm) -> None:
    """jvp of jvp and grad of jvp, where autograd's own layer and batch norm are wrong."""
    x, t, s, u = (normal(*norm.shape) for _ in range(4))
    w, wt, b = (normal(*norm.affine) for _ in range(3))

    def ours(x: Tensor) -> Tensor:
        return norm.jvp(x, t, w, wt, None, *norm.statistics(x))

    def primitives(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda x, w: norm.function(x, w, b), (x, w), (t, wt))[1]

    for order in (
        lambda f: torch.func.jvp(f, (x,), (s,))[1],
        lambda f: torch.func.grad(lambda x: (f(x) * u).sum())(x),
        lambda f: torch.func.jvp(torch.func.grad(lambda x: (f(x) * u).sum()), (x,), (s,))[1],
    ):
        assert_close(order(ours), order(primitives), **TIGHT)


# --- mixed dtypes, layouts, what may not be returned, errors -------------------------------------


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_results_have_the_dtypes_of_their_arguments(train: bool) -> None:
    """A bfloat16 x with float32 parameters and statistics."""
    x, g, v = (normal(4, 3, 2).bfloat16() for _ in range(3))
    w, vw, vb, mean = (normal(3).float() for _ in range(4))
    both = (mean, mean.exp())
    running, saved = ((None, None), both) if train else (both, (None, None))
    twice = ops.batchnorm_double_backward(x, w, v, vw, vb, g, *running, train, EPS, *saved, MASK)
    assert [r.dtype for r in twice] == [torch.bfloat16, torch.float32, torch.bfloat16]
    y_t = ops.batch_norm_jvp(x, v, w, vw, None, vb, *running, *saved, train, EPS)
    assert y_t.dtype == torch.bfloat16


def test_a_result_is_never_an_argument() -> None:
    """Where the tangent or gradient of the bias alone is there, and already has the shape of x."""
    x, w, b, g = normal(5), normal(5), normal(5), normal(5)
    saved = statistics(x, [0], keepdim=True)
    y_t = ops.layer_norm_jvp(x, None, w, None, None, b, *saved, [5])
    dgO = ops.layer_norm_double_backward(x, w, None, None, b, g, *saved, [5], MASK)[2]
    for result in (y_t, dgO):
        assert torch.equal(result, b)
        assert result.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_an_offset_of_x_and_of_its_tangent_costs_no_digits() -> None:
    """In float32, and no more than autograd's own formula, which centres the tangent too."""
    x, t = (1000 + torch.randn(64, 512) for _ in range(2))
    _, *saved = torch.native_layer_norm(x, [512], None, None, EPS)
    ours = ops.layer_norm_jvp(x, t, None, None, None, None, *saved, [512])
    replaced, reference = (
        torch.func.jvp(lambda x, f=f: f(x, [512], eps=EPS), *pair)[1]
        for f, pair in (
            (functional.layer_norm, ((x,), (t,))),
            (oracles.layer_norm, ((x.double(),), (t.double(),))),
        )
    )
    oracles.assert_no_less_accurate(ours, replaced, reference, "layer_norm_jvp")


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0)], ids=str)
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x, w, saved = normal(*shape), normal(4), normal(shape[0], GROUPS)
    twice = ops.batchnorm_double_backward(x, w, x, w, w, x, None, None, True, EPS, w, w, MASK)
    assert [v.shape for v in twice] == [x.shape, w.shape, x.shape]
    assert not twice[1].any()
    assert ops.group_norm_jvp(x, x, w, w, None, w, saved, saved, GROUPS).shape == x.shape


def test_batch_norm_says_which_statistics_it_misses() -> None:
    x, w = normal(4, 3), normal(3)
    for train, expected in ((True, "save_mean and save_inv"), (False, "running_mean and")):
        with pytest.raises(ValueError, match=f"train={train} needs {expected}"):
            ops.batch_norm_jvp(x, x, w, w, w, w, None, None, None, None, train, EPS)
