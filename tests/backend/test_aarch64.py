"""Kernels for ARM processors, cross-compiled and run in an emulator: against float64, where eager
mode's own error is what is allowed, and random regions within what rounding explains.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import bounded
import cross_compiled
import pytest
import random_regions
import torch
from compiled import compile_fused, count_fused
from cross_compiled import (
    NEON,
    NEWER_NEON,
    NORMS,
    SVE128,
    SVE256,
    Call,
    Program,
    cases,
    needs_compiler,
)
from hypothesis import HealthCheck, given, settings
from launched import BACKWARD, forward
from piecewise import as_exact, both

from normpass.backend import fusion
from normpass.backend.codegen import cpp
from normpass.backend.program.plan import make_plan
from normpass.backend.run import cpp_function, op, toolchain
from normpass.backend.run.layouts import reads_what_is_not_there
from normpass.backend.run.reference import evaluate
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from cross_compiled import Processor
    from random_regions import Case
    from torch import Tensor

    Runner = Callable[[str, Sequence[Tensor], Sequence[int]], list[Tensor]]


@contextmanager
def running(runner: Runner) -> Iterator[None]:
    """With regions that somebody else runs, and nothing built for this machine."""

    def kernel(text: str, sizes: tuple[int, ...]) -> Callable[..., list[Tensor]]:
        return lambda inputs, _: runner(text, inputs, sizes)

    with mock.patch.object(op, "kernel", kernel), mock.patch.object(fusion, "kernel", kernel):
        yield


def built(program: Program) -> None:
    """Skips what follows where it cannot be run; that it compiles is known then."""
    program.build()
    if cross_compiled.EMULATOR is None:
        pytest.skip("it compiles; no qemu-aarch64 to run it (Debian: qemu-user-static)")


SOME = ("layer_norm", "rows that go together", "batch_norm of pixels", "softmax", "pairs")
THOROUGH = [SVE256, NEWER_NEON, SVE128]


@needs_compiler
@pytest.mark.parametrize(
    ("processor", "names"),
    [
        pytest.param(NEON, [*NORMS], id=NEON.name),
        pytest.param(SVE256, SOME, id=f"{SVE256.name}, some"),
        *(pytest.param(x, [*NORMS], id=x.name, marks=pytest.mark.sweep) for x in THOROUGH),
    ],
)
def test_norms(processor: Processor, names: Sequence[str], tmp_path: Path) -> None:
    """Forward and backward, all of whose regions run there."""
    program = Program.of(processor, tmp_path)

    def added(text: str, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        program.add(text, sizes)
        return evaluate(parse(text), inputs, sizes)

    def emulated(text: str, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        called.add(text)
        return program.call(Call(text, inputs, sizes))[0]

    called: set[str] = set()
    compiled = [(compile_fused(f, inner="eager"), f, args) for f, args in cases(names)]
    before = toolchain.compiled
    with running(added):
        for one, _, args in compiled:
            both(one, args)
    assert count_fused() >= 2 * len(compiled)
    built(program)
    with running(emulated):
        for one, f, args in compiled:
            as_exact(both(one, args), f, args)
    assert called == {text for text, _ in program.sources}
    assert toolchain.compiled == before


# ---- regions by themselves

by_processor = pytest.mark.parametrize(
    "processor",
    [NEON, *(pytest.param(each, marks=pytest.mark.sweep) for each in THOROUGH)],
    ids=lambda each: each.name,
)


@needs_compiler
@pytest.mark.parametrize(
    ("processor", "count"),
    [
        pytest.param(NEON, 4, id=NEON.name),
        *(
            pytest.param(x, 25, id=f"{x.name}, many", marks=pytest.mark.sweep)
            for x in (NEON, *THOROUGH)
        ),
    ],
)
def test_random_regions(processor: Processor, count: int, tmp_path: Path) -> None:
    """Of each kind so many, for all their sizes, by one worker and by two."""
    found: list[Case] = []

    @settings(
        max_examples=count, derandomize=True, deadline=None, suppress_health_check=HealthCheck
    )
    @given(random_regions.cases(), random_regions.grouped_cases())
    def collect(any_: Case, grouped: Case) -> None:
        found.extend((any_, grouped))

    collect()
    program, calls = Program.of(processor, tmp_path), []
    for case in found:
        for extents in case.extents:
            sizes = case.sizes(extents)
            if reads_what_is_not_there(case.region, case.region.extents(sizes)):
                continue
            program.add(str(case.region), sizes)
            tensors = random_regions.tensors(case, extents)
            calls += [Call(str(case.region), tensors, sizes, workers) for workers in (1, 2)]
    built(program)
    for call, results in zip(calls, program.call(*calls), strict=True):
        region = parse(call.text)
        expected = bounded.evaluate(region, call.inputs, call.sizes)
        for output, one, right in zip(region.outputs, results, expected, strict=True):
            bounded.assert_within(one, right, f"{output.buffer.name} of {call.workers}\n{region}")
    assert len(calls) >= 4 * count


LONG = {
    "rows": forward({"r": 7, "c": 203}, "r c", "c"),
    # Of these each worker has a part.
    "few rows": forward({"r": 2, "c": 40_000}, "r c", "c"),
    "a row that leaves the caches": forward({"r": 1, "c": 280_000}, "r c", "c"),
    "pixels": forward({"r": 3000, "c": 5}, "r c", "r"),
    "columns": BACKWARD.format(r=70, c=45, dtype="f32"),
    "columns in half precision": BACKWARD.format(r=70, c=45, dtype="bf16"),
}


@needs_compiler
@by_processor
def test_workers(processor: Processor, tmp_path: Path) -> None:
    """However many there are, more than there is work for among them; past the caches or not."""
    program, calls = Program.of(processor, tmp_path), []
    numbers = torch.Generator().manual_seed(0)
    for text in LONG.values():
        program.add(text)
        given = [
            torch.randn(parse(text).shape(each, parse(text).extents(())), generator=numbers)
            .mul(2)
            .add(0.5)
            .to(each.dtype)
            for each in parse(text).inputs
        ]
        calls += [Call(text, given, (), k, past) for k in (1, 2, 5) for past in (False, True)]
    built(program)
    right = {call.text: bounded.evaluate(parse(call.text), call.inputs, ()) for call in calls[::6]}
    for call, results in zip(calls, program.call(*calls), strict=True):
        for one, each in zip(results, right[call.text], strict=True):
            bounded.assert_within(one, each, f"{call.workers} workers\n{call.text}")
        if "rstd    = rsqrt" in call.text:
            statistics_are_exact(call, results)


def statistics_are_exact(call: Call, results: Sequence[Tensor]) -> None:
    """A forward's, to a few units in the last place."""
    (x,), (_, mean, rstd) = call.inputs, results
    over = int("sum[c]" in call.text)
    var, right = torch.var_mean(x.double(), over, correction=0)
    torch.testing.assert_close(mean.double(), right, rtol=5e-7, atol=1e-6)
    torch.testing.assert_close(rstd.double(), (var + 1e-5).rsqrt(), rtol=5e-7, atol=0)


