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
import torch
from function_cases import CASES, TRANSFORMS, Case, X, Y, loss, over_first
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.func import functionalize, grad, hessian, jvp, linearize, vmap
from torch.testing import assert_close

import normpass

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BY_NAME = {case.op.__name__: case for case in CASES}
swish = BY_NAME["Swish"].op
BACKENDS = ["eager", "aot_eager", "inductor", "normpass"]
# Compiled by every backend; the others by aot_eager, and by the rest in a sweep.
ALWAYS = ("Swish", "Described", "Rounded")


def plain_swish(x: Tensor) -> Tensor:
    return x * (2.0 * x).sigmoid()


def swish_of_two(x: Tensor) -> Tensor:
    found: Tensor = swish(x, 2.0)
    return found


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
    squared = normpass.as_op(functions.Squared)
    z = torch.complex(X, Y).requires_grad_()
    assert torch.autograd.gradcheck(squared, z, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(squared, z)
    compiled = torch.compile(lambda z: squared(z.conj()), backend="aot_eager", fullgraph=True)
    assert_close(compiled(z), z.conj() ** 2)


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
    dropped = normpass.as_op(functions.Dropped)
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
    assert_close(y, functions.Dropped.apply(x, 0.5)[0])


@pytest.mark.parametrize("fake", [None, lambda x, y: (x, torch.empty_like(x))], ids=str)
@pytest.mark.parametrize("backend", ["", "aot_eager", "inductor"])
def test_an_argument_that_is_written_to(fake: Any, backend: str) -> None:
    halved = normpass.as_op(functions.Halved, fake=fake)

    def total(x: Tensor) -> Tensor:
        z = x * 1
        one, other = halved(z, torch.full_like(x, 0.5))
        return (one.sin() + other.cos() + z).sum()

    def formula(x: Tensor) -> Tensor:
        return ((x / 2).sin() + x.cos() + x / 2).sum()

    def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(f, backend=backend, fullgraph=True) if backend else f

    x, written = X.clone().requires_grad_(), X.clone()
    (found,) = torch.autograd.grad(compiled(total)(x), x)
    assert_close(found, grad(formula)(X))
    for transform in (grad, hessian, lambda f: lambda x: jvp(f, (x,), (Y,))[1]):
        assert_close(compiled(transform(total))(X), transform(formula)(X))
    result = compiled(lambda x: halved(x, torch.full_like(x, 2.0))[1])(written)
    assert_close((written, result), (2 * X, 4 * X))
    torch.library.opcheck(*halved.operator(X.clone(), Y))
    with pytest.raises(NotImplementedError, match="writes to an argument: it has no vmap"):
        vmap(lambda x: halved(x, x)[1])(X.clone())
    with pytest.raises(RuntimeError, match="writes to a tensor that is no variable"):
        grad(lambda y: halved(written, y)[1].sum())(X)


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


# --- compiled -----------------------------------------------------------------------------------


def compared(backend: str, case: Case) -> None:
    """Gradients on the tape and transforms, in one graph each."""

    def total(f: Callable[..., Any]) -> Callable[..., Any]:
        return loss(case.of(f))

    def several(f: Callable[..., Any]) -> Callable[..., Any]:
        one, each = total(f), tuple(range(len(case.tensors)))
        return lambda x, *rest: (
            hessian(one, each)(x, *rest),
            over_first(case.of(f), 1, out_dims=1)(torch.stack([x, x - 1], 1), *rest),
            over_first(grad(one, each), 0)(torch.stack([x, x - 1]), *rest),
        )

    leaves = [x.clone().requires_grad_() for x in case.tensors]
    y = torch.compile(total(case.op), backend=backend, fullgraph=True)(*leaves)
    expected = total(case.formula)(*leaves)
    assert_close(y, expected)
    assert_close(torch.autograd.grad(y, leaves), torch.autograd.grad(expected, leaves))
    found = torch.compile(several(case.op), backend=backend, fullgraph=True)(*case.tensors)
    assert_close(found, several(case.formula)(*case.tensors))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.sweep) for name in BY_NAME],
)
def test_compiled(backend: str, name: str) -> None:
    compared(backend, BY_NAME[name])


def test_compiled_by_aot_eager(case: Case) -> None:
    compared("aot_eager", case)


