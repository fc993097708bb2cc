"""The batching rules of the norms against a loop of the operator over the examples.

cuDNN's, MIOpen's and RMS norm's backward have no kernel for the CPU: the loop is that of
native_batch_norm, or of torch's own decomposition (norm_batching_cases.py).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from norm_batching_cases import (
    CASES,
    INFO,
    SIZES,
    C,
    K,
    N,
    S,
    V,
    arguments,
    assert_same,
    check,
    count,
    every_batching,
    loop,
    stacked,
)

from normpass.decomps.registry import batch_rule, by_op, rules

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

# These write running statistics in place: test_running_statistics.py.
IN_PLACE = {"aten::_batch_norm_with_update"}


def test_every_rule_of_a_norm_is_tested() -> None:
    own = {rule.op for rule in rules() if rule.kind == "batching" and "_norm" in rule.name}
    assert {op.name() for op in own - {case.op for case in CASES.values()}} <= IN_PLACE
    assert {case.op for case in CASES.values()} <= set(by_op("batching"))


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_the_loop_over_examples_wherever_each_argument_is_batched(name: str) -> None:
    case = CASES[name]
    for dims in every_batching(case):
        check(case, *arguments(case.arguments, dims))


@pytest.mark.parametrize("name", CASES)
def test_every_none_is_none(name: str) -> None:
    case = CASES[name]
    for size in range(1, len(case.optional) + 1):
        for gone in itertools.combinations(case.optional, size):
            left = [None if i in gone else kind for i, kind in enumerate(case.arguments)]
            for dim in (0, 1, -1):
                check(case, *arguments(left, (dim,) * count(left)))
                check(case, *arguments(left, (dim, *(None,) * (count(left) - 1))))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.mask is not None])
@pytest.mark.parametrize("mask", list(itertools.product((False, True), repeat=3)))
def test_every_mask_leaves_out_what_it_says(name: str, mask: tuple[bool, ...]) -> None:
    case = CASES[name]
    assert case.mask is not None
    args, in_dims = arguments(case.arguments, (-1,) * case.tensors)
    full = loop(case, args, in_dims)
    args[case.mask] = list(mask[: len(full)])
    outs, out_dims = batch_rule(case.op)(INFO, in_dims, *args)
    expected = [e if wanted else None for e, wanted in zip(full, mask, strict=False)]
    assert_same(stacked(outs, out_dims), expected)


@pytest.mark.parametrize(
    ("name", "weights", "mask"),
    [
        ("layer_norm_backward", (5, 6), [True, False, False]),
        ("group_norm_backward", (4,), [True, False, True]),
        ("rms_norm_backward", (4,), [True, False]),
    ],
)
def test_a_backward_without_weight_has_the_other_gradients(
    name: str, weights: tuple[int, ...], mask: list[bool]
) -> None:
    case = CASES[name]
    left = [None if i in weights else kind for i, kind in enumerate(case.arguments)]
    args, in_dims = arguments(left, (1,) * count(left))
    ones = list(args)
    for i in weights:
        ones[i] = torch.ones(SIZES[case.arguments[i]], dtype=torch.float64)
    assert case.mask is not None
    args[case.mask] = mask
    outs, out_dims = batch_rule(case.op)(INFO, in_dims, *args)
    expected = loop(case, ones, in_dims)
    wanted = [e if m else None for e, m in zip(expected, mask, strict=True)]
    assert_same(stacked(outs, out_dims), wanted)


def has_rule_of_torchs(name: str) -> bool:
    """Whether torch.vmap of the operator is a rule of torch's own on the CPU, and no loop."""
    op, oracle = CASES[name].op, CASES[name].oracle
    batched = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "FuncTorchBatched")
    return batched and oracle is None


@pytest.mark.parametrize("name", [*filter(has_rule_of_torchs, CASES)])
def test_the_rules_agree_with_vmap(name: str) -> None:
    case = CASES[name]
    args, in_dims = arguments(case.arguments, (1,) * case.tensors)
    if name == "batch_norm_backward_eval":
        # what the CPU saves, and upstream's rule asserts
        args[5:7] = [torch.empty(0, dtype=torch.float64)] * 2
    places = [i for i, d in enumerate(in_dims) if d is not None]

    def function(*tensors: Tensor) -> Any:
        given = list(args)
        for i, value in zip(places, tensors, strict=True):
            given[i] = value
        return case.op(*given)

    expected = torch.vmap(function, 1)(*(args[i] for i in places))
    outs, out_dims = batch_rule(case.op)(INFO, in_dims, *args)
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
