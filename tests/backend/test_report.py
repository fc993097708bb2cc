"""The report of `normpass.explain`: its fields, as a table, as a page."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import normpass
from normpass.backend.explain.bars import columns_of
from normpass.backend.explain.memory import Memory, Saved, Side, Timeline
from normpass.backend.explain.page import page
from normpass.backend.explain.side_by_side import without_region
from normpass.backend.explain.timing import Times
from normpass.backend.explain.words import place
from normpass.passes import faults
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


class Parsed(HTMLParser):
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
    page = Parsed(text)
    assert page.open == []
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert page.tags.count("style") == page.tags.count("script") == 1
    assert not re.search(r"\b(url|import|fetch|eval)\(|@import|https?:", text)
    assert all(link.startswith("#") and link[1:] in page.names for link in page.links)
    assert "prefers-color-scheme: dark" in text
    for region in fused.regions:
        assert region.text in page.text
        assert without_region(region.source).strip() in page.text
    for graph in fused.graphs:
        assert all(line.text in page.text for line in (*graph.before, *graph.after))
    assert page.tags.count("details") == len(fused.regions) + len(fused.graphs)
    drawn = [len(graph.before) + len(graph.after) for graph in fused.graphs]
    assert page.tags.count("rect") == sum(drawn)
    assert page.tags.count("svg") == 2 * len(fused.graphs)


def widths(page: str, section: str) -> list[float]:
    """The widths of the bars below a heading, in percent."""
    part = page.split(f"<h3>{section}</h3>")[1].split("<h", 1)[0]
    return [float(width) for width in re.findall(r"width:([\d.]+)%", part)]


def test_bars_are_as_long_as_the_numbers_say(fused: normpass.Report) -> None:
    numbers = [
        count
        for region in fused.regions
        for count in (region.bytes_least, region.bytes_moved, region.bytes_stock)
    ]
    assert all(count is not None for count in numbers)
    shown = widths(page(fused), "Bytes")
    assert shown == pytest.approx([100 * n / max(numbers) for n in numbers], abs=0.01)  # type: ignore[type-var,operator]


def test_times_and_why_there_are_none(fused: normpass.Report) -> None:
    one, other = (replace(region) for region in fused.regions)
    one.times, other.times = Times(2e-4, 5e-4), "its kernel could not be built"
    report = replace(fused, regions=[one, other])
    assert widths(page(report), "Times") == [40, 100, 0]
    assert "not timed: its kernel could not be built" in page(report)
    text = str(report)
    row = next(line for line in text.splitlines() if "layer_norm | forward" in line)
    assert [cell.strip() for cell in row.split("|")[-4:-1]] == ["200 us", "500 us", "2.50x"]
    assert "not timed: layer_norm backward of 1: its kernel could not be built" in text
    assert max(map(len, text.splitlines())) <= 160
    assert "Inductor" not in str(fused)


def test_the_memory_of_a_step_is_drawn_as_it_was(fused: normpass.Report) -> None:
    line = Timeline(((0.25, 1000), (0.5, 400)), ((0.5, 2000), (0.75, 0)))
    other = Timeline(((0.5, 4000),), ((1.0, 0),))
    kept = Saved("mul", "f32[100]", "0.norm", 400, is_input=False)
    there = Saved("primals_1", "f32[9]", "", 36, is_input=True)
    memory = Memory(Side(line, (kept, there)), Side(other, ()))
    assert memory.ours.saved_bytes == 400
    assert (line.peak, line.after_forward) == (2000, 400)
    text = page(replace(fused, memory=memory))
    ours = re.search(r'<path class="ours" data-peak="2000" d="([^"]+)"', text)
    assert ours
    # A half of the highest is a half of the height; the backward begins in the middle.
    assert ours[1] == "M0 240H125.0V180.0H254.2V216.0H750.0V120.0H879.2V240.0H1000"
    assert "normpass 2 kB at most" in text
    assert columns_of(other, has_backward=True)[-2:] == [4000, 4000]
    assert "400 B saved for the backward" in str(replace(fused, memory=memory))
    assert "Not measured: too old" in page(replace(fused, memory="too old"))
    assert "Memory of a step" not in page(fused)


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


# ---- what reasons mean


def test_reasons_lead_to_what_they_mean() -> None:
    """In the table by a command, on the page folded up below them; `why` for programs."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    report = normpass.explain(model, torch.randn(4, 8), options={"inner": "eager"})
    assert {norm.why for norm in report.refused} == {"too-small"}
    assert "\nWhat the reasons mean: normpass why too-small\n" in str(report)
    shown = page(report)
    assert '<details class="why"><summary>too small: it moves ' in shown
    assert "<code>normpass bench --calibrate</code>" in shown


def test_a_report_is_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    report = normpass.explain(model, torch.randn(4, 8), options={"inner": "eager"})
    expected = str(report)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(report) == expected
    assert "too small" in expected


def test_a_region_that_cannot_be_taken_out_is_reported_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever goes wrong there: the region is in the table, and says why it has no time."""

    def failing(*_: object) -> None:
        raise KeyError("a node")

    monkeypatch.setattr("normpass.backend.explain.record.cut_out", failing)
    options = {"inner": "eager", "least_bytes": 0}
    report = normpass.explain(nn.LayerNorm(8), torch.randn(4, 8), options=options, measure="time")
    (region,) = (each for each in report.regions if each.phase == "forward")
    assert (
        region.times
        == "a fault of normpass in taking a region out of its graph: KeyError: 'a node'"
    )
    assert region.bytes_stock is None
    assert "not timed: layer_norm forward" in str(report)
    assert [kind[:2] for kind in faults.reported()] == [
        ("taking a region out of its graph", "KeyError")
    ]
    faults.forget()
