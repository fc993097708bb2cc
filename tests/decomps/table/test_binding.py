"""vjp(op) and jvp(op): the rows of derivatives.yaml against PyTorch's autograd and forward mode."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import table_calls
import torch
from snapshots import assert_snapshot
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import normpass
from normpass.decomps.registry import UnknownRule
from normpass.decomps.table.binding import jvp, row_of, vjp
from normpass.decomps.table.derivatives_yaml import DEFAULT, entries
from normpass.decomps.table.formulas import NoFormula
from normpass.decomps.torch_versions import RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten
SAMPLES = 2
# What PyTorch's operator database says of an operator is asked for once, and of one dtype here; of
# every sample and of complex numbers too by `make sweep`.
EVERY = pytest.mark.sweep


@pytest.mark.parametrize("name", sorted(table_calls.operators(torch.float64)))
def test_every_call_of_an_operator(name: str) -> None:
    check(name, torch.float64, SAMPLES)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", sorted(table_calls.operators(torch.float64)))
def test_every_call_of_every_sample(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, None)


def check(name: str, dtype: torch.dtype, samples: int | None) -> None:
    found = table_calls.operators(dtype).get(name)
    if found is None:
        pytest.skip(f"{name} does not take {dtype}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated operators and of complex casts
        for call in table_calls.calls(found, dtype, samples):
            table_calls.check_vjp(call)
            table_calls.check_jvp(call)


@pytest.mark.skipif(RELEASE != (2, 13), reason="the snapshot is of the rows of torch 2.13")
def test_what_cannot_be_evaluated() -> None:
    """Every row that has a formula which this table cannot evaluate, and why."""
    lines = []
    for name in sorted(entries()):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if op is None or DEFAULT not in entries()[name]:
            lines.append(f"{name}: {'no operator of this build' if op is None else 'no default'}")
            continue
        missing = [
            str(formula).removeprefix(f"{op}: ")
            for derivative in (vjp(op), jvp(op))
            for formula in derivative.formulas.values()
            if isinstance(formula, NoFormula) and derivative.own is None
        ]
        lines += [f"{name}: {text}" for text in missing]
    assert_snapshot("table.txt", "\n".join(lines))


# --- the convention -----------------------------------------------------------------------------

X = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4)
W, G = torch.linspace(1, 2, 4, dtype=torch.float64), X.sin()


def test_gradients_by_name_in_the_shapes_of_the_arguments() -> None:
    found = vjp(aten.mul.Tensor)((G,), (X, W), X * W)
    assert found.keys() == {"self", "other"}
    assert_close(found["self"], G * W)
    assert_close(found["other"], (G * X).sum(0))


def test_only_what_is_needed() -> None:
    asked: list[Any] = []

    class Asked(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    args = {"self": X, "mat2": X.t()}
    with Asked():
        found = vjp(aten.mm)((X @ X.t(),), args, X @ X.t(), ["self"])
    assert found.keys() == {"self"}
    assert torch.ops.normpass.mm_mat1_backward.default in asked
    assert torch.ops.normpass.mm_mat2_backward.default not in asked


def test_what_is_undefined_is_none() -> None:
    assert vjp(aten.mul.Tensor)((None,), (X, W), X * W) == {"self": None, "other": None}
    assert vjp(aten.mul.Tensor)(None, (X, W), X * W, ["self"]) == {"self": None}
    assert jvp(aten.mul.Tensor)({}, (X, W), X * W) == (None,)
    assert jvp(aten.mul.Tensor)((None, None), (X, W), X * W) == (None,)


def test_a_tangent_that_is_not_there_is_zero() -> None:
    (found,) = jvp(aten.mul.Tensor)({"other": W}, (X, W), X * W)
    assert_close(found, X * W)
    (found,) = jvp(aten.mul.Tensor)((G, None), (X, W), X * W)
    assert_close(found, G * W)


def test_a_list_of_one_result() -> None:
    x = torch.ones(1, 3)
    for results in ([x[0]], ([x[0]],)):
        found = vjp(aten.unbind.int)(([torch.ones(3)],), (x, 0), results)
        assert_close(found["self"], torch.ones(1, 3))


def test_an_argument_that_is_called_as_a_gradient() -> None:
    args = {"grad_output": G, "output": X.tanh()}
    found = vjp(aten.tanh_backward)((X,), args, aten.tanh_backward(*args.values()))
    assert_close(found["grad_output"], X * (1 - X.tanh() ** 2))
    assert_close(found["output"], -2 * X * G * X.tanh())


def test_a_norm() -> None:
    args = (X, [4], W, None, 1e-5)
    y, mean, rstd = aten.native_layer_norm(*args)
    found = normpass.vjp(aten.native_layer_norm)((G, None, None), args, (y, mean, rstd))
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    right = torch.autograd.grad(torch.layer_norm(x, (4,), w), (x, w), G)
    assert_close((found["input"], found["weight"]), right)
    tangent, *_ = normpass.jvp(aten.native_layer_norm)({"input": G}, args, (y, mean, rstd))
    right = torch.func.jvp(lambda x: torch.layer_norm(x, (4,), W), (X,), (G,))[1]
    assert_close(tangent, right)


def test_the_dtype_of_a_gradient_is_the_arguments() -> None:
    x = X.to(torch.bfloat16)
    found = vjp(aten.mul.Tensor)((G,), (x, W), x * W)
    assert found["self"].dtype is torch.bfloat16
    complex_ = torch.complex(X, G)
    found = vjp(aten.mul.Tensor)((complex_,), (X, complex_), X * complex_)
    assert found["self"].dtype is torch.float64


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: vjp(aten.einsum), UnknownRule, "put together from others"),
        (lambda: vjp("mul"), TypeError, "expected an operator"),
        (lambda: jvp(aten.mul)({"w": W}, (X, W), X), TypeError, "found tangents of w"),
        (lambda: vjp(aten.mul.out), UnknownRule, "near matches: mul.Tensor"),
        (lambda: vjp(aten.mul.Tensor)((G,), (X,), X), TypeError, "missing: other"),
        (
            lambda: vjp(aten.mul.Tensor)((G,), {"self": X, "w": W}, X),
            TypeError,
            "missing: other; unknown: w",
        ),
        (
            lambda: vjp(aten.mul.Tensor)((G,), (X, W), X, ["othr"]),
            ValueError,
            "has gradients of (self, other); found othr",
        ),
        (
            lambda: vjp(aten.igamma)((G,), (X, X), X),
            NotImplementedError,
            "the derivative for 'igamma: input' is not implemented.",
        ),
        (
            lambda: vjp(aten.mul.Tensor)((G, G), (X, W), X),
            ValueError,
            "has 1 results; found 2 grads",
        ),
    ],
    ids=[
        "composite",
        "no operator",
        "tangents",
        "out",
        "missing",
        "unknown",
        "needs",
        "undefined upstream",
        "grads",
    ],
)
def test_messages(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)


def test_the_tangent_of_a_complex_silu() -> None:
    """PyTorch's is wrong: it makes the tangent from a gradient that is not conjugated."""
    x, t = torch.complex(X, G), torch.complex(G, X.cos())
    h, silu = 1e-6, torch.nn.functional.silu
    (found,) = jvp(aten.silu)({"self": t}, (x,), silu(x))
    assert_close(found, (silu(x + h * t) - silu(x - h * t)) / (2 * h), rtol=1e-8, atol=1e-8)
    with forward_ad.dual_level():
        theirs = forward_ad.unpack_dual(silu(forward_ad.make_dual(x, t))).tangent
    assert not torch.allclose(theirs, found)


