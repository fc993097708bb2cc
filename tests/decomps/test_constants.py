"""What has a derivative and what is a constant: of each result of each norm as in stock, on
the tape, in forward mode and at the levels of torch.func, with the rules in eager mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from samples import Sample, sample
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from normpass.decomps.activation import registered
from normpass.decomps.registry import rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from normpass.decomps.registry import Rule

    Norm = Callable[[Tensor], tuple[Tensor, ...]]

# What torch itself warns of: rules for vmap that it has not.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NORMS = [
    rule
    for rule in rules()
    if rule.kind in ("autograd", "batching")
    and "norm" in rule.name
    and "backward" not in rule.name
    and not rule.name.startswith(("aten.cudnn", "aten.miopen"))  # no kernels on CPUs
]
# torch has no rule for vmap, and no fallback for what writes to its arguments.
NOT_BATCHED = "aten._batch_norm_with_update.default"


def in_training(rule: Rule) -> Sample:
    """A sample: of batch norm one with statistics of its own."""
    given = sample(rule)
    return given.changed(training=True) if "training" in given.given else given


def norm_of(given: Sample) -> tuple[Norm, Tensor]:
    """The operator as a function of its input, with fresh running statistics, and an input."""
    assert given.rule.op is not None
    op, x = given.rule.op, given.given["input"]

    def norm(x: Tensor) -> tuple[Tensor, ...]:
        # Running statistics are written to, and must be batched where the input is.
        fresh = {
            name: v + torch.zeros_like(x).flatten()[: len(v)]
            for name, v in given.given.items()
            if name.startswith("running") and v is not None
        }
        return op(*{**given.given, **fresh, "input": x}.values())

    return norm, x


def carried(duals: tuple[Tensor, ...]) -> list[bool]:
    return [forward_ad.unpack_dual(y).tangent is not None for y in duals]


def on_the_tape(norm: Norm, x: Tensor) -> list[bool]:
    return [y.requires_grad for y in norm(x.clone().requires_grad_())]


def of_duals(norm: Norm, x: Tensor) -> list[bool]:
    with forward_ad.dual_level():
        return carried(norm(forward_ad.make_dual(x, x.sin())))


def of_duals_on_the_tape(norm: Norm, x: Tensor) -> list[bool]:
    with forward_ad.dual_level():
        duals = norm(forward_ad.make_dual(x.clone().requires_grad_(), x.sin()))
        return [y.requires_grad for y in duals] + carried(duals)


def in_a_dual_level(norm: Norm, x: Tensor) -> list[bool]:
    """Where nothing has a tangent."""
    with forward_ad.dual_level():
        return on_the_tape(norm, x) + carried(norm(x))


def tangents(norm: Norm, x: Tensor) -> list[bool]:
    return [bool(t.any()) for t in jvp(norm, (x,), (x.sin(),))[1]]


def tangents_of_tangents(norm: Norm, x: Tensor) -> list[bool]:
    return tangents(lambda x: jvp(norm, (x,), (x.cos(),))[1], x)


def gradients(norm: Norm, x: Tensor) -> list[bool]:
    count = len(norm(x))
    return [bool(grad(lambda x, i=i: norm(x)[i].sum().sin())(x).any()) for i in range(count)]


def tangents_on_the_tape(norm: Norm, x: Tensor) -> list[bool]:
    return [t.requires_grad for t in jvp(norm, (x.clone().requires_grad_(),), (x.sin(),))[1]]


def of_a_batch_on_the_tape(norm: Norm, x: Tensor) -> list[bool]:
    return on_the_tape(vmap(norm), torch.stack([x, x.cos()]))


def tangents_of_a_batch(norm: Norm, x: Tensor) -> list[bool]:
    return tangents(vmap(norm), torch.stack([x, x.cos()]))


def a_batch_of_tangents(norm: Norm, x: Tensor) -> list[bool]:
    batch = vmap(lambda x: jvp(norm, (x,), (x.sin(),))[1])(torch.stack([x, x.cos()]))
    return [bool(t.any()) for t in batch]


WAYS: dict[str, Callable[[Norm, Tensor], list[bool]]] = {
    way.__name__: way
    for way in (
        on_the_tape,
        of_duals,
        of_duals_on_the_tape,
        in_a_dual_level,
        tangents,
        tangents_of_tangents,
        gradients,
        tangents_on_the_tape,
        of_a_batch_on_the_tape,
        tangents_of_a_batch,
        a_batch_of_tangents,
    )
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", NORMS, ids=lambda rule: f"{rule.name}-{rule.kind}")
def test_it_is_as_in_stock(rule: Rule, way: str) -> None:
    norm, x = norm_of(in_training(rule))
    if "batch" in way and rule.name == NOT_BATCHED:
        expected = [True] + [False] * (len(norm(x)) - 1)  # as without vmap
    else:
        expected = WAYS[way](norm, x)
    with registered(eager=True):
        found = WAYS[way](norm, x)
    assert expected[0]
    assert found == expected


@pytest.mark.parametrize("rule", NORMS, ids=lambda rule: f"{rule.name}-{rule.kind}")
def test_the_records_say_so(rule: Rule) -> None:
    """Of layer and batch norm all results but the first are constants; of the others none."""
    norm, x = norm_of(in_training(rule))
    constants = [i for i, has in enumerate(on_the_tape(norm, x)) if not has]
    if rule.kind == "autograd" or rule.constants:
        assert list(rule.constants) == constants


def test_compiled_statistics_are_constants_too() -> None:
    norm: Any = torch.nn.LayerNorm(5).double()
    x = torch.linspace(-1, 2, 20, dtype=torch.float64).reshape(4, 5) ** 2

    def of_mean(x: Tensor) -> Tensor:
        return torch.ops.aten.native_layer_norm(x, [5], norm.weight, norm.bias, 0.1)[1] + x[:, :1]

    def tangent(x: Tensor) -> Tensor:
        return jvp(of_mean, (x,), (x.sin(),))[1]

    expected = tangent(x)
    assert torch.equal(expected, x.sin()[:, :1])
    with registered():
        found = torch.compile(tangent, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, expected)
