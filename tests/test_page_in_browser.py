"""The page of `normpass.explain` in a real browser, without a network: what is drawn, what moves,
what can be pressed, and how it looks in light, dark and narrow windows.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import normpass
from normpass.backend.explain.bars import HEIGHT
from normpass.backend.explain.memory import Memory, Saved, Side, Timeline
from normpass.backend.explain.timing import Times

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"needs a browser, one of {', '.join(BROWSERS)}, and there is none"
)

MB = 1_000_000


@pytest.fixture(scope="module")
def report() -> normpass.Report:
    """Two regions of one graph and two of another, with times and a memory that are made up."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)
    )
    options = {"inner": "eager", "least_bytes": 0}
    found = normpass.explain(net, torch.randn(32, 64), options=options)
    assert [graph.phase for graph in found.graphs] == ["forward", "backward"]
    assert len(found.regions) == 4
    for region in found.regions:
        region.times = Times(1e-4, 4e-4)
    ours = Timeline(((0.1, 2 * MB), (0.9, MB)), ((0.2, 3 * MB), (0.9, 0)))
    stock = Timeline(((0.1, 2 * MB), (0.9, 2 * MB)), ((0.2, 4 * MB), (0.9, 0)))
    saved = (Saved("mul", "f32[32 64]", "1", 8192, is_input=False),)
    return replace(found, memory=Memory(Side(ours, saved), Side(stock, saved)))


@pytest.fixture(scope="module")
def file(report: normpass.Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    report.save(file)
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # Without a sandbox, which root may not have: it opens nothing but the page.
        launched = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Callable[..., Any]]:
    """Opens the page; afterwards nothing may have been complained of, or asked for elsewhere."""
    complaints: list[str] = []
    requests: list[str] = []
    contexts = []

    def open_page(width: int = 1400, scheme: str = "light") -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 1000}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert set(requests) <= {file.as_uri()}


def picture(page: Any, key: str) -> Any:
    return page.locator(f'.picture[data-key="{key}"]')


def moved(figure: Any) -> tuple[float, float, float]:
    """Where a picture's contents stand, and their scale."""
    text = figure.locator(".view").get_attribute("transform")
    x, y, scale = map(float, re.findall(r"-?[\d.]+(?:e-?\d+)?", text))
    return x, y, scale


# ---- what is drawn


def test_every_node_is_drawn(opened: Callable[..., Any], report: normpass.Report) -> None:
    page = opened()
    for k, graph in enumerate(report.graphs):
        for side, lines in (("before", graph.before), ("after", graph.after)):
            nodes = picture(page, f"{k}-{side}").locator(".n")
            assert nodes.count() == len(lines)
            labels = nodes.evaluate_all("nodes => nodes.map(n => n.getAttribute('aria-label'))")
            assert all(line.text in label for line, label in zip(lines, labels, strict=True))


def test_regions_have_their_colors(opened: Callable[..., Any], report: normpass.Report) -> None:
    page = opened()
    fill = "nodes => nodes.map(n => getComputedStyle(n.querySelector('rect')).fill)"
    colors = []
    for k in (0, 1):
        before = picture(page, "0-before").locator(f'.n[data-r="{k}"]')
        after = picture(page, "0-after").locator(f'.n[data-r="{k}"]')
        assert before.count() > 5
        assert after.count() == 1
        (color,) = set(before.evaluate_all(fill))
        assert after.evaluate_all(fill) == [color]
        colors.append(color)
    (plain,) = set(
        picture(page, "0-before").locator(".n:not([data-r]):not(.in)").evaluate_all(fill)
    )
    assert len({*colors, plain}) == 3


def test_nothing_is_drawn_over_anything(opened: Callable[..., Any]) -> None:
    page = opened()
    boxes = (
        picture(page, "0-before")
        .locator(".n rect")
        .evaluate_all(
            "rects => rects.map(r => { const b = r.getBoundingClientRect();"
            " return [b.left, b.top, b.right, b.bottom]; })"
        )
    )
    for k, one in enumerate(boxes):
        for other in boxes[:k]:
            apart = one[0] >= other[2] or other[0] >= one[2]
            assert apart or one[1] >= other[3] or other[1] >= one[3]
    texts = (
        picture(page, "0-before")
        .locator(".n")
        .evaluate_all(
            "nodes => nodes.every(n => [...n.querySelectorAll('text')].every("
            "t => t.getBBox().width <= n.querySelector('rect').getBBox().width))"
        )
    )
    assert texts


# ---- what moves


