"""The Triton dialect: what kernels compute, in its interpreter or on a GPU, and that they build."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import triton_cases
from snapshots import assert_snapshot
from triton_ahead import (
    HAS_TRITON,
    compiled,
    fitted,
    needs_triton,
    region,
    source,
    stages_on,
)

from normpass.backend.codegen.triton import generate
from normpass.backend.program.machine import GPU
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes
from normpass.backend.run import launch_triton
from normpass.decomps.torch_versions import release
from normpass.passes.region import DTYPE_NAMES
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from normpass.backend.codegen.triton import TritonSource

PROGRAM = Path(triton_cases.__file__)
# Triton up to 3.8 loads what a row's elements share more often than once.
LOADS_A_ROW_ONCE = HAS_TRITON and release(version("triton")) > (3, 8)


# ---- what kernels compute


def run_cases(device: str, family: str) -> dict[str, str | None]:
    environment = {**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), device, family],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.one_in(12)
@needs_triton
@pytest.mark.parametrize("family", triton_cases.FAMILIES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernels_compute_what_their_regions_mean(device: str, family: str) -> None:
    results = run_cases(device, family)
    assert results
    wrong = [f"{name}:\n{error}" for name, error in results.items() if error]
    assert not wrong, f"{len(wrong)} of {len(results)} cases:\n" + "\n".join(wrong)


@needs_triton
@pytest.mark.parametrize("examples", ["30", pytest.param("500", marks=pytest.mark.sweep)])
def test_kernels_compute_random_regions(examples: str) -> None:
    assert run_cases("cpu", examples) == {"random": None}


# ---- that they compile


@needs_triton
@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_every_function_compiles(dtype: str) -> None:
    """All functions in one region: of values, and of literals in all places but one."""
    ops, outputs = [], []
    for case in triton_cases.functions():
        if f" {dtype}" in case.name:
            (op,) = parse(case.text).ops[2:]
            ops.append(str(op).replace("out ", f"out{len(ops)} ", 1))
            kind = parse(case.text).outputs[0].buffer.dtype
            outputs.append(f"output o{len(ops)}: {DTYPE_NAMES[kind]}[r] = out{len(ops) - 1}")
    given = str(parse(case.text)).partition("out ")[0]
    assert len(ops) > 60
    for k in range(0, len(ops), 20):  # so many tensors can be passed to a kernel at once
        text = "\n".join([given, *ops[k : k + 20], *outputs[k : k + 20]])
        (kernel,) = compiled(generate(make_plan(parse(text), GPU)), 90)
        assert kernel.asm["cubin"]


@needs_triton
@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize("c", ["1024", "2048", "4096", "8192"])
@pytest.mark.parametrize("name", ["layer_norm_backward", "rms_norm_backward", "layer_norm_forward"])
def test_resident_rows_stay_in_registers(name: str, c: str, tmp_path: Path) -> None:
    check_resident(source(name, c=c), tmp_path)


@needs_triton
@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize("name", ["layer_norm_backward", "layer_norm_forward"])
def test_rows_of_bounded_sizes_stay_in_registers(name: str, tmp_path: Path) -> None:
    """Their length is known at run time only, and that it is at most 4096."""
    plan = make_plan(parse(region(name, c="?")), GPU, size_classes([512, 3000]))
    check_resident(generate(plan), tmp_path)


def check_resident(text: TritonSource, folder: Path) -> None:
    """Of one pass: a row's data is loaded once. Skips where the compiler does not tell."""
    assert text.text.count("tl.load(p_x ") == 1
    assert all(taken.spilled == 0 for taken in fitted(text, 90, folder))


@needs_triton
@pytest.mark.usefixtures("compiler_cache")
def test_neighbours_in_memory_are_loaded_together() -> None:
    """Two rows of g and x by 128 threads, sixteen bytes at a time, for as many iterations as are on
    chip at once; w once. One by one come only mean and rstd, which differ between rows.
    """
    text = source("layer_norm_backward", c="1024")
    stages = stages_on(text.kernels[0], 90)
    assert stages == 3
    row, *_ = compiled(text, 90)
    fetched = re.findall(r"cp\.async\.c[ag]\.[\w.]*[^,]*,[^,]*, 0x(\w+)", row.asm["ptx"])
    assert fetched.count("10") == stages * (2 + 2) * 1024 // 128 // 4, fetched
    once = 1 if LOADS_A_ROW_ONCE else 2
    assert len(fetched) - fetched.count("10") == stages * 2 * once, fetched
    loads = re.findall(r"ld\.global[\w.:]*", row.asm["ptx"])
    assert len(loads) == 1024 // 128 // 4, loads
    assert all(".v4." in load for load in loads), loads


