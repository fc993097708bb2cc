"""Calls of operators of ATen as they happen within PyTorch's operator database, and what PyTorch's
autograd and forward mode make of each alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.testing._internal import common_methods_invocations as database
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from normpass.decomps.registry import UnknownRule
from normpass.decomps.table.binding import jvp, vjp
from normpass.decomps.table.formulas import NoFormula
from normpass.decomps.table.rows import Row, row_of
from normpass.decomps.torch_versions import GROUP_MEAN_ALONE_IS_LOST

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from torch._ops import OpOverload
    from torch.testing._internal.opinfo.core import OpInfo

RIGHT, REFUSED, NOT_COUNTED = "right", "refused", "not counted"
# Casts are what there is of other dtypes than doubles.
TOLERANCE = {
    torch.float64: (1e-9, 1e-11),
    torch.complex128: (1e-9, 1e-11),
    torch.float32: (1e-5, 1e-6),
    torch.complex64: (1e-5, 1e-6),
    torch.bfloat16: (2e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
    torch.complex32: (2e-3, 1e-3),
}


@dataclass(frozen=True)
class Call:
    """An operator with a row in the table, and its arguments by name."""

    op: OpOverload
    args: Mapping[str, Any]

    @property
    def row(self) -> Row:
        return row_of(self.op)

    def __repr__(self) -> str:
        shown = tree_map_only(torch.Tensor, lambda t: f"{t.dtype}{list(t.shape)}", dict(self.args))
        return f"{self.op}({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def run(self, args: Mapping[str, Any]) -> tuple[Any, ...]:
        schema = self.op._schema.arguments
        positional = [args[a.name] for a in schema if not a.kwarg_only]
        found = self.op(*positional, **{a.name: args[a.name] for a in schema if a.kwarg_only})
        return tuple(found) if isinstance(found, tuple) else (found,)


# PyTorch's tangents of a complex silu and of cholesky_inverse are wrong, that of triangular_solve
# for a matrix that is transposed and for a tangent that is not triangular, that of logcumsumexp has
# six digits at best, and wrong are the gradients of what as_strided_scatter writes to and of a
# group's mean or deviation where the norm itself has none (test_binding.py,
# test_linalg_decompositions.py, test_scans.py and test_strides.py show them).
WRONG_TANGENTS = {
    ("aten.silu.default", torch.complex128),
    *(
        (f"aten.{name}.default", dtype)
        for name in ("cholesky_inverse", "logcumsumexp", "triangular_solve")
        for dtype in (torch.float64, torch.complex128)
    ),
}
WRONG_GRADIENTS = {"aten.as_strided_scatter.default"}
WRONG_ALONE = {"aten.native_group_norm.default"} if GROUP_MEAN_ALONE_IS_LOST else set()
# PyTorch's kernels have 1 / 6 in float32; and its gradient of a product of reflectors undoes one
# after the other, which loses digits of what is as large as in the samples.
ROUNDED = {
    "aten.hardsigmoid.default": 1e-7,
    "aten.hardsigmoid_backward.default": 1e-7,
    "aten.linalg_householder_product.default": 1e-6,
}
# PyTorch divides the product by an element: of one that is NaN or infinite it says NaN, where the
# product of the others, which is ours, may not be.
PRODUCTS = (torch.ops.aten.prod.default, torch.ops.aten.prod.dim_int)
# Of two numbers that go to one place either may be there: threads race.
UNPOOLS = {torch.ops.aten.max_unpool2d.default: 2, torch.ops.aten.max_unpool3d.default: 3}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (call := _call(func, args, kwargs or {})) is not None:
            self.calls.append(call)
        return func(*args, **(kwargs or {}))


def _call(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    try:
        row = row_of(op)
    except UnknownRule:
        return None
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if op is torch.ops.aten.as_strided.default and not _is_whole(tensors[0]):
        return None  # it reads a storage of which a copy has a part
    if op in UNPOOLS and _repeats(args[1].flatten(-UNPOOLS[op])):
        return None
    if op in PRODUCTS and any(not t.isfinite().all() for t in tensors):
        return None
    if op._schema.is_mutable or not any(map(is_number, tensors)):
        return None
    given = row.given({**dict(zip(row.arguments, args, strict=False)), **kwargs})
    return Call(op, tree_map_only(torch.Tensor, lambda t: t.detach().clone(), given))


def _repeats(rows: Tensor) -> bool:
    return bool((rows.sort(-1).values.diff(dim=-1) == 0).any())


def _is_whole(x: Tensor) -> bool:
    return x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()


def is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def calls(info: OpInfo, dtype: torch.dtype, samples: int | None) -> Iterator[Call]:
    """The calls that an operator makes below autograd: for each of so many samples, of these those
    that look different, or for all.
    """
    torch.manual_seed(0)
    recorder = _Recorder()
    for sample in islice(info.sample_inputs("cpu", dtype), samples):
        with recorder:
            info(sample.input, *sample.args, **sample.kwargs)
    if samples is None:  # the values may be special where shapes are alike
        yield from recorder.calls
    else:
        yield from {repr(call): call for call in reversed(recorder.calls)}.values()


def operators(dtype: torch.dtype) -> dict[str, OpInfo]:
    """Those of the database that CPUs have; jiterator's are for GPUs alone."""
    return {
        op.full_name: op
        for op in database.op_db
        if dtype in op.supported_dtypes("cpu") and not op.name.startswith("jiterator")
    }


