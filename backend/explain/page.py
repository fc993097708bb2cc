"""The report as a page of its own: one file, with its style and its script, and nothing from
elsewhere.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, NamedTuple

from normpass.backend.explain import bars, page_parts
from normpass.backend.explain.page_parts import path, row, table
from normpass.backend.explain.picture import COLORS, picture
from normpass.backend.explain.side_by_side import kernel_lines, region_lines
from normpass.backend.explain.words import place, refusals, short, time_cells, times
from normpass.passes.pipeline import Fused
from normpass.passes.sizes import human

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from normpass.backend.explain.listing import Line
    from normpass.backend.explain.record import Passed
    from normpass.backend.explain.report import FusedNorm, Report

HERE = Path(__file__).parent


def page(report: Report) -> str:
    """The page's text. backend/explain/report.html is its frame."""
    template = Template((HERE / "report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(report.title),
        summary=escape(report.summary()),
        style=(HERE / "report.css").read_text(encoding="utf-8"),
        script=(HERE / "report.js").read_text(encoding="utf-8"),
        fused=_fused(report),
        bars=_bars(report),
        refused=_refused(report),
        memory=page_parts.memory(report.memory),
        regions=_regions(report),
        graphs=_graphs(report),
    )


def _chosen(k: int, name: str) -> str:
    """A link to a region's kernel, which chooses it everywhere on the page."""
    return f'<a class="choose c{k % COLORS}" href="#region{k}" data-r="{k}">{k} {escape(name)}</a>'


def _fused(report: Report) -> str:
    if not report.regions:
        return "<p>Nothing was fused.</p>"
    is_timed = any(region.times for region in report.regions)
    numbers = ["moved", "least", "ratio", "passes"]
    numbers += ["time", "Inductor", "faster"] if is_timed else []
    head = row(("norm", "phase", "module", "target"), numbers, "th")
    rows = [
        row(
            (
                _chosen(k, short(region.name)),
                region.phase,
                path(place(region.module)),
                region.target,
            ),
            (
                human(region.bytes_moved),
                human(region.bytes_least),
                times(region.bytes_moved, region.bytes_least),
                str(region.passes),
                *(time_cells(region.times) if is_timed else ()),
            ),
            marks=f' data-row="{k}"',
        )
        for k, region in enumerate(report.regions)
    ]
    moved = sum(region.bytes_moved for region in report.regions)
    least = sum(region.bytes_least for region in report.regions)
    empty = [""] * (len(numbers) - 3)
    total = row(("total", "", "", ""), (human(moved), human(least), times(moved, least), *empty))
    return table(head, rows, total)


def _refused(report: Report) -> str:
    if not report.refused:
        return "<p>None.</p>"
    rows = [
        row((escape(name), phases, path(module), page_parts.reason(reason)))
        for name, phases, module, reason in refusals(report.refused)
    ]
    return table(row(("norm", "phase", "module", "reason"), tag="th"), rows)


# ---- regions


class Group(NamedTuple):
    """Regions that are equal: their numbers, and the first of them."""

    members: Sequence[int]
    region: FusedNorm


def _groups(report: Report) -> list[Group]:
    equal: dict[tuple[str, str], list[int]] = {}
    for k, region in enumerate(report.regions):
        equal.setdefault((region.text, region.target), []).append(k)
    return [Group(members, report.regions[members[0]]) for members in equal.values()]


def _bars(report: Report) -> str:
    """Bytes of every region, and its times where they were measured; equal ones once."""
    if not report.regions:
        return ""
    heads = [(_head(group), group.region) for group in _groups(report)]
    shown = (
        '<h3>Bytes</h3><p class="lead">What each kernel moves through memory, against the least '
        "that is possible and what Inductor's kernels for the same nodes are estimated to move."
        f"</p>{bars.rows(heads, bars.of_bytes, 'bytes')}"
    )
    if any(region.times for region in report.regions):
        shown += (
            '<h3>Times</h3><p class="lead">A call of each kernel, and of Inductor\'s kernels for '
            "the same nodes: medians of rounds in turn, on random tensors, after their results "
            "were compared; each pair on its own scale. On a machine that is busy otherwise they "
            "mean little.</p>"
            f"{bars.rows(heads, bars.of_times, 'seconds')}"
        )
    return shown


def _head(group: Group) -> str:
    first, region = group.members[0], group.region
    many = f" and {len(group.members) - 1} more like it" if len(group.members) > 1 else ""
    return (
        f'{_chosen(first, short(region.name))} <span class="place">{region.phase} of '
        f"{path(place(region.module))}{many}</span>"
    )


def _regions(report: Report) -> str:
    """Every region with its kernel; equal ones once."""
    return "\n".join(_region(report, group) for group in _groups(report))


def _region(report: Report, group: Group) -> str:
    region = group.region
    where = "".join(
        f'<li id="region{k}" data-row="{k}"><button type="button" class="choose c{k % COLORS}" '
        f'data-r="{k}" data-to="picture" aria-label="show region {k} in the picture">{k}</button> '
        f"{report.regions[k].phase} of {path(place(report.regions[k].module))}</li>"
        for k in group.members
    )
    return (
        f'<article><h3>{escape(region.name)}</h3><ul class="where">{where}</ul>'
        f"<details><summary>region and kernel ({region.target})</summary>"
        '<div class="sides matched"><div><h4>region</h4>'
        f"<pre>{region_lines(region.text)}</pre></div>"
        f"<div><h4>kernel</h4><pre>{kernel_lines(region.source, region.text)}</pre></div></div>"
        "</details></article>"
    )


# ---- graphs


def _graphs(report: Report) -> str:
    if not report.graphs:
        return "<p>No graph was compiled.</p>"
    parts = []
    first = 0  # regions are numbered through all graphs, in the order in which they were fused
    for k, graph in enumerate(report.graphs):
        parts.append(_graph(k, graph, first))
        first += sum(isinstance(decision, Fused) for decision in graph.decisions)
    return "\n".join(parts)


def _graph(k: int, graph: Passed, first: int) -> str:
    fused = [decision for decision in graph.decisions if isinstance(decision, Fused)]
    stay = {line.name for line in graph.after}  # views that are looked at outside too
    inside = {
        name: first + index
        for index, decision in enumerate(fused)
        for name in decision.nodes
        if name not in stay
    }
    calls = {decision.call: first + index for index, decision in enumerate(fused)}
    names = {first + index: short(decision.name) for index, decision in enumerate(fused)}
    sides = (
        _Side("before", graph.before, inside, {}),
        _Side("after", graph.after, calls, names),
    )
    key = "".join(f"<li>{_chosen(number, name)}</li>" for number, name in names.items())
    pictures = "".join(
        _picture(f"{k}-{side.name}", f"graph {k}, {graph.phase}, {side.name}", side)
        for side in sides
    )
    texts = "".join(
        f'<div><h4>{side.name}</h4><pre data-key="{k}-{side.name}">{_lines(side)}</pre></div>'
        for side in sides
    )
    return (
        f"<h3>graph {k}: {graph.phase}, {len(graph.before)} nodes, {len(graph.after)} after</h3>"
        f'<details class="graph"{" open" if k == 0 else ""}><summary>before and after</summary>'
        f'<ul class="key">{key}</ul><div class="sides">{pictures}</div>'
        f'<h4>as text</h4><div class="sides">{texts}</div></details>'
    )


class _Side(NamedTuple):
    """A graph before or after. regions: of nodes by name, which region they are of. names: of the
    regions that are one node here.
    """

    name: str
    lines: Sequence[Line]
    regions: Mapping[str, int]
    names: Mapping[int, str]


def _picture(key: str, label: str, side: _Side) -> str:
    """A picture with what moves it, and lines that say what is pointed at and what is chosen."""
    buttons = "".join(
        f'<button type="button" data-do="{does}" aria-label="{name}: {label}" title="{name}">{sign}'
        "</button>"
        for does, name, sign in (
            ("in", "zoom in", "+"),
            ("out", "zoom out", "&minus;"),
            ("fit", "show all", "fit"),
        )
    )
    return (
        f'<figure class="picture" data-key="{key}" data-label="{label}">'
        f'<figcaption><span>{side.name}</span><span class="tools">{buttons}</span></figcaption>'
        f"{picture(side.lines, side.regions, side.names)}"
        '<p class="told" role="status"></p><p class="chosen" role="status"></p></figure>'
    )


def _lines(side: _Side) -> str:
    return "\n".join(_line(line, side.regions.get(line.name)) for line in side.lines)


def _line(line: Line, region: int | None) -> str:
    """A line of a graph; one of a region is marked with its number."""
    text = escape(line.text)
    if line.place:
        text += f'<span class="place">  # {escape(line.place)}</span>'
    if region is None:
        return f'<span class="l">{text}</span>'
    color = region % COLORS
    return (
        f'<span class="l fused c{color}"><a href="#region{region}" data-r="{region}">{region}</a> '
        f"{text}</span>"
    )
