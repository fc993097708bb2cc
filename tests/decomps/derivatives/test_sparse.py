"""The derivatives of sparse tensors, by the rows that call them, against autograd's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.testing import assert_close

from normpass.decomps.table.binding import vjp

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten
PLACES = [[0, 1, 1, 0], [0, 1, 3, 3]]
LAYOUTS = ["csr", "csc", "bsr", "bsc"]
by_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex128], ids=["real", "complex"]
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]


def coo(dtype: torch.dtype, coalesced: bool = True) -> Tensor:
    places = PLACES if coalesced else [[*side, side[1]] for side in PLACES]
    elements = torch.randn(len(places[0]), dtype=dtype)
    found = torch.sparse_coo_tensor(places, elements, (2, 4), check_invariants=True)
    return found.coalesce() if coalesced else found


def compressed(layout: str, dtype: torch.dtype) -> Tensor:
    blocks = ((1, 2),) if layout.startswith("b") else ()
    return getattr(coo(dtype).to_dense(), f"to_sparse_{layout}")(*blocks)


def check(op: Any, args: tuple[Any, ...], grad: Tensor, **told: Any) -> None:
    """The gradients of the tensors, each alone too, against autograd's, and their layouts."""
    leaves = [x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x for x in args]
    names = [a.name for a in op._schema.arguments]
    given = {**dict(zip(names, leaves, strict=False)), **told}
    y = op(*leaves, **told)
    wanted = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
    wanted = [n for n in wanted if n in vjp(op).row.differentiable]
    expected = torch.autograd.grad(y, [given[n] for n in wanted], grad)
    found = vjp(op)((grad,), given, y.detach(), wanted)
    for name, e in zip(wanted, expected, strict=True):
        assert found[name].layout == e.layout == given[name].layout
        assert_close(found[name].to_dense(), e.to_dense())
        assert_close(vjp(op)((grad,), given, y, [name])[name].to_dense(), e.to_dense())
    assert vjp(op)((None,), given, y, wanted) == dict.fromkeys(wanted)


@by_dtype
@pytest.mark.parametrize("alpha", [1, 0.5])
@pytest.mark.parametrize("layout", ["coo", "twice", "csr", "strided"])
def test_sparse_addmm(layout: str, alpha: float, dtype: torch.dtype) -> None:
    A = {
        "coo": coo(dtype),
        "twice": coo(dtype, False),
        "csr": compressed("csr", dtype),
        "strided": coo(dtype).to_dense(),
    }[layout]
    C, B, g = torch.randn(2, 3, dtype=dtype), torch.randn(4, 3, dtype=dtype), torch.randn(2, 3)
    check(aten._sparse_addmm.default, (C, A, B), g.to(dtype), beta=0.25, alpha=alpha)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_complex_alpha_is_conjugated(layout: str) -> None:
    """Which PyTorch's is not, where A is sparse by coordinates."""
    A = coo(torch.complex128) if layout == "coo" else compressed("csr", torch.complex128)
    C, B, g = (torch.randn(s, dtype=torch.complex128) for s in ((2, 3), (4, 3), (2, 3)))
    args = {"self": C, "mat1": A, "mat2": B, "alpha": 2 + 1j}
    found = vjp(aten._sparse_addmm)((g,), args, C, ["mat1"])["mat1"]
    there = A.to_dense() != 0
    assert_close(found.to_dense(), (2 - 1j) * there * (g @ B.mH))
    x = A.detach().requires_grad_()
    y = aten._sparse_addmm(C, x, B, alpha=2 + 1j)
    (theirs,) = torch.autograd.grad(y, x, g)
    assert not torch.allclose(theirs.to_dense(), found.to_dense())


@by_dtype
def test_sampled_addmm(dtype: torch.dtype) -> None:
    C = compressed("csr", dtype)
    A, B = torch.randn(2, 3, dtype=dtype), torch.randn(3, 4, dtype=dtype)
    grad = C.clone()
    grad.values().copy_(torch.randn(len(grad.values()), dtype=dtype))
    for alpha, beta in ((1, 1), (0.5, 0.25)):
        check(aten.sparse_sampled_addmm.default, (C, A, B), grad, beta=beta, alpha=alpha)
    everywhere, args = torch.randn(2, 4, dtype=dtype), {"self": C, "mat1": A, "mat2": B}
    found = vjp(aten.sparse_sampled_addmm)((everywhere,), args, C, ["mat1", "mat2"])
    there = everywhere * (C.to_dense() != 0)
    assert_close(found, {"mat1": there @ B.mH, "mat2": A.mH @ there})


