"""Sizes that are only known at run time: their classes, what plans make of these, and kernels that
are chosen by them.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import oracles
import pytest
import sympy
import torch
import triton_regions
from launched import BACKWARD, axes_of
from torch import nn

from normpass.backend.codegen import cpp
from normpass.backend.codegen.text import index_expression
from normpass.backend.program.listing import listing
from normpass.backend.program.machine import GPU
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import SizeClass, Sizes, size_class, size_classes
from normpass.backend.run import runtime
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# ---- classes


@pytest.mark.parametrize(
    ("size", "most", "multiple"),
    [
        *[(0, 2, 1), (1, 1, 1), (2, 2, 1), (3, 4, 1), (1024, 1024, 512), (1000, 1024, 8)],
        *[(197, 256, 1), (3136, 4096, 64), (48, 64, 16), (2**40, 2**40, 512)],
    ],
)
def test_classes(size: int, most: int, multiple: int) -> None:
    found = size_class(size)
    assert found == SizeClass(most, multiple)
    assert size <= found.most
    assert size % found.multiple == 0


def test_products_of_sizes() -> None:
    region = parse("region r; axes n=? h=? c=8; input x: f32[n h c]; output y: f32[n h c] = x")
    n, h = (sympy.Symbol(name, integer=True, positive=True) for name in "nh")
    sizes = Sizes.of(region, size_classes([3, 48]))
    assert sizes.most(3 * n * h) == 3 * 4 * 64
    assert sizes.divisor(3 * n * h) == 3 * 16
    assert sizes.expected(h) == 64
    nothing = Sizes.of(region, ())
    assert nothing.most(3 * n) is None
    assert nothing.divisor(6 * n) == 6
    assert (sizes.most(5), nothing.most(5), nothing.divisor(6)) == (5, 5, 6)


def test_divided_sizes_as_text() -> None:
    n, c = sympy.symbols("n c", integer=True, positive=True)
    assert index_expression(49 * n * c / 4) == "49 * n_c * n_n / 4"


# ---- plans

ROWS = BACKWARD.replace("{c}.0", "65536.0")


@pytest.mark.parametrize(
    ("rows", "columns", "first"),
    [(3, 65536, "c_block"), (3, 50176, "c_block"), (4096, 1024, "r"), (3, 1024, "r")],
)
def test_plans_are_made_for_their_sizes(rows: int, columns: int, first: str) -> None:
    """As the same sizes are planned that are known."""
    region = parse(ROWS.format(r="?", c="?", dtype="f32"))
    assert axes_of(make_plan(region, classes=size_classes([rows, columns])))[0] == first
    known = parse(ROWS.format(r=rows, c=columns, dtype="f32"))
    assert axes_of(make_plan(known))[0] == first


def test_what_nothing_is_known_to_divide_is_not_in_blocks() -> None:
    region = parse(ROWS.format(r="?", c="?", dtype="f32"))
    assert axes_of(make_plan(region, classes=size_classes([3, 65535])))[0] == "r"


def test_a_program_tells_what_it_is_for() -> None:
    region = parse(ROWS.format(r="?", c="64", dtype="f32"))
    assert listing(make_plan(region, classes=size_classes([1000]))).startswith(
        "program layer_norm_backward  r=r<=1024 c=64, lanes along c"
    )


def test_known_numbers_divide_what_is_not_known() -> None:
    """Rows of a batch norm with channels last, in blocks of pixels for any number of images."""
    text = triton_regions.fill(triton_regions.BATCH_NORM_BACKWARD, c="16", r="?", x="r s c")
    plan = make_plan(parse(text.replace("s=35", "s=3136")), classes=size_classes([7]))
    assert "r_s_block" in axes_of(plan)
    assert plan.axis["r_s_block"].extent * plan.axis["r_s"].extent == 3136 * sympy.Symbol(
        "r", integer=True, positive=True
    )


def test_rows_that_begin_anywhere() -> None:
    """What divides a row's length tells whether it is written in lines."""
    text = triton_regions.fill(triton_regions.SOFTMAX, r="64", c="?")
    aligned, anywhere = (
        cpp.generate(make_plan(parse(text), classes=size_classes([c]))) for c in (1024, 1000)
    )
    assert "each_aligned" in anywhere
    assert "each_aligned" not in aligned


def test_gpus_hold_rows_of_sizes_that_are_bounded() -> None:
    region = parse(triton_regions.fill(triton_regions.LAYER_NORM_BACKWARD, c="?"))
    held = {
        sizes: make_plan(region, GPU, classes).launches[0].blocks.resident
        for sizes, classes in (
            (None, ()),
            ((64, 1000), size_classes([64, 1000])),
            ((512, 2**14), size_classes([512, 2**14])),
        )
    }
    assert held == {None: frozenset(), (64, 1000): {"c"}, (512, 2**14): frozenset()}


# ---- kernels


def test_classes_that_are_planned_alike_have_one_text() -> None:
    text = triton_regions.fill(triton_regions.SOFTMAX, r="?", c="65536")
    few, many, more = (runtime.kernel(text, (rows,)) for rows in (3, 1000, 4000))
    assert many is not more
    assert many.source == more.source
    assert few.source != more.source
    assert many is runtime.kernel(text, (1001 - 1,))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer_norm": lambda: nn.LayerNorm(64),
    "softmax": lambda: nn.Softmax(-1),
    "batch_norm": lambda: nn.BatchNorm2d(16),
    "group_norm": lambda: nn.GroupNorm(4, 16),
    "instance_norm": lambda: nn.InstanceNorm2d(16, affine=True),
}
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "layer_norm": [(3, 5, 64), (1, 4096, 64), (33, 100, 64)],
    "softmax": [(3, 5, 64), (2, 3, 70000), (64, 100, 65), (2, 2, 2**16)],
}
IMAGES = [(2, 16, 8, 8), (5, 16, 112, 112), (3, 16, 9, 7), (2, 16, 256, 256)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", NORMS)
def test_numbers_of_every_class(name: str, last: bool) -> None:
    """One compiled function, with sizes of several classes, forward and backward."""
    if last and name in SHAPES:
        pytest.skip("no image")
    torch.manual_seed(0)
    norm = NORMS[name]()
    for parameter in norm.parameters():
        nn.init.normal_(parameter, mean=1.0, std=0.3)
    compiled = torch.compile(norm, backend="normpass", dynamic=True, options={"least_bytes": 0})
    for shape in SHAPES.get(name, IMAGES):
        x = torch.randn(shape)
        x = x.to(memory_format=torch.channels_last) if last else x
        g = torch.randn(shape)
        found = gradients(compiled, x, g)
        exact = gradients(deepcopy(norm).double(), x.double(), g.double())
        eager = gradients(norm, x, g)
        for k, (ours, theirs, want) in enumerate(zip(found, eager, exact, strict=True)):
            oracles.assert_no_less_accurate(ours, theirs, want, f"result {k} of {shape}")


def gradients(norm: nn.Module | Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> list[Tensor]:
    """A norm's result, and the gradients of its input and its parameters."""
    x = x.detach().requires_grad_()
    parameters = list(norm.parameters()) if isinstance(norm, nn.Module) else []
    y = norm(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], g)]
