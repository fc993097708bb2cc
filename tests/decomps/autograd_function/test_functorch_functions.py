"""The autograd.Functions of functorch's own tests, compiled, under all that is asked of them there.

Those that compute in NumPy cannot be traced: an error says what to do, and without fullgraph=True
they run in eager mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from autograd_function_transforms import EVERY, FROM_OUTSIDE, compiled, numbers
from torch.testing._internal import autograd_function_db as functions
from torch.utils._pytree import tree_leaves

from normpass.decomps.activation import registered

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Program = Callable[[Tensor, Tensor], Tensor]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def taken(x: Tensor, w: Tensor) -> Tensor:
    order, back = torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0])
    return functions.NumpyTake.apply(x, order, back, -1) * w


IN_TORCH: dict[str, Program] = {
    "Select": lambda x, w: functions.Select.apply(x, -1).sin() * w,
    "CubeGenVmap": lambda x, w: functions.CubeGenVmap.apply(x)[0] * w,
    "MulGenVmap": lambda x, w: functions.MulGenVmap.apply(x, w).sin(),
    "SortGenVmap": lambda x, w: functions.SortGenVmap.apply(x, -1)[0] * w,
    "SelectGenVmap": lambda x, w: functions.SelectGenVmap.apply(x, -1).sin() * w,
    "ScaleGradGenVmap": lambda x, w: functions.ScaleGradGenVmap.apply(x).sin() * w,
    "ZeroGradientsGenVmap": lambda x, w: sum(functions.ZeroGradientsGenVmap.apply(x.sin(), w), w),
    "ForwardHasDefaultArgs": lambda x, w: functions.ForwardHasDefaultArgs.apply(x).sin() * w,
}
IN_NUMPY: dict[str, Program] = {
    "NumpyCube": lambda x, w: functions.NumpyCube.apply(x)[0] * w,
    "NumpyMul": lambda x, w: functions.NumpyMul.apply(x, w).sin(),
    "NumpyExp_": lambda x, w: functions.NumpyExp_.apply(x * 1.0) * w,
    "NumpySort": lambda x, w: functions.NumpySort.apply(x, -1)[0] * w,
    "NumpyTake": taken,
    "NumpyCubeNotComposable": lambda x, w: functions.NumpyCubeNotComposable.apply(x)[0] * w,
}
# What eager mode says of those that have no rule for what is asked.
REFUSED = ("does not have vmap support", "must implement the jvp", "Cannot convert a ZeroTensor")
# Their backward writes to a part of a tensor.
WRITES_PARTS = ("Select", "SelectGenVmap", "ForwardHasDefaultArgs")
# Its jvp calls a Function in NumPy, and these need it.
HALF_IN_NUMPY = "CubeGenVmap"
FORWARD_MODE = [name for name in EVERY if "jvp" in name or "hessian" in name]
FORWARD_MODE += ["dual", "jacfwd"]
# The others by `make sweep`.
SAMPLED = ("grad", "jvp", "vmap of vmap", "vmap of grad, shared w", "backward")
ASKED = [pytest.param(a, marks=[] if a in SAMPLED else pytest.mark.sweep) for a in EVERY]


def in_eager_mode(program: Program, asked: str) -> Any:
    """What eager mode finds; skips what it refuses."""
    try:
        return EVERY[asked](program)(*numbers(asked))
    except (IndexError, ValueError) as error:  # a sort of numbers without dimensions, and the like
        pytest.skip(f"eager mode refuses it: {type(error).__name__}")
    except RuntimeError as error:
        if not any(reason in str(error) for reason in REFUSED):
            raise
        pytest.skip(f"eager mode refuses it: {error}"[:80])


def assert_same(found: Any, right: Any) -> None:
    for ours, theirs in zip(tree_leaves(found), tree_leaves(right), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", IN_TORCH)
def test_in_one_graph(name: str, asked: str) -> None:
    if asked == "double backward":
        pytest.skip("aot_eager's backward has no derivative; test_product.py has that by normpass")
    if name == "ScaleGradGenVmap" and asked in FROM_OUTSIDE:
        pytest.skip("Dynamo cannot read a class's attribute; ours does not read torch's modules")
    if name in WRITES_PARTS and asked == "vmap of hessian":
        pytest.skip("torch cannot functionalize such a write, and forward mode is stuck afterwards")
    right = in_eager_mode(IN_TORCH[name], asked)
    torch._dynamo.reset()
    with registered():
        ours = compiled(IN_TORCH[name], asked, "aot_eager")
        if name == HALF_IN_NUMPY and asked in FORWARD_MODE:
            with pytest.raises(torch._dynamo.exc.Unsupported, match=r"normpass\.as_op\(Cube"):
                ours(*numbers(asked))
        else:
            assert_same(ours(*numbers(asked)), right)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", IN_NUMPY)
def test_what_computes_in_numpy(name: str, asked: str) -> None:
    if asked in FROM_OUTSIDE or asked == "forward":
        pytest.skip("outside of transforms Dynamo traces NumPy itself")
    program = IN_NUMPY[name]
    right = in_eager_mode(program, asked)
    torch._dynamo.reset()
    with registered():
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"normpass\.as_op\(Numpy"):
            compiled(program, asked, "aot_eager")(*numbers(asked))
        torch._dynamo.reset()
        anyway = torch.compile(EVERY[asked](program), backend="aot_eager")
        assert_same(anyway(*numbers(asked)), right)
