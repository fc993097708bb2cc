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
from normpass.decomps.table.binding import Jvp, jvp, vjp
from normpass.decomps.table.derivatives_yaml import DEFAULT, entries
from normpass.decomps.table.formulas import NoFormula
from normpass.decomps.table.rows import row_of
from normpass.decomps.torch_versions import GROUP_MEAN_ALONE_IS_LOST, RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten
SAMPLES = 2  # of each operator; of every sample it is asked by `make sweep`
OPERATORS = [
    (name, dtype)
    for dtype in (torch.float64, torch.complex128)
    for name in sorted(table_calls.operators(dtype))
]
each = pytest.mark.parametrize(
    ("name", "dtype"), OPERATORS, ids=[f"{name}-{dtype}" for name, dtype in OPERATORS]
)


@pytest.mark.one_in(3)
@each
def test_every_call_of_an_operator(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, SAMPLES)


@pytest.mark.sweep
@each
def test_every_call_of_every_sample(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, None)


def check(name: str, dtype: torch.dtype, samples: int | None) -> None:
    found = table_calls.operators(dtype)[name]
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


@pytest.mark.parametrize("rows", [1, 2])
def test_a_list_of_results_is_one(rows: int) -> None:
    x = X[:rows]
    for results in (list(x), (list(x),)):
        found = vjp(aten.unbind.int)(([*G[:rows]],), (x, 0), results)
        assert_close(found["self"], G[:rows])


def test_an_argument_that_is_called_as_a_gradient() -> None:
    args = {"grad_output": G, "output": X.tanh()}
    found = vjp(aten.tanh_backward)((X,), args, aten.tanh_backward(*args.values()))
    assert_close(found["grad_output"], X * (1 - X.tanh() ** 2))
    assert_close(found["output"], -2 * X * G * X.tanh())


def test_a_tangent_that_is_not_there_meets_an_infinity() -> None:
    """As in forward mode, where 0 * inf of nothing is nothing."""
    x, nought = torch.ones(2), torch.zeros(2)
    (found,) = jvp(aten.div.Tensor)({"self": x}, (x, nought), x / nought)
    assert_close(found, torch.full((2,), torch.inf))


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


def test_a_tangent_by_the_gradients_formula() -> None:
    """What derivatives.yaml calls auto_element_wise, without our slope for it."""
    derivative = Jvp(row_of(aten.tanh))
    assert derivative.own
    assert derivative.reverse
    derivative.own = derivative.reverse.own = None
    x, t = torch.complex(X, G), torch.complex(G, X.cos())
    (found,) = derivative({"self": t}, (x,), x.tanh())
    assert_close(found, t * (1 - x.tanh() ** 2))


def test_the_tangent_of_a_complex_silu() -> None:
    """PyTorch's is wrong: it makes the tangent from a gradient that is not conjugated."""
    x, t = torch.complex(X, G), torch.complex(G, X.cos())
    h, silu = 1e-6, torch.nn.functional.silu
    (found,) = jvp(aten.silu)({"self": t}, (x,), silu(x))
    assert_close(found, (silu(x + h * t) - silu(x - h * t)) / (2 * h), rtol=1e-8, atol=1e-8)
    with forward_ad.dual_level():
        theirs = forward_ad.unpack_dual(silu(forward_ad.make_dual(x, t))).tangent
    assert not torch.allclose(theirs, found)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("unitriangular", [False, True])
def test_the_tangent_of_triangular_solve(transpose: bool, unitriangular: bool) -> None:
    """PyTorch's takes no notice of the transpose, nor of the triangle."""
    args = (X.t(), 2 * W.diag() + 1)
    flags = (True, transpose, unitriangular)
    t, h = torch.cos(args[1] + W), 1e-6

    def solution(A: Tensor) -> Tensor:
        return aten.triangular_solve(args[0], A, *flags)[0]

    results = aten.triangular_solve(*args, *flags)
    found, _ = jvp(aten.triangular_solve)({"A": t}, (*args, *flags), results)
    expected = (solution(args[1] + h * t) - solution(args[1] - h * t)) / (2 * h)
    assert_close(found, expected, rtol=1e-8, atol=1e-8)
    with forward_ad.dual_level():
        theirs = forward_ad.unpack_dual(solution(forward_ad.make_dual(args[1], t))).tangent
    assert not torch.allclose(theirs, found)


def test_the_gradient_of_a_groups_mean_alone() -> None:
    """PyTorch's was undefined where the norm itself has no gradient, which means zero."""
    args = (torch.sin(torch.arange(18.0, dtype=torch.float64)).reshape(1, 6, 3), None, None)
    sizes = (1, 6, 3, 2, 0.5)
    x, h, step = args[0].clone().requires_grad_(), 1e-6, torch.cos(args[0] * 3)
    results = aten.native_group_norm(x, None, None, *sizes)
    for k in (1, 2):
        g = torch.tensor([[0.5, -1.5]], dtype=torch.float64)
        grads = [g if j == k else None for j in range(3)]
        found = vjp(aten.native_group_norm)(grads, (*args, *sizes), results, ["input"])["input"]
        ends = [
            aten.native_group_norm(args[0] + sign * h * step, None, None, *sizes)[k]
            for sign in (1, -1)
        ]
        assert_close(
            (found * step).sum(), ((ends[0] - ends[1]) * g).sum() / (2 * h), rtol=1e-7, atol=1e-9
        )
        (stock,) = torch.autograd.grad(results[k], x, g, retain_graph=True, allow_unused=True)
        assert (stock is None) == GROUP_MEAN_ALONE_IS_LOST


