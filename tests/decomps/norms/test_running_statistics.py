"""Batch norm's running statistics under vmap: updated in place, wherever they are batched."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad
from torch.nn import functional as F

from normpass.backend.entry import fusion_pass
from normpass.decomps.activation import registered
from normpass.decomps.registry import batch_rule, find_op

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten

V, N, C, S = 3, 4, 6, 5
INFO = SimpleNamespace(batch_size=V, randomness="error")
SETTINGS = (True, 0.3, 0.25)
Dims = tuple["int | None", "int | None", "int | None"]


def statistics(*sizes: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(sizes).double(), torch.ones(sizes).double()


def batched(dims: Dims) -> tuple[Tensor, Tensor, Tensor]:
    """x, running_mean and running_var, batched along these dimensions in the way of views."""
    values = torch.randn(V, N, C, S), torch.randn(V, C), torch.rand(V, C) + 0.5
    x, mean, var = (
        v[0].double() if d is None else v.double().movedim(0, d)
        for v, d in zip(values, dims, strict=True)
    )
    return x, mean, var


def rule(
    dims: Dims,
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    op: Any = aten.native_batch_norm,
    settings: tuple[Any, ...] = SETTINGS,
) -> Any:
    in_dims = (dims[0], None, None, *dims[1:], *(None,) * len(settings))
    return batch_rule(op)(INFO, in_dims, x, None, None, mean, var, *settings)


def example(value: Tensor, dim: int | None, i: int) -> Tensor:
    return value if dim is None else value.select(dim, i)


def loop(dims: Dims, *values: Tensor) -> list[Tensor]:
    """The operator over the examples: its results, stacked; it updates the views it is given."""
    rows = []
    for i in range(V):
        x, mean, var = (example(v, d, i) for v, d in zip(values, dims, strict=True))
        rows.append(aten.native_batch_norm(x, None, None, mean, var, *SETTINGS))
    return [torch.stack(row) for row in zip(*rows, strict=True)]


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(tuple(actual), tuple(expected), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dims", list(itertools.product((None, 0, 1, -1), (0, -1), (0, -1))))
def test_running_statistics_are_updated_in_place(dims: Dims) -> None:
    ours = batched(dims)
    theirs = [value.clone() for value in ours]
    outs, out_dims = rule(dims, *ours)
    expected = loop(dims, *theirs)
    assert set(out_dims) == {None if dims[0] is None else 0}
    assert_same((out.expand(e.shape) for out, e in zip(outs, expected, strict=True)), expected)
    assert_same(ours, theirs)


# cuDNN's and MIOpen's have no kernel for the CPU: the loop is native_batch_norm's for all of them.
SPELLINGS = {
    "legit": ("aten._native_batch_norm_legit.default", SETTINGS),
    "with update": ("aten._batch_norm_with_update.default", SETTINGS[1:]),
    "cudnn": ("aten.cudnn_batch_norm.default", SETTINGS),
    "miopen": ("aten.miopen_batch_norm.default", SETTINGS),
}


@pytest.mark.parametrize(("name", "settings"), SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("dims", [(0, 0, 0), (1, -1, 0), (None, 0, -1)], ids=str)
def test_other_operators_update_them_too(name: str, settings: tuple[Any, ...], dims: Dims) -> None:
    op = find_op(name)
    if op is None:
        pytest.skip(f"this torch has no {name}")
    ours = batched(dims)
    theirs = [value.clone() for value in ours]
    outs, out_dims = rule(dims, *ours, op, settings)
    expected = loop(dims, *theirs)
    assert_same((out.expand(e.shape) for out, e in zip(outs[:3], expected, strict=True)), expected)
    assert_same(ours, theirs)
    assert [(v.dtype, v.shape) for v in outs[3:]] == [(torch.uint8, (0,))] * (len(outs) - 3)
    assert not any(out_dims[3:])


def test_a_functional_operator_updates_nothing() -> None:
    """Running statistics that examples share are no error there: the new ones are results."""
    x, mean, var = batched((0, None, 0))
    before = mean.clone(), var.clone()
    op = aten._native_batch_norm_legit_functional.default
    outs, out_dims = rule((0, None, 0), x, mean, var, op)
    assert_same((mean, var), before)
    assert out_dims == (0,) * 5
    expected = [op(x[i], None, None, mean, var[i], *SETTINGS) for i in range(V)]
    assert_same(outs, map(torch.stack, zip(*expected, strict=True)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_averaged_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    x, mean, var = (value.to(dtype) for value in batched((0, 0, 0)))
    exact = [value.double() for value in (x, mean, var)]
    rule((0, 0, 0), x, mean, var)
    loop((0, 0, 0), *exact)
    for ours, right in zip((mean, var), exact[1:], strict=True):
        assert ours.dtype == dtype
        assert (ours - right).abs().max() <= torch.finfo(dtype).eps * right.abs().max()


def test_a_running_statistic_that_nothing_batched_reaches_is_updated_once() -> None:
    x, mean, var = batched((None, -1, None))
    first, other = mean[:, 0].clone(), var.clone()
    rule((None, -1, None), x, mean, var)
    aten.native_batch_norm(x, None, None, first, other, *SETTINGS)
    assert_same((mean[:, 0], var), (first, other))


@pytest.mark.parametrize("dims", [(0, None, None), (0, 0, None), (-1, None, 0)])
def test_running_statistics_shared_by_examples_are_upstreams_error(dims: Dims) -> None:
    x, mean, var = batched(dims)
    before = mean.clone()
    with pytest.raises(RuntimeError) as ours:
        rule(dims, x, mean, var)
    with pytest.raises(RuntimeError) as theirs:
        torch.vmap(lambda *v: aten.native_batch_norm(v[0], None, None, *v[1:], *SETTINGS), dims)(
            x, mean, var
        )
    assert str(ours.value) == str(theirs.value).partition("\nException raised from")[0]
    assert torch.equal(mean, before)


def test_the_variance_of_one_value_is_nan_as_in_eager() -> None:
    x, (mean, var) = torch.randn(V, 1, C).double(), statistics(V, C)
    rule((0, 0, 0), x, mean, var)
    assert_same([mean], [0.3 * x[:, 0]])
    assert var.isnan().all()


# --- under other transforms ---------------------------------------------------------------------


def trained(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """A number that depends on x through a batch norm of V examples."""
    (y, _, _), _ = rule((0, 0, 0), x, mean, var)
    return (y**3 * torch.arange(float(S))).sum()


DERIVATIVES = {
    "grad": torch.func.grad,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),)),
    "grad of grad": lambda f: torch.func.grad(lambda x: (torch.func.grad(f)(x) ** 2).sum()),
    "jvp of grad": lambda f: lambda x: torch.func.jvp(torch.func.grad(f), (x,), (x.cos(),)),
    "backward": lambda f: lambda x: f(x.requires_grad_()).backward(),
}


@pytest.mark.parametrize("outer", DERIVATIVES)
def test_captured_running_statistics_are_updated_under_derivatives(outer: str) -> None:
    x, (mean, var) = batched((0, 0, 0))[0], statistics(V, C)
    DERIVATIVES[outer](lambda x: trained(x, mean, var))(x)
    moments = x.detach().mean((1, 3)), x.detach().var((1, 3))
    assert_same((mean, var), (0.3 * moments[0], 0.7 + 0.3 * moments[1]))
    assert not mean.requires_grad


def test_running_statistics_are_updated_in_forward_mode_without_a_tangent() -> None:
    x, (mean, var) = batched((0, 0, 0))[0], statistics(V, C)
    with forward_ad.dual_level():
        trained(forward_ad.make_dual(x, x.cos()), mean, var)
        assert forward_ad.unpack_dual(mean).tangent is None
    assert_same([mean], [0.3 * x.mean((1, 3))])


@pytest.mark.parametrize("inner", [lambda f: f, torch.func.grad], ids=["value", "grad"])
def test_running_statistics_of_an_outer_vmap(inner: Callable[..., Any]) -> None:
    x, (mean, var) = torch.randn(2, V, N, C, S).double(), statistics(2, V, C)
    torch.vmap(lambda x, m, v: inner(lambda x: trained(x, m, v))(x))(x, mean, var)
    assert_same([mean], [0.3 * x.mean((2, 4))])
    with pytest.raises(RuntimeError, match="which will be updated in place, were not batched"):
        torch.vmap(lambda x: trained(x, mean[0], var[0]))(x)


# --- register(running_stats="mean") -------------------------------------------------------------


def shared(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, training=True, momentum=0.3)


SHARED: dict[str, Callable[..., Any]] = {
    "first": torch.vmap(shared, (0, None, None)),
    "last": lambda x, *buffers: torch.vmap(shared, (-1, None, None))(x.movedim(0, -1), *buffers),
    "two levels": lambda x, *buffers: torch.vmap(
        torch.vmap(shared, (0, None, None)), (0, None, None)
    )(x.unflatten(0, (1, -1)), *buffers),
    "gradients": torch.vmap(
        grad(lambda x, *buffers: shared(x, *buffers).sin().sum()), (0, None, None)
    ),
}


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", SHARED)
def test_what_examples_share_is_updated_once_with_their_mean(
    name: str, backend: str | None
) -> None:
    x = torch.randn(V, N, C, S, dtype=torch.float64)
    mean, var = statistics(C)
    rows = x.transpose(1, 2).flatten(2)
    right = 0.3 * rows.mean((0, 2)), 0.7 + 0.3 * rows.var(2).mean(0)
    function = SHARED[name]
    with registered(eager=backend is None, running_stats="mean"):
        if backend:
            torch._dynamo.reset()
            function = torch.compile(function, backend=backend, fullgraph=True)
        function(x, mean, var)
    assert_same((mean, var), right)


def test_one_that_is_shared_beside_one_that_is_not() -> None:
    x, mean, var = batched((0, None, 0))
    before, rows = mean.clone(), x.transpose(1, 2).flatten(2)
    right = 0.7 * before + 0.3 * rows.mean((0, 2)), 0.7 * var + 0.3 * rows.var(2)
    with registered(running_stats="mean"):
        rule((0, None, 0), x, mean, var)
    assert_same((mean, var), right)


def test_the_mean_is_taken_as_long_as_somebody_wants_it() -> None:
    x, mean, var = batched((0, None, None))
    with registered(eager=True, running_stats="mean"), registered(eager=True):
        torch.vmap(shared, (0, None, None))(x, mean, var)
    with registered(eager=True), pytest.raises(RuntimeError, match="were not batched"):
        torch.vmap(shared, (0, None, None))(x, mean, var)


def test_compiled_code_in_caches_is_of_one_of_the_two() -> None:
    with registered():
        error = fusion_pass().uuid()
        with registered(running_stats="mean"):
            assert fusion_pass().uuid() != error
        assert fusion_pass().uuid() == error