def test_buttons_the_wheel_and_the_hand_move_a_picture(opened: Callable[..., Any]) -> None:
    page = opened()
    figure = picture(page, "0-before")
    figure.scroll_into_view_if_needed()
    _, _, scale = moved(figure)
    figure.get_by_role("button", name="zoom in").click()
    assert moved(figure)[2] == pytest.approx(1.25 * scale)
    figure.get_by_role("button", name="zoom out").click()
    assert moved(figure)[2] == pytest.approx(scale)
    svg = figure.locator("svg").bounding_box()
    at = svg["x"] + svg["width"] / 2, svg["y"] + 8
    page.mouse.move(*at)
    page.mouse.wheel(0, -200)
    page.wait_for_function(
        "([key, scale]) => !document.querySelector(`[data-key='${key}'] .view`)"
        ".getAttribute('transform').endsWith(`scale(${scale})`)",
        arg=["0-before", scale],
    )
    x, y, larger = moved(figure)
    assert larger > scale
    page.mouse.down()
    page.mouse.move(at[0] + 40, at[1] + 30)
    page.mouse.up()
    assert moved(figure) == pytest.approx((x + 40, y + 30, larger))
    figure.get_by_role("button", name="show all").click()
    boxes = figure.locator(".n").evaluate_all(
        "nodes => nodes.map(n => { const b = n.getBoundingClientRect();"
        " return [b.left, b.top, b.right, b.bottom]; })"
    )
    svg = figure.locator("svg").bounding_box()
    assert min(box[1] for box in boxes) >= svg["y"]
    assert max(box[3] for box in boxes) <= svg["y"] + svg["height"]


def test_a_picture_is_used_by_keyboard(opened: Callable[..., Any], report: normpass.Report) -> None:
    page = opened()
    figure = picture(page, "0-before")
    figure.locator("svg").focus()
    x, _, scale = moved(figure)
    page.keyboard.press("+")
    assert moved(figure)[2] > scale
    page.keyboard.press("-")
    page.keyboard.press("ArrowRight")
    assert moved(figure)[0] == pytest.approx(x - 60)
    page.keyboard.press("0")
    page.keyboard.press("Enter")
    focused = page.locator(".n:focus")
    start = int(focused.get_attribute("data-i"))
    assert report.graphs[0].before[start].text in figure.locator(".told").inner_text()
    # From a node, an arrow follows what it reads and what reads it.
    lines = report.graphs[0].before
    while not lines[start].reads:
        page.keyboard.press("ArrowDown")
        start = int(page.locator(".n:focus").get_attribute("data-i"))
    page.keyboard.press("ArrowUp")
    above = int(page.locator(".n:focus").get_attribute("data-i"))
    assert lines[above].name in lines[start].reads
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.tagName") == "svg"


def test_controls_have_names_and_roles(opened: Callable[..., Any]) -> None:
    page = opened()
    assert page.get_by_role(
        "group", name=re.compile(r"graph 0, forward, before: \d+ nodes")
    ).count()
    for name in ("zoom in", "zoom out", "show all"):
        buttons = page.get_by_role("button", name=f"{name}: graph 0, forward, before")
        assert buttons.count() == 1
    assert page.get_by_role("img", name=re.compile("bytes alive over a step")).count() == 1
    assert not page.evaluate(
        "[...document.querySelectorAll('button, a')]"
        ".filter(e => !(e.textContent.trim() || e.getAttribute('aria-label'))).length"
    )


# ---- regions


def test_pointing_at_a_node_shows_its_text(
    opened: Callable[..., Any], report: normpass.Report
) -> None:
    page = opened()
    figure = picture(page, "0-after")
    figure.scroll_into_view_if_needed()
    figure.get_by_role("button", name="show all").click()
    node = figure.locator(".n.whole").first
    node.hover()
    line = report.graphs[0].after[int(node.get_attribute("data-i"))]
    assert line.text in figure.locator(".told").inner_text()
    assert figure.locator("path.near").count() == len(line.reads) + sum(
        line.name in other.reads for other in report.graphs[0].after
    )


def test_a_click_in_a_picture_goes_to_the_region(opened: Callable[..., Any]) -> None:
    page = opened()
    figure = picture(page, "0-after")
    figure.scroll_into_view_if_needed()
    figure.get_by_role("button", name="show all").click()
    figure.locator('.n[data-r="1"]').click()
    assert page.locator("tr.now").get_attribute("data-row") == "1"
    assert page.locator("li.now").get_attribute("data-row") == "1"
    article = page.locator("article", has=page.locator("#region1"))
    assert article.locator("details").get_attribute("open") is not None
    same = picture(page, "0-before").locator('.n[data-r="1"]').count()
    assert picture(page, "0-before").locator(".n.now").count() == same
    figure.get_by_role("button", name="table").click()
    assert page.evaluate("document.activeElement.closest('tr').dataset.row") == "1"
    figure.get_by_role("button", name="kernel").click()
    assert page.evaluate("document.activeElement.closest('li').id") == "region1"


