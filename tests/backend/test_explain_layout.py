"""The layout of a graph's picture: layers below each other, and nothing over anything else."""

from __future__ import annotations

import re
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normpass.backend.explain.layout import GAP, LAYERS_APART, layout, ranks
from normpass.backend.explain.listing import Line
from normpass.backend.explain.picture import picture

Sizes = list[tuple[float, float]]
Edges = list[tuple[int, int]]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Sizes, Edges]:
    count = draw(st.integers(1, 24))
    number = st.floats(10, 200, allow_nan=False)
    sizes = draw(st.lists(st.tuples(number, number), min_size=count, max_size=count))
    places = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    pairs = draw(st.lists(places, max_size=3 * count, unique=True))
    return sizes, sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})


@settings(deadline=None, max_examples=150)
@given(graphs())
def test_boxes_lie_apart_and_edges_go_down(graph: tuple[Sizes, Edges]) -> None:
    sizes, edges = graph
    found = layout(sizes, edges)
    assert len(found.centres) == len(sizes)
    assert len(found.paths) == len(edges)
    boxes = [
        (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
        for (x, y), (w, h) in zip(found.centres, sizes, strict=True)
    ]
    for left, top, right, bottom in boxes:
        assert -1e-6 <= left <= right <= found.width + 1e-6
        assert -1e-6 <= top <= bottom <= found.height + 1e-6
    for k, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[:k]:
            beside = max(left - other[2], other[0] - right)
            below = max(top - other[3], other[1] - bottom)
            assert beside >= GAP - 1e-6 or below >= LAYERS_APART - 1e-6
    for (start, end), path in zip(edges, found.paths, strict=True):
        assert path[0] == (found.centres[start][0], pytest.approx(boxes[start][3]))
        assert path[-1] == (found.centres[end][0], pytest.approx(boxes[end][1]))
        assert all(one[1] < other[1] for one, other in pairwise(path))


@settings(deadline=None, max_examples=100)
@given(graphs())
def test_curves_pass_between_boxes(graph: tuple[Sizes, Edges]) -> None:
    """Where an edge passes a layer, it passes no box of it."""
    sizes, edges = graph
    found = layout(sizes, edges)
    for path in found.paths:
        for x, y in path[1:-1]:
            for (centre, middle), (width, height) in zip(found.centres, sizes, strict=True):
                if abs(y - middle) < height / 2:
                    assert abs(x - centre) >= width / 2 + GAP


def test_what_is_used_once_stands_near_its_use() -> None:
    # 0 -> 2 -> 3 -> 4; a parameter 1, through a view 5 of it, is used by 6 alone.
    edges = [(0, 2), (2, 3), (3, 4), (1, 5), (4, 6), (5, 6)]
    assert ranks(7, edges) == [0, 2, 1, 2, 3, 3, 4]


def test_a_chain_is_straight() -> None:
    found = layout([(50, 20)] * 5, [(k, k + 1) for k in range(4)])
    assert len({round(x, 6) for x, _ in found.centres}) == 1


@pytest.mark.parametrize("edge", [(1, 0), (0, 0), (0, 2)])
def test_an_edge_that_goes_back_is_refused(edge: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"expected edges to later nodes, of 2, found one from"):
        layout([(1, 1)] * 2, [edge])


def large(count: int) -> tuple[Line, ...]:
    """The listing of something like a model: two neighbours are read, and a residual."""
    lines = [Line("x0", "input   x0: f32[8 8]", "", kind="placeholder", type="f32[8 8]")]
    for k in range(1, count - 1):
        reads = dict.fromkeys((f"x{k - 1}", f"x{max(0, k - 2)}", f"x{k // 10 * 10 - 10}"))
        known = tuple(name for name in reads if int(name[1:]) >= 0)
        text = f"x{k}: f32[8 8] = add({', '.join(known)})"
        lines.append(Line(f"x{k}", text, f"layers.{k // 10}", "add", type="f32[8 8]", reads=known))
    last = f"x{count - 2}"
    lines.append(Line("output", f"output  ({last},)", "", kind="output", reads=(last,)))
    return tuple(lines)


def test_two_thousand_nodes_are_drawn_in_time() -> None:
    lines = large(2000)
    start = time.process_time()
    text = picture(lines, {"x5": 0, "x6": 0}, {})
    # 0.8 s on one core of Zen 4.
    assert time.process_time() - start < 6
    assert len(text) < 1.2e6
    assert len(re.findall(r'<g class="n[ "]', text)) == 2000
    reads = {(name, line.name) for line in lines for name in line.reads}
    assert text.count("<path ") == len(reads)


def test_every_node_is_there_once_and_regions_have_their_colors() -> None:
    lines = large(40)
    text = picture(lines, {"x5": 7, "x6": 7, "x9": 8}, {8: "layer_norm"})
    assert [int(k) for k in re.findall(r'data-i="(\d+)"', text)] == list(range(40))
    assert re.findall(r'class="n ([\w ]+)" data-i="(\d+)" data-r="(\d)"', text) == [
        ("c1", "5", "7"),
        ("c1", "6", "7"),
        ("whole c2", "9", "8"),
    ]
    assert ">8 layer_norm</text>" in text
