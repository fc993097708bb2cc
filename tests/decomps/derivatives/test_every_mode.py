"""What every formula owes, of those of reductions, scans, views, matrices and activations:
derivatives in every mode, vmap, one trace for all sizes, halves rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import formula_modes
import pytest
import torch
from torch.testing import assert_close

from normpass.decomps.registry import rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

rules()  # the operators exist once the rules are loaded
ops = torch.ops.normpass
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def lu(A: Tensor) -> tuple[Tensor, Tensor]:
    return torch.linalg.lu_factor(A)


def rows(n: int) -> list[Tensor]:
    """x, another of its shape, one for each of its rows"""
    return [normal(n, 4), normal(n, 4), normal(n)]


def system(n: int) -> list[Tensor]:
    """A, two right-hand sides, a tangent of A"""
    return [
        normal(n, 3, 3) + 4 * torch.eye(3).double(),
        *(normal(n, 3, 2) for _ in "BG"),
        normal(n, 3, 3),
    ]


def solve_backward(A: Tensor, B: Tensor, gX: Tensor, left: bool) -> Any:
    X = torch.linalg.solve(A, B, left=left)
    return ops.linalg_solve_backward(gX, X, A, *lu(A), left, True)


def solve_jvp(A: Tensor, B: Tensor, dB: Tensor, dA: Tensor) -> Tensor:
    return ops.linalg_solve_jvp(dA, dB, torch.linalg.solve(A, B), *lu(A), True)


def norm(p: float) -> tuple[Callable[[int], list[Tensor]], Callable[..., Any]]:
    def both(x: Tensor, t: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.linalg.vector_norm(x, p, 1)
        back = ops.norm_backward(g, x, p, y, [-1], False)
        return back, ops.norm_jvp(x, t, p, y, [1], False)

    return rows, both


def norm_of_all(x: Tensor, t: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.linalg.vector_norm(x, 3)
    return ops.norm_backward(g.sum(), x, 3, y), ops.norm_jvp(x, t, 3, y)


def cat_backward(x: Tensor, g: Tensor) -> list[Tensor]:
    sizes = [[x.shape[0], 3], [x.shape[0], 1], [0]]
    return ops.cat_tensors_backward(g * x, sizes, [x.dtype] * 3, -1)[:2]


def split_backward(x: Tensor, g: Tensor) -> Tensor:
    n = x.shape[0]
    return ops.split_with_sizes_backward([x, None, g[:1]], [n, 2, 1], 0, [n + 3, 4], dtype=x.dtype)


def index_backward(x: Tensor, g: Tensor) -> Tensor:
    columns = torch.arange(3, device=x.device) % 2
    return ops.index_backward(x * 0, [None, columns], g[:, :3])


def mm_backward(x: Tensor, y: Tensor) -> Tensor:
    return ops.mm_mat1_backward(x, y[:3], [x.shape[0], 3], [3, 1], torch.strided, 2)


def two(call: Callable[..., Any]) -> tuple[Callable[[int], list[Tensor]], Callable[..., Any]]:
    return (lambda n: [normal(n, 4), normal(n, 4)]), call


def logsumexp(x: Tensor, t: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    back = ops.logsumexp_backward(g, x, x.logsumexp(1), [-1], False)
    return back, ops.logsumexp_jvp(x, t, [1], False)


def glu(n: int) -> list[Tensor]:
    """x, v, and a gradient of its half"""
    return [normal(n, 4), normal(n, 4), normal(n, 2)]


def gelu(how: str) -> Callable[..., Tensor]:
    return lambda x, v, g: ops.gelu_double_backward(v, g, x, how)


SAMPLES: dict[str, tuple[Callable[[int], list[Tensor]], Callable[..., Any]]] = {
    "logsumexp": (rows, logsumexp),
    "sum": (rows, lambda x, t, g: x * t * ops.sum_backward(g, x.shape, [-1], False)),
    "prod": (rows, lambda x, t, g: ops.prod_backward(g, x, t[:, 0], 1, False) * t),
    "prod of all": (rows, lambda x, t, g: ops.prod_backward(g.sum(), x, g.sum()) * t),
    **{f"norm, p = {p}": norm(p) for p in (0.5, 1, 1.5, 2, 3, float("inf"))},
    "norm of all": (rows, norm_of_all),
    "cumprod": two(lambda x, g: ops.cumprod_backward(g, x, -1, x.cumprod(-1))),
    "cumprod of the first axis": two(lambda x, g: ops.cumprod_backward(g, x, 0, x.cumprod(0))),
    "cat": two(cat_backward),
    "split": two(split_backward),
    "index": two(index_backward),
    "mm": ((lambda n: [normal(n, 4), normal(3, 4)]), mm_backward),
    "solve": (lambda n: system(n)[:3], lambda A, B, g: solve_backward(A, B, g, True)),
    "solve from the right": (
        lambda n: [v.mT if v.shape[-1] == 2 else v for v in system(n)[:3]],
        lambda A, B, g: solve_backward(A, B, g, False),
    ),
    "solve jvp": (system, solve_jvp),
    "cholesky": (
        lambda n: [system(n)[0], normal(n, 3, 3)],
        lambda L, g: ops.cholesky_backward(g, False, L.tril()),
    ),
    "glu": (glu, lambda x, v, g: ops.glu_double_backward(v, g, x, -1)),
    "glu's gradient": (glu, lambda x, v, g: g * ops.glu_double_backward_grad_output(v, x, 1)),
    **{
        f"gelu, {how}": (
            lambda n: [normal(n, 4) for _ in range(3)],
            gelu(how),
        )
        for how in ("none", "tanh")
    },
}
by_sample = pytest.mark.parametrize(("tensors", "call"), SAMPLES.values(), ids=SAMPLES)
# LAPACK knows no halves; and those of the sums here come from several operators.
MATRICES = {name for name in SAMPLES if name.startswith(("solve", "cholesky"))}
ROUNDED_ONCE = {
    name: SAMPLES[name] for name in ("cat", "split", "index", "glu", "gelu, none", "gelu, tanh")
}


def results(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


@by_sample
def test_a_formula_can_be_differentiated_in_every_mode(tensors: Any, call: Any) -> None:
    formula_modes.check_derivatives(call, tensors)


@by_sample
def test_a_formula_under_vmap_is_a_loop(tensors: Any, call: Any) -> None:
    formula_modes.check_vmap(call, tensors, 3)


@by_sample
def test_a_trace_at_one_size_runs_at_another(tensors: Any, call: Any) -> None:
    formula_modes.check_trace(call, tensors, (5, 7))


@by_sample
def test_fake_tensors_say_what_comes_out(tensors: Any, call: Any) -> None:
    formula_modes.check_fake(call, tensors(3))


@pytest.mark.parametrize(("tensors", "call"), ROUNDED_ONCE.values(), ids=ROUNDED_ONCE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_rounded_once(tensors: Any, call: Any, dtype: torch.dtype) -> None:
    formula_modes.check_half(call, tensors(3), dtype)


HALVES = [name for name in SAMPLES if name not in MATRICES and name not in ROUNDED_ONCE]


@pytest.mark.parametrize("name", HALVES)
def test_the_rest_of_half_precision_is_as_exact_as_what_it_is_given(name: str) -> None:
    """The saved result is rounded before the formula sees it."""
    tensors, call = SAMPLES[name]
    half = [v.bfloat16() for v in tensors(3)]
    both = call(*half), call(*(v.double() for v in half))
    for found, expected in zip(*map(results, both), strict=True):
        assert found.dtype == torch.bfloat16
        assert_close(found.double(), expected, rtol=0.05, atol=0.05)
