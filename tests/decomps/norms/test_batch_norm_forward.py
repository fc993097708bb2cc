"""Batch norm as a composition, for autograd: what it returns, refuses and saves is eager's."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from normpass.decomps.registry import by_op
from normpass.decomps.torch_versions import MIOPEN_META_IS_RIGHT

aten = torch.ops.aten

N, C, S = 4, 3, 5
COMPOSITIONS = {op: f for op, f in by_op("autograd").items() if "batch_norm" in op.name()}


def modes(op: Any) -> tuple[bool, ...]:
    """Training or not: some operators are for training alone, or have no running statistics."""
    names = [argument.name for argument in op._schema.arguments]
    return (True, False) if {"running_mean", "training"} <= set(names) else (True,)


def has_kernel(op: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU")


EVERY = [
    pytest.param(op, training, id=f"{op}, {'train' if training else 'eval'}")
    for op in COMPOSITIONS
    for training in modes(op)
]
ON_CPU = [param for param in EVERY if has_kernel(param.values[0])]
IN_EVAL = [param for param in EVERY if not param.values[1]]
EMPTY = [(0, C, S), (N, 0, S), (N, C, 0), (0, 0)]


def arguments(
    op: Any,
    sizes: tuple[int, ...],
    training: bool,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3,
) -> list[Any]:
    """New arguments for one of the operators, of the dtypes of x, of parameters, of statistics."""
    x, parameter, statistic = dtypes
    channels = (sizes[1],)
    values = {
        "input": torch.randn(sizes).to(x) * 3 + 1,
        "weight": torch.randn(channels).to(parameter),
        "bias": torch.randn(channels).to(parameter),
        "running_mean": torch.randn(channels).to(statistic),
        "running_var": torch.rand(channels).to(statistic) + 0.5,
        "training": training,
    }
    rest = {"momentum": 0.3, "exponential_average_factor": 0.3, "eps": 0.25, "epsilon": 0.25}
    return [{**values, **rest}[argument.name] for argument in op._schema.arguments]


def outcome(function: Any, args: list[Any]) -> Any:
    """Shapes and dtypes of the results, or the error."""
    try:
        return [(v.shape, v.dtype) for v in function(*args)]
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}".partition("\nException raised from")[0]


@pytest.mark.parametrize(("op", "training"), ON_CPU)
@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_of_nothing_it_is_what_the_operator_is(
    op: Any, training: bool, sizes: tuple[int, ...]
) -> None:
    """In training an error, which leaves the running statistics alone; else nothing."""
    args = arguments(op, sizes, training)
    before = [v.clone() if isinstance(v, torch.Tensor) else v for v in args]
    assert outcome(COMPOSITIONS[op], args) == outcome(op, list(before))
    for now, then in zip(args, before, strict=True):
        assert torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then


HALVES = (torch.bfloat16, torch.float16)
# What eager's kernel for the CPU takes.
DTYPES = [
    *((dtype,) * 3 for dtype in (torch.float64, torch.float32, *HALVES)),
    *((dtype, torch.float32, torch.float32) for dtype in HALVES),
]


@pytest.mark.parametrize(("op", "training"), ON_CPU)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: f"{d[0]}, {d[1]}".replace("torch.", ""))
def test_every_result_has_eagers_dtype_and_is_no_less_accurate(
    op: Any, training: bool, dtypes: tuple[torch.dtype, ...]
) -> None:
    args = arguments(op, (N, C, S), training, dtypes)
    runs = []
    for function, dtype in ((COMPOSITIONS[op], None), (op, None), (op, torch.float64)):
        given = [v.clone().to(dtype or v.dtype) if isinstance(v, torch.Tensor) else v for v in args]
        results = function(*given)
        runs.append((*results, *(v for v in given[3:5] if isinstance(v, torch.Tensor))))
    for index, (ours, replaced, reference) in enumerate(zip(*runs, strict=True)):
        assert (ours.dtype, ours.shape) == (replaced.dtype, replaced.shape), index
        if ours.is_floating_point() and ours.numel():
            oracles.assert_no_less_accurate(ours, replaced, reference, f"{op} [{index}]")


@pytest.mark.parametrize(("op", "training"), IN_EVAL)
def test_on_an_accelerator_it_saves_what_the_operator_does(op: Any, training: bool) -> None:
    """The CPU saves nothing in evaluation mode, CUDA the running statistics, cuDNN nothing."""
    if "miopen" in str(op) and not MIOPEN_META_IS_RIGHT:
        pytest.skip("this torch's meta function says the input's dtype, MIOpen saves the weight's")
    args = arguments(op, (N, C, S), training, (torch.bfloat16, torch.float32, torch.float32))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = tree_map_only(
            torch.Tensor, lambda v: torch.empty(v.shape, dtype=v.dtype, device="cuda"), args
        )
        ours, theirs = COMPOSITIONS[op](*fake), op(*fake)
    assert [(v.shape, v.dtype) for v in ours] == [(v.shape, v.dtype) for v in theirs]
    assert not any(v is w for v in ours for w in fake)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("given", [(True, False), (False, True), (False, False)], ids=str)
def test_running_statistics_that_are_not_there_are_eagers_error(
    training: bool, given: tuple[bool, bool]
) -> None:
    """torch.batch_norm's: the operator's own kernel crashes in evaluation mode without both."""
    if training and not any(given):
        return
    x, c = torch.randn(N, C, S), torch.ones(C)
    running = [c if there else None for there in given]
    composition = by_op("autograd")[aten.native_batch_norm.default]
    ours = outcome(composition, [x, None, None, *running, training, 0.3, 0.25])
    assert isinstance(ours, str)
    assert ours == outcome(functional.batch_norm, [x, *running, None, None, training, 0.3, 0.25])