LISTS = [torch.linspace(0.5, 1.5, n, dtype=torch.float64) for n in (3, 4)]
OTHERS = [torch.linspace(1.7, 0.3, n, dtype=torch.float64) for n in (3, 4)]
FOREACH = (
    ("_foreach_div.List", (LISTS, OTHERS)),
    ("_foreach_maximum.Scalar", (LISTS, 1.0)),
    ("_foreach_maximum.ScalarList", (LISTS, [0.9, 0.8])),
    ("_foreach_minimum.Scalar", (LISTS, 0.9)),
    ("_foreach_minimum.ScalarList", (LISTS, [0.9, 0.8])),
    ("_foreach_norm.Scalar", (LISTS, 2)),
    ("_foreach_pow.List", (LISTS, OTHERS)),
    ("_foreach_pow.ScalarAndTensor", (1.5, LISTS)),
    ("_foreach_pow.ScalarList", (LISTS, [2.0, 1.5])),
)


@pytest.mark.parametrize(("name", "args"), FOREACH, ids=[name for name, _ in FOREACH])
def test_rows_of_lists(name: str, args: tuple[Any, ...]) -> None:
    """Gradients are autograd's, where one is left out too; tangents are the transpose of them.
    PyTorch's tangent of a maximum or minimum is not: it adds the bound (1.0 at 1.0 is a tie).
    """
    packet, overload = name.split(".")
    op = getattr(getattr(aten, packet), overload)
    lists = [
        k for k, a in enumerate(args) if isinstance(a, list) and isinstance(a[0], torch.Tensor)
    ]
    leaves = [
        [x.clone().requires_grad_() for x in a] if k in lists else a for k, a in enumerate(args)
    ]
    ys, xs = op(*leaves), [x for k in lists for x in leaves[k]]
    grads = [y.detach().cos() for y in ys]
    found = vjp(op)((grads,), args, op(*args))
    assert_close([g for of in found.values() for g in of], list(torch.autograd.grad(ys, xs, grads)))
    assert all(of[0] is None for of in vjp(op)(([None, grads[1]],), args, op(*args)).values())
    if not row_of(op).tangents:
        return
    moved = {n: [torch.sin(x * 7) for x in args[k]] for n, k in zip(found, lists, strict=True)}
    (tangents,) = jvp(op)(moved, args, op(*args))
    along = sum((t * g).sum() for t, g in zip(tangents, grads, strict=True))
    pairs = ((g, t) for n in found for g, t in zip(found[n], moved[n], strict=True))
    assert_close(along, sum((g * t).sum() for g, t in pairs))


@pytest.mark.parametrize("name", ["celu_", "elu_", "leaky_relu_"])
def test_the_tangent_of_what_is_written_to(name: str) -> None:
    """Its arguments are those before the write."""
    op = getattr(aten, name).default
    (found,) = jvp(op)({"self": G}, (X,), op(X.clone()))
    functional = getattr(aten, name.removesuffix("_")).default
    assert_close(found, jvp(functional)({"self": G}, (X,), functional(X))[0])


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


def test_a_condition_of_a_derivative_is_compiled_too() -> None:
    """Whether a cast has one depends on the dtype that it is to."""
    derivative = vjp(aten._to_copy)

    def gradient(g: Tensor) -> Any:
        args = {"self": X, "dtype": g.dtype}
        return derivative((g,), {**derivative.row.defaults, **args}, X.to(g.dtype))

    compiled = torch.compile(gradient, fullgraph=True, backend="eager")
    for dtype in (torch.float32, torch.int64):
        g = G.to(dtype)
        assert compiled(g).keys() == gradient(g).keys() == {"self"}
        assert (compiled(g)["self"] is None) == (dtype is torch.int64)


def test_a_row_says_where_it_is_from() -> None:
    assert row_of(aten.mul).entry.fields["self",].startswith("mul_tensor_backward")
    assert repr(vjp(aten.mul)) == "vjp(aten.mul.Tensor)"


NO_FORMULA = {
    "grid_sampler_2d": (X.view(1, 1, 3, 4), X.reshape(1, 3, 2, 2) * 0.37, 0, 0, False),
    "ormqr": (X, X[:, 0], X[:, :2], True, False),
    "index_reduce": (X, 0, torch.tensor([0, 0, 2]), X + 3, "prod"),
}


@pytest.mark.parametrize("name", NO_FORMULA)
def test_a_tangent_that_upstream_has_no_formula_for_is_the_transpose(name: str) -> None:
    op, args = getattr(aten, name).default, NO_FORMULA[name]
    assert not row_of(op).tangents
    steps = [
        torch.linspace(1, 2, v.numel(), dtype=v.dtype).cos().reshape(v.shape)
        if isinstance(v, torch.Tensor) and v.is_floating_point()
        else None
        for v in args
    ]

    def moved(h: float) -> Tensor:
        pairs = zip(args, steps, strict=True)
        result: Tensor = op(*(v if step is None else v + h * step for v, step in pairs))
        return result

    (found,) = jvp(op)(steps, args, moved(0))
    assert_close(found, (moved(1e-6) - moved(-1e-6)) / 2e-6, rtol=1e-6, atol=1e-7)


def test_the_transpose_of_a_kernel_says_what_is_missing() -> None:
    y = aten._cdist_forward(X, X + 1, 2.0, None)
    message = "_cdist_forward.default has no forward derivative: .*'_cdist_backward' is not impl"
    with pytest.raises(NotImplementedError, match=message):
        jvp(aten._cdist_forward)((X, None), (X, X + 1, 2.0, None), y)
