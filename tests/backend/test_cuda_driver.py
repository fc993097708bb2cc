"""CUDA C++ through NVIDIA's driver, of which this file has one: its modules are built for a CPU.
The structures and constants are those of the real bindings.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import cuda_on_cpu
import pytest
import torch
import triton_regions as regions
from cuda_on_cpu import plan_of
from triton_regions import fill

from normpass.backend.program.dialect import gpu_machine
from normpass.backend.program.machine import GPU, cuda_machine
from normpass.backend.program.team import shared_bytes, team_of
from normpass.backend.run import cuda_driver, cuda_launch, launch_gpu, nvrtc, prepared
from normpass.backend.run.cuda_launch import DriverError
from normpass.backend.run.launch_cuda import CudaKernel
from normpass.backend.run.launch_triton import TritonKernel
from normpass.passes.region import RegionError
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from pathlib import Path

    from normpass.backend.codegen.cuda import CudaSource

driver = pytest.importorskip("cuda.bindings.driver", reason="NVIDIA's bindings are not installed")

PROCESSORS = 6
SUCCESS = (driver.CUresult.CUDA_SUCCESS,)


class FakeDriver:
    """As much of a driver as is called. spilling: bytes that threads spill, by the text they were
    compiled from: those with this in it. failing: what a launch answers.
    """

    def __init__(self, spilling: str = "", failing: Any = None) -> None:
        self.spilling, self.failing = spilling, failing
        self.sources: list[CudaSource] = []
        self.set: dict[str, int] = {}
        self.clusters: list[tuple[int, int, int]] = []
        self.contexts: dict[int, Any] = {}  # by thread

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.contexts.get(threading.get_ident(), 0)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 10 * index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        assert device.value == 30
        context._obj.value = 33
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.contexts[threading.get_ident()] = context.value
        return 0

    def compiled(self, text: str, capability: int) -> bytes:
        assert capability == 90
        return text.encode()

    def build(self, source: CudaSource, device: torch.device) -> Any:
        """What the driver's caller does, with the source kept for when its kernels are launched."""
        self.sources.append(source)
        return cuda_driver.build(source, device)

    def cuModuleLoadData(self, code: bytes) -> tuple[Any, ...]:
        assert threading.get_ident() in self.contexts
        assert code.decode() == self.sources[-1].text
        return *SUCCESS, cuda_on_cpu.build(self.sources[-1], torch.device("cpu"))

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, ...]:
        return *SUCCESS, FakeFunction(name.decode(), module[name.decode()])

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> tuple[Any, ...]:
        assert attribute.name.endswith("MAX_DYNAMIC_SHARED_SIZE_BYTES")
        self.set[function.name] = value
        return SUCCESS

    def cuFuncGetAttribute(self, attribute: Any, function: Any) -> tuple[Any, ...]:
        assert attribute.name.endswith("LOCAL_SIZE_BYTES")
        return *SUCCESS, 8 * (self.spilling != "" and self.spilling in self.sources[-1].text)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, function: Any, threads: int, shared: int
    ) -> tuple[Any, ...]:
        assert shared == self.set[function.name]
        return *SUCCESS, 1

    def cuOccupancyMaxActiveClusters(self, function: Any, config: Any) -> tuple[Any, ...]:
        assert config.numAttrs == 1
        size = config.attrs[0].value.clusterDim
        self.clusters.append((size.x, config.blockDimX, config.sharedMemBytes))
        return *SUCCESS, 2

    def cuLaunchKernel(self, function: Any, *arguments: Any) -> int:
        if self.failing:
            return int(self.failing)
        if threading.get_ident() not in self.contexts:
            return int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT)
        *size, shared, stream, parameters, extra = arguments
        assert (size[1:3], size[4:6], stream.value, extra) == ([1, 1], [1, 1], 77, None)
        found = FakeFunction.all[function.value]
        assert shared == self.set[found.name]
        (kernel,) = (k for k in self.sources[-1].kernels if k.name == found.name)
        assert size[3] == team_of(kernel.launch).threads
        assert len(parameters) == len(kernel.arguments)
        found.run(size[0], parameters, stream)
        return 0

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = driver.CUresult(status).name.encode()
        return 0


