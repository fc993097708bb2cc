"""Decompositions where random gradients are no test: phases, ranks, refusals."""

from __future__ import annotations

import re
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from normpass import decompositions
from normpass.decomps.table.binding import jvp, vjp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

aten = torch.ops.aten
ops: Any = torch.ops.normpass
TIGHT = {"rtol": 1e-9, "atol": 1e-10}
by_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex128], ids=["real", "complex"]
)


def matrix(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random, its singular values apart."""
    m, n = shape[-2:]
    return torch.randn(shape, dtype=dtype) + 3 * torch.eye(m, n) * torch.arange(1, n + 1)


# --- phases --------------------------------------------------------------------------------------


def weighted(X: Tensor) -> Tensor:
    return (X * torch.linspace(1, 2, X.numel(), dtype=torch.float64).reshape(X.shape)).sum()


def squares(X: Tensor) -> Tensor:
    """Of vectors, whatever their phases."""
    return weighted((X * X.conj()).real.pow(2))


def check_loss(
    op: Any, args: Sequence[Any], loss: Callable[..., Tensor], name: str, hermitian: bool = False
) -> None:
    """The gradient of a loss of the results, and its derivative, against autograd's."""
    A = args[0].requires_grad_()
    results = op((A + A.mH) / 2 if hermitian else A, *args[1:])
    grads = torch.autograd.grad(loss(*results), results, create_graph=True, allow_unused=True)
    ours = vjp(op)(grads, args, results)[name]
    (theirs,) = torch.autograd.grad(loss(*results), A, create_graph=True)
    assert_close(ours, theirs, **TIGHT)
    along = torch.randn_like(A)
    second = (torch.autograd.grad(g, A, along, retain_graph=True)[0] for g in (ours, theirs))
    assert_close(*second, **TIGHT)


SVD_LOSSES: dict[str, Callable[..., Tensor]] = {
    "U": lambda U, S, Vh: squares(U),
    "S": lambda U, S, Vh: weighted(S),
    "Vh": lambda U, S, Vh: squares(Vh),
    "U and Vh": lambda U, S, Vh: squares(U @ Vh),
    "all": lambda U, S, Vh: squares((U * S.pow(3).unsqueeze(-2)) @ Vh) + squares(U),
}


@by_dtype
@pytest.mark.parametrize("full", [False, True], ids=["", "full"])
@pytest.mark.parametrize("loss", SVD_LOSSES.values(), ids=SVD_LOSSES)
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (3, 3), (2, 4, 3)], ids=str)
def test_a_loss_of_singular_vectors(
    shape: tuple[int, ...], loss: Callable[..., Tensor], full: bool, dtype: torch.dtype
) -> None:
    k = min(shape[-2:])
    check_loss(
        aten._linalg_svd,
        (matrix(*shape, dtype=dtype), full),
        lambda U, S, Vh: loss(U[..., :k], S, Vh[..., :k, :]),
        "A",
    )


EIG_LOSSES: dict[str, Callable[..., Tensor]] = {
    "L": lambda L, V: squares(L),
    "V": lambda L, V: squares(V),
    "both": lambda L, V: squares((V * L.unsqueeze(-2)) @ V.mH),
}


