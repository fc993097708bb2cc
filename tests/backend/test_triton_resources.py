"""What Triton's kernels take of a GPU, compiled ahead of time for three generations: registers,
shared memory, and nothing that spills.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from snapshots import assert_snapshot
from triton_ahead import TRITON, fitted, is_recorded, needs_triton, source

if TYPE_CHECKING:
    from pathlib import Path

CAPABILITIES = (80, 90, 100)
# What an older one spills: Triton 3.6 leaves 8 bytes of a thread over on sm_80, where no more than
# one program runs at once.
SPILLS = {("rms_norm_backward_sums_held", (3, 6))}
# By snapshot: a region of triton_regions.py and what is filled in.
REGIONS = {
    "layer_norm_backward": ("layer_norm_backward", {"c": "768"}),
    "rms_norm_backward": ("rms_norm_backward", {"c": "1024", "t": "bf16", "w": "f32"}),
    "modulated_backward": ("modulated_backward", {"c": "768", "t": "bf16", "w": "f32"}),
    "layer_norm_forward": ("layer_norm_forward", {"c": "1000", "t": "f16"}),
    "softmax": ("softmax", {"c": "?"}),
    "softmax_backward": ("softmax_backward", {"c": "100000"}),
    "softmax_middle": ("softmax_middle", {"c": "77"}),
    "group_norm_backward": ("group_norm_backward", {"c": "8", "x": "r s (g d)", "t": "bf16"}),
    "batch_norm_backward": ("batch_norm_backward", {"c": "64", "x": "r c s"}),
    "three_levels": ("three_levels", {"c": "512", "t": "f64"}),
    "masked": ("masked", {"c": "300"}),
    "one_hot": ("one_hot", {"c": "32000", "t": "bf16"}),
    "strided": ("strided", {"c": "70"}),
    "global": ("global", {}),
    "extremes": ("extremes", {"t": "f64"}),
    "layer_norm_backward_few_rows": ("layer_norm_backward", {"r": "3", "c": "262144"}),
    "layer_norm_backward_long_rows": (
        "layer_norm_backward",
        {"c": "65536", "t": "bf16", "w": "f32"},
    ),
    "layer_norm_backward_in_pieces": (
        "layer_norm_backward",
        {"c": "5120", "t": "bf16", "w": "f32"},
    ),
    "layer_norm_backward_sums_held": (
        "layer_norm_backward",
        {"c": "10240", "t": "bf16", "w": "f32"},
    ),
    "rms_norm_backward_sums_held": (
        "rms_norm_backward",
        {"c": "16384", "t": "bf16", "w": "f32"},
    ),
    "layer_norm_few_rows": ("layer_norm_forward", {"r": "3", "c": "262144"}),
    "layer_norm_long_rows": ("layer_norm_forward", {"r": "4096", "c": "65536", "t": "bf16"}),
    "three_levels_long_rows": ("three_levels", {"r": "64", "c": "65536"}),
    "softmax_few_rows": ("softmax", {"r": "8", "c": "262144"}),
    "softmax_long_rows": ("softmax", {"r": "4096", "c": "131072", "t": "bf16"}),
    "batch_norm_few_channels": ("batch_norm", {"r": "3", "c": "6", "v": "36864", "x": "r c s"}),
    "batch_norm_channels_last": (
        "batch_norm",
        {"r": "32", "c": "512", "v": "3136", "x": "r s c", "t": "bf16"},
    ),
}


@needs_triton
@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xfail] * ((name, TRITON) in SPILLS))
        for name in REGIONS
    ],
)
def test_resources(name: str, tmp_path: Path) -> None:
    region, sizes = REGIONS[name]
    text = source(region, **sizes)
    lines = []
    for capability in CAPABILITIES:
        for kernel, taken in zip(text.kernels, fitted(text, capability, tmp_path), strict=True):
            assert taken.spilled == 0, (capability, kernel)
            lines.append(
                f"sm_{capability}  {kernel.name}  {kernel.warps} warps  {taken.programs} at once  "
                f"{taken.registers} registers  {taken.shared} bytes shared"
            )
    if is_recorded():
        assert_snapshot(f"triton/resources/{name}.txt", "\n".join(lines) + "\n")
