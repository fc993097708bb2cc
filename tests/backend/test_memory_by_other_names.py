"""Memory that is read later by another name: no result is written over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBERS = torch.Generator().manual_seed(0)
X = torch.randn(256, 64, generator=NUMBERS) / 8


def _real_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """A norm of a complex product's numbers, which is read later."""
    y = x @ x.t()
    z = F.layer_norm(torch.view_as_real(y).flatten(1), (512,))
    return z @ z.t(), y @ (x + z[:, :64])


def _complex_view(x: Tensor) -> tuple[Tensor, Tensor]:
    """A norm of real numbers, which are read later as complex ones."""
    y = x.real @ x.real.t()
    c = torch.view_as_complex(y.view(256, 128, 2))
    z = F.layer_norm(y, (256,))
    return z @ z.t(), c.t() @ (x + z[:, :64])


def _joined(x: Tensor) -> tuple[Tensor, Tensor]:
    """A norm of two products, in whose memory Inductor has computed them; one is read later."""
    one, other = x.real @ x.real.t(), x.imag @ x.imag.t()
    z = F.layer_norm(torch.cat([one, other]), (256,))
    return z @ z.t(), one.t() @ z[:256]


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("f", [_real_parts, _complex_view, _joined], ids=lambda f: f.__name__)
def test_memory_that_is_read_by_another_name_stays(f: Callable[[Tensor], Any]) -> None:
    x = torch.complex(X, torch.randn(256, 64, generator=NUMBERS) / 8)
    with torch.no_grad():
        torch._dynamo.reset()
        function = torch.compile(f, backend="normpass", options={"least_bytes": 0})
        found, codes = run_and_get_code(lambda: function(x))
    assert "normpass_call_site()" in codes[0]
    for one, stock, exact in zip(found, f(x), f(x.to(torch.complex128)), strict=True):
        numbers = (torch.view_as_real(t) if t.is_complex() else t for t in (one, stock, exact))
        oracles.assert_no_less_accurate(*numbers)