@by_dtype
@pytest.mark.parametrize("loss", EIG_LOSSES.values(), ids=EIG_LOSSES)
@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("name", ["linalg_eig", "_linalg_eigh"])
def test_a_loss_of_eigenvectors(
    name: str, shape: tuple[int, ...], loss: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    op = getattr(aten, name)
    A = matrix(*shape, dtype=dtype)
    if name == "_linalg_eigh":
        A = A + A.mH
    check_loss(op, (A,), loss, op.default._schema.arguments[0].name)


def off_phase() -> list[tuple[Any, Tensor, str]]:
    A = matrix(3, 3, dtype=torch.complex128)
    return [
        (aten._linalg_svd, A, "svd_backward: The singular vectors in the complex case are"),
        (aten._linalg_eigh, A + A.mH, "linalg_eigh_backward: The eigenvectors in the complex"),
        (aten.linalg_eig, A, "linalg_eig_backward: The eigenvectors in the complex case are"),
    ]


@pytest.mark.parametrize("number", range(3))
def test_a_loss_of_phases_is_refused_where_values_can_be_asked_for(number: int) -> None:
    op, A, message = off_phase()[number]
    results = op(A)
    grads = [1j * (k + 1) * y if y.is_complex() else y for k, y in enumerate(results)]

    def gradient(A: Tensor, *grads: Tensor) -> Any:
        return vjp(op)(grads, (A,), op(A))

    with pytest.raises(RuntimeError, match=re.escape(message)):
        gradient(A, *grads)
    make_fx(gradient, tracing_mode="fake")(A, *grads)
    torch.vmap(gradient)(*(x.unsqueeze(0) for x in (A, *grads)))


@by_dtype
@pytest.mark.parametrize("name", ["_linalg_svd", "_linalg_eigh", "linalg_eig"])
def test_gradients_are_the_adjoints_of_tangents_whatever_the_phases(
    name: str, dtype: torch.dtype
) -> None:
    """Under vmap, where no one asks for values."""
    op, A, T = getattr(aten, name), matrix(4, 4, dtype=dtype), torch.randn(4, 4, dtype=dtype)
    if name == "_linalg_eigh":
        A, T = A + A.mH, T + T.mH
    results = op(A)
    grads = [torch.randn_like(y) for y in results]
    tangents = jvp(op)((T,), (A,), results)
    (found,) = torch.vmap(lambda A: vjp(op)(grads, (A,), op(A)))(A.unsqueeze(0)).values()
    expected = sum((g.conj() * t).sum().real for g, t in zip(grads, tangents, strict=True))
    assert_close((found.conj() * T).sum().real, expected, **TIGHT)


@pytest.mark.parametrize("op", [aten._linalg_svd, aten._linalg_eigh], ids=str)
def test_equal_values_have_derivatives_and_their_vectors_none(op: Any) -> None:
    A = torch.eye(3, dtype=torch.float64)
    results = op(A)
    values = 1 if op is aten._linalg_svd else 0
    for chosen in range(len(results)):
        grads = [torch.randn_like(y) if k == chosen else None for k, y in enumerate(results)]
        found = vjp(op)(grads, (A,), results)["A"]
        assert found.isfinite().all() == (chosen == values)


def test_symeig_without_vectors_is_refused() -> None:
    L, V = torch.linalg.eigh(torch.eye(2))
    with pytest.raises(RuntimeError, match=re.escape("symeig(A, eigenvectors=False) is not diff")):
        ops.linalg_eig_backward(L, None, L, V, True, False)


# --- determinants --------------------------------------------------------------------------------


def by_permutations(A: Tensor) -> Tensor:
    """det(A), of which every derivative is exact."""
    n, total = A.shape[-1], torch.zeros((), dtype=A.dtype)
    for p in permutations(range(n)):
        sign = (-1) ** sum(p[i] > p[j] for i in range(n) for j in range(i + 1, n))
        term = torch.tensor(float(sign), dtype=A.dtype)
        for row, column in enumerate(p):
            term = term * A[row, column]
        total = total + term
    return total


def of_rank(n: int, rank: int, dtype: torch.dtype, zeros: bool) -> Tensor:
    """zeros: pivots are zero exactly."""
    if zeros:
        return torch.eye(n, dtype=dtype).roll(1, 0) * (torch.arange(n) < rank)
    return torch.randn(n, rank, dtype=dtype) @ torch.randn(rank, n, dtype=dtype)


RANKS = [(n, n - lost) for n in (1, 2, 3, 4) for lost in (0, 1, 2, 3) if lost <= n]


def gradient_of_det(A: Tensor) -> Tensor:
    results = aten._linalg_det(A)
    found = vjp(aten._linalg_det)((torch.ones_like(results[0]), None, None), (A,), results)
    return found["A"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("zeros", [False, True], ids=["", "zero pivots"])
@pytest.mark.parametrize(("n", "rank"), RANKS)
def test_every_derivative_of_a_determinant(n: int, rank: int, zeros: bool) -> None:
    """Where the matrix is singular too. PyTorch's first gradient is zero at zero pivots, the
    second NaN where singular values are equal.
    """
    A = of_rank(n, rank, torch.float64, zeros)
    ours, exact = gradient_of_det, torch.func.jacrev(by_permutations)
    for _ in range(3 if n - rank < 3 else 2):
        assert_close(ours(A), exact(A), rtol=1e-7, atol=1e-9)
        ours, exact = torch.func.jacfwd(ours), torch.func.jacfwd(exact)


@by_dtype
@pytest.mark.parametrize("zeros", [False, True], ids=["", "zero pivots"])
@pytest.mark.parametrize(("n", "rank"), RANKS)
def test_the_tangent_of_a_determinant(n: int, rank: int, zeros: bool, dtype: torch.dtype) -> None:
    """PyTorch's is zero at zero pivots."""
    A, T = of_rank(n, rank, dtype, zeros), torch.randn(n, n, dtype=dtype)
    _, expected = torch.func.jvp(by_permutations, (A,), (T,))
    for matrix in (A, A.mT.contiguous().mT):
        (found, _, _) = jvp(aten._linalg_det)((T,), (matrix,), aten._linalg_det(matrix))
        assert_close(found, expected, rtol=1e-8, atol=1e-10)
        gradient = gradient_of_det(matrix)
        assert_close((gradient.conj() * T).sum(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3, 3), (2, 0, 0)], ids=str)
def test_the_determinant_of_nothing(shape: tuple[int, ...]) -> None:
    A = torch.zeros(shape)
    assert gradient_of_det(A).shape == shape
    (tangent, _, _) = jvp(aten._linalg_det)((A,), (A,), aten._linalg_det(A))
    assert_close(tangent, torch.zeros(shape[:-2]))


def test_a_determinants_gradient_in_a_trace_of_any_size() -> None:
    traced = make_fx(gradient_of_det, tracing_mode="symbolic")(torch.randn(4, 3, 3))
    A = torch.ones(2, 5, 5, dtype=torch.float32) + torch.diag(torch.tensor([1.0, 2, 3, 0, 0]))
    assert_close(traced(A), gradient_of_det(A))
    count = [len(make_fx(gradient_of_det)(torch.randn(n, n)).graph.nodes) for n in (3, 30)]
    assert count[0] == count[1]


@pytest.mark.parametrize("zeros", [False, True], ids=["", "zero pivots"])
@pytest.mark.parametrize(("n", "rank"), [(3, 3), (3, 2), (4, 2)])
def test_a_recorded_gradient_of_a_determinant_is_differentiated(
    n: int, rank: int, zeros: bool
) -> None:
    """Afterwards: what was recorded may not have taken the matrix for one that has an inverse."""
    A = of_rank(n, rank, torch.float64, zeros)
    recorded = make_fx(gradient_of_det, decomposition_table=decompositions())(A)
    hessian = torch.func.jacrev(torch.func.jacrev(by_permutations))
    assert_close(torch.func.jacrev(recorded)(A), hessian(A), rtol=1e-7, atol=1e-9)


def test_the_logarithm_of_a_singular_matrix_is_not_refused() -> None:
    A = torch.zeros(2, 2)
    results = aten._linalg_slogdet(A)
    found = vjp(aten._linalg_slogdet)((None, torch.ones(()), None, None), (A,), results)
    assert not found["A"].isfinite().all()


# --- QR, least squares, Cholesky -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "message"),
    [("r", "depends on Q, which is not computed when mode='r'"), ("complete", "nrows > ncols.")],
)
def test_a_qr_that_has_no_derivative(mode: str, message: str) -> None:
    A = matrix(5, 3)
    Q, R = torch.linalg.qr(A, mode)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        vjp(aten.linalg_qr)((None, R), (A, mode), (Q, R))
    with pytest.raises(RuntimeError, match=re.escape(message)):
        jvp(aten.linalg_qr)((A, None), (A, mode), (Q, R))


