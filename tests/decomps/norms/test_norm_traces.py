"""The decompositions of the norms as graphs: symbolic, without copies, and under AOTAutograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import norm_samples
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch.fx.experimental.proxy_tensor import make_fx

from normpass.decomps.registry import Rule, decompositions, rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten
DECOMPOSITIONS = [rule for rule in rules() if rule.kind == "decomposition"]

by_rule = pytest.mark.parametrize("rule", DECOMPOSITIONS, ids=lambda rule: rule.name)


def argument_names(rule: Rule) -> list[str]:
    assert rule.op is not None
    return [argument.name for argument in rule.op._schema.arguments]


def place_of_input(rule: Rule) -> int:
    """Of what is normalized, by the names that PyTorch's operators have for it."""
    names = argument_names(rule)
    found = [names.index(name) for name in ("input", "self", "saved_v") if name in names]
    assert found, f"which argument of {rule.op} is normalized? Its name belongs into this list"
    return found[0]


COPIES = {"as_strided", "clone", "permute", "transpose", "t", "copy_", "contiguous"}


def with_tensors(rule: Rule, arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Tensor]]:
    """The rule as a function of its tensors alone, sizes of group norm read off the input."""
    places = [i for i, v in enumerate(arguments) if isinstance(v, torch.Tensor)]
    names = argument_names(rule)

    def function(*values: Tensor) -> Any:
        filled = list(arguments)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        if "HxW" in names:
            x = filled[names.index("input")]
            size = 1
            for extent in x.shape[2:]:
                size = size * extent
            filled[names.index("N") : names.index("HxW") + 1] = [*x.shape[:2], size]
        if "normalized_shape" in names:
            place = names.index("normalized_shape")
            x = filled[names.index("input")]
            filled[place] = [*x.shape[x.dim() - len(arguments[place]) :]]
        return rule(*filled)

    return function, [arguments[i] for i in places]


def first_sample(rule: Rule, dtype: torch.dtype) -> tuple[Any, ...]:
    assert rule.op is not None
    return next(iter(norm_samples.samples(rule.op, dtype)))[1]


@by_rule
def test_trace_is_symbolic_and_copies_nothing(rule: Rule) -> None:
    function, values = with_tensors(rule, first_sample(rule, torch.bfloat16))
    traced = make_fx(function, tracing_mode="symbolic")(*values)
    traced.graph.eliminate_dead_code()
    called = {n.target._schema.name.split("::")[1] for n in traced.graph.nodes if overload(n)}
    assert called
    assert not called & COPIES
    assert traced.shape_env is not None
    constants = {str(s): v for s, v in traced.shape_env.replacements.items() if v.is_number}
    assert not constants, f"sizes were specialized: {constants}"


def overload(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


@by_rule
def test_trace_holds_for_another_batch(rule: Rule) -> None:
    arguments = first_sample(rule, torch.float32)
    function, values = with_tensors(rule, arguments)
    traced = make_fx(function, tracing_mode="symbolic")(*values)
    x = arguments[place_of_input(rule)]
    longer = [
        torch.cat([v, v[:2] * 0.5]) if v.dim() > 1 and v.shape[0] == x.shape[0] else v
        for v in values
    ]
    for ours, expected in zip(traced(*longer), function(*longer), strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None:
            torch.testing.assert_close(ours, expected)


@by_rule
def test_the_input_is_read_once(rule: Rule) -> None:
    """What needs x again uses x_hat; a forward reads it for the statistics as well."""
    arguments = first_sample(rule, torch.float32)
    function, values = with_tensors(rule, arguments)
    traced = make_fx(function)(*values)
    traced.graph.eliminate_dead_code()
    place = place_of_input(rule)
    among_tensors = sum(isinstance(v, torch.Tensor) for v in arguments[:place])
    x = [n for n in traced.graph.nodes if n.op == "placeholder"][among_tensors]
    allowed = 1 if "backward" in rule.name else 3
    assert 1 <= len(readers(x)) <= allowed


def readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The users of a value, those of its views in place of the views."""
    found: list[torch.fx.Node] = []
    for user in node.users:
        found += readers(user) if user.target is aten.view.default else [user]
    return found


MODULES = {
    "layer": (lambda: torch.nn.LayerNorm(6), (6, 6)),
    "rms": (lambda: torch.nn.RMSNorm(6), (6, 6)),
    "group": (lambda: torch.nn.GroupNorm(2, 6), (6, 5, 3)),
    "batch": (lambda: torch.nn.BatchNorm2d(6), (6, 5, 3)),
    "instance": (lambda: torch.nn.InstanceNorm2d(6, affine=True), (6, 5, 3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_aot_autograd_with_the_table(name: str) -> None:
    """As a user hands it over: gradients as in eager, and no recompilation for another batch."""
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=keep, decompositions=decompositions())
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, dynamic=True, fullgraph=True)

    def gradients(function: Any, batch: int) -> list[Tensor]:
        g, x = norm_samples.pair((batch, *shape), torch.float32)
        x.requires_grad_()
        y = function(x)
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], g)]

    for batch in (4, 7):
        for ours, expected in zip(
            gradients(compiled, batch), gradients(module, batch), strict=True
        ):
            torch.testing.assert_close(ours, expected)
    assert len(graphs) == 2, "one forward and one backward, for both batches"
    called = {n.target for gm in graphs for n in gm.graph.nodes}
    assert not called & set(decompositions())
