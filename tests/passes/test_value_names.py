"""Names of values and axes say what they are where it can be seen; nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import norm_regions
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from random_regions import Case, cases, tensors
from torch import Tensor, nn

from normpass.backend.run.reference import evaluate
from normpass.passes.region_text import parse
from normpass.passes.value_names import with_names


def names(text: str) -> set[str]:
    region = parse(text)
    return {*(buffer.name for buffer in region.inputs), *region.producer}


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm"])
def test_a_norms_values(name: str) -> None:
    assert names(norm_regions.region(name, "forward")) >= {"mean", "var", "rstd", "x_hat"}
    region = parse(norm_regions.region(name, "backward"))
    assert {buffer.name for buffer in region.inputs} >= {"g", "x", "mean", "rstd"}
    assert {output.value for output in region.outputs} == {"dx", "dw", "db"}
    assert region.producer["x_hat"].args == ("sub", "rstd")


def test_without_a_mean() -> None:
    found = names(norm_regions.region("rms_norm", "forward"))
    assert found >= {"x", "rstd", "x_hat"}
    assert not found & {"mean", "var"}


def test_what_is_taken_off_but_not_a_mean() -> None:
    """A softmax's maximum, and the sum that its backward takes off."""
    for phase in ("forward", "backward"):
        assert not names(norm_regions.region("softmax", phase)) & {"mean", "x_hat", "rstd"}


def test_forwards_have_no_gradients() -> None:
    for name in norm_regions.CASES:
        if "backward" not in name:
            assert not names(norm_regions.region(name, "forward")) & {"dx", "dw", "db", "gw"}


class Entropy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(x, 1)


class OfRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x, 0)


AXES = {
    "layer norm": (lambda: nn.LayerNorm(1024), (8, 16, 1024), "r q c"),
    "batch norm of rows": (lambda: nn.BatchNorm1d(64), (512, 64), "n c"),
    "batch norm of images": (lambda: nn.BatchNorm2d(64), (8, 64, 16, 16), "n c d e"),
    "instance norm": (lambda: nn.InstanceNorm2d(8), (4, 8, 32, 32), "r q c d"),
    "over channels": (Entropy, (4, 32, 16, 16), "r c q k"),
    "over rows": (OfRows, (512, 64), "n c"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", AXES)
def test_axes(name: str) -> None:
    build, shape, axes = AXES[name]
    for one in norm_regions.fused(build, shape, False, backward=True):
        assert " ".join(axis.name for axis in parse(one.text).axes) == axes, one.text


@settings(deadline=None)
@given(cases())
def test_nothing_else_changes(case: Case) -> None:
    renamed = with_names(replace(case.region, name="random_backward"))
    assert parse(str(renamed)) == renamed
    for extents in case.extents:
        inputs, sizes = tensors(case, extents), case.sizes(extents)
        pairs = zip(
            evaluate(renamed, inputs, sizes), evaluate(case.region, inputs, sizes), strict=True
        )
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