def check_vjp(call: Call) -> str:
    """Compares every gradient with autograd's, and those of the gradients; and where there are
    several, those of one result alone, and of one argument alone.
    """
    if str(call.op) in WRONG_GRADIENTS:
        return NOT_COUNTED
    args = tree_map_only(torch.Tensor, _leaf, dict(call.args))
    try:
        results = call.run(args)
        chosen = [y for y in tree_leaves(results) if _has_gradient(y)]
        cotangents = [torch.randn_like(y).requires_grad_() for y in chosen]
        leaves = [x for x in tree_leaves(args) if _has_gradient(x)]
        if not chosen:
            return NOT_COUNTED
        expected = _gradients(chosen, leaves, cotangents)
    except (RuntimeError, NotImplementedError) as error:
        return f"{NOT_COUNTED}: {error}"
    derivative = vjp(call.op)

    def ours(wanted: Sequence[Tensor | None], needs: Sequence[str] | None = None) -> list[Any]:
        left = iter(wanted)
        grads = tree_map_only(
            torch.Tensor, lambda y: next(left) if _has_gradient(y) else None, results
        )
        by_name = derivative(grads, args, results, needs)
        return [g for n, value in args.items() for g in _aligned(value, by_name.get(n))]

    try:
        found = ours(cotangents)
    except NotImplementedError as error:
        return _refused(call, error)
    _compare(call, found, expected, leaves)
    _compare_next(call, found, expected, [*leaves, *cotangents])
    several = len(chosen) > 1 and str(call.op) not in WRONG_ALONE
    for k in range(len(chosen) if several else 0):
        alone = [c if j == k else None for j, c in enumerate(cotangents)]
        _compare(call, ours(alone), _gradients([chosen[k]], leaves, [cotangents[k]]), leaves)
    names = [name for name, value in args.items() if any(map(_has_gradient, tree_leaves(value)))]
    of_each = [n for n in names for v in tree_leaves(args[n]) if _has_gradient(v)]
    for name in names if len(names) > 1 else ():
        wanted = [e if n == name else None for e, n in zip(expected, of_each, strict=True)]
        _compare(call, ours(cotangents, [name]), wanted, leaves)
    return RIGHT


def _refused(call: Call, error: NotImplementedError) -> str:
    """The verdict, if upstream says that there is no derivative, or the table that it has none;
    AssertionError where something else is not implemented.
    """
    derivatives = vjp(call.op), jvp(call.op)
    formulas = [f for derivative in derivatives for f in derivative.formulas.values()]
    missing = [isinstance(f, NoFormula) or "not_implemented" in f.text for f in formulas]
    assert any(missing) or not call.row.tangents, f"{call}: {error}"
    return f"{REFUSED}: {error}"


