"""The rules of custom_function_call by themselves: what a generated rule honours, and the errors.

In eager mode with register(eager=True), where the same rules run as in traces; what can be is also
compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from autograd_functions import OwnAll, Plain
from torch import func
from torch.autograd import Function

import normpass
from normpass.decomps.autograd_function.batches import reductify
from normpass.decomps.autograd_function.contexts import CtxCustomSave, CtxWithSavedTensors
from normpass.decomps.autograd_function.levels import custom_function_call_functionalize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

# Dynamo makes an instance of Function to trace a call.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

MORE = "https://pytorch.org/docs/main/notes/extending.func.html"


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    with normpass.registered(eager=True):
        yield


def derived(base: type[Function] = Plain, name: str = "Mine", **methods: Any) -> type[Function]:
    return type(name, (base,), methods)


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(f, backend="aot_eager", fullgraph=True)


RUNS = {"eager": lambda f: f, "compiled": compiled}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    found: Callable[..., Any] = RUNS[request.param]
    return found


# --- errors -------------------------------------------------------------------------------------


def _returns(value: Any) -> dict[str, Any]:
    return {"vmap": staticmethod(lambda info, in_dims, x, w: value(x))}


ERRORS: dict[str, tuple[type[Function], str]] = {
    "no rule": (
        derived(),
        "You tried to vmap over Mine, but it does not have vmap support. Please override and "
        "implement the vmap staticmethod or set generate_vmap_rule=True. For more details, please "
        f"see {MORE}",
    ),
    "two rules": (
        derived(OwnAll, generate_vmap_rule=True),
        "You tried to vmap over Mine, but it has both generate_vmap_rule=True and an overridden "
        "vmap staticmethod. Please set generate_vmap_rule=False or delete the overridden vmap "
        f"staticmethod to avoid ambiguity. For more details, please see {MORE}",
    ),
    "no tuple": (
        derived(**_returns(lambda x: x)),
        "Expected the vmap staticmethod to have two returns, an output and out_dims with pytree "
        "structure compatible with the output. Got a <class 'torch.Tensor'> instead",
    ),
    "three": (
        derived(**_returns(lambda x: (x, 0, 0))),
        "Expected the vmap staticmethod to have two returns, an output and out_dims with pytree "
        "structure compatible with the output. Got 3 returns instead",
    ),
    "other structure": (
        derived(**_returns(lambda x: ((x, x), (0, 0, 0)))),
        "The autograd.Function's vmap staticmethod returned an incompatible (output, out_dims) "
        "tuple. Expected out_dims=(0, 0, 0) to be compatible with the structure of `output`. "
        "out_dims has structure ",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_of_vmap(case: str, run: Callable[..., Any]) -> None:
    function, message = ERRORS[case]
    x, w = torch.randn(2, 3), torch.randn(2, 3)
    with pytest.raises(RuntimeError) as caught:
        run(func.vmap(function.apply))(x, w)
    # Traces know fake tensors.
    assert message.partition("<class")[0] in str(caught.value)


@pytest.mark.parametrize("case", [case for case in ERRORS if case != "other structure"])
def test_the_texts_are_torchs(case: str) -> None:
    normpass.unregister()
    with pytest.raises(RuntimeError) as caught:
        func.vmap(ERRORS[case][0].apply)(torch.randn(2, 3), torch.randn(2, 3))
    assert str(caught.value) == ERRORS[case][1]


def test_the_text_for_structures_is_torchs() -> None:
    texts = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            func.vmap(ERRORS["other structure"][0].apply)(torch.randn(2, 3), torch.randn(2, 3))
        texts.append(str(caught.value))
        normpass.unregister()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("order", ["jvp of vmap", "vmap of jvp"])
def test_without_a_jvp(order: str, run: Callable[..., Any]) -> None:
    """In torch's rule one of them is AssertionError: flat_bdims must not be None."""
    function = derived(generate_vmap_rule=True)
    x = torch.randn(2, 3)

    def tangent(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: func.jvp(f, (x,), (x,))

    def asked(x: Tensor) -> Tensor:
        return function.apply(x, x)

    f = tangent(func.vmap(asked)) if order == "jvp of vmap" else func.vmap(tangent(asked))
    with pytest.raises(Exception, match="You must implement the jvp function for custom autograd"):
        run(f)(x)


def test_functionalize() -> None:
    with pytest.raises(RuntimeError, match="NYI: Functionalize rule for custom_function_call"):
        custom_function_call_functionalize(None, Plain)
    with pytest.raises(RuntimeError, match="NYI: Functionalize rule for custom_function_call"):
        func.functionalize(Plain.apply)(torch.randn(3), torch.randn(3))


@pytest.mark.parametrize("wrapper", [CtxWithSavedTensors, CtxCustomSave])
def test_reserved_names(wrapper: Any) -> None:
    class Context:
        _pt_inner_ctx = 1

    reserved = wrapper._pt_reserved_attrs
    with pytest.raises(RuntimeError) as caught:
        wrapper(Context(), ())
    assert str(caught.value) == (
        f"PyTorch reserves the {reserved} field on ctx. Please name your fields on ctx something "
        "else to avoid name collision."
    )


def test_a_tangent_that_no_result_can_have() -> None:
    class Same(Plain):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor, w: Tensor) -> Tensor:
            return w * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None: ...

        @staticmethod
        def jvp(ctx: Any, dx: Tensor, dw: Any) -> Tensor:
            return dx

    def tangent(x: Tensor, w: Tensor) -> Any:
        return func.jvp(lambda x: func.vmap(Same.apply, (0, None))(x, w), (x,), (x,))

    with pytest.raises(RuntimeError, match="vmap over the jvp of Same: expected the tangent of a"):
        tangent(torch.randn(2, 3), torch.randn(3))


