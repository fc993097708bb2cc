"""What every rule owes, whatever it computes: checks that need no more than a record and samples of
it (tests/samples.py).

Each raises AssertionError, or the error of gradcheck or opcheck, where the rule is wrong.
"""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import oracles
import samples as made
import torch
from samples import Sample, named, shapes_of, tensors_in
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map_only

from normpass.decomps.activate import registered
from normpass.decomps.registry import decompositions
from normpass.decomps.shapes import bind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch._ops import OpOverload

OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


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
    found = dict(zip(shapes.results, results(_whole(given)), strict=True))
    for name, value in [*given.given.items(), *found.items()]:
        axes = {**shapes.arguments, **shapes.results}.get(name)
        # In eval mode the CPU's batch norm saves nothing.
        nothing = name in found and given.given.get("training") is False and value.numel() == 0
        if axes is None or nothing:
            continue
        for tensor in tensors_in(value)[:1]:
            bound = bind(axes, tensor.shape, given.ranks)
            wrong = {k: (v, sizes[k]) for k, v in bound.items() if sizes.get(k, v) != v}
            assert not wrong, f"{name} is {tuple(tensor.shape)}: {wrong} in {given.rule.shapes}"
            sizes.update(bound)


def _whole(given: Sample) -> Any:
    """What the rule returns: a list of tensors is one result."""
    if given.rule.kind == "batching":
        return given.rule.op(*given.given.values())  # type: ignore[misc]
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
    # Its SchemaCheckMode has no lists of lists (torch 2.13: "Unable to cast Python instance").
    nested = any("List[List" in str(a.type) for a in given.rule.op._schema.arguments)
    utils = tuple(u for u in OPCHECKS if u != "test_schema" or not nested)
    asked = [v.clone().requires_grad_() for v in given.numbers]
    for arguments in (given.given, given.on(asked)):
        torch.library.opcheck(given.rule.op, *_call(given.rule.op, arguments), test_utils=utils)


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


def check_compiled_tangent(given: Sample) -> None:
    """While the rules are registered, a compiled jvp of the operator is that of its composition."""
    rule = given.rule
    tangents = [torch.randn_like(v) for v in given.numbers]

    def tangent(function: Any) -> Any:
        def along(*numbers: Tensor) -> Any:
            def of(*moved: Tensor) -> Any:
                left = iter(moved)
                return function(
                    *(next(left) if made.is_number(v) else v for v in given.given.values())
                )

            return torch.func.jvp(of, numbers, tuple(tangents))[1]

        return along

    expected = tangent(rule.function)(*given.numbers)
    with registered():
        compiled = torch.compile(tangent(rule.op), fullgraph=True, backend="aot_eager")
        same(compiled(*given.numbers), expected)


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
    reverse and forward mode.
    """
    assert gradcheck(_of_numbers(given), _leaves(given), check_forward_ad=True, fast_mode=True)
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


# --- against what it is the derivative of -------------------------------------------------------


def check_derivative_of(given: Sample) -> None:
    """A formula against autograd of the function that the record names, and against finite
    differences of it: `of` with this backward, or this forward mode.
    """
    if given.rule.kind == "jvp":
        primals, tangents = _tangents(given)
        here = given.changed(**tangents)
        function = _in(given, primals)
        _, expected = torch.func.jvp(function, tuple(primals.values()), tuple(tangents.values()))
        same(here(), expected)
        _check_differences(function, tuple(primals.values()), tuple(tangents.values()), here())
        return
    primals = _primals(given)
    function = _in(given, primals)
    y, pull = torch.func.vjp(function, *primals.values())
    cotangents = tree_map_only(torch.Tensor, torch.randn_like, y)
    names = [name for name in given.rule.linear if name not in _arguments_of(given)]
    grads = [cotangents] if len(names) == 1 else list(cotangents)
    grads = [list(g) if isinstance(g, tuple) else g for g in grads]
    here = given.changed(**dict(zip(names, grads, strict=True)))
    found, expected = results(_whole(here)), pull(cotangents)
    same(found, expected)
    steps = tuple(tree_map_only(torch.Tensor, torch.randn_like, p) for p in primals.values())
    pairing = sum(
        (g.conj() * s).sum().real
        for g, s in zip(tree_leaves(found), tree_leaves(steps), strict=True)
    )

    def paired(*given: Any) -> Tensor:
        leaves = zip(*map(tree_leaves, (cotangents, function(*given))), strict=True)
        return sum((g.conj() * v).sum().real for g, v in leaves)  # type: ignore[return-value]

    _check_differences(paired, tuple(primals.values()), steps, pairing)


def _check_differences(
    function: Callable[..., Any], at: tuple[Any, ...], steps: tuple[Any, ...], expected: Any
) -> None:
    """The derivative along steps against central differences."""
    h = 1e-5
    ends = []
    for sign in (1, -1):
        moved = [
            [p + sign * h * s for p, s in zip(tree_leaves(a), tree_leaves(b), strict=True)]
            for a, b in zip(at, steps, strict=True)
        ]
        ends.append(
            function(*(m if isinstance(a, list) else m[0] for m, a in zip(moved, at, strict=True)))
        )
    assert_close((ends[0] - ends[1]) / (2 * h), expected, rtol=1e-6, atol=1e-7)


def _arguments_of(given: Sample) -> list[str]:
    return list(inspect.signature(given.rule.of).parameters)  # type: ignore[arg-type]


def _in(given: Sample, primals: dict[str, Any]) -> Callable[..., Any]:
    """`of` as a function of these of its arguments."""
    known = {**given.given, **given.extra}

    def function(*values: Any) -> Any:
        changed = dict(zip(primals, values, strict=True))
        return named(given.rule.of, {**known, **changed})  # type: ignore[arg-type]

    return function


def _primals(given: Sample) -> dict[str, Any]:
    """The arguments of `of` whose gradients the results are: "dx" or "gx" is that of x."""
    known = {**given.given, **given.extra}
    return {name[1:]: known[name[1:]] for name in shapes_of(given.rule).results}


def _tangents(given: Sample) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors that `of` takes, and their tangents: x_t is that of x_p, dx that of x."""
    known = {**given.given, **given.extra}
    primals, tangents = {}, {}
    for name in _arguments_of(given):
        tangent = next(
            (t for t in (f"d{name}", f"{name.removesuffix('_p')}_t") if t in given.rule.linear),
            None,
        )
        if tangent is not None:
            primals[name] = known[name]
            tangents[tangent] = torch.randn_like(known[name])
    return primals, tangents


