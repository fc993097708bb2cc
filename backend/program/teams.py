"""A plan's launches in CUDA C++: how a team (team.py) goes through each of them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from normpass.backend.program.launches import UnsupportedPlanError
from normpass.backend.program.team import WARP, Team, refused
from normpass.backend.program.team_columns import Columns
from normpass.backend.program.team_groups import Groups, group_axis
from normpass.backend.program.team_rows import Rows
from normpass.backend.program.team_segments import Segments
from normpass.backend.program.tree import Blocks, Compute, Keep, Load, Recall, Store, walk

if TYPE_CHECKING:
    from normpass.backend.program.machine import Clusters
    from normpass.backend.program.tree import Launch, Node, Plan

# Threads of a block that combines parts, and of one whose threads have an element each.
COMBINING, ALONE = 256, 128
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool)
UNSUPPORTED = frozenset({"to_int8", "to_uint8", "to_float8_e4m3fn", "to_float8_e5m2"})


def with_teams(plan: Plan, clusters: Clusters) -> Plan:
    """The plan with the teams of its launches.

    Raises:
        UnsupportedPlanError: if a launch is neither one over rows nor one that combines their sums.
    """
    if plan.region.joins:  # which may begin where no vector can be written
        raise refused(plan, "results of their own", "some that are parts of one tensor")
    launches = []
    for launch in plan.launches:
        for node in (*launch.scalars, *walk(*launch.body)):
            if complaint := _of_any_node(node):
                raise refused(plan, *complaint)
        launches.append(_with_team(plan, launch, clusters))
    return replace(plan, launches=tuple(launches))


def _with_team(plan: Plan, launch: Launch, clusters: Clusters) -> Launch:
    if not launch.inner:
        return _of_elements(plan, launch)
    if plan.vector in {axis.name for axis in launch.outer}:
        return Columns(plan, launch).fitting(clusters)
    if len(launch.inner) == 1:
        return Rows(plan, launch).fitting(clusters)
    group = group_axis(plan, launch)
    if group is None:
        return Segments(plan, launch).fitting(clusters)
    try:
        return Groups(plan, launch, group).fitting(clusters)
    except UnsupportedPlanError as refusal:
        with suppress(UnsupportedPlanError):
            return Segments(plan, launch).fitting(clusters)
        raise refusal from None


def _of_elements(plan: Plan, launch: Launch) -> Launch:
    """A launch without loops: a thread for each element, or a warp for neighbours and as many more
    as share out the parts of their sums.
    """
    for node in launch.body:
        if not isinstance(node, Load | Store | Compute | Keep | Recall):
            raise refused(plan, "sums along rows", f"{type(node).__name__} of each element")
    width = plan.region.compute_dtype.itemsize
    team, parts = Team(ALONE, width), 1
    if launch.combined:
        team, parts = Team(COMBINING, width, beside=COMBINING * width), COMBINING // WARP
    size = {axis.name: 1 for axis in launch.outer}
    if launch.outer:
        size[launch.outer[-1].name] = team.threads // parts
    blocks = Blocks((), size, frozenset(), parts, team.threads // WARP)
    return replace(launch, team=team, blocks=blocks)


def _of_any_node(node: Node) -> tuple[str, str] | None:
    """What was expected of a node instead of what it is, wherever it stands."""
    match node:
        case Load(access) | Store(_, access) if access.buffer.dtype not in DTYPES:
            found = f"{access.buffer.name} of {access.buffer.dtype}"
            return f"one of {', '.join(map(str, DTYPES))}", found
        case Compute(op) if op.fn in UNSUPPORTED:
            return "a function that there is", op.fn
    return None
