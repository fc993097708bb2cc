"""The batching rules of the norms against a loop of the operator over the examples."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from normpass.decomps.registry import batch_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

aten = torch.ops.aten

V, N, C, S, K = 3, 4, 6, 5, 2
INFO = SimpleNamespace(batch_size=V, randomness="error")
SIZES = {"x": (N, C, S), "d": (C, S), "c": (C,), "n1": (N, 1, 1), "group": (N, K)}

# Of each case: the operator, what its arguments are (the name of a size is a tensor, "c+" one of
# positive numbers), and which of the tensors may be None.
CASES: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]] = {
    "layer_norm": (aten.native_layer_norm.default, ("x", [C, S], "d", "d", 0.25), (2, 3)),
    "layer_norm_backward": (
        aten.native_layer_norm_backward.default,
        ("x", "x", [C, S], "n1", "n1+", "d", "d", [True, True, True]),
        (),
    ),
    "group_norm": (
        aten.native_group_norm.default,
        ("x", "c", "c", N, C, S, K, 0.25),
        (1, 2),
    ),
    "group_norm_backward": (
        aten.native_group_norm_backward.default,
        ("x", "x", "group", "group+", "c", N, C, S, K, [True, True, True]),
        (),
    ),
    "batch_norm_train": (
        aten.native_batch_norm.default,
        ("x", "c", "c", None, None, True, 0.3, 0.25),
        (1, 2),
    ),
    "batch_norm_eval": (
        aten.native_batch_norm.default,
        ("x", "c", "c", "c", "c+", False, 0.3, 0.25),
        (1, 2),
    ),
    "batch_norm_legit": (
        aten._native_batch_norm_legit.default,
        ("x", "c", "c", "c", "c+", False, 0.3, 0.25),
        (1, 2),
    ),
    "batch_norm_legit_without_statistics": (
        aten._native_batch_norm_legit.no_stats,
        ("x", "c", "c", True, 0.3, 0.25),
        (1, 2),
    ),
    "batch_norm_legit_no_training": (
        aten._native_batch_norm_legit_no_training.default,
        ("x", "c", "c", "c", "c+", 0.3, 0.25),
        (1, 2),
    ),
    "batch_norm_backward_train": (
        aten.native_batch_norm_backward.default,
        ("x", "x", "c", None, None, "c", "c+", True, 0.25, [True, True, True]),
        (2,),
    ),
    "batch_norm_backward_eval": (
        aten.native_batch_norm_backward.default,
        ("x", "x", "c", "c", "c+", None, None, False, 0.25, [True, True, True]),
        (2,),
    ),
}


def tensor(kind: str, dim: int | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor of this kind: v lies first in memory, and last where dim is -1."""
    sizes = SIZES[kind.rstrip("+")]
    value = torch.randn(sizes if dim is None else (V, *sizes), dtype=dtype)
    value = value.abs() + 0.5 if kind.endswith("+") else value
    value = value if dim is None else value.movedim(0, dim)
    return value.contiguous() if dim == -1 else value


def arguments(
    case: Sequence[Any], dims: Sequence[int | None], dtype: torch.dtype = torch.float64
) -> tuple[list[Any], list[Any]]:
    """Arguments and in_dims: `dims` are those of the tensors in turn."""
    left = iter(dims)
    in_dims = [next(left) if isinstance(kind, str) else None for kind in case]
    pairs = zip(case, in_dims, strict=True)
    args = [tensor(k, dim, dtype) if isinstance(k, str) else k for k, dim in pairs]
    return args, in_dims


def example(value: Any, dim: int | None, i: int) -> Any:
    # The operators' own kernels want contiguous examples.
    return value if dim is None else value.select(dim, i).contiguous()


def loop(op: Any, args: Sequence[Any], in_dims: Sequence[Any]) -> list[Tensor | None]:
    """What the operator gives for the examples one by one, stacked along v."""
    rows = [op(*(example(a, d, i) for a, d in zip(args, in_dims, strict=True))) for i in range(V)]
    return [None if r[0] is None else torch.stack(r) for r in zip(*rows, strict=True)]


