"""What Dynamo makes of an autograd.Function with the rules: guards, refusals, and what stays."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from autograd_functions import Generated, Numbers, OwnJvp, Plain, Unmaterialized
from torch import func
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._functorch.autograd_function import custom_function_call
from torch.autograd import Function

import normpass
from normpass.decomps.torch_versions import (
    DUAL_INPUTS_ARE_REFUSED,
    FRAMES_CAN_BE_SKIPPED,
    FUNCTION_TAKES_KEYWORDS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

# Dynamo makes an instance of Function to trace a call, and looks at tensors' .grad after a break.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

SCALE = 2.0
SHIFT = torch.ones(3)


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    with normpass.registered():
        yield


def test_import_and_unregister_leave_nothing() -> None:
    def state() -> list[Any]:
        return [AutogradFunctionVariable.call_apply, *custom_function_call.functorch_table.values()]

    inside = state()
    normpass.unregister()
    outside = state()
    assert not set(map(id, inside)) & set(map(id, outside))
    assert all("normpass" not in f.__module__ for f in outside)
    normpass.register()
    normpass.unregister()
    assert state() == outside


def test_eager_mode_has_torchs_rules() -> None:
    """Without eager=True: torch's own generated rule refuses this in its own way."""
    x = torch.randn(2, 3)
    with pytest.raises(AssertionError, match="flat_bdims"):
        func.jvp(func.vmap(lambda x: Generated.apply(x, x)), (x,), (x,))


# --- guards -------------------------------------------------------------------------------------


class Scaled(Plain):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * SCALE, _helped(grad)


def _helped(grad: Tensor) -> Tensor:
    return grad * SCALE


def test_a_number_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(3), torch.randn(3)
    counter = CompileCounter()
    f = torch.compile(func.grad(lambda x, w: Scaled.apply(x, w).sum()), backend=counter)
    for value in (2.0, 3.0, 3.0):
        monkeypatch.setattr(__import__(__name__, fromlist=["SCALE"]), "SCALE", value)
        torch.testing.assert_close(f(x, w), torch.full((3,), value))
    assert counter.frame_count == 2


def _scaled_by(number: float) -> tuple[type[Function], Callable[[float], None]]:
    class Inner(Plain):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * number, None

    def change(value: float) -> None:
        nonlocal number
        number = value

    return Inner, change


def test_a_number_of_the_function_around() -> None:
    x, w = torch.randn(3), torch.randn(3)
    (one, change), (other, _) = _scaled_by(2.0), _scaled_by(5.0)
    f = torch.compile(
        lambda cls, x, w: func.grad(lambda x: cls.apply(x, w).sum())(x),
        backend="eager",
        fullgraph=True,
    )
    assert f(one, x, w)[0] == 2
    assert f(other, x, w)[0] == 5
    change(3.0)
    assert f(one, x, w)[0] == 3


class Shifted(Plain):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w + SHIFT


def test_a_tensor_that_is_no_argument() -> None:
    """An error that says what to do; without fullgraph=True, eager mode's numbers."""
    x, w = torch.randn(3), torch.randn(3)
    f = func.grad(lambda x, w: Shifted.apply(x, w).sum())
    if FRAMES_CAN_BE_SKIPPED:
        torch.testing.assert_close(torch.compile(f, backend="eager")(x, w), f(x, w))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="Expected every tensor that Shifted computes") as caught:
        torch.compile(f, backend="eager", fullgraph=True)(x, w)
    message = " ".join(str(caught.value).split())
    assert f"found SHIFT, of {__name__}" in message
    assert f"Pass SHIFT, of {__name__} to Shifted.apply" in message


class Holder:
    def __init__(self, value: float) -> None:
        self.value = value


def test_an_argument_that_is_an_object() -> None:
    class OfHolder(Function):
        @staticmethod
        def forward(x: Tensor, holder: Holder) -> Tensor:
            return x * holder.value

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None: ...

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * 7, None

    x, holder = torch.randn(3), Holder(2.0)
    f = func.grad(lambda x: OfHolder.apply(x, holder).sum())
    if FRAMES_CAN_BE_SKIPPED:
        torch.testing.assert_close(torch.compile(f, backend="eager")(x), torch.full((3,), 7.0))
    torch._dynamo.reset()
    leaf = x.clone().requires_grad_()
    plain = torch.compile(OfHolder.apply, backend="eager", fullgraph=True)
    plain(leaf, holder).sum().backward()  # Dynamo's own way takes objects
    torch.testing.assert_close(leaf.grad, torch.full((3,), 7.0))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="Expected tensors, numbers, strings and tuples of them"):
        torch.compile(f, backend="eager", fullgraph=True)(x)


def test_forward_mode_around_compiled_code() -> None:
    """What was compiled outside of forward mode is not taken in it: it has no jvp of the class."""
    x, v = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    f = torch.compile(OwnJvp.apply, backend="eager", fullgraph=not DUAL_INPUTS_ARE_REFUSED)
    f(x, x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, v)
        tangent = torch.autograd.forward_ad.unpack_dual(f(dual, x)).tangent
    torch.testing.assert_close(tangent, 6 * x * x * v)


