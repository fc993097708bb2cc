"""A graph as a picture, in SVG: boxes in layers (layout.py), curves between them, the regions in
their colors.

    <g class="n c1" data-i="12" data-r="7">     node 12 of the listing, of region 7, in color 1
    <path data-e="3 12">                        what it reads

report.js makes it move, and has the text of node 12 from line 12 of the listing beside it.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

import torch

from normpass.backend.explain.layout import layout, ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from normpass.backend.explain.layout import Edge, Layout, Point
    from normpass.backend.explain.listing import Line

# Regions next to each other differ in color; report.css has as many.
COLORS = 6
LETTER = 6.7  # the width of one
LINE = 14
LONGEST = 24


class Box(NamedTuple):
    """What stands in a box: a name, and below it what is known of it."""

    title: str
    note: str
    is_region: bool = False

    @property
    def size(self) -> tuple[float, float]:
        letters = max(len(self.title), len(self.note))
        height = 10 + LINE * (2 if self.note else 1) + (12 if self.is_region else 0)
        return max(40.0, letters * LETTER + 18 + 16 * self.is_region), height


def picture(lines: Sequence[Line], regions: Mapping[str, int], names: Mapping[int, str]) -> str:
    """The picture of a listing.

    regions: of nodes by name, which region they are of. names: of the regions that are one node
    here.
    """
    place = {line.name: k for k, line in enumerate(lines)}
    whole = {name: f"{k} {names[k]}" for name, k in regions.items() if k in names}
    boxes = [_box(line, whole.get(line.name)) for line in lines]
    edges, below = _edges(lines, place)
    found = layout([box.size for box in boxes], edges + below)
    returned = {name for line in lines if line.kind == "output" for name in line.reads}
    drawn = set(edges)
    nodes = []
    for k, line in enumerate(lines):
        is_marked = line.name in returned and (k, len(lines) - 1) not in drawn
        nodes.append(_node(k, line, boxes[k], found.centres[k], regions, marked=is_marked))
    curves = [
        f'<path data-e="{a} {b}" d="{_curve(path)}"/>'
        for (a, b), path in zip(edges, found.paths, strict=False)
    ]
    return (
        f'<svg viewBox="{_frame(found)}" data-size="{found.width:.0f} {found.height:.0f}">'
        f'<g class="view"><g class="edges">{"".join(curves)}</g>\n'
        + "\n".join(nodes)
        + "</g></svg>"
    )


def _frame(found: Layout) -> str:
    margin = 12
    return f"{-margin} {-margin} {found.width + 2 * margin:.0f} {found.height + 2 * margin:.0f}"


def _edges(lines: Sequence[Line], place: Mapping[str, int]) -> tuple[list[Edge], list[Edge]]:
    """What reads what; and what else there is to keep the output below everything. Of what is
    returned, only what stands lowest is joined to the output: the rest gets a mark, where curves
    would go past everything else.
    """
    last = len(lines) - 1
    inside = [
        (place[name], k)
        for k, line in enumerate(lines)
        if line.kind != "output"
        for name in line.reads
    ]
    rank = ranks(len(lines), inside)
    lowest = [node for node in range(last) if rank[node] == max(rank)]
    returned = {place[name] for line in lines if line.kind == "output" for name in line.reads}
    ends = [(node, last) for node in lowest if node in returned]
    return inside + ends, [] if ends else [(node, last) for node in lowest[:1]]


def _box(line: Line, region: str | None) -> Box:
    if region is not None:
        results = line.type.count("[")
        of = "result" if results == 1 else "results"
        return Box(region, f"{len(line.reads)} inputs, {results} {of}", is_region=True)
    title = {"placeholder": line.name, "output": "output"}.get(line.kind, _operator(line))
    several = f"{line.type.count('[')} results" if line.type.startswith("(") else line.type
    return Box(_short(title), _short(several))


def _operator(line: Line) -> str:
    """What a node calls, without the overload where it is PyTorch's own."""
    name = line.op.partition(".")[0]
    known = any(hasattr(space, name) for space in (torch.ops.aten, torch.ops.prims) if name)
    return name if known else line.op or line.name


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _node(
    k: int,
    line: Line,
    box: Box,
    centre: Point,
    regions: Mapping[str, int],
    *,
    marked: bool,
) -> str:
    (x, y), (width, height) = centre, box.size
    region = regions.get(line.name)
    kinds = ["n", *(["in"] if line.kind == "placeholder" else [])]
    kinds += ["whole"] if box.is_region else []
    data = f'data-i="{k}"'
    if region is not None:
        kinds.append(f"c{region % COLORS}")
        data += f' data-r="{region}"'
    lines = [f'<text y="{4 if not box.note else -3}">{escape(box.title)}</text>']
    if box.note:
        lines.append(f'<text class="t" y="11">{escape(box.note)}</text>')
    if marked:
        lines.append(f'<circle cy="{height / 2:.0f}" r="3.5"/>')
    corner = height / 2 if line.kind == "placeholder" else 4
    return (
        f'<g class="{" ".join(kinds)}" {data} transform="translate({x:.0f} {y:.0f})">'
        f'<rect x="{-width / 2:.0f}" y="{-height / 2:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" rx="{corner:.0f}"/>{"".join(lines)}</g>'
    )


def _curve(path: Sequence[Point]) -> str:
    """A curve that leaves and enters every layer downwards; one straight line where it can be."""
    (x, y), *rest = ((round(x), round(y)) for x, y in path)
    drawn, straight, is_smooth = f"M{x} {y}", 0, False
    for to_x, to_y in rest:
        if to_x == x:
            straight += to_y - y
            is_smooth = False
        else:
            drawn += f"v{straight}" if straight else ""
            straight, half, way = 0, (to_y - y) // 2, to_x - x
            # The first control point is a mirror image of the last one, where there is one.
            start = "s" if is_smooth else f"c0 {half} "
            drawn += f"{start}{way} {half} {way} {to_y - y}"
            is_smooth = True
        x, y = to_x, to_y
    return drawn + (f"v{straight}" if straight else "")