@pytest.mark.parametrize(
    ("c", "ahead", "on_a100", "on_h100"),
    [
        ("1024", 2 * 2 * (1024 + 1) * 4, 2, 3),  # four programs a multiprocessor, of two rows
        ("8192", 2 * (8192 + 1) * 4, 3, 4),
    ],
)
def test_what_rows_need_is_fetched_where_there_is_room(
    c: str, ahead: int, on_a100: int, on_h100: int
) -> None:
    """Of g, x and the statistics; the weight is there."""
    (rows, *_) = source("layer_norm_backward", c=c).kernels
    assert rows.fetch is not None
    assert rows.fetch.ahead == ahead
    assert [stages_on(rows, capability) for capability in (80, 90)] == [on_a100, on_h100]


def test_arrays_in_memory_are_not_read_ahead() -> None:
    """What is fetched before it is written would be what was there before."""
    text = source("layer_norm_backward", c="16384").text
    rows, last = text.split("# phase 1, over c\n")
    assert "num_stages=STAGES" in rows
    assert "num_stages" not in last.split("def ")[0]


# ---- what the text promises


@needs_triton
def test_sizes_do_not_recompile() -> None:
    """Neither a value of one nor a multiple of sixteen makes a kernel of its own."""
    text = source("batch_norm_backward", c="64", x="r c s")
    module = launch_triton.load(text.text)
    for kernel in text.kernels:
        sizes = {name for name, kind in kernel.arguments if not kind.startswith("*")}
        parameters = {p.name: p for p in getattr(module, kernel.name).params}
        assert sizes
        assert all(parameters[name].do_not_specialize for name in sizes)


def test_the_same_region_gives_the_same_text() -> None:
    program = (
        "from normpass.backend.program.plan import make_plan\n"
        "from normpass.backend.program.machine import GPU\n"
        "from normpass.backend.codegen.triton import generate\n"
        "from normpass.passes.region_text import parse\n"
        "import sys\n"
        "sys.stdout.write(generate(make_plan(parse(sys.argv[1]), GPU)).text)"
    )
    text = region("group_norm_backward", c="8", x="r (g d) s")
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program, text],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == generate(make_plan(parse(text), GPU)).text


def test_offsets_have_64_bits_where_they_need_them() -> None:
    small = source("softmax", r="4096", c="1024").text
    assert "int64" not in small
    large = source("softmax", r=str(2**22), c="1024").text
    assert "tl.program_id(0).to(tl.int64)" in large
    dynamic = source("softmax", c="1024").text
    assert "n_r = n_r.to(tl.int64)" in dynamic


def test_a_row_of_which_sums_alone_are_held_is_read_in_each_phase() -> None:
    """Its registers are for the sums, and the weight is there; one that is held is read once."""
    long = source("rms_norm_backward", c="16384", t="bf16", w="f32").text
    assert [long.count(f"tl.load({name} ") for name in ("p_x", "p_g", "p_w")] == [16, 16, 8]
    held = source("rms_norm_backward", c="5120", t="bf16", w="f32").text
    assert [held.count(f"tl.load({name} ") for name in ("p_x", "p_g", "p_w")] == [5, 5, 5]
    for text in (long, held):
        assert "parts_dw + share" in text
        assert "tl.debug_barrier" not in text  # nothing is added up in memory


def test_long_rows_are_streamed() -> None:
    assert "for c_0 in range" not in source("layer_norm_backward", c="8192").text
    assert "for c_0 in range" in source("layer_norm_backward", c="16384").text


@pytest.mark.parametrize(
    ("file", "name", "replace"),
    [
        ("layer_norm_backward", "layer_norm_backward", {"c": "1024"}),
        ("layer_norm_backward_streamed", "layer_norm_backward", {"c": "16384"}),
        ("layer_norm_backward_in_blocks", "layer_norm_backward", {"c": "65536"}),
        ("rms_norm_backward", "rms_norm_backward", {"c": "4096", "t": "bf16"}),
        ("layer_norm", "layer_norm_forward", {"c": "1000"}),
        ("softmax", "softmax", {"c": "1000"}),
        ("group_norm_backward", "group_norm_backward", {"c": "8", "x": "r (g d) s"}),
        ("batch_norm_backward", "batch_norm_backward", {"c": "64", "x": "r c s"}),
        ("batch_norm_backward_nhwc", "batch_norm_backward", {"c": "64", "x": "r s c"}),
        ("modulated_backward", "modulated_backward", {"c": "1024"}),
        ("three_levels", "three_levels", {"c": "512"}),
    ],
)
def test_snapshot(file: str, name: str, replace: dict[str, str]) -> None:
    assert_snapshot(f"triton/{file}.txt", source(name, **replace).text)
