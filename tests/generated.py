"""What every rule owes, whatever it computes: checks that need no more than a record and samples of
it (tests/samples.py). What it computes is for tests/generated_values.py.

Each raises AssertionError, or the error of gradcheck or opcheck, where the rule is wrong.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import samples as made
import torch
from samples import Sample, is_number, shapes_of, tensors_in
from stand_ins import replaced
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from normpass.decomps.registry import decompositions
from normpass.decomps.shapes import bind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._ops import OpOverload

OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
TIGHT = {"rtol": 1e-9, "atol": 1e-11}
# Rules whose primitives the vmap of torch.autograd, an old one, has no rule for (torch 2.13).
NOT_IN_BATCHES = ("block_diag_jvp",)


def results(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def same(found: Any, expected: Any, **tolerance: float) -> None:
    """Equal but for rounding, None where None is."""
    pairs = itertools.zip_longest(*(tree_leaves(results(v)) for v in (found, expected)))
    for a, b in pairs:
        assert (a is None) == (b is None), f"{a}, not {b}"
        if a is not None:
            assert_close(a, b, equal_nan=True, **(tolerance or TIGHT))


def meta(value: Any) -> list[Any]:
    return [
        None if v is None else (tuple(v.shape), v.dtype, v.stride())
        for v in tree_leaves(results(value))
    ]


# --- shapes, traces, fake tensors, operators ----------------------------------------------------


def check_shapes(given: Sample) -> None:
    """The results have the shapes that the record says, of the sizes that the arguments have."""
    shapes, sizes = shapes_of(given.rule), dict[str, Any]()
    found = dict(zip(shapes.results, results(whole(given)), strict=True))
    for name, value in [*given.given.items(), *found.items()]:
        axes = {**shapes.arguments, **shapes.results}.get(name)
        nothing = name in found and made.in_evaluation(given) and value.numel() == 0
        if axes is None or nothing:
            continue
        for tensor in tensors_in(value)[:1]:
            bound = bind(axes, tensor.shape, given.ranks)
            wrong = {k: (v, sizes[k]) for k, v in bound.items() if sizes.get(k, v) != v}
            assert not wrong, f"{name} is {tuple(tensor.shape)}: {wrong} in {given.rule.shapes}"
            sizes.update(bound)


def whole(given: Sample) -> Any:
    """What the rule returns: a list of tensors is one result. Of a batching rule the operator."""
    if given.rule.kind == "batching":
        return replaced(given.rule.op)(*given.given.values())  # type: ignore[arg-type]
    value = given()
    return [value] if isinstance(value, list) else value


def check_trace(first: Sample, second: Sample) -> None:
    """Traced symbolically at one set of sizes it runs at another, and no size is specialized."""

    def run(*tensors: Tensor) -> Any:
        return first.rule(*first.resized(tensors).values())

    traced = make_fx(run, tracing_mode="symbolic")(*first.tensors)
    assert specialized(traced) <= {made.SIZES[0]["k"]}, "the number of groups is a literal"
    for given in (first, second):
        same(traced(*given.tensors), given())


def specialized(traced: torch.fx.GraphModule) -> set[Any]:
    """The sizes that a trace has replaced by numbers."""
    for node in traced.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            known = value.fake_mode.shape_env.replacements.values()  # type: ignore[attr-defined]
            return {int(v) for v in known if v.is_number}
    return set()


def check_fake(given: Sample) -> None:
    """Fake tensors tell shape, dtype and strides of what comes out."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = tree_map_only(torch.Tensor, mode.from_tensor, given.given)
    with mode:
        found = given.rule(*fake.values())
    assert meta(found) == meta(given())


def check_operator(given: Sample) -> None:
    """torch.library.opcheck of a formula's operator, without and with a gradient asked for."""
    assert given.rule.op is not None
    # Its SchemaCheckMode has no lists of lists or of dtypes (torch 2.13: "Unable to cast Python
    # instance").
    lists = [value for value in given.given.values() if isinstance(value, list | tuple)]
    unknown = any(isinstance(v, list | tuple | torch.dtype) for value in lists for v in value)
    utils = tuple(u for u in OPCHECKS if u != "test_schema" or not unknown)
    asked = [v.clone().requires_grad_() for v in given.numbers]
    for arguments in (given.given, given.on(asked)):
        opcheck(given.rule.op, *_call(given.rule.op, arguments), test_utils=utils)


def opcheck(op: OpOverload, *call: Any, **options: Any) -> None:
    """torch.library.opcheck without a warning that is none of the operator's."""
    with warnings.catch_warnings():
        # torch 2.15 hands its clones to AOTAutograd, which looks for a gradient of what is no leaf
        # and hides the warning, but not from a filter that raises.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        torch.library.opcheck(op, *call, **options)


