"""Results that Inductor would never have in memory: a region writes them and Inductor reads them
again, which is weighed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import refusals
import torch
import torch.nn.functional as F
from torch import Tensor

from normpass.backend import fusion
from normpass.backend.explain import record
from normpass.passes.made import only_computed_for, only_used_beside
from normpass.passes.pipeline import Fused

if TYPE_CHECKING:
    from collections.abc import Callable

    from normpass.passes.pipeline import Decision

X, W = torch.randn(2048, 4096), torch.rand(4096)


def norm(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w)


def integers(x: Tensor, w: Tensor) -> Tensor:
    return (norm(x, w) * 100).to(torch.int32)


def half(x: Tensor, w: Tensor) -> Tensor:
    return torch.special.i0(norm(x, w)[:, :2048])


def rotated(x: Tensor, w: Tensor) -> Tensor:
    one, other = norm(x, w).chunk(2, -1)
    return torch.special.i0(torch.cat([-other, one], -1))


def joined(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([norm(x, w), x])


def counted(x: Tensor, w: Tensor) -> Tensor:
    return (norm(x, w) > 0).sum(-1)


def multiplied_too(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = norm(x, w)
    return y @ x.t(), torch.special.i0(y)


def with_a_later_product(x: Tensor, w: Tensor) -> Tensor:
    """The loop that reads the norm waits for a product of it: the norm is in memory until then."""
    y = norm(x, w)
    return torch.special.i0(y + (y @ x.t()) @ x)


def returned_too(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = norm(x, w)
    return y, torch.special.i0(y)


def alone(x: Tensor, w: Tensor) -> Tensor:
    return norm(x, w)


def decision(f: Callable[[Tensor, Tensor], object], monkeypatch: pytest.MonkeyPatch) -> Decision:
    monkeypatch.setattr(fusion, "conditions_of", lambda device: refusals.CONDITIONS)
    torch._dynamo.reset()
    with record.listen() as heard, torch.no_grad():
        torch.compile(f, backend="normpass")(X, W)
    (found,) = heard
    assert not isinstance(found, str)
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("f", [integers, half, rotated, joined, counted], ids=lambda f: f.__name__)
def test_what_inductor_computes_where_it_is_used(
    f: Callable[[Tensor, Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = decision(f, monkeypatch)
    assert not isinstance(found, Fused)
    assert found.reason.startswith("more memory: ")


@pytest.mark.parametrize(
    "f", [multiplied_too, with_a_later_product, returned_too, alone], ids=lambda f: f.__name__
)
def test_what_is_in_memory_anyway(
    f: Callable[[Tensor, Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(decision(f, monkeypatch), Fused)


def test_a_reader_of_many_loops() -> None:
    """Each reads the one before in two places: to go all ways through them would not end."""
    aten, graph = torch.ops.aten, torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sin.default, (x,))
    z = x
    for _ in range(200):
        z = graph.call_function(aten.mul.Tensor, (z, z))
    reader = graph.call_function(aten.atan2.default, (y, z))
    product = graph.call_function(aten.mm.default, (x, x))
    other = graph.call_function(aten.atan2.default, (y, product))
    graph.output(reader)
    assert not only_used_beside(y, {y})  # the other reader waits for a product
    graph.erase_node(other)
    assert only_used_beside(y, {y})


def test_a_reader_of_sizes_reads_no_elements() -> None:
    """A graph with sizes that are known at run time asks a pointwise value for its own."""
    graph = torch.fx.Graph()
    x, value = graph.placeholder("x"), torch.empty(8)
    made = graph.call_function(torch.ops.aten.neg.default, (x,))
    length = graph.call_function(torch.ops.aten.sym_size.int, (made, 0))
    read = graph.call_function(torch.ops.aten.exp.default, (made,))
    product = graph.call_function(torch.ops.aten.mm.default, (made, made))
    for node in (x, made, read, product):
        node.meta["val"] = value
    length.meta["val"] = 8
    assert not only_computed_for(made, {read})
    graph.erase_node(product)
    assert only_computed_for(made, {read})