class FakeFunction:
    """A kernel whose handle is a number."""

    all: ClassVar[dict[int, FakeFunction]] = {}

    def __init__(self, name: str, run: Any) -> None:
        self.name, self.run = name, run

    def __int__(self) -> int:
        self.all[id(self)] = self
        return id(self)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The driver in place of the real one, and a GPU whose tensors are a CPU's."""
    found = FakeDriver()
    for name in dir(FakeDriver):
        if name.startswith(("cuModule", "cuFunc", "cuOccupancy")):
            monkeypatch.setattr(driver, name, getattr(found, name))
    monkeypatch.setattr(cuda_launch, "library", lambda: found)
    monkeypatch.setattr(nvrtc, "compiled", found.compiled)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    properties = SimpleNamespace(multi_processor_count=PROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(cuda_launch, "_here", threading.local())
    monkeypatch.setattr(prepared, "stream_of", lambda _: lambda: 77)
    return found


def softmax_kernel(fake: FakeDriver, width: int = 64, **clusters: int) -> CudaKernel:
    machine = cuda_on_cpu.small(**clusters) if clusters else cuda_machine(90)
    region = parse(fill(regions.SOFTMAX, c=str(width)))
    return CudaKernel(region, machine, (), fake.build, lambda: TritonKernel(region))


def launched(kernel: CudaKernel, x: torch.Tensor) -> None:
    (y,) = kernel([x], [len(x)])
    torch.testing.assert_close(y, torch.softmax(x, 1))
    assert not kernel._failed


def test_a_launch_takes_addresses_and_sizes(fake: FakeDriver) -> None:
    kernel = softmax_kernel(fake)
    for rows in (1, 5, 40):
        launched(kernel, torch.randn(rows, 64))
    assert len(fake.sources) == 1  # it is built once
    assert not fake.clusters


def test_a_thread_that_has_called_nothing_yet_can_launch(fake: FakeDriver) -> None:
    """The driver knows no context there, as in threads of Python that torch has not worked in."""
    kernel = softmax_kernel(fake)
    launched(kernel, torch.randn(5, 64))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(launched, kernel, torch.randn(5, 64)).result()
    assert len(fake.contexts) == 2


def test_as_many_teams_as_find_room(fake: FakeDriver) -> None:
    kernel = softmax_kernel(fake, 512, threads=32, blocks=4, of_thread=16)
    launch = kernel.source.kernels[0].launch
    team = team_of(launch)
    assert team.blocks == 4
    launched(kernel, torch.randn(9, 512))
    assert fake.clusters == [(4, team.threads, shared_bytes(launch))]


def test_what_spills_is_built_for_teams_with_more_registers(fake: FakeDriver) -> None:
    """Vectors of half as many elements."""
    fake.spilling = "Row<64, 32, 1, 1, 4>"
    kernel = softmax_kernel(fake)
    assert fake.spilling in kernel.source.text
    launched(kernel, torch.randn(5, 64))
    assert ["Row<64, 32, 1, 2, 2>" in source.text for source in fake.sources] == [False, True]


def test_what_always_spills_is_launched_in_the_end(fake: FakeDriver) -> None:
    fake.spilling = "softmax"
    kernel = softmax_kernel(fake)
    launched(kernel, torch.randn(5, 64))
    programs = [source.kernels[0].launch.blocks.programs for source in fake.sources]
    assert programs == sorted(programs, reverse=True)
    assert programs[-1] == 1


def test_an_error_of_the_device_is_raised(fake: FakeDriver) -> None:
    fake.failing = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DriverError, match="CUDA driver: CUDA_ERROR_ILLEGAL_ADDRESS"):
        launched(softmax_kernel(fake), torch.randn(5, 64))


THROUGH_THE_BINDINGS = """
import types
from concurrent.futures import ThreadPoolExecutor
import cuda_on_cpu, torch, triton_regions as regions
from normpass.backend.program.machine import cuda_machine
from normpass.backend.run import cuda_driver, nvrtc
from normpass.backend.run.launch_cuda import CudaKernel
from normpass.passes.region_text import parse

sources = []

def build(source, device):
    sources.append(source)
    return cuda_driver.build(source, device)

nvrtc.compiled = lambda text, capability: str(cuda_on_cpu.built(sources[-1])).encode() + bytes(1)
torch.cuda.get_device_capability = lambda _: (9, 0)
torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(multi_processor_count=6)
torch.cuda.current_device = lambda: 0

def run(kernel, width):
    x = torch.randn(9, width)
    torch.testing.assert_close(kernel([x], [9])[0], torch.softmax(x, 1))

def softmax(width, machine):
    text = regions.fill(regions.SOFTMAX, c=str(width))
    kernel = CudaKernel(parse(text), machine, (), build, None)
    run(kernel, width)
    return kernel

softmax(16384, cuda_machine(90))  # more than 48 KiB on chip, which have to be asked for
kernel = softmax(512, cuda_on_cpu.small(threads=32, blocks=4, of_thread=16))  # a cluster
with ThreadPoolExecutor(1) as pool:
    pool.submit(run, kernel, 512).result()
    pool.submit(softmax, 64, cuda_machine(90)).result()
print(len(sources))
"""