# --- traces --------------------------------------------------------------------------------------


def test_traced_with_symbolic_sizes() -> None:
    def gradients(g: Tensor, x: Tensor, w: Tensor) -> Any:
        return vjp(aten.mul.Tensor)((g,), (x, w), x * w)

    traced = make_fx(gradients, tracing_mode="symbolic")(G, X, W)
    g, x, w = (torch.randn(5, 6), torch.randn(5, 6), torch.randn(6))
    assert_close(traced(g, x, w), gradients(g, x, w))


CALLS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten.mul.Tensor, (X, W)),
    (aten.mm.default, (X, X.t())),
    (aten.tanh.default, (X,)),
    (aten.native_layer_norm.default, (X, [4], W, None, 1e-5)),
    (aten.clamp.default, (X, -0.5, None)),
)


@pytest.mark.parametrize(("op", "args"), CALLS, ids=[str(op) for op, _ in CALLS])
def test_compiled_in_one_graph(op: Any, args: tuple[Any, ...]) -> None:
    first = op(*args)[0] if isinstance(op(*args), tuple) else op(*args)
    count = len(op._schema.returns)

    derivative = vjp(op)

    def gradients(g: Tensor) -> Any:
        return derivative((g, *[None] * (count - 1)), args, op(*args))

    compiled = torch.compile(gradients, fullgraph=True, backend="eager")
    g = torch.randn_like(first)
    assert_close(compiled(g), gradients(g))


def test_a_row_says_where_it_is_from() -> None:
    assert row_of(aten.mul).entry.fields["self",].startswith("mul_tensor_backward")
    assert repr(vjp(aten.mul)) == "vjp(aten.mul.Tensor)"