def test_a_click_in_the_table_and_at_a_kernel_shows_the_picture(opened: Callable[..., Any]) -> None:
    page = opened()
    # The third is of the backward, whose graph is folded.
    assert not picture(page, "1-before").is_visible()
    page.locator('tr[data-row="2"] a').click()
    assert page.url.endswith("#region2")
    page.get_by_role("button", name="show region 2 in the picture").click()
    figure = picture(page, "1-before")
    assert figure.is_visible()
    svg = figure.locator("svg").bounding_box()
    middle = figure.locator(".n.now").evaluate_all(
        "nodes => { const b = nodes.map(n => n.getBoundingClientRect());"
        " return b.map(b => [b.left + b.width / 2, b.top + b.height / 2]); }"
    )
    inside = [
        svg["x"] <= x <= svg["x"] + svg["width"] and svg["y"] <= y <= svg["y"] + svg["height"]
        for x, y in middle
    ]
    assert any(inside)
    assert 0 <= svg["y"] + svg["height"] / 2 <= 1000


def test_lines_of_a_region_and_of_its_kernel(opened: Callable[..., Any]) -> None:
    page = opened()
    page.locator('tr[data-row="0"] a').click()
    block = page.locator("article", has=page.locator("#region0")).locator(".matched")
    region, kernel = block.locator("pre").nth(0), block.locator("pre").nth(1)
    for one, other in ((region, kernel), (kernel, region)):
        one.locator('[data-v="rstd"]').first.hover()
        shown = other.bounding_box()
        places = [mark.bounding_box()["y"] - shown["y"] for mark in other.locator(".now").all()]
        assert any(0 <= place < shown["height"] for place in places)
        marked = other.locator(".now").all_inner_texts()
        assert marked
        assert all("rstd" in line for line in marked)
        assert block.locator('.now:not([data-v="rstd"])').count() == 0


# ---- how it looks


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(
    opened: Callable[..., Any], width: int, scheme: str
) -> None:
    page = opened(width, scheme)
    for details in page.locator("details").all():
        details.evaluate("d => { d.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.body.scrollWidth") <= width


def luminance(color: str) -> float:
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", color)[:3])
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(opened: Callable[..., Any], scheme: str) -> None:
    page = opened(scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) < 0.05) == (scheme == "dark")
    pairs = page.locator(".n").evaluate_all(
        "nodes => nodes.map(n => [getComputedStyle(n.querySelector('text')).fill,"
        " getComputedStyle(n.querySelector('rect')).fill])"
    )
    pairs += page.locator("p, td, th, code").evaluate_all(
        "texts => texts.map(t => [getComputedStyle(t).color, ''])"
    )
    for text, box in set(map(tuple, pairs)):
        behind = box if box.startswith("rgb") else ground
        one, other = sorted((luminance(text), luminance(behind)))
        assert (other + 0.05) / (one + 0.05) >= 4.5, (text, behind)


def test_bars_and_lines_are_as_high_as_the_numbers_say(
    opened: Callable[..., Any], report: normpass.Report
) -> None:
    page = opened()
    measured = (
        page.locator(".bars")
        .nth(0)
        .locator(".bar")
        .evaluate_all("bars => bars.map(b => b.getBoundingClientRect().width)")
    )
    numbers = [
        float(count)
        for region in {region.text: region for region in report.regions}.values()
        for count in (region.bytes_least, region.bytes_moved, region.bytes_stock or 0)
    ]
    longest = max(measured)
    assert [w / longest for w in measured] == pytest.approx(
        [n / max(numbers) for n in numbers], abs=0.01
    )
    times = (
        page.locator(".bars")
        .nth(1)
        .locator(".bar")
        .evaluate_all("bars => bars.map(b => b.getBoundingClientRect().width)")
    )
    assert times[0] / times[1] == pytest.approx(0.25, abs=0.01)
    svg = page.locator(".timeline svg").bounding_box()
    for kind, peak in (("ours", 0.75), ("stock", 1.0)):
        box = page.locator(f".timeline path.{kind}").evaluate(
            "path => { const b = path.getBBox(); return [b.y, b.height]; }"
        )
        assert box == pytest.approx([HEIGHT * (1 - peak), HEIGHT * peak], abs=0.1)
    assert svg["height"] > 200
