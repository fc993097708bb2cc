"""normpass.as_op under torch.compile and torch.export, against the mathematics in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import single_functions as single
import torch
from function_cases import BY_NAME, Case, X, Y, loss, over_first, plain_swish, swish_of_two
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.func import grad, hessian, jvp, vmap
from torch.testing import assert_close

import normpass
from normpass.decomps.function_ops import operator
from normpass.decomps.torch_versions import HESSIAN_OF_SEVERAL_COMPILES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch._prims_common.check` is deprecated:FutureWarning"  # Inductor, in a Hessian
)
INDUCTORS = ["inductor", "normpass"]
swish = BY_NAME["Swish"].op


def compared(backend: str, case: Case) -> None:
    """Gradients on the tape and transforms, in one graph each."""

    def total(f: Callable[..., Any]) -> Callable[..., Any]:
        return loss(case.of(f))

    def several(f: Callable[..., Any]) -> Callable[..., Any]:
        one, each = total(f), tuple(range(len(case.tensors)))
        twice = each if HESSIAN_OF_SEVERAL_COMPILES else 0
        return lambda x, *rest: (
            hessian(one, twice)(x, *rest),
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["eager", "inductor", "normpass"])
@pytest.mark.parametrize(
    "name",
    [name if name == "Swish" else pytest.param(name, marks=pytest.mark.sweep) for name in BY_NAME],
)
def test_compiled(backend: str, name: str) -> None:
    compared(backend, BY_NAME[name])


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", BY_NAME)
def test_compiled_by_aot_eager(name: str) -> None:
    compared("aot_eager", BY_NAME[name])


@pytest.mark.parametrize(
    "backend", ["", "aot_eager", *(pytest.param(b, marks=pytest.mark.sweep) for b in INDUCTORS)]
)
@pytest.mark.parametrize("eager", [False, True])
def test_with_rules_registered(eager: bool, backend: str) -> None:
    """A Function whose forward and backward are made of what has rules."""
    normalized = normpass.as_op(single.Normalized)

    def formula(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    with normpass.registered(eager=eager):
        if backend:
            compared(backend, Case(normalized, formula))
        else:
            assert_close(hessian(loss(normalized))(X), hessian(loss(formula))(X))


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
    multiplied = normpass.as_op(single.Multiplied)
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
    assert_close(gradient(multiplied), gradient(single.Multiplied.apply))
    compiled = torch.compile(lambda a: product(multiplied, a), backend="aot_eager", fullgraph=True)
    assert_close(compiled(a), expected)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
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


@pytest.mark.parametrize(
    "fake", [None, lambda x, y: (x, torch.empty_like(x))], ids=["traced", "opaque"]
)
@pytest.mark.parametrize(
    "backend",
    [
        "",
        "aot_eager",
        *(pytest.param(b, marks=pytest.mark.sweep) for b in ("inductor", "normpass")),
    ],
)
def test_an_argument_that_is_written_to(fake: Any, backend: str) -> None:
    halved = normpass.as_op(single.Halved, fake=fake)

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


def test_another_kernel_for_fake_tensors_is_another_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor's cache knows an operator by its name, and other constants are other shapes."""

    def name(fake: Callable[..., Any]) -> str:
        monkeypatch.setattr(operator, "_names", set())  # as in another process
        function = type("InNumPy", (single.WithoutFake,), {"__module__": __name__})
        return normpass.as_op(function, fake=fake).operator(X)[0].name()

    small, large = lambda x: x.new_empty(3000), lambda x: x.new_empty(4000)
    assert name(small) != name(large)
    with pytest.raises(RuntimeError, match="with the same name and overload"):
        name(small)
