"""Bars and lines that show numbers: bytes and times of regions, memory over a step."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from normpass.backend.explain.timing import Times
from normpass.backend.explain.words import clock
from normpass.passes.sizes import human

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from normpass.backend.explain.memory import Memory, Timeline
    from normpass.backend.explain.report import FusedNorm

# A line has so many steps; each is as high as the highest that it stands for.
STEPS = 240
WIDTH, HEIGHT = 1000, 240


class Bar(NamedTuple):
    """kind: its color, as in report.css. value: None where it is not known, and note says why."""

    kind: str
    label: str
    value: float | None
    note: str = ""


class Row(NamedTuple):
    """The bars of regions that are equal. head: HTML."""

    head: str
    bars: Sequence[Bar]


def rows(
    groups: Sequence[tuple[str, FusedNorm]], of: Callable[[FusedNorm], Sequence[Bar]], unit: str
) -> str:
    """Bars of regions: bytes all on one scale, times of each region on its own, since those of the
    largest would hide the others. groups: (head as HTML, region).
    """
    made = [Row(head, of(region)) for head, region in groups]
    written = human if unit == "bytes" else clock
    all_of_them = _most(made)
    shown = (_row(row, all_of_them if unit == "bytes" else _most([row]), written) for row in made)
    return f'<div class="bars">{"".join(shown)}</div>'


def _most(rows: Sequence[Row]) -> float:
    return max((bar.value or 0 for row in rows for bar in row.bars), default=0)


def of_bytes(region: FusedNorm) -> list[Bar]:
    stock = region.bytes_stock
    return [
        Bar("least", "least possible", region.bytes_least),
        Bar("ours", "normpass", region.bytes_moved),
        Bar("stock", "Inductor", stock, "" if stock is not None else "not estimated"),
    ]


def of_times(region: FusedNorm) -> list[Bar]:
    found = region.times
    if isinstance(found, Times):
        return [Bar("ours", "normpass", found.ours), Bar("stock", "Inductor", found.stock)]
    return [Bar("ours", "normpass", None, f"not timed: {found}")]


def _row(row: Row, most: float, written: Callable[..., str]) -> str:
    bars = "".join(_bar(bar, most, written) for bar in row.bars)
    return f'<div class="row"><div class="head">{row.head}</div><dl>{bars}</dl></div>'


def _bar(bar: Bar, most: float, written: Callable[..., str]) -> str:
    value = bar.value
    width = 100 * value / most if value is not None and most else 0.0
    text = escape(bar.note) if value is None else written(value)
    return (
        f"<dt>{bar.label}</dt>"
        f'<dd><span class="track"><span class="bar {bar.kind}" style="width:{width:.2f}%"></span>'
        f"</span><span>{text}</span></dd>"
    )


# ---- memory over a step


def timeline(memory: Memory) -> str:
    """Two lines over the forward and the backward, each stretched to half of the width."""
    sides = (("stock", memory.stock.timeline), ("ours", memory.ours.timeline))
    most = max((side.peak for _, side in sides), default=0) or 1
    has_backward = any(side.backward for _, side in sides)
    lines = "".join(
        f'<path class="{kind}" data-peak="{side.peak}" d="{_steps(side, most, has_backward)}"/>'
        for kind, side in sides
    )
    half = f'<path class="grid" d="M{WIDTH // 2} 0V{HEIGHT}"/>' if has_backward else ""
    grid = "".join(f'<path class="grid" d="M0 {HEIGHT * k // 4}H{WIDTH}"/>' for k in range(1, 4))
    phases = ("forward", "backward") if has_backward else ("forward",)
    scale = "".join(f"<span>{human(most * k // 4)}</span>" for k in (4, 3, 2, 1, 0))
    told = "; ".join(
        f"{'normpass' if kind == 'ours' else 'Inductor'} {human(side.peak)} at most"
        for kind, side in sides
    )
    return (
        f'<div class="timeline"><div class="scale" aria-hidden="true">{scale}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="bytes alive over a step: {told}">{grid}{half}{lines}</svg>'
        f'<div class="phases">{"".join(f"<span>{phase}</span>" for phase in phases)}</div></div>'
    )


def _steps(side: Timeline, most: int, has_backward: bool) -> str:
    """The outline of what is alive."""
    columns = columns_of(side, has_backward)
    drawn, before = f"M0 {HEIGHT}", 0
    for k, alive in enumerate(columns):
        if alive != before:
            drawn += f"H{WIDTH * k / len(columns):.1f}V{HEIGHT * (1 - alive / most):.1f}"
            before = alive
    return f"{drawn}H{WIDTH}"


def columns_of(side: Timeline, has_backward: bool) -> list[int]:
    """The most that is alive in each of STEPS parts of the step."""
    scale = 0.5 if has_backward else 1.0
    points = [(when * scale, alive) for when, alive in side.forward]
    points += [(0.5 + when * scale, alive) for when, alive in side.backward]
    columns, last, at = [], 0, 0
    for k in range(STEPS):
        most = last
        while at < len(points) and (points[at][0] < (k + 1) / STEPS or k == STEPS - 1):
            last = points[at][1]
            most = max(most, last)
            at += 1
        columns.append(most)
    return columns