def stacked(outs: Sequence[Any], out_dims: Sequence[int | None]) -> list[Tensor | None]:
    return [
        o if o is None else o.expand(V, *o.shape) if d is None else o.movedim(d, 0)
        for o, d in zip(outs, out_dims, strict=True)
    ]


def assert_same(actual: Sequence[Any], expected: Sequence[Any], **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-11}
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, **tolerance)


def check(op: Any, args: list[Any], in_dims: list[Any], **tolerance: float) -> None:
    outs, out_dims = batch_rule(op)(INFO, tuple(in_dims), *args)
    assert_same(stacked(outs, out_dims), loop(op, args, in_dims), **tolerance)


def tensors_of(case: Sequence[Any]) -> int:
    return sum(isinstance(kind, str) for kind in case)


def every_batching(name: str) -> list[tuple[int | None, ...]]:
    """Each tensor batched nowhere, first or last; of many tensors each one and each pair."""
    count = tensors_of(CASES[name][1])
    if count <= 3:
        return list(itertools.product((None, 0, -1), repeat=count))
    apart: list[tuple[int | None, ...]] = [
        (None,) * count,
        (0,) * count,
        (-1,) * count,
        (1,) * count,
    ]
    for i, j in itertools.combinations_with_replacement(range(count), 2):
        for a, b in ((0, -1), (-1, 0), (1, 1)):
            apart.append(tuple(a if k == i else b if k == j else None for k in range(count)))
            apart.append(tuple(None if k in (i, j) else (a, b)[k % 2] for k in range(count)))
    return list(dict.fromkeys(apart))


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_the_loop_over_examples_wherever_each_argument_is_batched(name: str) -> None:
    op, case, _ = CASES[name]
    for dims in every_batching(name):
        check(op, *arguments(case, dims))


@pytest.mark.parametrize("name", CASES)
def test_every_none_is_none(name: str) -> None:
    op, case, optional = CASES[name]
    for size in range(1, len(optional) + 1):
        for gone in itertools.combinations(optional, size):
            left = [None if i in gone else kind for i, kind in enumerate(case)]
            for dim in (0, 1, -1):
                check(op, *arguments(left, (dim,) * tensors_of(left)))
                check(op, *arguments(left, (dim, *(None,) * (tensors_of(left) - 1))))


@pytest.mark.parametrize("name", [name for name in CASES if "backward" in name])
@pytest.mark.parametrize("mask", list(itertools.product((False, True), repeat=3)))
def test_every_mask_leaves_out_what_it_says(name: str, mask: tuple[bool, ...]) -> None:
    op, case, _ = CASES[name]
    args, in_dims = arguments([*case[:-1], [True] * 3], (-1,) * tensors_of(case))
    args[-1] = list(mask)
    outs, out_dims = batch_rule(op)(INFO, in_dims, *args)
    args[-1] = [True] * 3
    full = loop(op, args, in_dims)
    expected = [e if wanted else None for e, wanted in zip(full, mask, strict=True)]
    assert_same(stacked(outs, out_dims), expected)


@pytest.mark.parametrize("name", ["layer_norm_backward", "group_norm_backward"])
def test_a_backward_without_weight_has_the_other_gradients(name: str) -> None:
    op, case, _ = CASES[name]
    left = list(case)
    mask = [True, False, name == "group_norm_backward"]
    for i in (5, 6) if name == "layer_norm_backward" else (4,):
        left[i] = None
    args, in_dims = arguments([*left[:-1], mask], (1,) * tensors_of(left))
    outs, out_dims = batch_rule(op)(INFO, in_dims, *args)
    ones = list(args)
    for i in (5, 6) if name == "layer_norm_backward" else (4,):
        ones[i] = torch.ones(SIZES[case[i]], dtype=torch.float64)
    expected = loop(op, ones, in_dims)
    wanted = [e if m else None for e, m in zip(expected, mask, strict=True)]
    assert_same(stacked(outs, out_dims), wanted)


# --- messages -----------------------------------------------------------------------------------


