"""What Inductor would do with norms, against the code that it generates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from inductor_counts import (
    BACKWARD,
    B,
    W,
    X,
    aten,
    in_inference,
    layer_norm,
    layer_norm_backward,
    needs_two_steps,
    work,
)
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return x * rstd * w, rstd


def returning_statistics(x: Tensor, w: Tensor) -> object:
    return aten.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5)


FEW = getattr(config.cpp, "use_two_step_variance_threshold", 1)
WIDE, NARROW = torch.randn(64, 2 * FEW), torch.randn(64, FEW)
FLAT = torch.randn(2, 1000)
PIXELS, DEVIATIONS = torch.randn(8, 32, 28, 28), torch.randn(32)
LAST = PIXELS.to(memory_format=torch.channels_last)
LOOPS = {
    "layer norm": (layer_norm, X, W, B),
    "layer norm, in inference": (in_inference, X, W, B),
    "layer norm, backward": (layer_norm_backward, *BACKWARD),
    "rms norm": (rms_norm, X, W),
    "rms norm, in inference": (lambda *inputs: rms_norm(*inputs)[0], X, W),
    "softmax": (lambda x: x.softmax(-1), X),
    "its logarithm": (lambda x: x.log_softmax(-1), X),
    "softmax of few rows": (lambda x: x.softmax(-1), FLAT),
    "layer norm of few images": (lambda x: F.layer_norm(x, x.shape[1:]), torch.randn(4, 8, 200)),
    "softmax of one row": (lambda x: x.softmax(-1), X[:1]),
    "variance of few": (lambda x: F.layer_norm(x, x.shape[-1:]), NARROW),
    "variance of many": (lambda x: F.layer_norm(x, x.shape[-1:]), WIDE),
    "batch norm": (returning_statistics, PIXELS, DEVIATIONS),
    "batch norm, channels last": (returning_statistics, LAST, DEVIATIONS),
    "instance norm": (lambda x: F.instance_norm(x), PIXELS),
    "instance norm, channels last": (lambda x: F.instance_norm(x), LAST),
}


@pytest.mark.one_in(5)
@needs_two_steps
@pytest.mark.parametrize("name", LOOPS)
def test_inductor_does_so(name: str) -> None:
    function, *inputs = LOOPS[name]
    expected = work(function, *inputs)
    torch._dynamo.reset()
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
    assert ("welford" in code) == ("welford" in dict(expected.functions))
    loops = code.count("#pragma omp for") + code.count("#pragma omp single")
    assert loops == expected.launches
