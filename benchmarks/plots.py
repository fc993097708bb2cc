"""Bars of time, for every benchmark that compares variants."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# A label, and the length of each variant's bar.
Row = tuple[str, "Sequence[float]"]


def bars(panels: Mapping[str, Sequence[Row]], variants: Sequence[str], path: Path) -> bool:
    """A panel of horizontal bars per title, a line where 1 is; False without matplotlib, and where
    there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not panels:
        return False
    longest = max(map(len, panels.values()))
    figure = Figure(figsize=(9, len(panels) * (0.6 + 0.34 * longest)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    height = 0.8 / len(variants)
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        for i, variant in enumerate(variants):
            places = [row + i * height for row in range(len(rows))]
            axis.barh(places, [lengths[i] for _, lengths in rows], height, label=variant)
        middles = [row + 0.4 - height / 2 for row in range(len(rows))]
        axis.set_yticks(middles, [label for label, _ in rows])
        axis.invert_yaxis()
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(title, fontsize=10)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    return True