def message(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(RuntimeError) as error:
        function(*args)
    return str(error.value).partition("\nException raised from")[0]


@pytest.mark.parametrize("batched_at", [0, -1])
def test_a_weight_of_another_shape_is_upstreams_error(batched_at: int) -> None:
    x, w = torch.randn(V, N, C), torch.randn(V, S).movedim(0, batched_at)
    in_dims = (0, None, batched_at, None, None)
    args = (x, [C], w, None, 0.25)
    ours = message(batch_rule(aten.native_layer_norm), INFO, in_dims, *args)
    assert ours == message(torch.vmap(aten.native_layer_norm.default, in_dims), *args)
    # Upstream says "weight" of a bias as well.
    args, in_dims = (x, [C], None, w, 0.25), (0, None, None, batched_at, None)
    assert message(batch_rule(aten.native_layer_norm), INFO, in_dims, *args) == ours.replace(
        "weight", "bias"
    )


def test_a_layer_norm_does_not_reach_into_the_batch_axis() -> None:
    x = torch.randn(V, C)
    ours = message(
        batch_rule(aten.native_layer_norm),
        INFO,
        (0, None, None, None, None),
        x,
        [V, C],
        None,
        None,
        0.25,
    )
    assert ours == message(aten.native_layer_norm.default, x[0], [V, C], None, None, 0.25)


@pytest.mark.parametrize("groups", [0, 4])
def test_wrong_numbers_of_groups_are_the_operators_error(groups: int) -> None:
    x = torch.randn(N, C, V, S)
    rest = (None, None, N, C, S, groups, 0.25)
    ours = message(batch_rule(aten.native_group_norm), INFO, (2, *(None,) * 7), x, *rest)
    assert ours == message(aten.native_group_norm.default, x[:, :, 0], *rest)


def test_a_batch_norm_of_nothing_is_the_operators_error() -> None:
    x = torch.randn(V, 0, C, S)
    rest = (None, None, None, None, True, 0.3, 0.25)
    ours = message(batch_rule(aten.native_batch_norm), INFO, (0, *(None,) * 7), x, *rest)
    assert ours == message(aten.native_batch_norm.default, x[0], *rest)


def test_what_eval_needs_is_said() -> None:
    rule = batch_rule(aten.native_batch_norm)
    args, in_dims = arguments(("x", None, None, None, None, False, 0.3, 0.25), (0,))
    assert message(rule, INFO, in_dims, *args) == "running_mean must be defined in evaluation mode"
    args, in_dims = arguments(CASES["batch_norm_backward_eval"][1], (0,) * 5)
    args[4] = in_dims[4] = None
    assert "needs running_mean and running_var" in message(
        batch_rule(aten.native_batch_norm_backward), INFO, in_dims, *args
    )


# --- dtypes, graphs, vmap -----------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True], ids=["half", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_halves_have_eagers_dtypes_and_are_no_less_accurate(
    name: str, dtype: torch.dtype, wide: bool
) -> None:
    op, case, _ = CASES[name]
    dims = (1,) * tensors_of(case)
    args, in_dims = arguments(case, dims, torch.float32)
    for i, kind in enumerate(case):
        if kind == "x" or (isinstance(kind, str) and not wide):
            args[i] = args[i].to(dtype)
    theirs = loop(op, args, in_dims)
    double = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    outs, out_dims = batch_rule(op)(INFO, in_dims, *args)
    for ours, eager, exact in zip(
        stacked(outs, out_dims), theirs, loop(op, double, in_dims), strict=True
    ):
        assert ours is not None
        assert eager is not None
        assert exact is not None
        assert ours.dtype == eager.dtype
        if exact.numel():
            scale = torch.finfo(ours.dtype).eps * exact.abs().max()
            assert (ours - exact).abs().max() <= (eager - exact).abs().max() + 2 * scale


COPIES = {"clone", "_to_copy", "contiguous", "ones", "zeros", "ones_like", "zeros_like", "expand"}
COPIES |= {"new_ones", "new_zeros", "full", "full_like", "_unsafe_view", "repeat", "cat", "stack"}


