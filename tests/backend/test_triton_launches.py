"""Triton's kernels given to NVIDIA's driver: what a generated module launches, and its arguments
where a binary reads them. The kernels are compiled for a GPU; Triton's interpreter runs them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton_direct
import triton_regions as regions
from triton_driver import fake_gpu
from triton_regions import fill

from normpass.backend.codegen.triton_library import Card
from normpass.backend.run import cuda_launch, launch_triton, triton_launches
from normpass.backend.run.cuda_launch import Loaded
from normpass.backend.run.launch_triton import TritonKernel
from normpass.backend.run.prepared import Prepared
from normpass.passes import faults
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triton_cases import Case

pytest.importorskip("triton", reason="Triton is not installed")

CPU = torch.device("cpu")
PROGRAM = Path(triton_direct.__file__)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(launch_triton, "card_of", lambda _: Card(3, 228 << 10, 227 << 10))
    monkeypatch.setattr(cuda_launch, "library", lambda: SimpleNamespace(cuLaunchKernel=None))
    with fake_gpu() as driver:
        yield driver


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case", [*triton_direct.cases()], ids=lambda case: case.name)
def test_a_binary_reads_what_it_is_given(case: Case) -> None:
    """As many arguments as there are, addresses where it reads addresses, and integers as wide."""
    kernel = TritonKernel(parse(case.text))
    for sizes in case.sizes:
        run = kernel.ready(sizes, CPU).run
        assert isinstance(run, Prepared)
        for launch in run.launches:
            assert isinstance(launch.function, Loaded)
            compiled: Any = launch.function.owner
            entry = compiled.asm["ptx"].partition(".entry")[2].partition(")")[0]
            parameters = re.findall(r"\.param \.\w(\d+)(?: \.(ptr))?", entry)
            assert len(parameters) == len(launch.arguments)
            own = len(parameters) - len(triton_launches.SCRATCH)
            pairs = zip(parameters, launch.arguments, strict=True)
            for k, ((bits, pointer), argument) in enumerate(pairs):
                assert k >= own or isinstance(argument, int) is not bool(pointer)
                assert not isinstance(argument, int) or argument < 2 ** (int(bits) - 1)
            assert launch.function.threads == 32 * compiled.metadata.num_warps


def test_kernels_compute_from_addresses() -> None:
    """In Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 6


@pytest.mark.usefixtures("gpu")
def test_no_rows_are_no_launch() -> None:
    kernel = TritonKernel(parse(fill(regions.SOFTMAX_BACKWARD, c="64")))
    run = kernel.ready((0,), CPU).run
    assert isinstance(run, Prepared)
    assert not run.launches


@pytest.mark.parametrize(
    ("asked", "value"),
    [("global_scratch_size", 8), ("launch_pdl", True), ("num_ctas", 2), ("gsan", True)],
)
def test_what_asks_for_more_is_launched_by_triton(
    asked: str, value: object, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = TritonKernel(parse(fill(regions.SOFTMAX_BACKWARD, c="64")))
    assert isinstance(kernel.ready((5,), CPU).run, Prepared)
    record = triton_launches.record

    def recorded(*arguments: Any) -> Any:
        found = record(*arguments)
        for launched in found.launches:
            metadata = launched.kernel.metadata._asdict()
            given = type("Metadata", (), {**metadata, asked: value})
            monkeypatch.setattr(launched.kernel, "metadata", given)
        return found

    monkeypatch.setattr(launch_triton, "record", recorded)
    assert not isinstance(kernel.ready((6,), CPU).run, Prepared)


@pytest.mark.usefixtures("gpu", "faults_are_meant")
def test_a_fault_in_preparing_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Triton, whose kernels tell other things: its own launcher knows them."""

    def refuse(*given: object) -> None:
        raise AttributeError("signature")

    monkeypatch.setattr(launch_triton, "prepared", refuse)
    ready = TritonKernel(parse(fill(regions.SOFTMAX_BACKWARD, c="64"))).ready((5,), CPU)
    assert ready is not None
    assert not isinstance(ready.run, Prepared)
    assert [stage for stage, *_ in faults.reported()] == ["preparing launches"]
