"""The batching rules of the norms in halves, as graphs, and for another device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from norm_batching_cases import (
    CASES,
    INFO,
    C,
    K,
    S,
    V,
    arguments,
    assert_same,
    loop,
    stacked,
)
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from normpass.decomps.registry import batch_rule
from normpass.decomps.torch_versions import MIOPEN_META_IS_RIGHT

if TYPE_CHECKING:
    from torch import Tensor


@pytest.mark.parametrize("wide", [False, True], ids=["half", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_halves_have_eagers_dtypes_and_are_no_less_accurate(
    name: str, dtype: torch.dtype, wide: bool
) -> None:
    case = CASES[name]
    args, in_dims = arguments(case.arguments, (1,) * case.tensors, torch.float32)
    for i, kind in enumerate(case.arguments):
        if kind == "x" or (isinstance(kind, str) and not wide):
            args[i] = args[i].to(dtype)
    theirs = loop(case, args, in_dims)
    double = [a.double() if isinstance(a, torch.Tensor) and a.numel() else a for a in args]
    outs, out_dims = batch_rule(case.op)(INFO, in_dims, *args)
    for ours, eager, exact in zip(
        stacked(outs, out_dims), theirs, loop(case, double, in_dims), strict=True
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
            if isinstance(value, list) and value == [C, S]:
                given[i] = sizes[1:]
        if "group_norm" in str(op):
            at = next(i for i, a in enumerate(args) if isinstance(a, int))
            given[at : at + 3] = sizes
        info = SimpleNamespace(batch_size=batch, randomness="error")
        outs, _ = batch_rule(op)(info, in_dims, *given)
        return [out for out in outs if out is not None]

    return make_fx(function, tracing_mode=mode)(*(args[i] for i in places))


# In evaluation mode the new running statistics are copies of the old, as they are in eager.
COPYING = ("batch_norm_functional_eval",)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("name", [name for name in CASES if name not in COPYING])
def test_nothing_is_copied_and_nothing_invented(name: str, dim: int, weights: bool) -> None:
    case = CASES[name]
    dims = [
        dim if kind == "x" or weights else None for kind in case.arguments if isinstance(kind, str)
    ]
    traced = graph(case.op, *arguments(case.arguments, dims), "fake")
    called = {
        node.target.__name__.partition(".")[0]
        for node in traced.graph.nodes
        if node.op == "call_function" and hasattr(node.target, "__name__")
    }
    assert not called & COPIES


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_symbolic_sizes_stay_symbolic(name: str) -> None:
    case = CASES[name]
    for dim in (0, 1):
        args, in_dims = arguments(case.arguments, (dim,) * case.tensors)
        traced = graph(case.op, args, in_dims, "symbolic")
        shape_env = next(
            n.meta["val"].fake_mode.shape_env
            for n in traced.graph.nodes
            if n.op == "placeholder" and isinstance(n.meta["val"], torch.Tensor)
        )
        # The number of groups is a literal, and the statistics have that size.
        fixed = {K} if name == "group_norm_backward" else set()
        assert set(shape_env.replacements.values()) <= fixed, "a size was specialized"
        other = [
            a if d is None else torch.cat([a, a + 1], d) for a, d in zip(args, in_dims, strict=True)
        ]
        info = SimpleNamespace(batch_size=2 * V, randomness="error")
        expected, _ = batch_rule(case.op)(info, in_dims, *other)
        actual = traced(*(a for a in other if isinstance(a, torch.Tensor)))
        assert_same(actual, [e for e in expected if e is not None])


@pytest.mark.parametrize("name", [name for name in CASES if "batch_norm" in name])
def test_on_an_accelerator_batch_norm_saves_what_the_operator_does(name: str) -> None:
    """In evaluation mode too. In halves with wider parameters; fake tensors need no device."""
    if "miopen" in name and not MIOPEN_META_IS_RIGHT:
        pytest.skip("this torch's meta function says the input's dtype, MIOpen saves the weight's")
    case = CASES[name]
    args, in_dims = arguments(case.arguments, (0,) * case.tensors, torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = [
            torch.empty_strided(
                a.shape,
                a.stride(),
                dtype=torch.bfloat16 if kind == "x" else a.dtype,
                device="cuda",
            )
            if isinstance(a, torch.Tensor)
            else a
            for a, kind in zip(args, case.arguments, strict=True)
        ]
        outs, out_dims = batch_rule(case.op)(INFO, in_dims, *fake)
        expected = case.op(
            *(a if d is None else a.select(d, 0) for a, d in zip(fake, in_dims, strict=True))
        )
    for out, dim, one in zip(outs, out_dims, expected, strict=True):
        assert tuple(out.shape) == (*(() if dim is None else (V,)), *one.shape)
        assert out.dtype == one.dtype
