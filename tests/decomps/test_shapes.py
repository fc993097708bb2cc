"""The notation of shapes."""

from __future__ import annotations

import pytest
import torch

from normpass.decomps.shapes import bind, parse, put


def test_shapes_are_read_and_put_to_sizes() -> None:
    found = parse("x: *n 2d *m, w: d, s: -> y: *n d *m, mean: *n 1")
    assert found.arguments == {"x": ("*n", "2d", "*m"), "w": ("d",), "s": ()}
    sizes = {"d": 5, "*n": (3, 2), "*m": ()}
    assert put(found.arguments["x"], sizes) == (3, 2, 10)
    assert put(found.results["mean"], sizes) == (3, 2, 1)
    assert bind(found.arguments["x"], (3, 2, 10), {"*n": 2, "*m": 0}) == sizes
    with pytest.raises(ValueError, match="has 3 axes, the tensor's are"):
        bind(found.arguments["x"], (3, 10), {"*n": 2, "*m": 0})


@pytest.mark.parametrize(("s", "n"), [(5, 3), (2, 7), (4, 4)])
def test_quotients_and_the_shorter_of_two(s: int, n: int) -> None:
    """Of sizes that torch knows: half a spectrum, and the factors of a matrix."""
    found = parse("A: *b s n -> Q: *b s min(s,n), R: *b min(s,n) n, half: *b s n/2+1, pairs: n/2")
    sizes = bind(found.arguments["A"], (6, s, n), {"*b": 1})
    A = torch.randn(6, s, n)
    shapes = {name: put(axes, sizes) for name, axes in found.results.items()}
    assert (shapes["Q"], shapes["R"]) == tuple(x.shape for x in torch.linalg.qr(A))
    assert shapes["half"] == torch.fft.rfft(A).shape
    assert shapes["pairs"] == torch.arange(n)[1::2].shape
    assert bind(found.results["half"], shapes["half"], {"*b": 1}) == {"*b": (6,), "s": s}


@pytest.mark.parametrize(
    "text",
    [
        "x: d",
        "x -> y",
        "x: D -> y: d",
        "x: d, x: d -> y: d",
        "x: d/n -> y: d",
        "x: min(d) -> y: d",
        "x: min(d, n) -> y: d",
    ],
)
def test_what_is_not_in_the_notation_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse(text)
