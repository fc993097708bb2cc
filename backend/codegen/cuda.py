"""CUDA C++: prints a plan whose launches have teams (program/team.py) as kernels for NVRTC.

The text is written for people: names from the region, one comment a phase, normpass.cuh for what
would only repeat. The pointwise operations are those of the C++ for CPUs, on one number at a time.

This file prints the module. cuda_team.py prints what a team has; cuda_rows.py launches over rows,
cuda_bulk_rows.py those that one copy brings for all threads of a block, cuda_segments.py those over
rows along two axes, cuda_columns.py those down columns, cuda_groups.py those down groups of them,
cuda_elements.py those that combine what programs leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from normpass.backend.codegen.cuda_bulk_rows import BulkRowsPrinter
from normpass.backend.codegen.cuda_columns import ColumnsPrinter
from normpass.backend.codegen.cuda_elements import ElementsPrinter
from normpass.backend.codegen.cuda_groups import GroupsPrinter
from normpass.backend.codegen.cuda_rows import RowsPrinter
from normpass.backend.codegen.cuda_segments import SegmentsPrinter
from normpass.backend.program.team import team_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from normpass.backend.codegen.cuda_names import CudaNames, Kernel
    from normpass.backend.program.tree import Launch, Plan

AS_PLANNED: Mapping[int, Launch] = MappingProxyType({})


@dataclass(frozen=True)
class CudaSource:
    """A module's text, and the kernels in it in the order of their launches."""

    text: str
    kernels: tuple[Kernel, ...]


def generate(plan: Plan, others: Mapping[int, Launch] = AS_PLANNED) -> CudaSource:
    """The CUDA C++ of a plan.

    others: launches, by number, that have other teams than were planned.
    """
    printers: list[CudaNames] = []
    for number, launch in enumerate(plan.launches):
        launch = others.get(number, launch)
        printers.append(printer_of(launch)(plan, launch, number))
    double = printers[0].double if printers else False
    lines = [f"// {line}" for line in str(plan.region).splitlines()]
    lines += [
        '#include "normpass.cuh"',
        "using namespace normpass;",
        f"using scalar = {'double' if double else 'float'};",
    ]
    for printer in printers:
        lines += ["", *printer.source()]
    return CudaSource("\n".join(lines) + "\n", tuple(printer.kernel for printer in printers))


def printer_of(launch: Launch) -> type[CudaNames]:
    """What prints a launch."""
    team = team_of(launch)
    if team.group:
        return GroupsPrinter
    if team.across:
        return ColumnsPrinter
    if team.bulk:
        return BulkRowsPrinter
    return (ElementsPrinter, RowsPrinter, SegmentsPrinter)[len(launch.inner)]
