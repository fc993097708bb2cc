"""normpass.as_op: autograd.Functions as operators, against the mathematics in plain torch."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import TYPE_CHECKING, Any

import custom_functions as functions
import pytest
import single_functions as single
import torch
from function_cases import BY_NAME, CASES, TRANSFORMS, Case, X, Y, plain_swish, swish_of_two
from torch.func import functionalize, grad, hessian, jvp, linearize, vmap
from torch.testing import assert_close

import normpass

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

swish = BY_NAME["Swish"].op


@pytest.fixture(params=CASES, ids=lambda case: case.op.__name__)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


# --- eager --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_under_every_transform(transform: str, case: Case) -> None:
    run = TRANSFORMS[transform]
    assert_close(run(case.of(case.op), case.tensors), run(case.of(case.formula), case.tensors))


def test_like_apply(case: Case) -> None:
    run, apply = TRANSFORMS["tape"], case.op.function.apply
    assert_close(run(case.of(case.op), case.tensors), run(case.of(apply), case.tensors))


# From torch 2.14 on it looks at the .grad of what an operator returns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_opcheck(case: Case) -> None:
    op, args = case.op.operator(*case.arguments())
    leaves = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
    given = [x.clone().requires_grad_() if any(x is y for y in leaves) else x for x in args]
    torch.library.opcheck(op, tuple(given))


@pytest.mark.parametrize("name", ["Swish", "Exp", "Product", "InNumPy"])
def test_finite_differences(name: str) -> None:
    case = BY_NAME[name]
    f, leaves = case.of(case.op), tuple(x.clone().requires_grad_() for x in case.tensors)
    assert torch.autograd.gradcheck(f, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, leaves, check_fwd_over_rev=True)


def test_complex_numbers() -> None:
    squared = normpass.as_op(single.Squared)
    z = torch.complex(X, Y).requires_grad_()
    assert torch.autograd.gradcheck(squared, z, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(squared, z)
    compiled = torch.compile(lambda z: squared(z.conj()), backend="aot_eager", fullgraph=True)
    assert_close(compiled(z), z.conj() ** 2)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # linearize
def test_other_ways_of_calling() -> None:
    assert_close(functionalize(swish_of_two)(X), plain_swish(X))
    assert_close(linearize(swish_of_two, X)[1](Y), jvp(plain_swish, (X,), (Y,))[1])
    assert_close(vmap(swish_of_two, chunk_size=2)(X), plain_swish(X))
    assert vmap(swish_of_two)(X[:0]).shape == (0, 4)
    assert swish(X.to("meta"), 2.0).device.type == "meta"
    assert_close(swish(scale=2.0, x=X), plain_swish(X))
    assert_close(swish.apply(X, 2.0), plain_swish(X))
    with torch.inference_mode():
        assert_close(swish_of_two(X), plain_swish(X))


def test_its_own_vmap_is_called() -> None:
    before = functions.Tripled.calls
    vmap(BY_NAME["Tripled"].op)(X, Y)
    assert functions.Tripled.calls == before + 1


def test_random_numbers() -> None:
    dropped = normpass.as_op(single.Dropped)
    x = torch.ones(4, 100)

    def masks(randomness: str) -> Tensor:
        return vmap(lambda x: dropped(x, 0.5), randomness=randomness)(x)[1]

    different, same = masks("different"), masks("same")
    assert not different[0].equal(different[1])
    assert same[0].equal(same[1])
    with pytest.raises(RuntimeError, match="called random operation while in randomness error"):
        masks("error")
    torch.manual_seed(0)
    y = dropped(x, 0.5)[0]
    torch.manual_seed(0)
    assert_close(y, single.Dropped.apply(x, 0.5)[0])


def test_memory_is_given_back() -> None:
    x, kept = X.clone().requires_grad_(), []

    class Big(torch.autograd.Function):
        @staticmethod
        def forward(x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
            saved = inputs[0] + 0
            kept.append(weakref.ref(saved))
            ctx.save_for_backward(saved)

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return 2 * grad + 0 * ctx.saved_tensors[0]

    big = normpass.as_op(Big)
    gc.disable()
    try:
        y = big(x)
        del y
        assert kept[-1]() is None
        y = big(x).sum()
        assert kept[-1]() is not None
        y.backward()
        assert kept[-1]() is None
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()
        vmap(grad(lambda x: big(x).sum()))(X)
        assert kept[-1]() is None
    finally:
        gc.enable()


def test_threads() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x, k):  # type: ignore[no-untyped-def]
            return x * k

        @staticmethod
        def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
            ctx.k = inputs[1]

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad * ctx.k, None

    errors: list[BaseException] = []
    ops = set()

    def work() -> None:
        try:
            for k in range(20):
                scaled, x = normpass.as_op(Scaled), X.clone().requires_grad_()
                ops.add(scaled)
                scaled(x, float(k)).sum().backward()
                assert_close(x.grad, torch.full_like(X, k))
                assert_close(vmap(lambda x, f=scaled: f(x, 2))(X), 2 * X)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(ops) == 1


def test_one_that_calls_another() -> None:
    @normpass.as_op
    class Outer(functions.Saving):
        @staticmethod
        def forward(x):  # type: ignore[no-untyped-def]
            return BY_NAME["Exp"].op(x.float()) + swish(x.float(), 0.5)

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (x,) = ctx.saved_tensors
            return grad * Outer(x)

    x = X.clone().requires_grad_()
    y = X.float().exp() + X.float() * (X.float() / 2).sigmoid()
    assert_close(Outer(x), y)
    assert_close(torch.autograd.grad(Outer(x).sum(), x)[0], y.double())


# --- what it is ---------------------------------------------------------------------------------


def test_the_same_for_the_same_class() -> None:
    assert normpass.as_op(functions.Swish) is swish
    assert copy.deepcopy(swish) is swish
    assert pickle.loads(pickle.dumps(swish)) is swish
    assert normpass.as_op(functions.InNumPy) is BY_NAME["InNumPy"].op  # which has a fake
    op, args = swish.operator(X, 2.0)
    assert op is swish.operator(Y, 3.0)[0]
    assert str(op._schema).startswith("normpass_functions::Swish_")
    assert str(op._schema).endswith("(Tensor x, Scalar scale) -> Tensor")
    assert args == (X, 2.0)


def test_a_decorator() -> None:
    @normpass.as_op
    class Doubled(functions.Bare):
        """Twice."""

        @staticmethod
        def forward(x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return Doubled.apply(grad)  # of the operator

    assert (Doubled.__name__, Doubled.__doc__) == ("Doubled", "Twice.")
    assert_close(hessian(lambda x: Doubled(x).square().sum())(X[0]), 8 * torch.eye(4).double())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: normpass.as_op(single.OldStyle),
            TypeError,
            r"forward has no ctx, .*; found OldStyle.forward\(ctx, x\) and no setup_context",
        ),
        (lambda: normpass.as_op(torch.sin), TypeError, "a subclass of torch.autograd.Function"),
        (lambda: swish(X, {1, 2}), TypeError, "constants that can be hashed; found a set"),
        (lambda: swish(X), TypeError, "missing 1 required positional argument: 'scale'"),
        (
            lambda: BY_NAME["Product"].op(torch.ones(3), torch.ones(4)),
            RuntimeError,
            r"The size of tensor a \(3\) must match",
        ),
        (
            lambda: normpass.as_op(single.WithoutFake)(X),
            RuntimeError,
            r"WithoutFake.forward cannot be run on fake tensors \(.*say with fake=f what it",
        ),
        (
            lambda: normpass.as_op(single.Changing)(X, 0),
            TypeError,
            "Changing.forward is to return a tensor, or several",
        ),
        (
            lambda: [normpass.as_op(single.Changing)(X, n) for n in (1, 2)],
            RuntimeError,
            r"returns \('Tensor',\), as its first call did; found \('Tensor', 'Tensor'\)",
        ),
        (
            lambda: vmap(normpass.as_op(single.Ambiguous))(X),
            RuntimeError,
            "both generate_vmap_rule=True and an overridden vmap staticmethod",
        ),
        (
            lambda: jvp(normpass.as_op(single.Once), (X,), (Y,)),
            NotImplementedError,
            "Once has no jvp, and none can be derived",
        ),
        (
            lambda: normpass.as_op(functions.Bare),
            TypeError,
            "as_op takes a Function with a forward; found Bare",
        ),
    ],
)
def test_messages(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_without_a_backward() -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="implement either the backward or vjp method"):
        normpass.as_op(single.Changing)(x, True)[0].sum().backward()
