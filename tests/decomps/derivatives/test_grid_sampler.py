"""Second derivatives of grid_sampler, of every mode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import table_calls
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from normpass.decomps.registry import derivative
from normpass.decomps.table.binding import vjp
from normpass.decomps.torch_versions import GRID_SAMPLER_TWICE

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(not GRID_SAMPLER_TWICE, reason="torch has no formula to compare")

BICUBIC = 2
MODES = [
    (axes, *modes)
    for axes in (2, 3)
    for modes in itertools.product((0, 1, 2), (0, 1, 2), (False, True))
    if axes == 2 or modes[0] != BICUBIC
]
each = pytest.mark.parametrize(("axes", "mode", "padding", "align"), MODES)


def call(axes: int, mode: int, padding: int, align: bool, sizes: Any = (4, 5, 3)) -> Any:
    """Points within the image, far beyond it on both sides, and in its corners."""
    torch.manual_seed(axes + 3 * mode)
    input = torch.randn(2, 3, *sizes[:axes], dtype=torch.float64)
    grid = torch.rand(2, *(3, 4, 2)[:axes], axes, dtype=torch.float64) * 7 - 3.5
    grid[0, 0] = grid[0, 0].sign()
    grad = torch.randn(2, 3, *grid.shape[1:-1], dtype=torch.float64)
    op = (aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward)[axes - 2].default
    named = {"grad_output": grad, "input": input, "grid": grid, "interpolation_mode": mode}
    rest = {"padding_mode": padding, "align_corners": align, "output_mask": [True, True]}
    return table_calls.Call(op, {**named, **rest})


@each
def test_against_autograd(axes: int, mode: int, padding: int, align: bool) -> None:
    assert table_calls.check_vjp(call(axes, mode, padding, align)) == table_calls.RIGHT


@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("align", [False, True])
def test_an_image_of_one_pixel(padding: int, align: bool) -> None:
    for mode in (0, 1, BICUBIC):
        found = table_calls.check_vjp(call(2, mode, padding, align, (1, 1)))
        assert found == table_calls.RIGHT


@pytest.mark.parametrize("mode", [0, 1, BICUBIC])
def test_no_images_and_no_points(mode: int) -> None:
    for n, points in ((0, 3), (2, 0)):
        input, grid = torch.randn(n, 3, 4, 5), torch.randn(n, points, 2, 2)
        args = (torch.randn(n, 3, points, 2), input, grid, mode, 0, False, [True, True])
        op = aten.grid_sampler_2d_backward.default
        found = vjp(op)((input, grid), args, op(*args))
        assert [found[k].shape for k in ("grad_output", "input", "grid")] == [
            value.shape for value in args[:3]
        ]


def test_the_graph_does_not_grow_with_the_image() -> None:
    rule = derivative("grid_sampler_2d_double_backward")
    lengths = []
    for sizes in ((4, 5), (9, 8)):
        given = call(2, BICUBIC, 2, False, sizes).args
        args = [*given.values()][:-1]

        def run(*tensors: Any, rest: Any = args[3:]) -> Any:
            return rule(*tensors, *rest, [True] * 3)

        tensors = (given["input"], given["grid"], *args[:3])
        traced = make_fx(run, tracing_mode="symbolic")(*tensors)
        lengths.append(len(traced.graph.nodes))
        assert_close(traced(*tensors), run(*tensors))
    assert lengths[0] == lengths[1]