@by_dtype
@pytest.mark.parametrize("driver", ["gels", "gelsd", "gelsy", "gelss"])
@pytest.mark.parametrize("shapes", [((5, 3), (5, 2)), ((2, 5, 3), (2, 5)), ((5, 3), (5,))], ids=str)
@pytest.mark.parametrize("alone", [None, 0, 1], ids=["both", "solution", "residuals"])
def test_least_squares(
    shapes: tuple[tuple[int, ...], ...], driver: str, alone: int | None, dtype: torch.dtype
) -> None:
    A, B = (torch.randn(shape, dtype=dtype) for shape in shapes)
    args = {"self": A, "b": B, "rcond": None, "driver": driver}
    steps = {"self": torch.randn_like(A), "b": torch.randn_like(B)}

    def run(h: float) -> tuple[Tensor, ...]:
        moved = (x + h * t for x, t in zip((A, B), steps.values(), strict=True))
        return aten.linalg_lstsq(*moved, driver=driver)  # type: ignore[no-any-return]

    results = run(0)
    change = [(a - b) / 2e-6 for a, b in zip(run(1e-6)[:2], run(-1e-6)[:2], strict=True)]
    tangents = jvp(aten.linalg_lstsq)(steps, args, results)
    assert_close(tangents[0], change[0], rtol=1e-6, atol=1e-7)
    if results[1].numel():
        assert_close(tangents[1], change[1], rtol=1e-6, atol=1e-7)
    grads = [torch.randn_like(y) if alone in (None, k) else None for k, y in enumerate(results[:2])]
    found = vjp(aten.linalg_lstsq)((*grads, None, None), args, results)
    pairs = [(g, change[k]) for k, g in enumerate(grads) if g is not None and g.numel()]
    expected = sum((g.conj() * c).sum().real for g, c in pairs)
    if not pairs:
        assert found == {"self": None, "b": None}
        return
    paired = sum((found[name].conj() * step).sum().real for name, step in steps.items())
    assert_close(paired, expected, rtol=1e-6, atol=1e-7)


