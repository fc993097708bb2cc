"""A region's domain as a picture: what is read, what is added up along it, what is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normpass.passes.region import Region

# Pixels: of a tensor's longer and shorter side, and of the space that one takes with its name.
LONG, SHORT, STEP = 72, 12, 88
MARGIN, HEAD = 20, 44
STYLE = """
.tensor { stroke-width: 1.5; } .read { fill: #4f8fd033; stroke: #4f8fd0; }
.sum { fill: #d08a2e33; stroke: #d08a2e; } .written { fill: #4ea36433; stroke: #4ea364; }
text { font: 13px system-ui, sans-serif; fill: #7a828c; }
.name { font: 600 13px ui-monospace, Menlo, Consolas, monospace; fill: currentColor; }
.head { font-weight: 600; }
"""


def domain_picture(region: Region) -> str:
    """An SVG. A tensor that varies over both axes is a square, one of rows alone a column, one of
    columns alone a row; the axes are the region's first and last.
    """
    rows, columns = region.axes[0], region.axes[-1]
    written = {output.value for output in region.outputs}
    panels = {
        "read": ("read", [buffer.name for buffer in region.inputs]),
        "added up, and met again": (
            "sum",
            [op.name for op in region.ops if op.is_reduction and op.name not in written],
        ),
        "written": ("written", [output.value for output in region.outputs]),
    }
    parts, left = [], MARGIN
    for title, (kind, names) in panels.items():
        parts.append(f'<text class="head" x="{left}" y="{MARGIN}">{title}</text>')
        for name in names:
            axes = region.varies[name]
            parts.append(tensor(name, kind, left, rows.name in axes, columns.name in axes))
            left += STEP
        left += MARGIN
    axes_text = f"{rows} is the number of rows, {columns} what each row has; sums run along a row"
    parts.append(f'<text x="{MARGIN}" y="{HEAD + LONG + 48}">{axes_text}</text>')
    size = f'viewBox="0 0 {left} {HEAD + LONG + 64}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" color="#5d6670">'
        f"<title>the domain of {region.name}</title><style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def tensor(name: str, kind: str, left: int, has_rows: bool, has_columns: bool) -> str:
    width, height = LONG if has_columns else SHORT, LONG if has_rows else SHORT
    box = f'x="{left}" y="{HEAD}" width="{width}" height="{height}" rx="3"'
    return (
        f'<rect class="tensor {kind}" {box}/>'
        f'<text class="name" x="{left}" y="{HEAD + LONG + 20}">{name}</text>'
    )
