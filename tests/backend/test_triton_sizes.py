"""Run-time sizes in Triton's kernels: what is known to divide them."""

from __future__ import annotations

import re

import pytest
import triton_regions as regions
from triton_ahead import compiled, needs_triton
from triton_regions import fill

from normpass.backend.codegen.triton import TritonSource, generate
from normpass.backend.program.machine import GPU
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes
from normpass.passes.region_text import parse


def source(text: str, *sizes: int) -> TritonSource:
    return generate(make_plan(parse(text), GPU, size_classes(sizes)))


def hints(found: TritonSource) -> dict[str, int]:
    """What each size is a multiple of, of those of which anything is said."""
    return {
        name: int(number)
        for name, number in re.findall(r"(n_\w+) = tl.multiple_of\(.*, (\d+)\)", found.text)
    }


@pytest.mark.parametrize(("columns", "divisor"), [(4096, 16), (48, 16), (1000, 8), (1002, None)])
def test_rows_begin_at_multiples(columns: int, divisor: int | None) -> None:
    found = hints(source(fill(regions.SOFTMAX_BACKWARD, c="?"), 4096, columns))
    assert found == ({"n_c": divisor} if divisor else {})


def test_rows_are_only_counted() -> None:
    """Any number of them has the same kernel."""
    text = fill(regions.LAYER_NORM_BACKWARD, c="1024")
    assert len({source(text, rows).text for rows in (4096, 4095, 4080)}) == 1


def test_pixels_side_by_side() -> None:
    """Of images of any size, with their channels apart."""
    text = fill(regions.BATCH_NORM_BACKWARD, c="64", x="r c s")
    text = re.sub(r"s=\d+", "s=?", text, count=1)
    assert hints(source(text, 8, 3136)) == {"n_s": 16}
    assert not hints(source(text, 8, 3135))


@needs_triton
@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize("t", ["f32", "bf16"])
def test_they_are_read_in_vectors(t: str) -> None:
    """Sixteen bytes at a time, and one by one where some rows begin between two of them."""
    text = fill(regions.SOFTMAX_BACKWARD, c="?", t=t)
    for columns, in_vectors in ((1024, True), (1000, True), (1001, False)):
        (kernel,) = compiled(source(text, 4096, columns), 90)
        reads = set(re.findall(r"(?:ld|st)\.global\.(\S+)", kernel.asm["ptx"]))
        assert reads == ({"v4.b32"} if in_vectors else {"b32" if t == "f32" else "b16"})