def test_the_real_bindings_take_what_they_are_given(tmp_path: Path) -> None:
    """NVIDIA's, over a driver that runs kernels on this CPU (cuda_on_cpu/libcuda.cpp)."""
    library = tmp_path / "libcuda.so.1"
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-shared", "-fPIC"]
    command += ["-Wl,-soname,libcuda.so.1", str(cuda_on_cpu.FIBERS / "libcuda.cpp")]
    subprocess.run([*command, "-o", str(library), "-ldl"], check=True)
    paths = [str(cuda_on_cpu.FIBERS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["LD_LIBRARY_PATH"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", THROUGH_THE_BINDINGS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr


# ---- which dialect


def machine_of(width: str, capability: int = 90, dialect: str = "", **changed: str) -> Any:
    text = fill(regions.LAYER_NORM_BACKWARD, c=width, **changed)
    if dialect:
        text = text.replace("\ninput", f"\ndialect {dialect}\ninput", 1)
    return gpu_machine(parse(text), (), capability)


@pytest.mark.parametrize(
    ("width", "changed", "is_cuda"),
    [
        ("1024", {}, False),  # a program of Triton holds it
        ("65536", {}, True),
        ("131072", {"t": "bf16"}, True),
        ("65537", {"t": "bf16"}, False),  # rows begin where nothing can be copied from
        ("4000000", {}, False),  # no cluster holds it
        ("?", {}, False),
    ],
)
def test_rows_that_triton_reads_again_are_of_cuda(
    width: str, changed: dict[str, str], is_cuda: bool
) -> None:
    assert bool(machine_of(width, **changed).clusters) is is_cuda


def test_older_gpus_have_triton() -> None:
    assert machine_of("65536", capability=75) is GPU
    assert machine_of("65536", capability=0) is GPU
    assert machine_of("65536", capability=80) is GPU  # no clusters
    assert machine_of("16384", capability=80, t="bf16").clusters


@pytest.mark.parametrize(
    ("capability", "width", "blocks"), [(120, "16384", 2), (86, "16384", 1), (86, "32768", None)]
)
def test_gpus_with_less_shared_memory_have_smaller_rows(
    capability: int, width: str, blocks: int | None
) -> None:
    """Of capability 8.6 and 12.0 a block has 99 KiB, and only the latter has clusters."""
    machine = machine_of(width, capability, "cuda", t="bf16")
    assert (machine is not GPU) is (blocks is not None)
    if blocks:
        launch = plan_of("layer_norm_backward", capability, c=width, t="bf16").launches[0]
        assert team_of(launch).blocks == blocks
        assert shared_bytes(launch) <= 99 << 10


HALVES = """
region halves
axes    r=? c=64
dialect cuda
input   x: f32[r c]
total   = sum[c](x)
y       = div(x, total)
z       = sub(x, total)
output  one: f32[r c] (128, 1) = y
output  two: f32[r c] (128, 1) = z
"""


def test_parts_of_one_result_have_triton() -> None:
    """They may begin where no vector can be written."""
    assert gpu_machine(parse(HALVES), (), 90).clusters
    assert gpu_machine(parse(f"{HALVES}joined  one two [1]\n"), (), 90) is GPU


def test_a_region_can_ask_for_a_dialect() -> None:
    assert machine_of("65536", dialect="triton") is GPU
    assert machine_of("1024", dialect="cuda").clusters
    assert machine_of("?", dialect="cuda") is GPU


def test_the_kernel_is_of_the_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_gpu, "capability", lambda _: 90)
    for width, kind in (("1024", TritonKernel), ("65536", CudaKernel)):
        text = fill(regions.LAYER_NORM_BACKWARD, c=width)
        assert type(launch_gpu.kernel(text, (4096,), 0)) is kind
        assert type(launch_gpu.kernel(text, (4096,), None)) is TritonKernel


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(RegionError, match=r"expected one of .*'cuda'.*, found cobol"):
        machine_of("1024", dialect="cobol")
