"""Pieces of the page that several of its sections have: tables, paths, and a step's memory."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from normpass.backend.explain import bars
from normpass.backend.explain.messages import message_of
from normpass.backend.explain.words import place
from normpass.passes.sizes import human

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.backend.explain.memory import Memory, Saved


CODE = re.compile(r"`([^`]+)`")


def row(cells: Sequence[str], numbers: Sequence[str] = (), tag: str = "td", marks: str = "") -> str:
    """A row of a table. marks: attributes of it."""
    left = "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)
    right = "".join(f'<{tag} class="number">{cell}</{tag}>' for cell in numbers)
    return f"<tr{marks}>{left}{right}</tr>"


def table(head: str, rows: Sequence[str], foot: str = "") -> str:
    body = "\n".join(rows)
    foot = f"<tfoot>{foot}</tfoot>" if foot else ""
    return (
        '<div class="wide" role="region" aria-label="table" tabindex="0"><table>'
        f"<thead>{head}</thead>\n<tbody>{body}</tbody>{foot}</table></div>"
    )


def path(module: str) -> str:
    """Paths may be broken after a dot or a comma, so that narrow windows can hold them."""
    text = escape(module)
    for mark in (".", "/", ","):
        text = text.replace(mark, f"{mark}<wbr>")
    return f"<code>{text}</code>"


def reason(text: str) -> str:
    """Why a norm was not fused, and folded up below it what that means and what to do."""
    message = message_of(text)
    if message is None:
        return escape(text)
    paragraphs = CODE.sub(r"<code>\1</code>", escape(message.meaning)).split("\n\n")
    meaning = "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
    return f'<details class="why"><summary>{escape(text)}</summary>{meaning}</details>'


def memory(found: Memory | str | None) -> str:
    """A step's memory: what is alive, and what is saved."""
    if found is None:
        return ""
    if isinstance(found, str):
        return f"<h2>Memory of a step</h2><p>Not measured: {escape(found)}</p>"
    sides = (("ours", "normpass", found.ours), ("stock", "Inductor", found.stock))
    key = "".join(
        f'<li><span class="swatch {kind}"></span>{name}: {human(side.timeline.peak)} at most, '
        f"{human(side.timeline.after_forward)} after the forward</li>"
        for kind, name, side in sides
    )
    return (
        '<h2>Memory of a step</h2><p class="lead">Bytes alive, as measured, above what was there '
        "before: over the forward and the backward, each stretched to half of the width.</p>"
        f'<ul class="key">{key}</ul>{bars.timeline(found)}'
        '<h3>Saved for the backward</h3><p class="lead">What the forward keeps. Arguments and '
        "parameters are there anyway.</p>"
        f"{_saved(found)}"
    )


def _saved(found: Memory) -> str:
    sides = [_by_tensor(side.saved) for side in (found.ours, found.stock)]
    every = {key: tensor for side in reversed(sides) for key, tensor in side.items()}
    rows = [
        row(
            (
                f"<code>{escape(tensor.name)}</code>",
                f"<code>{escape(tensor.type)}</code>",
                path(place(tensor.module)),
            ),
            [human(side[key].nbytes) if key in side else "-" for side in sides],
        )
        for key, tensor in sorted(every.items(), key=lambda item: -item[1].nbytes)
    ]
    saved = [human(side.saved_bytes) for side in (found.ours, found.stock)]
    there = [
        human(sum(tensor.nbytes for tensor in side.saved if tensor.is_input))
        for side in (found.ours, found.stock)
    ]
    foot = row(("saved", "", ""), saved) + row(("there anyway", "", ""), there)
    return table(row(("name", "tensor", "module"), ("normpass", "Inductor"), "th"), rows, foot)


def _by_tensor(saved: Sequence[Saved]) -> dict[tuple[Saved, int], Saved]:
    """What is not there anyway. Of several graphs, tensors may look the same: those are counted."""
    found: dict[tuple[Saved, int], Saved] = {}
    for tensor in saved:
        if not tensor.is_input:
            count = sum(same == tensor for same, _ in found)
            found[tensor, count] = tensor
    return found