def graph(op: Any, args: list[Any], in_dims: list[Any], mode: Any) -> torch.fx.GraphModule:
    """The rule as a graph of its tensors."""
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    x = next(i for i in places if args[i].dim() == 4)

    def function(*tensors: Tensor) -> list[Tensor]:
        given = list(args)
        for i, value in zip(places, tensors, strict=True):
            given[i] = value
        batch, sizes = given[x].shape[in_dims[x]], list(given[x].shape)
        del sizes[in_dims[x]]
        for i, value in enumerate(args):  # what an argument says of sizes has to be symbolic too
            if value == [C, S]:
                given[i] = sizes[1:]
        if "group_norm" in str(op):
            at = next(i for i, a in enumerate(args) if isinstance(a, int))
            given[at : at + 3] = sizes
        info = SimpleNamespace(batch_size=batch, randomness="error")
        outs, _ = batch_rule(op)(info, in_dims, *given)
        return [out for out in outs if out is not None]

    return make_fx(function, tracing_mode=mode)(*(args[i] for i in places))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_copied_and_nothing_invented(name: str, dim: int, weights: bool) -> None:
    op, case, _ = CASES[name]
    dims = [dim if kind == "x" or weights else None for kind in case if isinstance(kind, str)]
    traced = graph(op, *arguments(case, dims), "fake")
    called = {
        node.target.__name__.partition(".")[0]
        for node in traced.graph.nodes
        if node.op == "call_function" and hasattr(node.target, "__name__")
    }
    assert not called & COPIES


@pytest.mark.parametrize("name", CASES)
def test_symbolic_sizes_stay_symbolic(name: str) -> None:
    op, case, _ = CASES[name]
    for dim in (0, 1):
        args, in_dims = arguments(case, (dim,) * tensors_of(case))
        traced = graph(op, args, in_dims, "symbolic")
        shape_env = next(
            n.meta["val"].fake_mode.shape_env
            for n in traced.graph.nodes
            if n.op == "placeholder" and isinstance(n.meta["val"], torch.Tensor)
        )
        # The number of groups is a literal, and the statistics have that size.
        fixed = {K} if name == "group_norm_backward" else set()
        assert set(shape_env.replacements.values()) <= fixed, "a size was specialized"
        other = [
            torch.cat([a, a + 1], in_dims[i]) if isinstance(a, torch.Tensor) else a
            for i, a in enumerate(args)
        ]
        info = SimpleNamespace(batch_size=2 * V, randomness="error")
        expected, _ = batch_rule(op)(info, in_dims, *other)
        actual = traced(*(a for a in other if isinstance(a, torch.Tensor)))
        assert_same(actual, [e for e in expected if e is not None])


@pytest.mark.parametrize("name", CASES)
def test_the_rules_agree_with_vmap(name: str) -> None:
    op, case, _ = CASES[name]
    args, in_dims = arguments(case, (1,) * tensors_of(case))
    if name == "batch_norm_backward_eval":
        args[5:7] = [
            torch.empty(0, dtype=torch.float64)
        ] * 2  # what the CPU saves, and upstream's rule asserts
    places = [i for i, d in enumerate(in_dims) if d is not None]

    def function(*tensors: Tensor) -> Any:
        given = list(args)
        for i, value in zip(places, tensors, strict=True):
            given[i] = value
        return op(*given)

    expected = torch.vmap(function, 1)(*(args[i] for i in places))
    outs, out_dims = batch_rule(op)(INFO, in_dims, *args)
    assert_same(stacked(outs, out_dims), expected)


def test_a_rule_is_what_register_vmap_takes() -> None:
    @torch.library.custom_op(
        "normpass_test::group_norm",
        mutates_args=(),
        schema=str(aten.native_group_norm.default._schema).partition("native_group_norm")[2],
    )
    def norm(*args: Any) -> Any:
        return aten.native_group_norm(*args)

    norm.register_vmap(batch_rule(aten.native_group_norm).function)
    x, w, sizes = torch.randn(2, N, C, V, S), torch.randn(C, V), (N, C, S, K, 0.25)
    found = torch.vmap(torch.vmap(lambda x, w: norm(x, w, None, *sizes), (2, 1)), (0, None))(x, w)
    for i, j in itertools.product(range(2), range(V)):
        expected = aten.native_group_norm(
            x[i, :, :, j].contiguous(), w[:, j].contiguous(), None, *sizes
        )
        torch.testing.assert_close(tuple(out[i, j] for out in found), expected)
