"""Regions as functions of a C++ file that launch kernels of a GPU. Those of CUDA C++ run here: a
driver for CPUs loads them (cuda_on_cpu/libcuda.cpp). What Triton's are launched with is compared
with what Python launches.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bounded
import cuda_on_cpu
import pytest
import torch
import triton_direct
import triton_regions as regions
from cuda_on_cpu import TEAMS
from triton_driver import fake_gpu
from triton_regions import fill

from normpass.backend.codegen.triton_library import Card
from normpass.backend.program.counts import cpp, size_symbol
from normpass.backend.program.machine import cuda_machine
from normpass.backend.program.sizes import size_classes
from normpass.backend.program.team import shared_bytes, team_of
from normpass.backend.run import cuda_launch, gpu_function, launch_gpu, launch_triton
from normpass.backend.run.cuda_launch import Binary, Loaded
from normpass.backend.run.gpu_kernel import NotBuiltError
from normpass.backend.run.launch_cuda import CudaKernel
from normpass.backend.run.launch_triton import TritonKernel
from normpass.backend.run.layouts import Layout, Piece, outputs_in, pieces
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from triton_cases import Case

    from normpass.backend.codegen.cuda import CudaSource
    from normpass.backend.codegen.cuda_names import Kernel
    from normpass.backend.run.prepared import Launches

CPU = torch.device("cpu")
CXX = os.environ.get("CXX", "g++")
# A context and a stream of that driver.
CONTEXT, STREAM = 0x1000, 77

# Of an axis that may be empty, along which elements repeat.
REPEATED = """\
region repeated
axes    r=? c=64
input   x: f32[r c]
input   y: f32[r c] (0, 1)
mul     = mul(x, y)
total   = sum[c](mul)
less    = sub(x, total)
output  z: f32[r c] = less"""
# What C++ and the functions themselves call otherwise.
NAMED = """\
region named
axes    r=? c=64
input   new: f32[r c]
input   stream: f32[c]
input   arrays: f32[r c]
mul     = mul(new, stream)
add     = add(mul, arrays)
top     = amax[c](add)
less    = sub(add, top)
output  this: f32[r c] = less"""
TEXTS = {
    "layer norm": (fill(regions.LAYER_NORM_BACKWARD, c="128", t="bf16", w="f32"), (8,)),
    "softmax": (fill(regions.SOFTMAX, c="96"), (5,)),
    "rows of known number": (fill(regions.SOFTMAX, c="96", r="7"), ()),
    "repeated": (REPEATED, (4,)),
    "named": (NAMED, (4,)),
    "groups of columns": (fill(regions.GROUP_NORM_BACKWARD, c="12", x="r s (g d)"), (12,)),
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver's library."""
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = [CXX, "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    source = str(cuda_on_cpu.FIBERS / "libcuda.cpp")
    subprocess.run([*command, source, "-o", str(library), "-ldl"], check=True)
    return library


class OnCpu(Loaded):
    """A kernel that is built for a CPU, as that driver loads it."""

    spilled, teams = 0, TEAMS

    def __init__(self, library: Path, kernel: Kernel) -> None:
        self.threads, self.shared = team_of(kernel.launch).threads, shared_bytes(kernel.launch)
        self.binary = Binary(bytes(library), kernel.name)


def build(source: CudaSource, device: torch.device) -> Mapping[str, Any]:
    library = cuda_on_cpu.built(source)
    return {kernel.name: OnCpu(library, kernel) for kernel in source.kernels}


@cache
def in_cuda(text: str, classes: Any, device: int | None = None) -> CudaKernel:
    def otherwise() -> Any:
        raise AssertionError("the kernel could not be built")

    return CudaKernel(parse(text), cuda_machine(90), classes, build, otherwise)


@pytest.fixture(scope="module")
def library(driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """The functions of all texts in one file, each as often as somebody could put it there."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(launch_gpu, "kernel_for", in_cuda)
        gpu_function.function.cache_clear()
        functions = [gpu_function.function(*given, CPU) for given in TEXTS.values()]
        folder = tmp_path_factory.mktemp("functions")
        source, found = folder / "functions.cpp", folder / "functions.so"
        text = "\n".join((gpu_function.header(), *(each.source for each in functions)))
        source.write_text(f"{text}\n{text}")
        torch_folder = Path(torch.__file__).parent
        include = torch_folder / "include"
        command = [CXX, "-std=c++20", "-shared", "-fPIC", "-Wall", "-Werror", str(source)]
        command += [f"-I{cuda_on_cpu.FIBERS / 'driver'}", f"-isystem{include}", str(driver)]
        command += ["-Daoti_torch_device_type_cuda=aoti_torch_device_type_cpu"]  # of new memory
        command += [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(found)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]
        ctypes.CDLL(str(driver), ctypes.RTLD_GLOBAL).cuCtxSetCurrent(ctypes.c_void_p(CONTEXT))
        yield ctypes.CDLL(str(found))
        gpu_function.function.cache_clear()


def tensors(text: str, sizes: Sequence[int], begin: int) -> list[Tensor]:
    """A region's inputs. begin: elements from where a vector begins."""
    region, numbers = parse(text), torch.Generator().manual_seed(1)
    found = []
    for buffer in region.inputs:
        layout = Layout.of(region, buffer, region.extents(sizes))
        dense = [1 if step == 0 else size for size, step in zip(*layout[:2], strict=True)]
        count = 1 + sum((n - 1) * step for n, step in zip(dense, layout.strides, strict=True))
        values = torch.randn(max(count, 0) + begin, generator=numbers).to(layout.dtype)[begin:]
        found.append(values.as_strided(dense, layout.strides).expand(layout.shape))
    return found


def call(library: ctypes.CDLL, name: str, given: list[Tensor], sizes: list[int]) -> list[Tensor]:
    text, example = TEXTS[name]
    region = parse(text)
    extents = region.extents(sizes)
    results = [Layout.of_result(region, each, extents).empty(CPU) for each in region.results]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*given, *results)]
    called = getattr(library, gpu_function.function(text, example, CPU).name)
    called(*pointers, *map(ctypes.c_int64, sizes), ctypes.c_void_p(STREAM))
    return outputs_in(results, pieces(region, extents), torch.as_strided)