@pytest.mark.parametrize("eager", [False, True])
def test_with_rules_registered(eager: bool) -> None:
    """A Function whose forward and backward are made of what has rules."""
    normalized = normpass.as_op(functions.Normalized)

    def formula(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    case = Case(normalized, formula)
    with normpass.registered(eager=eager):
        assert_close(hessian(loss(normalized))(X), hessian(loss(formula))(X))
        compared("aot_eager", case)
        compared("inductor", case)
        compared("normpass", case)


def test_the_compiler_sees_what_is_inside() -> None:
    def names(f: Callable[..., Any], *args: Any) -> str:
        return "".join(run_and_get_code(torch.compile(f, fullgraph=True), *args)[1])

    assert "normpass_functions" not in names(swish_of_two, X)
    with torch.inference_mode():
        assert "normpass_functions" not in names(vmap(swish_of_two, in_dims=1), X)
    assert "normpass_functions.InNumPy" in names(BY_NAME["InNumPy"].op, X)


def test_sizes_and_numbers_stay_symbolic() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(swish_of_two, backend=counter, fullgraph=True, dynamic=True)
    for n in (3, 5, 9):
        x = torch.ones(n, 4, requires_grad=True)
        compiled(x).sum().backward()
        assert_close(x.grad, grad(lambda x: plain_swish(x).sum())(torch.ones(n, 4)))
    assert counter.frame_count == 1

    scaled = torch.compile(lambda x, a: swish(x, a), backend=counter, fullgraph=True)
    counter.clear()
    for a in (0.5, 1.5, 2.5, 3.5):
        assert_close(scaled(X, a), X * (a * X).sigmoid())
    assert counter.frame_count == 2  # the first number is a constant

    total = BY_NAME["Total"].op
    counter.clear()
    per_example = torch.compile(
        vmap(grad(lambda x: total(x).sin().sum())), backend=counter, fullgraph=True, dynamic=True
    )
    for n in (3, 5, 9):
        x = torch.ones(n, 4, 7)
        assert_close(per_example(x), x.sum(-1, keepdim=True).cos().expand_as(x))
    assert counter.frame_count == 1


def test_autocast() -> None:
    multiplied = normpass.as_op(functions.Multiplied)
    a = X.float().requires_grad_()

    def product(f: Callable[..., Tensor], a: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return f(a, a.mT)

    def gradient(f: Callable[..., Tensor]) -> Tensor:
        (found,) = torch.autograd.grad(product(f, a).float().square().sum(), a)
        return found

    expected = product(torch.matmul, a)
    assert expected.dtype == torch.bfloat16
    assert_close(product(multiplied, a), expected)
    assert_close(gradient(multiplied), gradient(functions.Multiplied.apply))
    compiled = torch.compile(lambda a: product(multiplied, a), backend="aot_eager", fullgraph=True)
    assert_close(compiled(a), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return swish_of_two(x)

    sizes = ({0: torch.export.Dim("n")},)
    program = torch.export.export(Module(), (X,), strict=strict, dynamic_shapes=sizes)

    def targets(program: torch.export.ExportedProgram) -> str:
        return " ".join(str(n.target) for n in program.graph.nodes if n.op == "call_function")

    assert targets(program).startswith("normpass_functions.Swish")
    assert (
        targets(program.run_decompositions())
        == "aten.mul.Tensor aten.sigmoid.default aten.mul.Tensor"
    )
    x = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
    program.module()(x).sum().backward()
    assert_close(x.grad, grad(lambda x: plain_swish(x).sum())(x.detach()))


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
            lambda: normpass.as_op(functions.OldStyle),
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
            lambda: normpass.as_op(functions.WithoutFake)(X),
            RuntimeError,
            r"WithoutFake.forward cannot be run on fake tensors \(.*say with fake=f what it returns",
        ),
        (
            lambda: normpass.as_op(functions.Changing)(X, 0),
            TypeError,
            "Changing.forward is to return a tensor, or several",
        ),
        (
            lambda: [normpass.as_op(functions.Changing)(X, n) for n in (1, 2)],
            RuntimeError,
            r"returns \('Tensor',\), as its first call did; found \('Tensor', 'Tensor'\)",
        ),
        (
            lambda: vmap(normpass.as_op(functions.Ambiguous))(X),
            RuntimeError,
            "both generate_vmap_rule=True and an overridden vmap staticmethod",
        ),
        (
            lambda: jvp(normpass.as_op(functions.Once), (X,), (Y,)),
            NotImplementedError,
            "Once has no jvp, and none can be derived",
        ),
        (
            lambda: normpass.as_op(functions.Bare),
            TypeError,
            "expected a Function with a forward",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*failed while attempting to run meta")
def test_messages(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_without_a_backward() -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="implement either the backward or vjp method"):
        normpass.as_op(functions.Changing)(x, True)[0].sum().backward()
