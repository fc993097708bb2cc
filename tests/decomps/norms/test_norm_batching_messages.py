"""What the batching rules of the norms refuse, in the words of the operators or of upstream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from norm_batching_cases import CASES, INFO, C, N, S, V, arguments
from torch.nn import functional

from normpass.decomps.registry import batch_rule

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def message(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        function(*args)
    kind = type(error.value).__name__
    return f"{kind}: {error.value}".partition("\nException raised from")[0]


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
    x, rest = torch.randn(V, C), ([V, C], None, None, 0.25)
    in_dims = (0, None, None, None, None)
    ours = message(batch_rule(aten.native_layer_norm), INFO, in_dims, x, *rest)
    assert ours == message(aten.native_layer_norm.default, x[0], *rest)
    with pytest.raises(RuntimeError, match=r"expected input with shape \[\*, 3, 6\]"):
        batch_rule(aten._fused_rms_norm)(INFO, in_dims[:4], x, [V, C], None, None)


@pytest.mark.parametrize("groups", [0, 4])
def test_wrong_numbers_of_groups_are_the_operators_error(groups: int) -> None:
    x = torch.randn(N, C, V, S)
    rest = (None, None, N, C, S, groups, 0.25)
    ours = message(batch_rule(aten.native_group_norm), INFO, (2, *(None,) * 7), x, *rest)
    assert ours == message(aten.native_group_norm.default, x[:, :, 0], *rest)


@pytest.mark.parametrize("sizes", [(0, C, S), (N, 0, S), (N, C, 0), (0, 0)])
def test_a_batch_norm_of_nothing_is_the_operators_error(sizes: tuple[int, ...]) -> None:
    x = torch.randn(V, *sizes)
    rest = (None, None, None, None, True, 0.3, 0.25)
    ours = message(batch_rule(aten.native_batch_norm), INFO, (0, *(None,) * 7), x, *rest)
    assert ours == message(aten.native_batch_norm.default, x[0], *rest)


@pytest.mark.parametrize("sizes", [(0, C, S), (N, 0, S), (N, C, 0), (0, 0)])
def test_in_evaluation_mode_nothing_is_normalized_to_nothing(sizes: tuple[int, ...]) -> None:
    x, c = torch.randn(V, *sizes), torch.ones(sizes[1])
    rest = (c, c, c, c, False, 0.3, 0.25)
    outs, _ = batch_rule(aten.native_batch_norm)(INFO, (0, *(None,) * 7), x, *rest)
    eager = aten.native_batch_norm(x[0], *rest)
    assert outs[0].shape == (V, *eager[0].shape)
    assert [v.shape for v in outs[1:]] == [v.shape for v in eager[1:]]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("given", [(True, False), (False, True), (False, False)], ids=str)
def test_running_statistics_that_are_not_there_are_eagers_error(
    training: bool, given: tuple[bool, bool]
) -> None:
    """torch.batch_norm's: the operator's own kernel crashes in evaluation mode without both."""
    if training and not any(given):
        return
    kinds = ["x", None, None, *("c+" if there else None for there in given)]
    args, in_dims = arguments([*kinds, training, 0.3, 0.25], (0,) * (1 + sum(given)))
    ours = message(batch_rule(aten.native_batch_norm), INFO, in_dims, *args)
    x, _, _, mean, var = (None if v is None else v[0] for v in args[:5])
    assert ours == message(functional.batch_norm, x, mean, var, None, None, training, 0.3, 0.25)


@pytest.mark.parametrize("name", ["batch_norm_backward_eval", "batch_norm_backward_train"])
def test_a_backward_says_which_statistics_it_needs(name: str) -> None:
    case = CASES[name]
    args, in_dims = arguments(case.arguments, (0,) * case.tensors)
    last = max(i for i, kind in enumerate(case.arguments) if kind == "c+")
    args[last] = in_dims[last] = None
    expected = "save_mean and save_invstd" if "train" in name else "running_mean and running_var"
    assert f"needs {expected}" in message(batch_rule(case.op), INFO, in_dims, *args)