# --- what a generated rule honours --------------------------------------------------------------


class Scaled(Function):
    """x *= 3 where it lies, with a rule for vmap that is generated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul_(3)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 6 * grad


def test_in_place(run: Callable[..., Any]) -> None:
    def loss(x: Tensor) -> Tensor:
        y = x * 2
        func.vmap(Scaled.apply)(y)
        return (y * x).sum()

    x = torch.randn(2, 3, dtype=torch.float64)
    # y = 6 x: d(y x) = y + x dy, where dy is 2 times what backward makes of a gradient, 6.
    torch.testing.assert_close(run(func.grad(loss))(x), 6 * x + 12 * x)


class Sorted(Function):
    """Values and places, of which the latter have no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Any:
        return x.sort()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        (places,) = ctx.saved_tensors
        return 2 * torch.zeros_like(grad).scatter(0, places, grad)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Any:
        x, places = ctx.saved_tensors
        return 3 * dx.gather(0, places) + 0 * x, None


def test_other_tensors_for_forward_and_places_without_a_gradient(run: Callable[..., Any]) -> None:
    x, v = torch.randn(2, 2, 5, dtype=torch.float64).unbind()
    places = x.argsort(1)

    def loss(x: Tensor) -> Tensor:
        values, _ = func.vmap(Sorted.apply)(x)
        return (values * v).sum()

    torch.testing.assert_close(
        run(func.grad(loss))(x), 2 * torch.zeros_like(v).scatter(1, places, v)
    )
    (values, found), (tangent, _) = run(lambda x, v: func.jvp(func.vmap(Sorted.apply), (x,), (v,)))(
        x, v
    )
    torch.testing.assert_close(values, x.sort(1).values)
    torch.testing.assert_close(found, places)
    torch.testing.assert_close(tangent, 3 * v.gather(1, places))


# --- gradients of batches -----------------------------------------------------------------------

B = 2
REDUCED: dict[str, tuple[tuple[int, ...], int | None, int | None, Any, tuple[int, ...]]] = {
    "as it is": ((B, 4), 0, 0, (4,), (B, 4)),
    "other axis": ((4, B), 1, 0, (4,), (B, 4)),
    "to the last": ((B, 4), 0, 1, (4,), (4, B)),
    "the same for all": ((3, 4), None, 0, (4,), (B, 4)),
    "broadcast": ((3, B, 4), 1, 0, (4,), (B, 4)),
    "broadcast of one": ((B, 3, 4), 0, 1, (1, 4), (1, B, 4)),
    "shared": ((3, B), 1, None, (3,), (3,)),
    "shared alone": ((3,), None, None, (3,), (3,)),
    "no shape": ((4, B), 1, 0, None, (B, 4)),
}


@pytest.mark.parametrize("case", REDUCED)
def test_reductify(case: str) -> None:
    """Each example by itself, with autograd's own reduction."""
    shape, dim, in_dim, target, expected = REDUCED[case]
    grad = torch.randn(shape, dtype=torch.float64)
    (found,) = reductify(grad, dim, in_dim, B, None if target is None else (target,))
    each = list(grad.unbind(dim)) if dim is not None else [grad] * B
    each = [g if target is None else g.sum_to_size(target) for g in each]
    if in_dim is not None:
        right = torch.stack(each, in_dim)
    else:
        right = grad if dim is None else torch.stack(each).sum(0)
    assert found.shape == expected
    torch.testing.assert_close(found, right)


def test_reductify_of_several() -> None:
    found = reductify((None, torch.ones(B, 3), None), (None, 0, None), (0, None), B, ((3,), (3,)))
    assert found[0] is None
    assert len(found) == 2
    torch.testing.assert_close(found[1], torch.full((3,), float(B)))
