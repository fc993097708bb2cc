"""scatter_reduce and index_reduce, against products and maxima that are written out."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import table_calls
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from normpass.decomps.registry import derivative
from normpass.decomps.table.binding import jvp, vjp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten
SCATTER, INDEX = aten.scatter_reduce.two, aten.index_reduce.default
both = pytest.mark.parametrize("op", [SCATTER, INDEX])
included = pytest.mark.parametrize("include_self", [True, False])

# Groups of one, two, three and no elements; each takes other zeros below.
PLACES = torch.tensor([1, 3, 1, 4, 3, 3, 0])
SELF = torch.tensor([0.5, -1.5, 2.0, 0.75, -0.25], dtype=torch.float64)
SRC = torch.tensor([1.5, -0.5, -2.0, 3.0, 0.8, 1.1, -0.7], dtype=torch.float64)
ZEROS = ([], [0], [0, 2], [1, 4], [1, 4, 5], [3, 6], [*range(7)])


def written_out(self: Tensor, src: Tensor, include_self: bool) -> Tensor:
    """The products of groups, one factor after another."""
    found = []
    for i, x in enumerate(self):
        chosen = [s for s, place in zip(src, PLACES.tolist(), strict=True) if place == i]
        factors = [*([x] if include_self or not chosen else []), *chosen]
        y = factors[0]
        for factor in factors[1:]:
            y = y * factor
        found.append(y)
    return torch.stack(found)


def of_product(
    op: Any, self: Tensor, src: Tensor, include_self: bool, g: Tensor
) -> tuple[Tensor, Tensor]:
    args = {"self": self, "dim": 0, "index": PLACES, "reduce": "prod"}
    name = "src" if op is SCATTER else "source"
    args |= {name: src, "include_self": include_self}
    result = op(self, 0, PLACES, src, "prod", include_self=include_self).detach()
    found = vjp(op)((g,), args, result)
    return found["self"], found[name]


@both
@included
@pytest.mark.parametrize("zeros", ZEROS, ids=str)
@pytest.mark.parametrize("of_self", [[], [3], [1, 4]], ids=str)
def test_a_product_to_the_second_derivative(
    op: Any, include_self: bool, zeros: list[int], of_self: list[int]
) -> None:
    self, src, g = SELF.clone(), SRC.clone(), torch.linspace(-1, 2, 5, dtype=torch.float64)
    self[of_self], src[zeros] = 0, 0
    xs = [x.requires_grad_() for x in (self, src, g)]
    found = of_product(op, self, src, include_self, g)
    y = written_out(self, src, include_self)
    expected = torch.autograd.grad(y, (self, src), g, create_graph=True)
    assert_close(found, expected)
    torch.manual_seed(0)
    steps = [torch.randn_like(e) for e in expected]
    second, right = (
        torch.autograd.grad(first, xs, steps, materialize_grads=True) for first in (found, expected)
    )
    assert_close(second, right)


@both
def test_a_product_to_the_fourth_derivative_away_from_zero(op: Any) -> None:
    self, src = SELF.clone().requires_grad_(), SRC.clone().requires_grad_()
    g = torch.linspace(-1, 2, 5, dtype=torch.float64)
    found = of_product(op, self, src, True, g)
    y = written_out(self, src, True)
    expected = torch.autograd.grad(y, (self, src), g, create_graph=True)
    for order in range(3):
        torch.manual_seed(order)
        steps = [torch.randn_like(e) for e in expected]
        found = torch.autograd.grad(found, (self, src), steps, create_graph=True)
        expected = torch.autograd.grad(expected, (self, src), steps, create_graph=True)
        assert_close(found, expected)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("zeros", ZEROS, ids=str)
def test_the_tangent_of_a_product(include_self: bool, zeros: list[int]) -> None:
    """PyTorch has none, and takes it for zero."""
    self, src = SELF.clone(), SRC.clone()
    src[zeros] = 0
    torch.manual_seed(0)
    steps = torch.randn_like(self), torch.randn_like(src)

    def function(self: Tensor, src: Tensor) -> Tensor:
        return written_out(self, src, include_self)

    _, expected = torch.func.jvp(function, (self, src), steps)
    args = (self, 0, PLACES, src, "prod", include_self)
    (found,) = jvp(SCATTER)({"self": steps[0], "src": steps[1]}, args, SCATTER(*args[:-1]))
    assert_close(found, expected)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_derivative_of_a_product_can_be_traced(mode: str) -> None:
    """Under torch.func too, where torch's own asks for values."""
    self, src = SELF.clone(), SRC.clone()
    src[[1, 4]] = 0
    rule = derivative("scatter_reduce_backward")

    def first(self: Tensor, src: Tensor, places: Tensor) -> Tensor:
        result = torch.ones_like(self)  # which a product does not ask for
        of_self, of_src = rule(self, self, 0, places, src, "prod", True, result)
        return of_self.sin().sum() + of_src.sin().sum()

    second = torch.func.grad(first, argnums=(0, 1))
    traced = make_fx(second, tracing_mode=mode)(self, src, PLACES)
    assert_close(traced(self, src, PLACES), second(self, src, PLACES))