def test_transforms_around_compiled_code() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    f = torch.compile(lambda x: OwnJvp.apply(x, x).sum(), backend="eager", fullgraph=True)
    torch.testing.assert_close(func.vmap(func.grad(f))(x), 6 * x * x)


# --- graphs without transforms ------------------------------------------------------------------


def _graphs(f: Callable[..., Any], *args: Any) -> list[str]:
    torch._dynamo.reset()
    recorded = EagerAndRecordGraphs()
    torch.compile(f, backend=recorded, fullgraph=True)(*args)
    return [graph.print_readable(print_output=False) for graph in recorded.graphs]


def test_graphs_without_transforms_are_dynamos() -> None:
    x, w = torch.randn(3, requires_grad=True), torch.randn(3)
    ours = _graphs(Plain.apply, x, w)
    with_jvp = _graphs(OwnJvp.apply, x, w)
    normpass.unregister()
    assert _graphs(Plain.apply, x, w) == ours
    assert "autograd_function_apply" in ours[0]
    assert len(with_jvp) == 1
    assert "autograd_function_apply" in with_jvp[0]


class OwnVjp(Plain):
    backward = Function.backward
    vjp = staticmethod(Plain.backward)


REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one tensor twice": lambda x, w: Plain.apply(x, x) * w,
    "a vjp": lambda x, w: OwnVjp.apply(x, w),
    "gradients not materialized": lambda x, w: Unmaterialized.apply(x, w)[0],
    "a default": lambda x, w: Numbers.apply(x, 2, 1.5) * w,
}
if FUNCTION_TAKES_KEYWORDS:
    REFUSED["keywords"] = lambda x, w: Plain.apply(x, w=w)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_dynamo_refuses_or_drops(case: str, backend: str) -> None:
    def gradients(f: Callable[..., Tensor]) -> Any:
        leaves = [torch.arange(1.0, 4.0, requires_grad=True) for _ in range(2)]
        return torch.autograd.grad(f(*leaves).sum(), leaves, allow_unused=True)

    program = REFUSED[case]
    torch._dynamo.reset()
    found = gradients(torch.compile(program, backend=backend, fullgraph=True))
    torch.testing.assert_close(found, gradients(program))


def test_dynamic_sizes() -> None:
    counter = CompileCounter()
    f = torch.compile(
        func.vmap(func.grad(lambda x: OwnJvp.apply(x, x).sum())),
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    for size in (2, 3, 5):
        x = torch.randn(size, 4, dtype=torch.float64)
        torch.testing.assert_close(f(x), 6 * x * x)
    assert counter.frame_count == 1


class Multiple(Function):
    scale = 2.0

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * Multiple.scale


class MultipleTwice(Function):
    forward = Multiple.forward
    setup_context = Multiple.setup_context

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return Multiple.apply(g * Multiple.scale)


@pytest.mark.parametrize("function", [Multiple, MultipleTwice])
def test_a_number_of_a_class_may_change(
    function: type[Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo cannot read it, and stops where a Function does."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def outside(x: Tensor) -> Tensor:
        return function.apply(x).sin()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def inside(x: Tensor) -> Tensor:
        return func.grad(lambda x: function.apply(x).sin().sum())(x)

    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    for scale in (2.0, 5.0):
        monkeypatch.setattr(Multiple, "scale", scale)
        torch.testing.assert_close(torch.autograd.grad(outside(x).sum(), x)[0], scale * x.cos())
        torch.testing.assert_close(inside(x.detach()), scale * x.cos())


def test_what_fake_tensors_cannot_go_through() -> None:
    class InNumPy(Plain):
        @staticmethod
        def forward(x: Tensor, w: Tensor) -> Tensor:
            return torch.from_numpy(x.numpy() ** 2) * w

    def slope(x: Tensor, w: Tensor) -> Tensor:
        return func.grad(lambda x: InNumPy.apply(x, w).sum())(x)

    torch._dynamo.reset()
    x, w = torch.randn(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"numpy.*\n.*normpass.as_op\(InNumPy, fake=...\)"
    ):
        torch.compile(slope, backend="aot_eager", fullgraph=True)(x, w)
    torch._dynamo.reset()
    anyway = torch.compile(slope, backend="aot_eager")
    torch.testing.assert_close(anyway(x, w), slope(x, w))


def test_a_class_that_was_compiled_is_given_back() -> None:
    """Dynamo is shown another class in place of one that has a jvp; it goes with it."""

    def once() -> weakref.ref[type]:
        own = type("Own", (OwnJvp,), {})
        x = torch.arange(3.0, requires_grad=True)
        torch.compile(lambda x: own.apply(x, x * 2), backend="eager", fullgraph=True)(x)
        return weakref.ref(own)

    gone = once()
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
