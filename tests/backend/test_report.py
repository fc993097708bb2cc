"""The report of `normpass.explain`: its fields, as a table, as a page."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import normpass
from normpass.backend.explain.report import place
from normpass.passes.pipeline import Fused
from normpass.passes.region_text import parse
from normpass.passes.sizes import human

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def fused() -> normpass.Report:
    return normpass.explain(
        nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)),
        torch.randn(32, 64),
        options={"inner": "eager", "least_bytes": 0},
    )


def test_the_fields_of_what_is_fused(fused: normpass.Report) -> None:
    assert [(r.name, r.module, r.phase) for r in fused.regions] == [
        ("layer_norm", "1", "forward"),
        ("layer_norm_backward", "1", "backward"),
    ]
    assert not fused.refused
    for region in fused.regions:
        read = parse(region.text)
        sizes = {axis.name: axis.extent or 0 for axis in read.axes}
        buffers = [*read.inputs, *(output.buffer for output in read.outputs)]
        least = 0
        for buffer in buffers:
            count = buffer.dtype.itemsize
            for axis in buffer.axes:
                count *= sizes[axis]
            least += count
        assert region.bytes_least == region.bytes_moved == least
        assert region.passes == 1
        assert region.target == "cpp"
        assert "kernel" in region.source


def test_the_printed_table(fused: normpass.Report) -> None:
    text = str(fused)
    assert text.isascii()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 160
    rows = [line for line in text.splitlines() if "layer_norm" in line]
    assert [("forward" in row, "backward" in row) for row in rows] == [(True, False), (False, True)]
    total = next(line for line in text.splitlines() if "total" in line)
    assert human(sum(region.bytes_moved for region in fused.regions)) in total
    assert text.splitlines()[-1].startswith("Sequential: 2 fused, 0 not.")


class Page(HTMLParser):
    """Reads a page: its text, what it links to, and that what opens is closed."""

    EMPTY = frozenset({"meta", "wbr", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.tags: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "srcset", "data", "action"):
                self.links.append(value or "")
            if name == "id":
                self.names.add(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_complete_and_stands_alone(fused: normpass.Report, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    fused.save(file)
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert all(link.startswith("#") and link[1:] in page.names for link in page.links)
    assert "prefers-color-scheme: dark" in text
    for region in fused.regions:
        assert region.text in page.text
        assert region.source in page.text
    for graph in fused.graphs:
        assert all(line.text in page.text for line in (*graph.before, *graph.after))
    assert page.tags.count("details") == len(fused.regions) + len(fused.graphs)


def test_graphs_before_and_after(fused: normpass.Report) -> None:
    assert [graph.phase for graph in fused.graphs] == ["forward", "backward"]
    for graph in fused.graphs:
        (decision,) = graph.decisions
        before = {line.name: line for line in graph.before}
        assert isinstance(decision, Fused)
        assert set(decision.nodes) <= before.keys()
        assert any(line.inner and line.place == "1" for line in graph.before)
        calls = [line for line in graph.after if line.op == "normpass.region"]
        assert [line.name for line in calls] == [decision.call]
        assert not any(line.op == "normpass.region" for line in graph.before)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (17152, "17.2 kB"), (999_600, "1 MB")],
)
def test_bytes_are_readable(count: int, text: str) -> None:
    assert human(count) == text


def test_files_are_named_from_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert place(f"{tmp_path}/models/net.py:3") == "models/net.py:3"
    assert place("/somewhere/else/far/net.py:3") == ".../far/net.py:3"
    assert place("layers.0.norm") == "layers.0.norm"
