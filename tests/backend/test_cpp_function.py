"""Regions as functions of a C++ file without Python, all of them in one file: against an evaluation
in float64 and against the same kernels built alone.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import bounded
import pytest
import random_regions
import torch
from hypothesis import HealthCheck, given, settings
from norm_regions import CASES, decisions
from piecewise import compiled, gated, inputs, rms_rope
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
from torch._inductor.cpu_vec_isa import pick_vec_isa

from normpass.backend.run import runtime
from normpass.backend.run.cpp_function import function, header
from normpass.backend.run.layouts import Layout, reads_what_is_not_there
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

# Along rows that there may be none of, the values of columns repeat.
REPEATED = """\
region repeated
axes    r=? c=? d=24
input   x: f32[r c d]
input   y: f32[r c d] (0, 24, 1)
input   z: i32[r c d] (0, 0, 1)
mul     = mul(x, y)
add     = add(mul, z)
sum     = sum[d](add)
total   = sum[r](add)
output  s: f32[r c] = sum
output  t: f32[c d] = total"""


# What the functions themselves call otherwise.
NAMED = """\
region named
axes    r=? c=24
input   tensors: f32[r c]
input   sizes: f32[c]
input   workers: f32[r c]
mul     = mul(tensors, sizes)
add     = add(mul, workers)
output  most: f32[r c] = add"""


@dataclass
class Built:
    """Functions of one file that Inductor's flags compile."""

    library: ctypes.CDLL

    def call(self, text: str, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """sizes: where there are none in the example, those of the call."""
        region = parse(text)
        extents = region.extents(sizes)
        results = [Layout.of_result(region, r, extents).empty(CPU) for r in region.results]
        called = getattr(self.library, function(text, examples[text]).name)
        called(
            *(ctypes.c_void_p(x.data_ptr()) for x in (*inputs, *results)),
            *map(ctypes.c_int64, sizes),
        )
        return results


CPU = torch.device("cpu")
examples: dict[str, tuple[int, ...]] = {}  # the sizes that a region was printed for, by its text


def build(texts: dict[str, tuple[int, ...]], folder: Path) -> Built:
    """All regions in one file, each as often as somebody could put it there."""
    examples.update(texts)
    functions = [function(text, sizes) for text, sizes in texts.items()]
    source = folder / "functions.cpp"
    once = "\n".join(each.source for each in functions)
    source.write_text("\n".join((header(), once, header(), once)))
    options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", extra_flags=["-w"])
    builder = CppBuilder(
        name="functions", sources=str(source), BuildOption=options, output_dir=str(folder)
    )
    builder.build()
    return Built(ctypes.CDLL(builder.get_target_file_path()))


@pytest.fixture(scope="module")
def regions() -> dict[str, tuple[int, ...]]:
    """The norms of the snapshots, of known sizes and of sizes that vary, and what cuts rows in
    pieces.
    """
    found = [each for name in CASES for k in (False, True) for each in decisions(name, k)]
    for f in (gated, rms_rope):
        found += compiled(f, inputs(torch.bfloat16))[1]
    return {each.text: each.sizes for each in found} | {REPEATED: (5, 7), NAMED: (5,)}


@pytest.fixture(scope="module")
def cases() -> list[random_regions.Case]:
    found: list[random_regions.Case] = []

    @settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=HealthCheck)
    @given(random_regions.cases())
    def collect(case: random_regions.Case) -> None:
        found.append(case)

    collect()
    return found


@pytest.fixture(scope="module")
def built(
    regions: dict[str, tuple[int, ...]],
    cases: list[random_regions.Case],
    tmp_path_factory: pytest.TempPathFactory,
) -> Built:
    texts = {str(case.region): tuple(case.sizes(case.extents[0])) for case in cases}
    return build(regions | texts, tmp_path_factory.mktemp("functions"))


def tensors(text: str, sizes: Sequence[int]) -> list[Tensor]:
    region = parse(text)
    extents, numbers = region.extents(sizes), torch.Generator().manual_seed(0)

    def tensor(buffer: Any) -> Tensor:
        layout = Layout.of(region, buffer, extents)
        dense = [1 if step == 0 else size for size, step in zip(*layout[:2], strict=True)]
        values = torch.randn(dense, generator=numbers).mul(3).to(layout.dtype)
        own = torch.empty_strided(dense, layout.strides, dtype=layout.dtype).copy_(values)
        return own.expand(layout.shape)

    return [tensor(buffer) for buffer in region.inputs]


def test_norms_are_the_kernels_built_alone(
    built: Built, regions: dict[str, tuple[int, ...]]
) -> None:
    """To the last bit, so products are contracted as there."""
    for text, sizes in regions.items():
        given = tensors(text, sizes)
        found = built.call(text, given, sizes)
        for one, other in zip(found, runtime.kernel(text, sizes)(given, sizes), strict=True):
            assert (one.shape, one.stride()) == (other.shape, other.stride())
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), text


def test_random_regions(built: Built, cases: list[random_regions.Case]) -> None:
    calls = 0
    for case in cases:
        region = case.region
        for extents in case.extents:
            sizes = case.sizes(extents)
            known = region.extents(sizes)
            if region.joins:
                continue
            drawn = random_regions.tensors(case, extents)
            expected = bounded.evaluate(region, drawn, sizes)
            found = built.call(str(region), drawn, sizes)
            for output, result, want in zip(region.outputs, found, expected, strict=True):
                assert result.stride() == region.strides(output.buffer, known)
                bounded.assert_within(result, want, f"{output.buffer.name}, {extents}\n{region}")
            calls += 1
    assert calls > 30


@pytest.mark.parametrize("sizes", [(0, 7), (3, 0), (0, 0), (1, 1), (5, 7), (64, 300)])
def test_axes_that_are_empty(built: Built, sizes: tuple[int, int]) -> None:
    region = parse(REPEATED)
    assert reads_what_is_not_there(region, region.extents(sizes)) == (0 in sizes)
    x, y, z = given = tensors(REPEATED, sizes)
    right = x.double() * y.double() + z
    s, t = built.call(REPEATED, given, sizes)
    torch.testing.assert_close(s, right.sum(-1).float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(t, right.sum(0).float(), rtol=1e-5, atol=1e-4)