def test_derivatives_of_a_product_under_vmap() -> None:
    rule = derivative("scatter_reduce_backward")
    src = torch.stack([SRC, SRC.flip(0)])

    def gradient(src: Tensor) -> Tensor:
        return rule(SELF, SELF, 0, PLACES, src, "prod", True, SELF)[1]

    assert_close(torch.vmap(gradient)(src), torch.stack([gradient(s) for s in src]))


@both
@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_an_extreme_that_self_is_but_has_no_part_in(op: Any, reduce: str) -> None:
    """PyTorch counts self among those that share the gradient, and takes its share away."""
    self = torch.tensor([1.0, 5.0], dtype=torch.float64, requires_grad=True)
    src = torch.tensor([1.0, 0.5 if reduce == "amax" else 2.0], dtype=torch.float64)
    src.requires_grad_()
    index = torch.tensor([0, 0])
    result = op(self, 0, index, src, reduce, include_self=False)
    stock = torch.autograd.grad(result, (self, src), torch.ones_like(result))
    args = (self, 0, index, src, reduce, False)
    found = [*vjp(op)((torch.ones_like(result),), args, result).values()]
    assert_close(found, [torch.tensor([0.0, 1.0]).double(), torch.tensor([1.0, 0.0]).double()])
    assert not torch.allclose(stock[1], found[1])


NAN = float("nan")


@both
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin", "sum"])
def test_where_numbers_are_equal_or_none(op: Any, reduce: str) -> None:
    """As PyTorch has it: equal numbers share a gradient, NaN makes NaN of it."""
    if reduce == "sum" and op is INDEX:
        return
    for self, src, include_self in (
        ([1.0, 1.0, 2.0], [1.0, 1.0, 2.0, 2.0], True),
        ([1.0, 3.0, 2.0], [1.0, NAN, 2.0, 0.5], True),
        ([3.0, 4.0, 5.0], [1.0, 1.0, 2.0, 2.0], False),
    ):
        x = torch.tensor(self, dtype=torch.float64)
        s = torch.tensor(src, dtype=torch.float64)
        args = {"self": x, "dim": 0, "index": torch.tensor([0, 0, 1, 0]), "reduce": reduce}
        args |= {"src" if op is SCATTER else "source": s, "include_self": include_self}
        assert table_calls.check_vjp(table_calls.Call(op, args)) == table_calls.RIGHT


def _args(op: Any, self: Tensor, index: Tensor, src: Tensor, reduce: str) -> dict[str, Any]:
    named = {"self": self, "dim": 0, "index": index, "reduce": reduce, "include_self": True}
    return {**named, "src" if op is SCATTER else "source": src}


@both
def test_without_axes_and_without_elements(op: Any) -> None:
    number, place = torch.tensor(2.0, dtype=torch.float64), torch.tensor(0)
    row = torch.ones(3, dtype=torch.float64)
    for reduce in ("prod", "mean", "amax"):
        for self, index, src in (
            (number, place, number + 1),
            (row, place.expand(0), row[:0]),
        ):
            call = table_calls.Call(op, _args(op, self, index, src, reduce))
            assert table_calls.check_vjp(call) == table_calls.RIGHT


@pytest.mark.parametrize("of", ["of self", "of src", "of both"])
def test_tangents_that_are_not_there(of: str) -> None:
    for reduce, include_self in itertools.product(("sum", "mean", "prod", "amax"), (True, False)):
        args = (SELF, 0, PLACES, SRC, reduce, include_self)
        result = aten.scatter_reduce.two(*args[:-1], include_self=include_self)
        steps = {"self": SELF.cos(), "src": SRC.sin()}
        given = {k: v for k, v in steps.items() if of in ("of both", f"of {k}")}
        zeros = {k: given.get(k, torch.zeros_like(v)) for k, v in steps.items()}
        assert_close(jvp(SCATTER)(given, args, result), jvp(SCATTER)(zeros, args, result))


def length(function: Callable[..., Any], *args: Any) -> int:
    return len(make_fx(function, tracing_mode="symbolic")(*args).graph.nodes)


def test_the_graph_does_not_grow() -> None:
    rule = derivative("index_reduce_backward")

    def gradient(self: Tensor, index: Tensor, src: Tensor) -> Any:
        return rule(self, self, 0, index, src, "prod", True, self)

    sizes = [length(gradient, torch.randn(n), torch.arange(n), torch.randn(n)) for n in (4, 9)]
    assert sizes[0] == sizes[1]
