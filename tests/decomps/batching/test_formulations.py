"""Which formulation of a convolution is chosen, at the sizes that were measured."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from normpass.decomps.activation import registered
from normpass.decomps.batching.formulations import MOST_EXAMPLES, by_columns, one_by_one

CPU = torch.empty(0)

# Images of an example, channels of the result, what it is along one axis, and the window. What
# took less time: a product of matrices with the columns of the input, or a grouped convolution.
MEASURED = [
    ((1, 64, 56, 56), 64, 56, 3, False),
    ((1, 64, 56, 56), 128, 28, 3, True),  # strides of two
    ((1, 256, 14, 14), 256, 14, 3, True),
    ((1, 512, 7, 7), 512, 7, 3, True),
    ((1, 64, 56, 56), 128, 28, 1, True),
    ((1, 3, 112, 112), 64, 56, 7, False),
    ((1, 32, 32, 32), 32, 32, 3, False),
    ((1, 32, 32, 32), 64, 16, 3, True),
    ((1, 32, 8, 8), 64, 4, 3, True),
    ((16, 64, 56, 56), 64, 56, 3, False),
    ((16, 256, 14, 14), 512, 7, 3, True),
    ((16, 64, 28, 28), 256, 28, 1, True),
]


@pytest.mark.parametrize(("image", "channels", "along", "window", "columns"), MEASURED)
def test_what_was_faster_is_chosen(
    image: tuple[int, ...], channels: int, along: int, window: int, columns: bool
) -> None:
    result, kernel = (image[0], channels, along, along), (window, window)
    assert by_columns(1, image, result, kernel, CPU) == columns
    # Near misses: what was not measured.
    assert not by_columns(2, image, result, kernel, CPU)
    assert not by_columns(1, image, result, kernel, CPU.bfloat16())
    assert not by_columns(1, image, result, kernel, CPU.to("meta"))


def test_weights_that_outweigh_images() -> None:
    images, weight = (1, 256, 14, 14), (256, 256, 3, 3)
    assert one_by_one(16, images, weight, CPU)
    assert not one_by_one(16, (16, 256, 14, 14), weight, CPU)  # an ensemble's
    assert not one_by_one(MOST_EXAMPLES + 1, images, weight, CPU)
    assert not one_by_one(16, images, weight, CPU.to("meta"))
    assert not one_by_one(8, (1, 128, 28, 28), (128, 128, 3, 3), CPU)  # as fast either way


def test_sizes_that_vary_are_not_decided_by() -> None:
    """A graph for all sizes has the formulation that is right for all."""

    def gradients(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return vmap(grad(lambda w, x: F.conv2d(x[None], w).sin().sum()), (None, 0))(w, x)

    x, w = torch.randn(3, 8, 6, 6), torch.randn(8, 8, 3, 3)
    with registered():
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(gradients, backend=counter, fullgraph=True, dynamic=True)
        for size in (6, 9, 14):
            x = torch.randn(3, 8, size, size)
            torch.testing.assert_close(compiled(x, w), gradients(x, w), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_the_chosen_one_is_in_the_graph() -> None:
    def gradients(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return vmap(grad(lambda w, x: F.conv2d(x[None], w).sin().sum()), (None, 0))(w, x)

    def called(size: int) -> str:
        x, w = torch.randn(3, 8, size, size), torch.randn(8, 8, 3, 3)
        with registered(), torch._dispatch.python.enable_python_dispatcher():
            return str(make_fx(gradients, tracing_mode="fake")(x, w).graph)

    assert "aten.bmm" in called(6)
    assert "convolution_backward" not in called(6)
    assert "convolution_backward" in called(20)