def _call(op: OpOverload, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position and by keyword, as the schema has them."""
    keywords = {a.name for a in op._schema.arguments if a.kwarg_only}
    return (
        tuple(v for k, v in given.items() if k not in keywords),
        {k: v for k, v in given.items() if k in keywords},
    )


def check_compiled(given: Sample) -> None:
    """torch.compile(fullgraph=True) of it agrees: of the operator that a formula or a decomposition
    is for, resolved by the table, and of an elementwise rule itself.
    """
    rule, targets = given.rule, list[Any]()

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler, decompositions=decompositions())
    args, kwargs = _call(rule.op, given.given)  # type: ignore[arg-type]
    function: Any = rule.function if made.elementwise(rule) else rule.op

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    found = torch.compile(call, fullgraph=True, backend=backend)(*args, **kwargs)
    same(found, given())
    assert targets
    if not made.elementwise(rule):
        assert rule.op not in targets, "the table resolves it"


# --- derivatives of the rule itself -------------------------------------------------------------


def _of_numbers(given: Sample) -> Callable[..., tuple[Tensor, ...]]:
    """The tensors of its results, in which each of its numbers has a part."""

    def function(*numbers: Tensor) -> tuple[Tensor, ...]:
        nothing = 0 * sum(v.sum() for v in numbers)
        return tuple(v + nothing for v in tensors_in(given(*numbers)))

    return function


def _leaves(given: Sample) -> list[Tensor]:
    return [v.detach().clone().requires_grad_() for v in given.numbers]


def check_derivatives(given: Sample) -> None:
    """gradcheck and gradgradcheck of the rule in all of its tensors, by finite differences, in
    reverse and forward mode and in batches of both.
    """
    batched = given.rule.name not in NOT_IN_BATCHES
    assert gradcheck(
        _of_numbers(given),
        _leaves(given),
        check_forward_ad=True,
        check_batched_grad=batched,
        check_batched_forward_grad=batched,
        fast_mode=True,
    )
    assert gradgradcheck(_of_numbers(given), _leaves(given), fast_mode=True)


def check_orders(given: Sample, orders: int = 4) -> None:
    """Derivatives along a direction, of each order, against differences of the order before."""
    start = [v.detach() for v in given.numbers]
    steps = [torch.randn_like(v) / 4 for v in start]
    weights = [torch.randn_like(v) for v in tensors_in(given())]

    def along(t: Tensor) -> Tensor:
        found = tensors_in(given(*(v + t * s for v, s in zip(start, steps, strict=True))))
        total = sum((v * w).sum().real for v, w in zip(found, weights, strict=True))
        return total + 0 * t

    function: Callable[[Tensor], Tensor] = along
    for _ in range(orders):
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        assert gradcheck(function, t, rtol=1e-4, atol=1e-5)
        function = _derivative(function)


def _derivative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def derivative(t: Tensor) -> Tensor:
        t = t if t.requires_grad else t.requires_grad_()
        (d,) = torch.autograd.grad(function(t), t, create_graph=True)
        return d + 0 * t

    return derivative


def check_vmap(first: Sample, second: Sample, dim: int) -> None:
    """Over all of its tensors, batched along this axis, it is a loop over the two examples."""
    each = [tensors_in(one.given) for one in (first, second)]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        left = iter(tensors)
        given = tree_map_only(torch.Tensor, lambda _: next(left), first.given)
        return tuple(tensors_in(replace(first, given=given)()))

    found = torch.vmap(call, dim)(*(torch.stack(pair, dim) for pair in zip(*each, strict=True)))
    for f, *pair in zip(found, *(call(*tensors) for tensors in each), strict=True):
        same(f, torch.stack(pair))


def check_half(given: Sample, dtype: torch.dtype) -> None:
    """In half precision the result is in it, and float64's of what was given, rounded once."""

    def in_precision(of: torch.dtype, values: dict[str, Any]) -> Sample:
        def cast(v: Any) -> Any:
            known = v in (torch.float64, dtype) if isinstance(v, torch.dtype) else False
            return v.to(of) if is_number(v) else of if known else v

        return replace(given, given=tree_map(cast, values))

    half = in_precision(dtype, given.given)
    pairs = zip(*map(tensors_in, (half(), in_precision(torch.float64, half.given)())), strict=True)
    for found, expected in pairs:
        assert found.dtype == dtype, f"{found.dtype}, not {dtype}"
        atol = _rounding(expected, dtype)
        assert_close(found.double(), expected, rtol=0, atol=atol, equal_nan=True)


def _rounding(value: Tensor, dtype: torch.dtype) -> float:
    largest = value.abs().max().item() if value.numel() else 0.0
    return torch.finfo(dtype).eps * max(largest, 1.0)


def check_linear(given: Sample) -> None:
    """In each gradient or tangent a formula is affine, with None for zero; without any it is zero.

    That is linear in all of them together, or in each.
    """
    for name in given.rule.linear:
        g = given.given[name]
        once, none = given(), given.changed(**{name: _none(g)})()
        twice = given.changed(**{name: tree_map_only(torch.Tensor, lambda v: 2 * v, g)})()
        leaves = (tree_leaves(results(v)) for v in (twice, once, none))
        for a, b, zero in zip(*leaves, strict=True):
            if b is not None:
                same(a - b, b if zero is None else b - zero)
    nothing = given.changed(**{name: _none(given.given[name]) for name in given.rule.linear})
    for v in tensors_in(nothing()):
        assert not v.any(), f"without {', '.join(given.rule.linear)} there is nothing"


def _none(value: Any) -> Any:
    return [None] * len(value) if isinstance(value, list) else None
