"""Large float32 products on CPUs are oneDNN's where that is faster: right, and only those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from normpass.backend.inductor import gemm
from normpass.backend.options import Options
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BY_ONEDNN = "mkldnn._linear_pointwise"

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where it pays, and for products of any size."""
    monkeypatch.setattr(gemm, "is_faster", lambda: True)
    monkeypatch.setattr(gemm, "LEAST_MULTIPLICATIONS", 1)


def compiled(function: Any, dynamic: bool = False, **options: Any) -> Any:
    options = {"inductor": {"fx_graph_cache": False}, **options}
    return torch.compile(
        function, backend="normpass", fullgraph=True, dynamic=dynamic, options=options
    )


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def counted(codes: list[str]) -> int:
    return sum(code.count(f"{BY_ONEDNN}.default(") for code in codes)


Product = tuple["Callable[..., Tensor]", "Callable[[], tuple[Tensor, ...]]", int]
PRODUCTS: dict[str, Product] = {
    "mm": (torch.mm, lambda: (random(12, 7), random(7, 9)), 1),
    "of columns": (lambda a, b: a @ b.t(), lambda: (random(12, 7), random(9, 7)), 1),
    "columns first": (lambda a, b: a.t() @ b, lambda: (random(7, 12), random(7, 9)), 0),
    "addmm": (torch.addmm, lambda: (random(9), random(12, 7), random(7, 9)), 1),
    "addmm of one": (torch.addmm, lambda: (random(1), random(12, 7), random(7, 9)), 0),
    "addmm of a matrix": (torch.addmm, lambda: (random(12, 9), random(12, 7), random(7, 9)), 0),
    "addmm with factors": (
        lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=0.5),
        lambda: (random(9), random(12, 7), random(7, 9)),
        0,
    ),
    "a bias that repeats": (
        lambda c, a, b: torch.addmm(c.expand(9), a, b),
        lambda: (random(1), random(12, 7), random(7, 9)),
        1,
    ),
    "a bias with gaps": (
        lambda c, a, b: torch.addmm(c[::2], a, b),
        lambda: (random(18), random(12, 7), random(7, 9)),
        1,
    ),
    "a row that repeats": (lambda a, b: a @ b.expand(7, 9), lambda: (random(12, 7), random(9)), 0),
    "a column that repeats": (
        lambda a, b: a @ b.expand(7, 9),
        lambda: (random(12, 7), random(7, 1)),
        0,
    ),
    "rows that repeat": (lambda a, b: a.expand(12, 7) @ b, lambda: (random(7), random(7, 9)), 0),
    "every second column": (
        lambda a, b: a @ b[:, ::2],
        lambda: (random(12, 7), random(7, 18)),
        0,
    ),
    "every second row": (lambda a, b: a[::2] @ b, lambda: (random(24, 7), random(7, 9)), 0),
    "computed": (
        lambda a, b: (a.exp() @ b.sin()).cos(),
        lambda: (random(12, 7), random(7, 9)),
        1,
    ),
    "some columns": (
        lambda a, b: a[:, 2:9] @ b[:, 1:8].t(),
        lambda: (random(12, 11), random(9, 11)),
        0,
    ),
    "some columns of the second": (
        lambda a, b: a @ b[:, 1:8].t(),
        lambda: (random(12, 7), random(9, 11)),
        1,
    ),
    "some rows": (lambda a, b: a[3:9] @ b, lambda: (random(12, 7), random(7, 9)), 1),
    "one row": (torch.mm, lambda: (random(1, 7), random(7, 9)), 1),
    "one column": (torch.mm, lambda: (random(12, 7), random(7, 1)), 1),
    "one term": (torch.mm, lambda: (random(12, 1), random(1, 9)), 1),
    "no rows": (torch.mm, lambda: (random(0, 7), random(7, 9)), 0),
    "no terms": (torch.mm, lambda: (random(12, 0), random(0, 9)), 0),
    "float64": (
        torch.mm,
        lambda: (random(12, 7, dtype=torch.float64), random(7, 9, dtype=torch.float64)),
        0,
    ),
    "bfloat16": (
        torch.mm,
        lambda: (random(12, 7, dtype=torch.bfloat16), random(7, 9, dtype=torch.bfloat16)),
        0,
    ),
    "written to": (
        lambda a, b: (a @ b).add_(1).relu_(),
        lambda: (random(12, 7), random(7, 9)),
        1,
    ),
    "by itself": (lambda a: a @ a, lambda: (random(9, 9),), 1),
    "a batch": (
        lambda a, w: torch.nn.functional.linear(a, w),
        lambda: (random(3, 4, 7), random(9, 7)),
        1,
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    torch.manual_seed(0)
    function, make, expected = PRODUCTS[name]
    inputs = make()
    found, codes = run_and_get_code(compiled(function), *inputs)
    want = function(*(x.double() for x in inputs))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if found.dtype is torch.bfloat16 else {}
    right = want.to(found.dtype)
    torch.testing.assert_close(found, right, **(tolerance or {"rtol": 1e-5, "atol": 1e-5}))
    assert found.stride() == function(*inputs).stride()
    # Inductor makes sums of the smallest products itself.
    assert counted(codes) in ((expected, 0) if name.startswith("one") else (expected,))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_step(dynamic: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Linear(24, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 24, bias=False)),
        nn.RMSNorm(24),
    )

    def step(function: Any, x: Tensor) -> list[Tensor]:
        y = function(x)
        return [y, *torch.autograd.grad(y.sin().sum(), [x, *net.parameters()])]

    function = compiled(net, dynamic=dynamic)
    for k, rows in enumerate((40, 56) if dynamic else (40,)):
        x = torch.randn(rows, 24, requires_grad=True)
        found, codes = run_and_get_code(lambda x=x: step(function, x))
        for ours, eager in zip(found, step(net, x), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
        if k == 0:
            # Two forward, and two gradients of inputs; those of weights are MKL's.
            assert counted(codes) == 4


def test_infinities_and_nan() -> None:
    a, b = torch.randn(8, 7), torch.randn(7, 9)
    a[0, 0], a[1, 1], b[2, 2] = float("inf"), float("nan"), -float("inf")
    torch.testing.assert_close(compiled(torch.mm)(a, b), a @ b, equal_nan=True)


def test_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(8, 7), torch.randn(7, 9)
    assert counted(run_and_get_code(compiled(torch.mm), a, b)[1]) == 1
    for other in (
        compiled(torch.mm, onednn=False),
        torch.compile(torch.mm, backend="inductor", options={"fx_graph_cache": False}),
        compiled(torch.mm, inductor={"max_autotune": True, "fx_graph_cache": False}),
    ):
        torch._dynamo.reset()
        found, codes = run_and_get_code(other, a, b)
        torch.testing.assert_close(found, a @ b)
        assert counted(codes) == 0
    torch._dynamo.reset()
    monkeypatch.setattr(gemm, "is_faster", lambda: False)
    assert counted(run_and_get_code(compiled(torch.mm), a, b)[1]) == 0


def test_small_products_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "LEAST_MULTIPLICATIONS", 8 * 7 * 9 + 1)
    a, b = torch.randn(8, 7), torch.randn(7, 9)
    assert counted(run_and_get_code(compiled(torch.mm), a, b)[1]) == 0
    torch._dynamo.reset()
    a = torch.randn(9, 7)
    assert counted(run_and_get_code(compiled(torch.mm), a, b)[1]) == 1


def test_a_fault_costs_no_more_than_time(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.forget()

    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(gemm, "_gains", fail)
    a, b = torch.randn(8, 7), torch.randn(7, 9)
    torch.testing.assert_close(compiled(torch.mm)(a, b), a @ b)
    assert {stage for stage, *_ in faults.reported()} == {"a product by oneDNN"}
    faults.forget()


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match=r"option onednn: expected True or False, found 'yes'"):
        Options.parse({"onednn": "yes"})
