"""Triton: prints a plan as kernels over blocks, and the function that launches them.

The text is written for people: names from the region, one comment a phase, triton_library.py for
what would only repeat. The plan's launches and their blocks are chosen before (program/launches.py,
program/tiles.py). A loop inside becomes a dimension of blocks if a block covers its axis, and then
its body is straight-line code: what one phase computed is there in the next, and arrays between
phases are plain values. So it is, piece after piece, where several blocks cover an axis. An axis
too long for that, or of an extent that is only known at run time, is a loop over chunks, and arrays
along it lie in global memory.

All blocks of a kernel have the same dimensions, of size one where a value does not vary.

This file prints the module; triton_kernel.py prints each kernel, and triton_leaves.py what stands
in its loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normpass.backend.codegen.names import Names
from normpass.backend.codegen.text import TYPES
from normpass.backend.codegen.triton_kernel import Kernel, KernelPrinter
from normpass.backend.codegen.triton_layout import RESERVED, divide_up, size_text, times
from normpass.backend.program.tree import SHARED
from normpass.passes.region import product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.backend.program.tree import Plan


@dataclass(frozen=True)
class TritonSource:
    """A Python module's text, and what is in it.

    text: has the kernels and `run(tensors, sizes, card)`, which launches them in order. tensors:
    the region's inputs, then its outputs; sizes: its run-time sizes; card: a `Card`
    (triton_library.py)."""

    text: str
    kernels: tuple[Kernel, ...]


def generate(plan: Plan) -> TritonSource:
    """The Triton module of a plan."""
    names = Names(plan, RESERVED)
    printers = [KernelPrinter(plan, launch, k, names) for k, launch in enumerate(plan.launches)]
    kernels = [printer.source() for printer in printers]
    lines = [f"# {line}" for line in str(plan.region).splitlines()]
    lines += [
        "import torch",
        "import triton",
        "import triton.language as tl",
        "",
        "from normpass.backend.codegen import triton_library as lib",
        "",
        "libdevice = lib.libdevice",
    ]
    for kernel in kernels:
        lines += ["", "", *kernel]
    lines += ["", "", *_launcher(plan, printers)]
    return TritonSource("\n".join(lines) + "\n", tuple(printer.kernel for printer in printers))


def _launcher(plan: Plan, printers: Sequence[KernelPrinter]) -> list[str]:
    """The host function: workspace and launches."""
    region = plan.region
    buffers = [f"p_{b.name}" for b in (*region.inputs, *(o.buffer for o in region.outputs))]
    double = region.compute_dtype is torch.float64
    lines = [f"{', '.join(buffers)}, = tensors"]
    for buffer in (*region.inputs, *(output.buffer for output in region.outputs)):
        if TYPES[buffer.dtype].bits:
            lines.append(f"p_{buffer.name} = p_{buffer.name}.view(torch.uint8)")
    if region.runtime_sizes:
        lines.append(f"{', '.join(f'n_{name}' for name in region.runtime_sizes)}, = sizes")
    lines.append(
        f"like = dict(dtype=torch.float{64 if double else 32}, device={buffers[0]}.device)"
    )
    parts: dict[str, str] = {}
    for printer in printers:
        lines += _launch(printer, parts)
    return [
        "def run(tensors, sizes, card):",
        '    """Launches the kernels on the current stream. tensors: inputs, then outputs."""',
        *(f"    {line}" for line in lines),
    ]


def _launch(printer: KernelPrinter, parts: dict[str, str]) -> list[str]:
    """One launch: workspace, grid, call. `parts`: how many partial results there are so far."""
    number, blocks = printer.number, printer.blocks
    tiles = printer.tiles_text(printer.tiles, "triton.cdiv")
    kernel, at_once = printer.kernel, f"programs_{number}"
    lines, grid = [f'{at_once} = card.programs("{kernel.name}", {kernel.programs})'], tiles
    if blocks.shares:
        programs = f"card.processors * {at_once}"
        extent = size_text(product(printer.plan.axis[a].extent for a in blocks.shares))
        count = divide_up(extent, blocks.size[SHARED], "triton.cdiv")
        lines.append(f"shares_{number} = lib.share_count({programs}, {tiles}, {count})")
        grid = times(f"shares_{number}", tiles)
    for space in printer.launch.workspaces:
        name, size = space.value, printer.space_size(space)
        if space.is_shared_sum:
            parts[f"n_parts_{name}"] = printer.how_many(space)
            size = times(printer.how_many(space), size)
        kind = "parts" if space.is_shared_sum else "kept"
        lines.append(f"{kind}_{name} = torch.empty({size}, **like)")
    given = {"shares": f"shares_{number}", **parts}
    lines.append(f"{kernel.name}[({grid},)](")
    lines += [f"    {given.get(name, name)}," for name, _ in kernel.arguments]
    if fetch := kernel.fetch:
        lines.append(f"    lib.stages(card, {fetch.ahead}, {fetch.beside}, {at_once}),")
    return [*lines, f"    **lib.options({kernel.warps}, {at_once}),", ")"]
