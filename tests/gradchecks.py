"""PyTorch's gradcheck machinery on operators that have rules: what upstream's test_ops_gradients.py
and test_ops_fwd_gradients.py ask of an OpInfo, and the same of compiled code.

Code that torch.compile has made cannot be differentiated twice from outside ("does not currently
support double backward"), nor in forward mode or under vmap. There the derivatives are taken
inside the compiled function, and compared with differences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config
from torch.func import jvp, vjp, vmap
from torch.testing import assert_close
from torch.testing._internal.common_utils import gradcheck, gradgradcheck
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from normpass.decomps import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from samples import Sample
    from slope_calls import Call
    from torch import Tensor

    Tensors = Sequence[Tensor]

MODES = ("gradcheck", "gradgradcheck", "forward over reverse", "batched")
STEP = 1e-6
# Differences of float64 at this step: its square and the rounding of the values over it.
DIFFERENCES = {"rtol": 1e-5, "atol": 1e-5}
SAME = {"rtol": 1e-8, "atol": 1e-8}


@dataclass(frozen=True)
class Problem:
    """A differentiable function at one place.

    function     its results, all of them: gradcheck finds out which have a derivative
    smooth       the function with those results only that have one in stock
    stock        the same, with stock's derivatives
    pullback     (xs, cotangents) -> gradients, as it is to be tested
    pushforward  (xs, tangents) -> tangents, likewise
    options      gradcheck's, for all modes
    batched      what the mode "batched" checks: of "grad", "forward", "gradgrad"
    forward      whether the function has a forward mode
    modes        those that the function supports
    """

    function: Callable[..., tuple[Tensor, ...]]
    smooth: Callable[..., tuple[Tensor, ...]]
    stock: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    pullback: Callable[[Tensors, Tensors], Tensors]
    pushforward: Callable[[Tensors, Tensors], Tensors]
    options: dict[str, Any] = field(default_factory=dict)
    batched: tuple[str, ...] = ("grad", "forward", "gradgrad")
    forward: bool = True
    modes: tuple[str, ...] = MODES

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(_leaf(x) for x in self.inputs)


def check(problem: Problem, mode: str) -> None:
    """One of MODES, in eager mode. Raises what gradcheck raises."""
    function, leaves = problem.function, problem.leaves
    options = {"check_batched_grad": False, **problem.options}
    forward = {**options, "check_backward_ad": False, "check_undefined_grad": False}
    # In forward mode gradcheck miscounts results without a derivative, which upstream skips for:
    # "Problem with _get_numerical_jacobian, IndexError: tuple index out of range".
    smooth = problem.smooth
    if mode == "gradcheck":
        assert gradcheck(function, leaves, **options)
        if problem.forward:
            assert gradcheck(smooth, leaves, check_forward_ad=True, **forward)
    elif mode == "gradgradcheck":
        assert gradgradcheck(function, leaves, gen_non_contig_grad_outputs=True, **options)
    elif mode == "forward over reverse":
        only = {"check_rev_over_rev": False, "check_undefined_grad": False}
        assert gradgradcheck(function, leaves, check_fwd_over_rev=True, **only, **options)
    else:
        options["check_batched_grad"] = True
        if "grad" in problem.batched:
            assert gradcheck(function, leaves, **options)
        if "forward" in problem.batched:
            batched = {"check_forward_ad": True, "check_batched_forward_grad": True}
            assert gradcheck(smooth, leaves, **batched, **forward)
        if "gradgrad" in problem.batched:
            assert gradgradcheck(function, leaves, **options)


# --- compiled -----------------------------------------------------------------------------------


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def waves(like: Tensor, phase: float) -> Tensor:
    """Numbers that are the same each time, of both signs and nowhere uniform."""
    n = torch.arange(1, like.numel() + 1, dtype=torch.float64)
    values = torch.sin(n * n + phase)
    if like.is_complex():
        values = torch.complex(values, torch.cos(n * n + 2 * phase))
    return values.reshape(like.shape).to(like.dtype)


def dot(a: Tensors, b: Tensors) -> Tensor:
    total = sum((x.conj() * y).real.sum() for x, y in zip(a, b, strict=True))
    return torch.as_tensor(total)


def differences(function: Callable[..., Tensors], at: Tensors, along: Tensors) -> list[Tensor]:
    """The derivative of a function along tangents, by central differences."""

    def end(sign: int) -> Tensors:
        # A function may take another way where its inputs are differentiated.
        moved = (x + sign * STEP * t for x, t in zip(at, along, strict=True))
        return [y.detach() for y in function(*(x.requires_grad_() for x in moved))]

    return [(a - b) / (2 * STEP) for a, b in zip(end(1), end(-1), strict=True)]


class Compiled:
    """The compiled derivatives of a problem, and what they must be, by differences of the function
    and of its gradient, which are stock's: to be made without the rules.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        xs = self.xs = [x.detach() for x in problem.inputs]
        ys = problem.stock(*xs)
        self.ts = [waves(x, 1.0) for x in xs]
        self.vs, self.vts = ([waves(y, phase) for y in ys] for phase in (2.0, 3.0))
        self.batch = [torch.stack([v, -2 * v, v.flip(0) if v.dim() else v]) for v in self.vs]
        self.along = differences(problem.stock, xs, self.ts)
        count = len(xs)

        def gradient(*values: Tensor) -> Tensors:
            return vjp(problem.stock, *values[:count])[1](values[count:])

        self.pulled = list(gradient(*xs, *self.vs))
        self.twice = differences(gradient, [*xs, *self.vs], [*self.ts, *self.vts])
        each = [gradient(*xs, *(v[i] for v in self.batch)) for i in range(3)]
        self.many = [torch.stack(parts) for parts in zip(*each, strict=True)]
        # gradcheck mistakes one result for another where one before it has no derivative.
        self.again = [_leaf(v) for v in (*xs, *self.vs)]
        self.smooth = [i for i, g in enumerate(gradient(*self.again)) if g.requires_grad]

    def check(self) -> None:
        """First derivatives in both modes, forward over reverse, and a batch of gradients."""
        problem, xs, count = self.problem, self.xs, len(self.xs)

        def gradient(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(problem.pullback(values[:count], values[count:]))

        def all_of_them(xs: Any, ts: Any, vs: Any, vts: Any, batch: Any) -> Any:
            pulled = gradient(*xs, *vs)
            pushed = problem.pushforward(xs, ts)
            _, twice = jvp(gradient, (*xs, *vs), (*ts, *vts))
            many = vmap(lambda *v: gradient(*xs, *v))(*batch)
            return pulled, tuple(pushed), twice, many

        found = compiled(all_of_them)(xs, self.ts, self.vs, self.vts, self.batch)
        pulled, pushed, twice, many = map(list, found)
        scale = max([1.0, *(v.abs().max().item() for v in self.along if v.numel())])
        near = {"rtol": DIFFERENCES["rtol"], "atol": DIFFERENCES["atol"] * scale}
        assert_close(pushed, self.along, msg=lambda m: f"forward mode: {m}", **near)
        forward, reverse = dot(self.vs, self.along), dot(pulled, self.ts)
        near["atol"] *= 10
        assert_close(reverse, forward, msg=lambda m: f"reverse mode: {m}", **near)
        assert_close(pulled, self.pulled, msg=lambda m: f"against eager: {m}", **SAME)
        assert_close(many, self.many, msg=lambda m: f"a batch of gradients: {m}", **SAME)
        scale = max([1.0, *(v.abs().max().item() for v in self.twice if v.numel())])
        near = {"rtol": DIFFERENCES["rtol"], "atol": DIFFERENCES["atol"] * scale}
        assert_close(twice, self.twice, msg=lambda m: f"forward over reverse: {m}", **near)

        def smooth(*values: Tensor) -> tuple[Tensor, ...]:
            gradients = gradient(*values)
            return tuple(gradients[i] for i in self.smooth)

        # gradcheck asks for each gradient several times, of one forward.
        with torch._functorch.config.patch(donated_buffer=False):
            assert gradcheck(compiled(smooth), self.again, atol=1e-4, check_batched_grad=False)


# --- OpInfos ------------------------------------------------------------------------------------


def of_opinfo(info: Any, dtype: torch.dtype, count: int | None) -> Iterator[Problem]:
    """The first `count` samples that have anything to differentiate, or all of them."""
    torch.manual_seed(0)
    # Not info.sample_inputs, which looks for a unittest in the stack: seconds under pytest.
    found = info.sample_inputs_func(info, "cpu", dtype, requires_grad=True)
    problems = (of_sample(info, sample) for sample in found)
    yield from islice((p for p in problems if p is not None), count)


def of_sample(info: Any, sample: Any) -> Problem | None:
    """As upstream's common_utils.TestGradients puts it; None where nothing has a derivative, or
    where elements are dropped at random, others at each call.
    """
    if sample.kwargs.get("dropout_p"):
        return None
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and v.requires_grad]
    finish = sample.output_process_fn_grad

    def call(*inputs: Tensor) -> list[Tensor]:
        filled = list(leaves)
        for place, value in zip(at, inputs, strict=True):
            filled[place] = value
        first, args, kwargs = tree_unflatten(filled, spec)
        output = info.gradcheck_wrapper(info.op, first, *args, **kwargs)
        return tree_leaves(finish(output) if finish else output)

    inputs = tuple(leaves[place] for place in at)
    kept = [i for i, y in enumerate(call(*inputs)) if y.requires_grad]
    if not kept:
        return None

    def smooth(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = call(*inputs)
        return tuple(results[i] for i in kept)

    batched = {
        "grad": info.check_batched_grad,
        "forward": info.check_batched_forward_grad and info.supports_forward_ad,
        "gradgrad": info.check_batched_gradgrad and info.supports_gradgrad,
    }
    modes = ["gradcheck", "batched"]
    modes += ["gradgradcheck"] * info.supports_gradgrad
    modes += ["forward over reverse"] * info.supports_fwgrad_bwgrad
    return Problem(
        lambda *inputs: tuple(call(*inputs)),
        smooth,
        smooth,
        inputs,
        lambda xs, vs: vjp(smooth, *xs)[1](tuple(vs)),
        lambda xs, ts: jvp(smooth, tuple(xs), tuple(ts))[1],
        {
            "check_grad_dtypes": True,
            "nondet_tol": info.gradcheck_nondet_tol,
            "fast_mode": info.gradcheck_fast_mode,
        },
        tuple(kind for kind, supported in batched.items() if supported),
        info.supports_forward_ad,
        tuple(mode for mode in MODES if mode in modes),
    )


# --- rules ----------------------------------------------------------------------------------------


def of_record(given: Sample) -> Problem:
    """A rule's operator, at a sample that the record implies."""
    op, numbers = given.rule.op, given.numbers
    assert op is not None
    by_keyword = {a.name for a in op._schema.arguments if a.kwarg_only}
    # ATen's operators refuse to differentiate running statistics; a formula is a function of them.
    running = [v for name, v in given.given.items() if name.startswith("running")]
    if op.namespace == "aten":
        numbers = [x for x in numbers if not any(x is v for v in running)]
    positional = [v for name, v in given.given.items() if name not in by_keyword]
    keywords = {name: given.given[name] for name in by_keyword}
    # What Dynamo is to trace knows no records.
    leaves, spec = tree_flatten((positional, keywords))
    at = [i for i, leaf in enumerate(leaves) if any(leaf is x for x in numbers)]

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        filled = list(leaves)
        for place, value in zip(at, inputs, strict=True):
            filled[place] = value
        args, kwargs = tree_unflatten(filled, spec)
        found = tree_leaves(op(*args, **kwargs))
        return tuple(y for y in found if isinstance(y, torch.Tensor))

    inputs = tuple(leaves[place] for place in at)
    kept = [i for i, y in enumerate(call(*(_leaf(x) for x in inputs))) if y.requires_grad]

    def smooth(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = call(*inputs)
        return tuple(results[i] for i in kept)

    return Problem(
        call,
        smooth,
        smooth,
        inputs,
        lambda xs, vs: vjp(smooth, *xs)[1](tuple(vs)),
        lambda xs, ts: jvp(smooth, tuple(xs), tuple(ts))[1],
    )


def of_slope(call: Call, x: Tensor) -> Problem:
    """An elementwise operator whose derivatives are those of its rules."""
    backward, forward = registry.rule_of("vjp", call.op), registry.rule_of("jvp", call.op)
    at, args, kwargs = call.at, call.on(x).args, call.kwargs

    def on(x: Tensor) -> tuple[Any, ...]:
        return (*args[:at], x, *args[at + 1 :])

    class Ruled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return call(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return backward(g, *on(*ctx.saved_tensors), **kwargs)

        @staticmethod
        def jvp(ctx: Any, t: Tensor) -> Tensor:
            return forward(t, *on(*ctx.saved_tensors), **kwargs)

    return Problem(
        lambda x: (Ruled.apply(x),),
        lambda x: (Ruled.apply(x),),
        lambda x: (call(x),),
        (x,),
        lambda xs, vs: (backward(vs[0], *on(xs[0]), **kwargs),),
        lambda xs, ts: (forward(ts[0], *on(xs[0]), **kwargs),),
        # The Function is not made for vmap: batches of tangents are for the compiled check.
        batched=("grad", "gradgrad"),
    )


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()
