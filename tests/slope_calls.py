"""Calls of elementwise operators, from PyTorch's OpInfo samples and from a table of more arguments:
what slopes are tested with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from samples import SIZES, Sample
from torch.autograd import forward_ad
from torch.testing import make_tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from normpass.decomps import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch._ops import OpOverload

    from normpass.decomps.registry import Rule

# Arguments beyond those of the OpInfo samples; `...` is the tensor.
MORE: dict[str, list[tuple[Any, ...]]] = {
    "aten.celu.default": [(..., 0.3), (..., 2)],
    "aten.clamp.default": [(..., -0.5, 1.5), (..., -1), (..., None, 1), (..., 1, -1)],
    "aten.clamp_max.default": [(..., 1), (..., -0.5)],
    "aten.clamp_min.default": [(..., 1), (..., -0.5)],
    "aten.copysign.Scalar": [(..., 2), (..., -0.0)],
    "aten.elu.default": [(..., 0.3, 1.5, 0.7)],
    "aten.fmod.Scalar": [(..., 1.5), (..., -2)],
    "aten.hardtanh.default": [(..., 0, 6)],
    "aten.leaky_relu.default": [(..., 0.3), (..., -0.2), (..., 0)],
    "aten.logit.default": [(..., 0.0), (..., 0.2), (..., None)],
    "aten.nan_to_num.default": [(..., 1.0, 2.0, -2.0)],
    "aten.polygamma.default": [(0, ...), (2, ...)],
    "aten.pow.Scalar": [(2, ...), (0.5, ...), (-2.0, ...), (0, ...), (1, ...)],
    "aten.pow.Tensor_Scalar": [(..., a) for a in (0, 1, 2, 3, 0.5, -1.5, 2.5, -1)],
    "aten.remainder.Scalar": [(..., 1.5), (..., -2)],
    "aten.rsub.Scalar": [(..., 1.5), (..., 2, -3)],
    "aten.softplus.default": [(..., 2, 5), (..., 0.5, 20)],
    "aten.special_xlog1py.other_scalar": [(..., 2.5), (..., -1), (..., -3.0)],
    "aten.special_xlog1py.self_scalar": [(2.5, ...), (0, ...), (-1, ...)],
    "aten.sub.Scalar": [(..., 1.5), (..., 2, 3)],
    "aten.threshold.default": [(..., 0.5, 3.0), (..., -1, 2)],
    "aten.xlogy.Scalar_Other": [(..., 2.5), (..., 0), (..., -3.0)],
    "aten.xlogy.Scalar_Self": [(2.5, ...), (0, ...), (-1, ...)],
}
MORE_COMPLEX: dict[str, list[tuple[Any, ...]]] = {
    "aten.pow.Scalar": [(2 - 1j, ...), (-2, ...)],
    "aten.pow.Tensor_Scalar": [(..., 2 - 1j), (..., 0.5), (..., -2)],
    "aten.rsub.Scalar": [(..., 1.5j), (..., 2, 1 - 3j)],
    "aten.sub.Scalar": [(..., 1.5j), (..., 2, 3j)],
}

aten = torch.ops.aten

# The same functions by other operators, where PyTorch's own derivative of float64 goes through
# float32: celu's 1 / alpha, hardsigmoid's 1 / 6 (which has no second derivative either).
EXACT: dict[str, Callable[..., Tensor]] = {
    "aten.celu.default": lambda x, alpha=1.0: aten.elu(x, alpha, 1, 1 / alpha),
    "aten.hardsigmoid.default": lambda x: aten.hardtanh(x, -3, 3) / 6 + 0.5,
}

# Samples of these operators have a point at which a derivative jumps.
KINKS = {"aten.special_i0e.default": 0.0, "aten.special_i1e.default": 0.0}


@dataclass(frozen=True)
class Call:
    """One call of an operator; `at` is where its tensor stands.

    exact: whether autograd is asked of what EXACT has for the operator.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    exact: bool = True

    @property
    def at(self) -> int:
        return next(i for i, v in enumerate(self.args) if isinstance(v, torch.Tensor))

    @property
    def x(self) -> Tensor:
        return self.args[self.at]

    def on(self, x: Tensor) -> Call:
        """The same call of another tensor; other tensors are like it."""
        like = [torch.full_like(x, 0.3) if isinstance(v, torch.Tensor) else v for v in self.args]
        like[self.at] = x
        return replace(self, args=tuple(like))

    def double(self) -> Call:
        args = [v.double() if isinstance(v, torch.Tensor) else v for v in self.args]
        return replace(self, args=tuple(args))

    def on_others(self, x: Tensor) -> tuple[Any, ...]:
        """The arguments, with this tensor and the others as they are."""
        return (*self.args[: self.at], x, *self.args[self.at + 1 :])

    def __call__(self, x: Tensor) -> Tensor:
        args = self.on_others(x)
        # Some draw noise.
        torch.manual_seed(0)
        function = EXACT.get(str(self.op), self.op) if self.exact else self.op
        return function(*args, **self.kwargs)

    def rule(
        self, kind: str, v: Tensor, x: Tensor | None = None, y: Tensor | None = None
    ) -> Tensor:
        args = self.on_others(self.x if x is None else x)
        return registry.rule_of(kind, self.op)(v, *args, result=y, **self.kwargs)

    def pullback(self, g: Tensor) -> Tensor:
        x = self.x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(self(x), x, g)
        return dx

    def pushforward(self, t: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(self(forward_ad.make_dual(self.x, t)))
        return torch.zeros_like(dual.primal) if dual.tangent is None else dual.tangent


class Recorder(TorchDispatchMode):
    """Keeps the calls of one operator."""

    def __init__(self, op: OpOverload) -> None:
        super().__init__()
        self.op = op
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is self.op:
            self.calls.append(Call(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def find(name: str) -> OpOverload:
    op = registry.find_op(name)
    assert op is not None
    return op


def infos(name: str) -> list[Any]:
    """The OpInfos through which the operator is reached."""
    base = name.split(".")[1].removeprefix("special_").removesuffix("_with_noise")
    base = {"clamp_max": "clamp", "clamp_min": "clamp"}.get(base, base)
    return [info for info in op_db if info.name.split(".")[-1] == base]


@functools.cache
def calls(name: str, dtype: torch.dtype = torch.float64) -> tuple[Call, ...]:
    """All OpInfo samples as calls of the operator itself, and those with more arguments; none
    where autograd does not support the dtype. An operator that no OpInfo reaches is called with a
    tensor alone.
    """
    recorder = Recorder(find(name))
    if not infos(name):
        return (Call(find(name), (make_tensor((5, 7), dtype=dtype, device="cpu"),), {}),)
    known = [info for info in infos(name) if dtype in info.supported_backward_dtypes("cpu")]
    for info in known:
        torch.manual_seed(0)
        # Not info.sample_inputs, which looks for a unittest in the stack: seconds under pytest.
        for sample in info.sample_inputs_func(info, "cpu", dtype, requires_grad=True):
            with recorder:
                info.op(sample.input, *sample.args, **sample.kwargs)
    more = MORE.get(name, []) if known else []
    more = more + (MORE_COMPLEX.get(name, []) if dtype.is_complex else [])
    for i, shape in enumerate([(5, 7), (), (0, 3)]):
        for args in more:
            x = make_tensor(shape, dtype=dtype, device="cpu", noncontiguous=i == 0)
            filled = tuple(x if v is ... else v for v in args)
            recorder.calls.append(Call(find(name), filled, {}))
    return tuple(recorder.calls)


def variants(name: str, dtype: torch.dtype = torch.float64) -> list[Call]:
    """One call for each set of arguments other than the tensor."""
    found = {}
    for call in calls(name, dtype):
        numbers = [v for v in call.args if not isinstance(v, torch.Tensor)]
        found[repr((numbers, call.at, call.kwargs))] = call
    return list(found.values())


def cotangent(y: Tensor) -> Tensor:
    """Non-uniform, of both signs."""
    return make_tensor(y.shape, dtype=y.dtype, device="cpu", low=-2, high=2)


def close(ours: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=1e-12, equal_nan=True)


# --- what a rule owes ---------------------------------------------------------------------------


def samples_of(rule: Rule, which: int = 0) -> Iterator[Sample]:
    """Each set of arguments as a sample of the rule, in either of two sizes; x is made of numbers
    that the operator's own samples have.
    """
    (first,) = rule.linear
    assert rule.op is not None
    names = [a.name for a in rule.op._schema.arguments]
    defaults = {a.name: a.default_value for a in rule.op._schema.arguments if a.has_default_value()}
    for call in variants(rule.name):
        x = domain(call, SIZES[which]["s"])
        if x is None:
            continue
        here = call.on(x)
        given = {**defaults, **dict(zip(names, here.args, strict=False)), **here.kwargs}
        given = {name: given[name] for name in names}
        label = ", ".join(str(v) for v in given.values() if not isinstance(v, torch.Tensor))
        yield Sample(rule, label, {first: cotangent(here.x), **given}, {"*s": 1})


def domain(call: Call, count: int) -> Tensor | None:
    """Some of the numbers of a call's tensor, where function and derivative are finite and not
    large, in the plane around them too; None where there are none, as for real powers of -2.
    """
    x = call.x.detach().flatten()
    # Away from branch cuts, which are on the axes.
    more = [0.3 + 0.2j, -0.7 + 0.4j, 1.3 - 0.6j] if x.is_complex() else [0.3, 0.7, 1.3]
    x = torch.cat([x[x != KINKS.get(str(call.op), torch.nan)], x.new_tensor(more)])
    here = call.on(x)
    slopes = here.pullback(torch.ones_like(x))
    beside = here(x + 1e-6j) if x.is_complex() else here(x)
    kept = x[slopes.isfinite() & (slopes.abs() < 100) & (here(x) + beside).isfinite()]
    return kept.repeat(count // len(kept) + 1)[:count].clone() if len(kept) else None


def check_against_autograd(rule: Rule, call: Call) -> None:
    """A vjp, with the result and without, is autograd's of the operator, a jvp forward AD's."""
    y = call(call.x)
    v = cotangent(y if rule.kind == "vjp" else call.x)
    expected = call.pullback(v) if rule.kind == "vjp" else call.pushforward(v)
    for result in (None, y):
        close(rule(v, *call.args, result=result, **call.kwargs), expected)


def check_by_differences(vjp: Rule, jvp: Rule, call: Call) -> None:
    """gradcheck, forward mode too, and gradgradcheck of the operator with these derivatives."""

    class Ruled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            ctx.call = call.on(x)
            return ctx.call(x)  # and the noise that it draws is kept

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return vjp(g, *ctx.call.on_others(*ctx.saved_tensors), **call.kwargs)

        @staticmethod
        def jvp(ctx: Any, t: Tensor) -> Tensor:
            return jvp(t, *ctx.call.on_others(*ctx.saved_tensors), **call.kwargs)

    x = domain(call, 4)
    if x is None:
        return
    x.requires_grad_()
    fast = {"fast_mode": True, "atol": 1e-4}
    assert torch.autograd.gradcheck(Ruled.apply, x, check_forward_ad=True, **fast)
    assert torch.autograd.gradgradcheck(Ruled.apply, x, **fast)