def _gradients(
    ys: Sequence[Tensor], xs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(ys, xs, cotangents, create_graph=True, allow_unused=True)


def _compare_next(
    call: Call,
    found: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    xs: Sequence[Tensor],
) -> None:
    """The gradient of a gradient, in a direction that is the same for both."""
    torch.manual_seed(1)
    pairs = [(f, e) for f, e in zip(found, expected, strict=True) if e is not None]
    pairs = [(f, e) for f, e in pairs if e.requires_grad and f is not None and not e.is_sparse]
    directions = [torch.randn_like(e) for _, e in pairs]
    try:
        second = _gradients([e for _, e in pairs], xs, directions) if pairs else ()
    except (RuntimeError, NotImplementedError):
        return  # no second derivative of PyTorch's to compare with
    ours = [(f, d) for (f, _), d in zip(pairs, directions, strict=True) if f.requires_grad]
    if ours:
        first, along = zip(*ours, strict=True)
        # Where PyTorch's is NaN (of a norm at zero), it has no second derivative to compare with.
        again = torch.autograd.grad(first, xs, along, retain_graph=True, allow_unused=True)
        known = [
            e if f is None or e is None else torch.where(e.isnan(), f, e)
            for f, e in zip(again, second, strict=True)
        ]
        _compare(call, again, known, xs)
    elif any(g is not None and g.any() for g in second):
        raise AssertionError(f"{call}: the gradient has no derivative")


def _compare(
    call: Call,
    found: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    like: Sequence[Tensor],
) -> None:
    for f, e, x in zip(found, expected, like, strict=True):
        if f is None and e is None:
            continue
        rtol, atol = TOLERANCE[x.dtype]
        rtol = ROUNDED.get(str(call.op), rtol)
        zero = torch.zeros_like(x)
        f, e = ((zero if value is None else value).to_dense() for value in (f, e))
        assert f.shape == x.shape, f"{call}: {f.shape} for {x.shape}"
        assert f.dtype == x.dtype, f"{call}: {f.dtype} for {x.dtype}"
        scale = float(e.detach().abs().nan_to_num(0, 0, 0).amax()) if e.numel() else 0.0
        message = f"{call}: {{}}".format
        assert_close(
            f,
            e,
            rtol=rtol,
            atol=atol * max(1, scale),
            equal_nan=True,
            msg=message,
        )


def check_jvp(call: Call) -> str:
    """Compares every tangent with forward mode's; and where several tensors have one, those of each
    alone.
    """
    torch.manual_seed(2)
    primals = dict(call.args)
    numbers = [x for x in tree_leaves(primals) if is_number(x)]
    tangents = [torch.randn_like(x) for x in numbers]
    verdict = _check_tangents(call, primals, tangents)
    if verdict == RIGHT and len(numbers) > 1:
        for k in range(len(numbers)):
            alone = [t if j == k else None for j, t in enumerate(tangents)]
            _check_tangents(call, primals, alone)
    return verdict


def _check_tangents(call: Call, primals: dict[str, Any], tangents: Sequence[Tensor | None]) -> str:
    results = call.run(primals)
    left = iter(tangents)

    def dual(x: Tensor) -> Tensor:
        tangent = next(left) if is_number(x) else None
        return x if tangent is None else forward_ad.make_dual(x, tangent)

    expected: Any
    with forward_ad.dual_level():
        try:
            expected = [
                forward_ad.unpack_dual(y).tangent if isinstance(y, torch.Tensor) else None
                for y in tree_leaves(call.run(tree_map_only(torch.Tensor, dual, primals)))
            ]
        except (RuntimeError, NotImplementedError) as error:
            expected = error
    if isinstance(expected, Exception):
        if call.row.tangents:
            return f"{NOT_COUNTED}: {expected}"
        return _check_transposed(call, primals, tangents)
    wrong = any((str(call.op), y.dtype) in WRONG_TANGENTS for y in tree_leaves(results))
    if wrong or all(tangent is None for tangent in expected):
        return NOT_COUNTED
    try:
        found = tree_leaves(jvp(call.op)(_given(primals, tangents), primals, results))
    except NotImplementedError as error:
        return _refused(call, error)
    ys = tree_leaves(results)
    if len(found) != len(ys):  # a list without a tangent is one None
        found = [None] * len(ys)
    _compare(call, found, expected, ys)
    return RIGHT


def _given(primals: dict[str, Any], tangents: Sequence[Tensor | None]) -> dict[str, Any]:
    left = iter(tangents)
    given = tree_map_only(torch.Tensor, lambda x: next(left) if is_number(x) else None, primals)
    return {name: given[name] for name in primals if _has_number(primals[name])}


def _check_transposed(
    call: Call, primals: dict[str, Any], tangents: Sequence[Tensor | None]
) -> str:
    """Compares the tangents of what PyTorch has no forward mode for with its reverse mode:
    <g, J t> = <J^H g, t>.
    """
    args = tree_map_only(torch.Tensor, _leaf, primals)
    if any(x.layout != torch.strided for x in tree_leaves(args) if isinstance(x, torch.Tensor)):
        return f"{NOT_COUNTED}: PyTorch has no gradients of a gradient of a compressed tensor"
    try:
        results = call.run(args)
        chosen = [y for y in tree_leaves(results) if _has_gradient(y)]
        cotangents = [torch.randn_like(y) for y in chosen]
        leaves = [x for x in tree_leaves(args) if _has_gradient(x)]
        if not chosen or len(leaves) != len(tangents):
            return NOT_COUNTED
        gradients = torch.autograd.grad(chosen, leaves, cotangents, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        return f"{NOT_COUNTED}: {error}"
    try:
        found = jvp(call.op)(_given(primals, tangents), primals, call.run(primals))
    except NotImplementedError as error:
        return f"{REFUSED}: {error}"
    with_gradient = [t for t, y in zip(found, results, strict=True) if _has_gradient(y)]
    _compare_pairings(call, (cotangents, with_gradient), (gradients, tangents))
    return RIGHT


def _compare_pairings(call: Call, *pairs: tuple[Sequence[Tensor | None], ...]) -> None:
    sums, size = [], 1.0
    for first, second in pairs:
        products = [
            (a.to_dense().conj() * b.to_dense()).real
            for a, b in zip(first, second, strict=True)
            if a is not None and b is not None
        ]
        sums.append(sum((p.double().sum() for p in products), torch.zeros((), dtype=torch.float64)))
        size = max([size, *(float(p.abs().sum()) for p in products)])
    rtol = max(TOLERANCE[t.dtype][0] for t in tree_leaves(pairs) if t is not None)
    message = f"{call}: {{}}".format
    assert_close(*sums, rtol=0, atol=rtol * size, equal_nan=True, msg=message)


def _has_number(value: Any) -> bool:
    return any(map(is_number, tree_leaves(value)))


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if is_number(x) else x


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _aligned(value: Any, gradients: Any) -> list[Tensor | None]:
    """A gradient for each tensor of an argument that has one."""
    leaves = [x for x in tree_leaves(value) if _has_gradient(x)]
    if isinstance(gradients, list | tuple):
        return list(gradients)
    return [gradients] * len(leaves)
