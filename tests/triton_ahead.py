"""Triton's compiler without a GPU: what a region's kernels are compiled to."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest
import triton_regions

from normpass.backend.codegen.triton import generate
from normpass.backend.codegen.triton_program import STAGES
from normpass.backend.program.machine import GPU
from normpass.backend.program.plan import make_plan
from normpass.backend.run import launch_triton
from normpass.decomps.torch_versions import release
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from pathlib import Path

    from normpass.backend.codegen.triton import TritonSource
    from normpass.backend.codegen.triton_kernel import Kernel
    from normpass.backend.program.machine import Tiling

HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON = release(version("triton"))[:2] if HAS_TRITON else None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton, and it is not installed")


def is_recorded() -> bool:
    """Whether snapshots are of this compiler: others need other registers."""
    return TRITON == (3, 9)


def source(name: str, tiling: Tiling | None = None, **changed: str) -> TritonSource:
    machine = dataclasses.replace(GPU, tiling=tiling) if tiling else GPU
    return generate(make_plan(parse(region(name, **changed)), machine))


def region(name: str, **replace: str) -> str:
    """The text of a region of triton_regions; see its `fill`."""
    return triton_regions.fill(getattr(triton_regions, name.upper()), **replace)


# GPUs of each capability: A100, H100, B200.
CARDS = {80: (108, 164 << 10, 163 << 10), 90: (132, 228 << 10, 227 << 10)}
CARDS[100] = (148, *CARDS[90][1:])


def compiled(text: TritonSource, capability: int) -> list[Any]:
    """Every kernel of a module, compiled for a device that need not be there, for as many programs
    at once as was planned.
    """
    return [_compiled(text, kernel, capability, kernel.programs) for kernel in text.kernels]


def _compiled(text: TritonSource, kernel: Kernel, capability: int, programs: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from normpass.backend.codegen import triton_library

    # As at run time: tensors begin at multiples of 16 bytes.
    aligned = {
        (k,): [["tt.divisibility", 16]]
        for k, (_, kind) in enumerate(kernel.arguments)
        if kind.startswith("*")
    }
    types, constants = dict(kernel.arguments), {}
    if stages := stages_on(kernel, capability, programs):
        types |= {STAGES: "constexpr"}
        constants = {(len(types) - 1,): stages}
    function = getattr(launch_triton.load(text.text), kernel.name)
    return triton.compile(
        ASTSource(function, types, constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options=triton_library.options(kernel.warps, programs),
    )


def stages_on(kernel: Kernel, capability: int, programs: int = 0) -> int | None:
    """As run() has it on a GPU; None for a kernel whose loops fetch nothing ahead. programs: at
    once, if other than planned.
    """
    from normpass.backend.codegen.triton_library import Card, stages

    if kernel.fetch is None:
        return None
    fetch, card = kernel.fetch, Card(*CARDS[capability])
    return stages(card, fetch.ahead, fetch.beside, programs or kernel.programs)


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a thread or a program of a kernel takes. registers: of 32 bits, of a thread. shared:
    bytes of a program. spilled: bytes of local memory, of a thread. programs: at once, of a
    multiprocessor.
    """

    registers: int
    shared: int
    spilled: int
    programs: int


def fitted(text: TritonSource, capability: int, folder: Path) -> list[Resources]:
    """What every kernel takes as a GPU runs it: for fewer programs at once where it would spill."""
    found = []
    for kernel in text.kernels:
        programs = kernel.programs
        while True:
            built = _compiled(text, kernel, capability, programs)
            taken = dataclasses.replace(resources(built, folder), programs=programs)
            if not taken.spilled or programs == 1:
                break
            programs -= 1
        found.append(taken)
    return found


def resources(kernel: Any, folder: Path) -> Resources:
    """Those of a compiled kernel. Skips where no tool tells."""
    ((registers, spilled),) = usage(kernel.asm["cubin"], folder).values()
    return Resources(registers, kernel.metadata.shared, spilled, 0)


def usage(cubin: bytes, folder: Path) -> dict[str, tuple[int, int]]:
    """Registers and bytes of local memory of a thread of each kernel in a binary, by its name.
    Skips where no tool tells.
    """
    from triton import knobs

    tool = getattr(knobs.nvidia.cuobjdump, "path", None)
    if tool is None:
        pytest.skip("Triton has no cuobjdump here")
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    done = subprocess.run(
        [tool, "-res-usage", str(file)], capture_output=True, text=True, check=False
    )
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", done.stdout)
    if not found:
        pytest.skip("Triton's cuobjdump does not tell what a kernel takes")
    return {name: (int(registers), int(stack)) for name, registers, stack in found}