@by_dtype
@pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "an element twice"])
@pytest.mark.parametrize("of", ["strided", "sparse", "twice"])
@pytest.mark.parametrize("grad", ["coalesced", "twice"])
def test_sparse_mask(grad: str, of: str, coalesced: bool, dtype: torch.dtype) -> None:
    mask = coo(dtype, coalesced)
    x = coo(dtype, of != "twice")
    x = x.to_dense() if of == "strided" else x
    g = coo(dtype, grad == "coalesced")
    check(aten.sparse_mask.default, (x, mask), g)


@by_dtype
def test_the_gradient_of_a_mask_that_has_an_element_twice(dtype: torch.dtype) -> None:
    """Counts it twice, as the result does."""
    mask, g = coo(dtype, False), torch.randn(2, 4, dtype=dtype)
    x = torch.randn(2, 4, dtype=dtype)
    places = torch.zeros(2, 4, dtype=dtype)
    places.index_put_(tuple(mask._indices()), torch.ones(5, dtype=dtype), accumulate=True)
    assert_close(x.sparse_mask(mask).to_dense(), x * places)
    found = vjp(aten.sparse_mask)((g,), (x, mask), x)["self"]
    assert_close(found, g * places)


@by_dtype
def test_a_product_of_sparse_matrices(dtype: torch.dtype) -> None:
    A, B = coo(dtype), coo(dtype).t().coalesce()
    grad = torch.randn(2, 2, dtype=dtype).to_sparse()
    check(aten._sparse_sparse_matmul.default, (A, B), grad)
    check(aten._sparse_sparse_matmul.default, (coo(dtype, False), B), grad)
    with pytest.raises(ValueError, match="expected grad_order to be 0, of a, or 1, of b; found 2"):
        torch.ops.normpass.sparse_sparse_matmul_backward(grad, A, B, 2)


# --- conversions ---------------------------------------------------------------------------------


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_sparse(layout: str, dtype: torch.dtype) -> None:
    """From strided tensors, and between sparse ones."""
    blocks = ([1, 2],) if layout.startswith("b") else ()
    op = getattr(aten, f"_to_sparse_{layout}").default
    x = coo(dtype)
    if not dtype.is_complex:  # autograd has no derivative of a complex one
        check(op, (x.to_dense(), *blocks), compressed(layout, dtype))
    y = compressed(layout, dtype)
    found = vjp(aten._to_sparse)((x,), {"self": y}, x)["self"]
    assert found.layout == y.layout
    assert_close(found.to_dense(), x.to_dense())
    if blocks:
        assert found.values().shape[1:] == (1, 2)


def test_to_sparse_by_coordinates() -> None:
    x = coo(torch.float64).to_dense()
    check(aten._to_sparse.default, (x,), coo(torch.float64))
    check(aten._to_sparse.sparse_dim, (x, 1), x.to_sparse(1))


@by_dtype
@pytest.mark.parametrize("layout", ["coo", "hybrid", *LAYOUTS])
def test_values(layout: str, dtype: torch.dtype) -> None:
    if layout == "hybrid":
        x = coo(dtype).to_dense().to_sparse(1)
    else:
        x = coo(dtype) if layout == "coo" else compressed(layout, dtype)
    check(aten.values.default, (x,), torch.randn_like(x.values()))


def test_values_of_what_has_none() -> None:
    with pytest.raises(NotImplementedError, match=r"a tensor of layout torch.strided"):
        torch.ops.normpass.values_backward(torch.ones(3), torch.ones(3))


@by_dtype
def test_second_derivatives(dtype: torch.dtype) -> None:
    """Of the gradient that a sparse factor has, in the others."""
    C, A = torch.zeros(2, 3, dtype=dtype), coo(dtype)
    B, g = torch.randn(4, 3, dtype=dtype), torch.randn(2, 3, dtype=dtype)
    h = coo(dtype)

    def pairing(g: Tensor, B: Tensor) -> Tensor:
        args = {"self": C, "mat1": A, "mat2": B}
        found = vjp(aten._sparse_addmm)((g,), args, C, ["mat1"])["mat1"]
        return (found.to_dense() * h.to_dense().conj()).sum().real

    for value in (g, B):
        value.requires_grad_()
    assert torch.autograd.gradcheck(pairing, (g, B))
