"""From a region to a kernel plan: which loops, in which order, and what each of them computes.

A plan is a tree (tree.py) over axes in one order (axes.py), with every value in its place
(schedule.py). Lanes run along one of the axes, or along short groups together (regroup.py). How its
loops go on CPUs is decided in rows.py, sums.py and kinds.py, what is launched on GPUs in
launches.py, tiles.py and fetches.py, for CUDA C++ in teams.py. Every generator prints what it finds
there, and decides nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from normpass.backend.program.axes import (
    choose_order,
    choose_vector,
    coalesce,
    local_axes,
    split_reductions,
)
from normpass.backend.program.blocks import column_blocks, in_blocks, row_blocks
from normpass.backend.program.fetches import with_fetches
from normpass.backend.program.kinds import with_kinds
from normpass.backend.program.launches import with_launches
from normpass.backend.program.machine import CPU, Machine
from normpass.backend.program.nests import with_nests
from normpass.backend.program.regroup import regroup
from normpass.backend.program.rows import with_rows_together
from normpass.backend.program.schedule import Scheduler
from normpass.backend.program.sums import with_sums
from normpass.backend.program.sweeps import sweeps_in_blocks
from normpass.backend.program.teams import with_teams
from normpass.backend.program.tiles import with_blocks
from normpass.backend.program.tree import LoopAxis, Plan
from normpass.backend.program.verify import verified
from normpass.backend.program.workspaces import with_workspaces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.backend.program.sizes import SizeClass
    from normpass.passes.region import Region


@lru_cache(maxsize=128)  # a region is weighed, printed and explained by the same plan
def make_plan(region: Region, machine: Machine = CPU, classes: tuple[SizeClass, ...] = ()) -> Plan:
    """The plan of a region, from its text, the kind of machine and the classes of run-time sizes
    alone: everywhere the same. The only place where the order of its passes exists.

    classes: in the order of the sizes; empty for a plan that knows nothing of them.

    Raises:
        UnsupportedPlanError: if launches cannot be made of it.
    """
    plan = verified(placed(region, machine, classes), "placing")
    if machine.has_vectors:
        plan = verified(with_nests(plan), "nests")
        plan = verified(with_rows_together(plan, machine), "rows")
        plan = verified(with_sums(plan), "sums")
        plan = verified(with_kinds(plan), "kinds")
    if machine.tiling:
        plan = verified(with_launches(plan), "launches")
    if machine.clusters:
        plan = verified(with_teams(plan, machine.clusters), "teams")
    elif machine.tiling:
        plan = verified(with_blocks(plan, machine.tiling), "blocks")
        plan = verified(with_fetches(plan), "fetches")
    return verified(with_workspaces(plan), "workspaces")


def placed(region: Region, machine: Machine, classes: Sequence[SizeClass] = ()) -> Plan:
    """The loops of a region in one order, with every value in its place."""
    region, axes, accesses, numel = coalesce(region, classes)
    vector = choose_vector(region, axes, accesses, machine)
    small: tuple[LoopAxis, ...] = ()
    if machine.regroups and (grouped := regroup(region, axes, accesses, vector)):
        region, axes, vector = grouped.region, grouped.axes, grouped.vector
        accesses, small = grouped.accesses, grouped.small
    if size := row_blocks(region, axes, accesses, vector, machine):
        region, axes, accesses = in_blocks(region, axes, accesses, vector, size, outermost=True)
    if found := column_blocks(region, axes, accesses, vector, machine):
        region, axes, accesses = in_blocks(region, axes, accesses, *found)
    region, axes, accesses = sweeps_in_blocks(region, axes, accesses, vector, machine)
    local = local_axes(region)
    order = (*choose_order(region, axes, accesses, vector, machine), *small)
    region = split_reductions(region, order)
    body = Scheduler(region, order, accesses, machine, vector, local).plan()
    return Plan(region, order, vector, local, body, numel)
