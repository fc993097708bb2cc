"""The report as a page of its own: no scripts, no fonts, nothing from elsewhere."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from normpass.backend.explain.words import place, refusals, short, times
from normpass.passes.pipeline import Fused
from normpass.passes.sizes import human

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from normpass.backend.explain.listing import Line
    from normpass.backend.explain.record import Passed
    from normpass.backend.explain.report import Report

# Regions next to each other differ in color; report.html has as many.
COLORS = 4


def page(report: Report) -> str:
    """The page's text. backend/explain/report.html is its frame."""
    template = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(report.title),
        summary=escape(report.summary()),
        fused=_fused(report),
        refused=_refused(report),
        regions=_regions(report),
        graphs=_graphs(report),
    )


def _row(cells: Sequence[str], numbers: Sequence[str] = (), tag: str = "td") -> str:
    left = "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)
    right = "".join(f'<{tag} class="number">{cell}</{tag}>' for cell in numbers)
    return f"<tr>{left}{right}</tr>"


def _path(module: str) -> str:
    """Paths may be broken after a dot or a comma, so that narrow windows can hold them."""
    text = escape(module)
    for mark in (".", "/", ","):
        text = text.replace(mark, f"{mark}<wbr>")
    return f"<code>{text}</code>"


def _fused(report: Report) -> str:
    if not report.regions:
        return "<p>Nothing was fused.</p>"
    head = _row(("norm", "phase", "module", "target"), ("moved", "least", "ratio", "passes"), "th")
    rows = [
        _row(
            (
                f'<a href="#region{k}">{k} {escape(short(region.name))}</a>',
                region.phase,
                _path(place(region.module)),
                region.target,
            ),
            (
                human(region.bytes_moved),
                human(region.bytes_least),
                times(region.bytes_moved, region.bytes_least),
                str(region.passes),
            ),
        )
        for k, region in enumerate(report.regions)
    ]
    moved = sum(region.bytes_moved for region in report.regions)
    least = sum(region.bytes_least for region in report.regions)
    total = _row(("total", "", "", ""), (human(moved), human(least), times(moved, least), ""))
    return _table(head, rows, total)


def _refused(report: Report) -> str:
    if not report.refused:
        return "<p>None.</p>"
    rows = [
        _row((escape(name), phases, _path(module), escape(reason)))
        for name, phases, module, reason in refusals(report.refused)
    ]
    return _table(_row(("norm", "phase", "module", "reason"), tag="th"), rows)


def _table(head: str, rows: Sequence[str], foot: str = "") -> str:
    body = "\n".join(rows)
    foot = f"<tfoot>{foot}</tfoot>" if foot else ""
    return (
        f'<div class="wide"><table><thead>{head}</thead>\n<tbody>{body}</tbody>{foot}</table></div>'
    )


def _regions(report: Report) -> str:
    """Every region with its kernel; equal ones once."""
    equal: dict[tuple[str, str], list[int]] = {}
    for k, region in enumerate(report.regions):
        equal.setdefault((region.text, region.target), []).append(k)
    return "\n".join(_region(report, members) for members in equal.values())


def _region(report: Report, members: Sequence[int]) -> str:
    region = report.regions[members[0]]
    where = "".join(
        f'<li id="region{k}">{k}: {report.regions[k].phase} of '
        f"{_path(place(report.regions[k].module))}</li>"
        for k in members
    )
    return (
        f"<article><h3>{escape(region.name)}</h3><ul>{where}</ul>"
        f"<pre>{escape(region.text)}</pre>"
        f"<details><summary>kernel ({region.target})</summary>"
        f"<pre>{escape(region.source)}</pre></details></article>"
    )


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
    return (
        f"<h3>graph {k}: {graph.phase}, {len(graph.before)} nodes, {len(graph.after)} after</h3>"
        f"<details{' open' if k == 0 else ''}><summary>before and after</summary>"
        '<div class="sides">'
        f"<div><h4>before</h4><pre>{_lines(graph.before, inside)}</pre></div>"
        f"<div><h4>after</h4><pre>{_lines(graph.after, calls)}</pre></div>"
        "</div></details>"
    )


def _lines(lines: Sequence[Line], regions: Mapping[str, int]) -> str:
    return "\n".join(_line(line, regions.get(line.name)) for line in lines)


def _line(line: Line, region: int | None) -> str:
    """A line of a graph; one of a region is marked with its number."""
    text = escape(line.text)
    if line.place:
        text += f'<span class="place">  # {escape(line.place)}</span>'
    if region is None:
        return text
    color = region % COLORS
    return f'<span class="fused c{color}"><a href="#region{region}">{region}</a> {text}</span>'