CALLS = [(name, rows) for name in TEXTS for rows in (1, 5, 8, 13, 300)]
CALLS = [(name, rows) for name, rows in CALLS if TEXTS[name][1] or rows == 1]


@pytest.mark.one_in(14)
@pytest.mark.parametrize("begin", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize(("name", "rows"), CALLS)
def test_a_function_computes_what_its_region_means(
    name: str, rows: int, begin: int, library: ctypes.CDLL
) -> None:
    """For sizes such as those of the example, and for others."""
    region = parse(TEXTS[name][0])
    sizes = [rows] * len(region.runtime_sizes)
    given = tensors(TEXTS[name][0], sizes, begin)
    expected = bounded.evaluate(region, given, sizes)
    found = call(library, name, given, sizes)
    for output, result, want in zip(region.outputs, found, expected, strict=True):
        bounded.assert_within(result, want, f"{output.buffer.name}, {rows} rows")


def test_no_rows(library: ctypes.CDLL) -> None:
    """Sums over them are zeros, and what repeats along them is not read where it is not there."""
    text, _ = TEXTS["layer norm"]
    dx, *sums = call(library, "layer norm", tensors(text, [0], 0), [0])
    assert dx.numel() == 0
    assert sums
    assert not any(each.any() for each in sums)
    (z,) = call(library, "repeated", tensors(REPEATED, [0], 0), [0])
    assert z.shape == (0, 64)


# ---- what is launched for sizes that are symbols


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(launch_triton, "card_of", lambda _: Card(3, 228 << 10, 227 << 10))
    monkeypatch.setattr(cuda_launch, "library", lambda: ctypes.CDLL(None))
    monkeypatch.setattr(Loaded, "__init__", lambda self, *given, **_: vars(self).update(on=given))
    with fake_gpu() as found:
        yield found


def numbers(launches: Launches, sizes: Mapping[Any, int]) -> Any:
    """Of grids, arguments and arrays, as C++ computes them."""

    def number(count: Any) -> int:
        text = cpp(count)
        text = re.sub(r"INT64_C|static_cast<int64_t>|c10::|std::|(?<=\d)L", "", text)
        names = {str(size): value for size, value in sizes.items()}
        functions = {"div_floor_integer": lambda x, y: x // y, "min": min, "max": max}
        return int(eval(text, {"__builtins__": {}}, names | functions))

    def argument(given: Any) -> Any:
        if hasattr(given, "offset"):
            return "array", number(given.offset)
        return ("tensor", given.number) if hasattr(given, "number") else number(given)

    found = [
        (number(launch.blocks), [argument(given) for given in launch.arguments])
        for launch in launches.launches
    ]
    return number(launches.size), [each for each in found if each[0]]


def run_time_cases() -> list[Case]:
    return [case for case in triton_direct.cases() if parse(case.text).runtime_sizes]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case", run_time_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("is_known", [False, True], ids=["any sizes", "sizes of a class"])
def test_triton_is_launched_as_by_python(case: Case, is_known: bool) -> None:
    for sizes in (*case.sizes, tuple(size + 100 for size in case.sizes[0])):
        kernel = TritonKernel(parse(case.text), classes=size_classes(sizes) if is_known else ())
        symbols = [size_symbol(name) for name in kernel.region.runtime_sizes]
        found = kernel.launches(symbols, CPU)
        right = kernel.launches(sizes, CPU)
        given = dict(zip(symbols, sizes, strict=True))
        size, launches = numbers(found, given)
        expected_size, expected = numbers(right, {})
        assert size == expected_size
        # Python's 1 is a constant of the kernel's.
        assert [blocks for blocks, _ in launches] == [blocks for blocks, _ in expected]
        for (_, ours), (_, its) in zip(launches, expected, strict=True):
            assert [x for x in ours if x != 1] == [x for x in its if x != 1]


@pytest.mark.usefixtures("gpu")
def test_integers_that_may_be_large_have_64_bits() -> None:
    text = fill(regions.LAYER_NORM_BACKWARD, c="?")
    for classes, kind in (((), "i64"), (size_classes((48, 64)), "i32")):
        kernel = TritonKernel(parse(text), classes=classes)
        _, recorded = kernel._recorded([*map(size_symbol, kernel.region.runtime_sizes)], CPU)
        for launched in recorded.launches:
            found = launched.kernel.src.signature
            kinds = {found[name] for name in found if name in ("n_r", "n_c")}
            assert kinds == {kind}


@pytest.mark.usefixtures("gpu")
def test_parts_of_a_result_that_begin_in_the_middle_of_a_vector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton compiles for addresses that are multiples of 16, where it is given some."""
    kernel = TritonKernel(parse(fill(regions.SOFTMAX, c="96")))
    for offset, divides in ((0, True), (8, True), (1, False)):
        piece = Piece(0, Layout((4, 96), (96, 1), torch.float32), offset)
        monkeypatch.setattr(launch_triton, "pieces", lambda *_, found=piece: [found])
        _, recorded = kernel._recorded((4,), CPU)
        (launched,) = recorded.launches
        last = len(kernel.region.inputs)
        attributes = launched.kernel.src.attrs[(last,)] if divides else []
        assert (["tt.divisibility", 16] in attributes) is divides
        assert launched.arguments[last].begin == (4 * offset % 16)


# Two outputs that are one tensor: side by side, and in turn.
HALVES = """\
region halves
axes    r=? c=24
input   x: f32[r c]
input   y: f32[r c]
one     = exp(x)
two     = exp(y)
output  y0: f32[r c] {strides} = one
output  y1: f32[r c] {strides} = two
{joined}"""
JOINED = HALVES.format(strides="(48, 1)", joined="joined  y0 y1 [1]")
IN_TURN = HALVES.format(strides="(48, 2)", joined="in turn y0 y1 [1]")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("text", "offset", "begin"), [(JOINED, 96, 0), (IN_TURN, 4, 4)])
def test_outputs_that_are_parts_of_a_result(
    text: str, offset: int, begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_triton(text: str, classes: Any, device: int | None = None) -> TritonKernel:
        return TritonKernel(parse(text), classes=classes)

    monkeypatch.setattr(launch_gpu, "kernel_for", in_triton)
    monkeypatch.setattr(Loaded, "binary", Binary(b"", "kernel"), raising=False)
    monkeypatch.setattr(Loaded, "threads", 32, raising=False)
    monkeypatch.setattr(Loaded, "shared", 0, raising=False)
    source = gpu_function.function.__wrapped__(text, (9,), CPU).source
    assert f"tensor_3 = static_cast<char*>(result_0) + INT64_C({offset});" in source
    assert "const normpass::Input tensor_1(input_1, 96L*n_r" in source
    slots = launch_triton._slots(parse(text), [size_symbol("r")], CPU)
    assert [slot.begin for slot in slots] == [0, 0, 0, begin]


# ---- what cannot be built


@pytest.mark.usefixtures("gpu")
def test_a_kernel_that_only_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = TritonKernel(parse(fill(regions.SOFTMAX, c="96")))
    monkeypatch.setattr(launch_triton, "launches", lambda _: None)
    with pytest.raises(NotBuiltError, match="only Triton launches"):
        kernel.launches((4,), CPU)


@pytest.mark.usefixtures("gpu", "faults_are_meant")
def test_where_cuda_cannot_be_built_triton_is_launched(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(source: CudaSource, device: torch.device) -> Any:
        raise ImportError("no compiler")

    text = fill(regions.SOFTMAX, c="96")
    in_triton = TritonKernel(parse(text))
    kernel = CudaKernel(parse(text), cuda_machine(90), (), refuse, lambda: in_triton)
    (launch,), (right,) = kernel.launches((4,), CPU)[0], in_triton.launches((4,), CPU)[0]
    assert launch[1:] == right[1:]
    assert "runs in Triton: its CUDA kernel could not be built: no compiler" in caplog.text