BYTES = """\
region bytes
axes    r=5 c=37
input   x: f32[r c]
y       = neg(x)
most    = amin[c](y)
{outputs}"""
KEPT = {
    "i8": torch.int8,
    "u8": torch.uint8,
    "b8": torch.bool,
    "f8e4m3fn": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
READ = """\
region read
axes    r=5 c=37
input   x: {name}[r c]
y       = mul(x, 0.5)
total   = sum[c](y)
output  y0: f32[r c] = y
output  y1: f32[r] = total"""


@needs_compiler
@by_processor
def test_numbers_of_one_byte(processor: Processor, tmp_path: Path) -> None:
    """Written in lanes and one by one, of what they do not hold among others, and read again: as
    eager mode has them.
    """
    x = torch.linspace(-700, 700, 185).view(5, 37)
    x[1, :4], x[2, ::5], x[3] = torch.tensor([3e4, -3e4, 1e9, torch.nan]), 0, torch.arange(37) / 8
    lines = [f"output  y{k}: {name}[r c] = y" for k, name in enumerate(KEPT)]
    lines += [f"output  m{k}: {name}[r] = most" for k, name in enumerate(KEPT)]
    written = BYTES.format(outputs="\n".join(lines))
    program = Program.of(processor, tmp_path)
    calls = [Call(written, [x])]
    for name, dtype in KEPT.items():
        if dtype is not torch.bool:
            every = torch.arange(185).to(torch.uint8).view(5, 37).view(dtype)
            calls.append(Call(READ.format(name=name), [every]))
    for call in calls:
        program.add(call.text)
    built(program)
    found, *read = program.call(*calls)
    right = [value.to(dtype) for value in (-x, (-x).amin(1)) for dtype in KEPT.values()]
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)
    for call, (y, total) in zip(calls[1:], read, strict=True):
        half = call.inputs[0].double() / 2
        torch.testing.assert_close(y.double(), half, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(
            total.double(), half.sum(1), rtol=1e-6, atol=1e-5, equal_nan=True
        )


@needs_compiler
@by_processor
def test_files_as_they_are_built(processor: Processor, tmp_path: Path) -> None:
    """A kernel that Python calls, and a package's functions, whose header is in the file."""
    text = BACKWARD.format(r=9, c=203, dtype="bf16")
    kernel = cpp.generate(make_plan(parse(text), Program.of(processor, tmp_path).processor.machine))
    function = cpp_function.function.__wrapped__(text, ())
    texts = {"kernel": kernel, "functions": f"{cpp_function.header()}\n{function.source}"}
    for name, content in texts.items():
        source, target = tmp_path / f"{name}.cpp", tmp_path / f"{name}.so"
        source.write_text(content)
        words = cross_compiled.command(processor, source, toolchain.FOLDER)
        cross_compiled.run(*words, "-shared", "-o", target)
        assert target.read_bytes()[18:20] == b"\xb7\0"  # ELF's number of the machine
