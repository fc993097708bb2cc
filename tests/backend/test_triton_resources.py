"""What Triton's kernels take of a GPU, compiled ahead of time for three generations: registers,
shared memory, and nothing that spills.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from snapshots import assert_snapshot
from triton_ahead import TRITON, compiled, fitted, is_recorded, needs_triton, source

from normpass.backend.codegen.triton import generate
from normpass.backend.program.machine import GPU
from normpass.backend.program.plan import make_plan
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from pathlib import Path

CAPABILITIES = (80, 90, 100)
# Rows of which one tensor has the other order in memory.
CROSSED = """
region crossed
axes    r=4 c=32
input   x: bf16[r c]
input   y: bf16[r c] (1, 4)
z       = add(x, y)
total   = sum[r](z)
output  o: bf16[r c] = z
output  t: f32[c] = total
"""
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


@pytest.mark.one_in(9)
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


@needs_triton
@pytest.mark.usefixtures("compiler_cache")
def test_what_a_warp_reads_across_its_lanes_is_not_fetched_ahead() -> None:
    """Triton 3.9 dies of a segmentation fault where it is."""
    text = CROSSED.strip()
    found = generate(make_plan(parse(text), GPU))
    assert "num_stages" not in found.text.split("crossed_1")[0]
    assert all(compiled(found, capability) for capability in CAPABILITIES)
    straight = generate(make_plan(parse(text.replace(" (1, 4)", "")), GPU))
    assert "num_stages" in straight.text.split("crossed_1")[0]