# --- decompositions -----------------------------------------------------------------------------


def replaced(op: OpOverload) -> Callable[..., Any]:
    """The operator; torch's decomposition of it where the CPU has no kernel."""
    from torch._decomp import decomposition_table

    keys = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys):
        return op
    return decomposition_table[op]


def check_replaces(given: Sample) -> None:
    """The results are those of the operator, no further from float64 than its own."""
    assert given.rule.op is not None
    op = replaced(given.rule.op)
    exact = tree_map_only(
        torch.Tensor, lambda v: v.double() if made.is_number(v) else v, given.given
    )
    ours, theirs, reference = given(), op(*given.given.values()), op(*exact.values())
    for a, b, c in zip(*map(results, (ours, theirs, reference)), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype, f"{a.dtype}, not {b.dtype}"
            oracles.assert_no_less_accurate(a, b, c, given.label)


# --- batching -----------------------------------------------------------------------------------

EXAMPLES = 3


def check_batched(given: Sample, dims: Sequence[int | None]) -> None:
    """A batching rule against a loop of the operator over examples. dims: of each tensor."""
    rule, left = given.rule, iter(dims)
    assert rule.op is not None
    in_dims = [next(left) if isinstance(v, torch.Tensor) else None for v in given.given.values()]
    args = [
        v if d is None else _several(v).movedim(0, d)
        for v, d in zip(given.given.values(), in_dims, strict=True)
    ]
    info = SimpleNamespace(batch_size=EXAMPLES, randomness="error")
    outs, out_dims = rule(info, tuple(in_dims), *args)
    found = [
        o if o is None else o.expand(EXAMPLES, *o.shape) if d is None else o.movedim(d, 0)
        for o, d in zip(results(outs), results(out_dims), strict=True)
    ]
    rows = [
        results(
            rule.op(
                *(
                    v if d is None else v.select(d, i).contiguous()
                    for v, d in zip(args, in_dims, strict=True)
                )
            )
        )
        for i in range(EXAMPLES)
    ]
    same(found, [None if r[0] is None else torch.stack(r) for r in zip(*rows, strict=True)])


def _several(v: Tensor) -> Tensor:
    """Examples that differ, with v among them; what is positive stays so."""
    return torch.stack([v * (1 + i / 4) for i in range(EXAMPLES)])


def batchings(given: Sample) -> list[tuple[int | None, ...]]:
    """Every tensor first, last; each alone, and all but each; the two ways in turn."""
    count = len([v for v in given.given.values() if isinstance(v, torch.Tensor)])
    chosen: list[tuple[int | None, ...]] = [(0,) * count, (-1,) * count]
    for i in range(count):
        chosen.append(tuple(-1 if j == i else None for j in range(count)))
        chosen.append(tuple(None if j == i else -(j % 2) for j in range(count)))
    return chosen


def check_vmap_compiled(given: Sample) -> None:
    """While the rules are registered, a compiled vmap of the operator asks the rule."""
    args = [_several(v) if isinstance(v, torch.Tensor) else v for v in given.given.values()]
    in_dims = tuple(0 if isinstance(v, torch.Tensor) else None for v in args)
    op: Any = given.rule.op
    rows = [
        results(op(*(v[i] if d == 0 else v for v, d in zip(args, in_dims, strict=True))))
        for i in range(EXAMPLES)
    ]
    with registered():
        found = torch.compile(
            lambda *a: torch.vmap(op, in_dims)(*a), fullgraph=True, backend="aot_eager"
        )(*args)
    same(found, [torch.stack(r) for r in zip(*rows, strict=True)])
