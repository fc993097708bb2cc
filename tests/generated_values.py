"""What rules compute, against PyTorch and finite differences: checks made from a record and samples
of it (tests/samples.py).
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import oracles
import pytest
import row_samples
import samples as made
import torch
from generated import results, same, whole
from samples import Sample, named, shapes_of
from stand_ins import replaced
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map_only

from normpass.decomps.activation import registered
from normpass.decomps.batching import by_position
from normpass.decomps.buffers import RUNNING_STATISTICS_NOT_BATCHED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

# --- against what it is the derivative of -------------------------------------------------------


def _mask(given: Sample) -> list[bool] | None:
    """Which results are asked for, where an argument says so."""
    lists = [v for v in given.given.values() if isinstance(v, list) and v]
    return next((v for v in lists if all(isinstance(x, bool) for x in v)), None)


def check_derivative_of(given: Sample) -> None:
    """A formula against autograd of the function that the record names, and against finite
    differences of it: `of` with this backward, or this forward mode.
    """
    if isinstance(given.rule.of, str):
        row_samples.check(given.rule, given.operands)
        return
    if given.rule.kind == "jvp":
        primals, tangents = _tangents(given)
        here = given.changed(**tangents)
        function = _in(given, primals)
        _, expected = torch.func.jvp(function, tuple(primals.values()), tuple(tangents.values()))
        found = [
            torch.zeros_like(e) if f is None else f  # a tangent that is not there is zero
            for f, e in zip(*map(results, (here(), expected)), strict=True)
        ]
        same(found, results(expected))
        _check_differences(function, tuple(primals.values()), tuple(tangents.values()), found)
        return
    primals = _primals(given)
    function = _in(given, primals)
    y, pull = torch.func.vjp(function, *primals.values())
    cotangents = tree_map_only(torch.Tensor, torch.randn_like, y)
    names = [name for name in given.rule.linear if name not in _arguments_of(given)]
    grads = [cotangents] if len(names) == 1 else list(cotangents)
    grads = [list(g) if isinstance(g, tuple) else g for g in grads]
    here = given.changed(**dict(zip(names, grads, strict=True)))
    found, expected = results(whole(here)), pull(cotangents)
    wanted = _mask(here) or [True] * len(expected)
    same(found, [e if w else None for e, w in zip(expected, wanted, strict=True)])
    steps = tuple(
        tree_map_only(torch.Tensor, torch.randn_like if w else torch.zeros_like, p)
        for p, w in zip(primals.values(), wanted, strict=True)
    )
    pairing = sum(
        (g.conj() * s).sum().real
        for g, s in zip(tree_leaves(found), tree_leaves(steps), strict=True)
        if g is not None
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
    for a, b, value in zip(*map(tree_leaves, (*ends, expected)), strict=True):
        assert_close((a - b) / (2 * h), value, rtol=1e-6, atol=1e-7)


def _arguments_of(given: Sample) -> list[str]:
    return list(made.wanted(given.rule.of, {**given.given, **given.extra}).values())


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


# --- backwards ----------------------------------------------------------------------------------


def check_backward(given: Sample) -> None:
    """The derivative of a backward operator, f(grads, *args), against finite differences of the
    operator, in which the saved statistics are those of the input.
    """
    rule, shapes = given.rule, shapes_of(given.rule)
    backward = replaced(rule.op)  # type: ignore[arg-type]
    masked = backward(*given.given.values())
    grads = [None if v is None else torch.randn_like(v) for v in masked]
    found = rule(grads, *given.given.values())
    assert {f"d{name}": shapes.arguments[name] for name in found} == shapes.results
    wanted = [name for name in found if given.given[name] is not None]
    primals = tuple(given.given[name] for name in wanted)
    steps = tuple(torch.randn_like(v) for v in primals)

    def paired(*values: Tensor) -> Tensor:
        moved = {**given.given, **dict(zip(wanted, values, strict=True))}
        moved.update(named(rule.sample, moved))  # type: ignore[arg-type]
        pairs = zip(grads, backward(*moved.values()), strict=True)
        return sum((g * v).sum() for g, v in pairs if g is not None)  # type: ignore[return-value]

    expected = torch.zeros((), dtype=torch.float64)
    for name, primal, step in zip(wanted, primals, steps, strict=True):
        if found[name] is not None:  # else it is zero
            assert found[name].shape == primal.shape
            expected = expected + (found[name] * step).sum()
    _check_differences(paired, primals, steps, expected)


# --- decompositions and compositions --------------------------------------------------------------


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
        if made.is_number(a):
            oracles.assert_no_less_accurate(a, b, c, given.label)


def check_compiled_tangent(given: Sample) -> None:
    """While the rules are registered, a compiled jvp of the operator is that of its composition.

    Results that are constants to autograd have none: their tangents are zero.
    """
    rule, written = given.rule, made.written(given.rule)
    names = [k for k, v in given.given.items() if made.is_number(v) and k not in written]
    tangents = [torch.randn_like(v) for v in given.numbers]

    def tangent(function: Any) -> Any:
        def along(*numbers: Tensor) -> Any:
            def of(*moved: Tensor) -> Any:
                return function(*{**given.given, **dict(zip(names, moved, strict=True))}.values())

            return torch.func.jvp(of, numbers, tuple(tangents))[1]

        return along

    expected = tree_leaves(tangent(rule.function)(*given.numbers))
    for number in rule.constants:
        expected[number] = torch.zeros_like(expected[number])
    with registered():
        compiled = torch.compile(tangent(rule.op), fullgraph=True, backend="aot_eager")
        same(compiled(*given.numbers), expected)


# --- batching -----------------------------------------------------------------------------------

EXAMPLES = 3


def check_batched(given: Sample, dims: Sequence[int | None]) -> None:
    """A batching rule against a loop of the operator over examples. dims: of each tensor.

    Where examples would write to a tensor that they share there is no loop, but upstream's error.
    """
    rule, left = given.rule, iter(dims)
    assert rule.op is not None
    in_dims = [next(left) if isinstance(v, torch.Tensor) else None for v in given.given.values()]
    args = [
        v if d is None else _several(v).movedim(0, d)
        for v, d in zip(given.given.values(), in_dims, strict=True)
    ]
    info = SimpleNamespace(batch_size=EXAMPLES, randomness="error")
    if _is_written_by_several(given, in_dims):
        with pytest.raises(RuntimeError, match=re.escape(RUNNING_STATISTICS_NOT_BATCHED)):
            rule(info, tuple(in_dims), *args)
        return
    outs, out_dims = rule(info, tuple(in_dims), *args)
    found = [
        o if o is None else o.expand(EXAMPLES, *o.shape) if d is None else o.movedim(d, 0)
        for o, d in zip(results(outs), results(out_dims), strict=True)
    ]
    rows = [
        results(
            replaced(rule.op)(
                *(
                    v if d is None else v.select(d, i).contiguous()
                    for v, d in zip(args, in_dims, strict=True)
                )
            )
        )
        for i in range(EXAMPLES)
    ]
    same(found, [None if r[0] is None else torch.stack(r) for r in zip(*rows, strict=True)])


def _is_written_by_several(given: Sample, in_dims: Sequence[int | None]) -> bool:
    """Whether batched inputs are averaged into running statistics that are not batched."""
    batched = {name for name, d in zip(given.given, in_dims, strict=True) if d is not None}
    averaged = not made.in_evaluation(given) and made.written(given.rule)
    return bool(averaged) and "input" in batched and not averaged <= batched


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
    function = by_position(op)
    rows = [
        results(replaced(op)(*(v[i] if d == 0 else v for v, d in zip(args, in_dims, strict=True))))
        for i in range(EXAMPLES)
    ]
    with registered():
        found = torch.compile(
            lambda *a: torch.vmap(function, in_dims)(*a),
            fullgraph=True,
            backend="aot_eager",
        )(*args)
    same(found, [torch.stack(r) for r in zip(*rows, strict=True)])
