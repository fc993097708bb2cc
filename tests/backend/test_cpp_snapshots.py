"""Generated C++ of the norms, as snapshots that reviews read; test_region_snapshots.py has the
regions that it is generated from.
"""

from __future__ import annotations

import pytest
from norm_regions import CASES, decisions, fused
from snapshots import assert_snapshot
from torch import Tensor, nn

from normpass.backend.program.machine import CPU
from normpass.backend.run.dialects import kernel_source


@pytest.fixture(autouse=True)
def _vectors_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever processor this is, the kernels are those of one with AVX-512."""
    monkeypatch.setattr("normpass.backend.run.dialects.machine_of", lambda _: CPU)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str, dynamic: bool) -> None:
    kind = "dynamic" if dynamic else "static"
    made = decisions(name, dynamic)
    kernels = [f"// {decision.phase}\n{kernel_source(decision)}" for decision in made]
    assert_snapshot(f"cpp/{name}_{kind}.txt", "\n\n".join(kernels))


def test_a_kernel_that_takes_two_rows_at_a_time() -> None:
    """Rows of 128 KiB: four of them would not fit in a core's own cache."""
    made = fused(lambda: nn.LayerNorm(32768), (64, 32768), False, backward=True)
    (backward,) = (decision for decision in made if decision.phase == "backward")
    assert_snapshot("cpp/layer_norm_two_rows.txt", f"// backward\n{kernel_source(backward)}")


class ChannelsLast(nn.Module):
    """A norm of images that lie as n h w c."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 3, 1, 2))


LAST = {
    # Lanes run along all groups.
    "group_norm": lambda: ChannelsLast(nn.GroupNorm(32, 64)),
    # What each channel has one of is computed once.
    "batch_norm": lambda: ChannelsLast(nn.BatchNorm2d(64)),
}


@pytest.mark.parametrize("name", LAST)
def test_kernels_of_channels_that_are_last(name: str) -> None:
    made = fused(LAST[name], (16, 64, 64, 64), False, backward=True)
    kernels = [f"// {decision.phase}\n{kernel_source(decision)}" for decision in made]
    assert_snapshot(f"cpp/{name}_channels_last.txt", "\n\n".join(kernels))