@by_dtype
@pytest.mark.parametrize("upper", [False, True], ids=["lower", "upper"])
def test_the_tangent_of_a_cholesky_inverse(upper: bool, dtype: torch.dtype) -> None:
    """PyTorch's is wrong: it multiplies by X L^H, where L^-1 is L^H X."""
    L = torch.randn(2, 3, 3, dtype=dtype).tril(-1) + 3 * torch.eye(3)
    T = torch.randn(2, 3, 3, dtype=dtype).tril(-1) + torch.diag(torch.randn(3))
    L, T, h = L.mH.contiguous() if upper else L, T.mH.contiguous() if upper else T, 1e-6
    X = torch.cholesky_inverse(L, upper)
    (found,) = jvp(aten.cholesky_inverse)({"self": T}, (L, upper), X)
    ends = [torch.cholesky_inverse(L + sign * h * T, upper) for sign in (1, -1)]
    assert_close(found, (ends[0] - ends[1]) / (2 * h), rtol=1e-7, atol=1e-8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(L, T)
        theirs = forward_ad.unpack_dual(torch.cholesky_inverse(dual, upper)).tangent
    assert not torch.allclose(theirs, found, rtol=1e-3)


@pytest.mark.parametrize("left", [True, False])
def test_systems_without_a_solution_raise_nothing(left: bool) -> None:
    """As the operators themselves, which say so in a result."""
    S = torch.ones(2, 2, dtype=torch.float64)
    T = torch.tensor([[1.0, -0.5], [2.0, 0.3]], dtype=torch.float64)
    sign, logabsdet, *rest = aten._linalg_slogdet(S)
    along = jvp(aten._linalg_slogdet)({"A": T}, (S,), (sign, logabsdet, *rest))
    assert along[0] == 0
    assert not along[1].isfinite()
    results = aten._linalg_solve_ex(S, T, left=left)
    args = {"A": S, "B": T, "left": left}
    assert not jvp(aten._linalg_solve_ex)({"A": T}, args, results)[0].isfinite().all()

    def gradient(T: Tensor) -> Tensor:
        return vjp(aten._linalg_solve_ex)((T, None, None, None), args, results)["A"]

    assert not make_fx(gradient)(T)(T).isfinite().all()
