"""One operator of PyTorch's operator database under one transform: compiled against eager.

An outcome is a text whose first word says what came out, and the rest why:

    right           the compiled transform gives what eager gives
    wrong: ...      it gives something else
    fails: ...      it raises, dies or never comes back
    not counted: .. eager has no result to compare with, or not the same one twice

Eager is asked before the rules are there, so that the reference is PyTorch's own.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
import torch._dynamo
from torch.func import grad, jvp, vmap
from torch.testing import assert_close
from torch.testing._internal import common_methods_invocations as database
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

RIGHT, WRONG, FAILS, NOT_COUNTED = "right", "wrong", "fails", "not counted"
# Their results are whatever the memory held.
UNINITIALIZED = re.compile(r"^(new_)?empty(_\w+)?$|^resize_(as_)?$")
# Beside the result they return the statistics that they used. These are functions of the input, but
# eager forward mode takes them for constants, and so cannot say what their derivatives are.
WITH_STATISTICS = {
    "_batch_norm_with_update",
    "_native_batch_norm_legit",
    "native_batch_norm",
    "native_group_norm",
    "native_layer_norm",
}
# Eager's tangent of a product of several, and what comes of it, is wrong in torch 2.13
# (tests/decomps/table/test_traced.py has it against finite differences).
WRONG_TANGENTS = {"scatter_reduce.prod"}
SAMPLES_TRIED = 10
# torch.testing's defaults for float32 are 1.3e-6 and 1e-5. Decomposed arithmetic rounds elsewhere,
# and a derivative of sums loses more: ten times the first, and the second in units of the largest.
RELATIVE, ABSOLUTE = 1.3e-5, 1e-5


def operators() -> dict[str, OpInfo]:
    """The database by full names, in its own order, as far as it has float32 on CPUs."""
    return {
        op.full_name: op for op in database.op_db if torch.float32 in op.supported_dtypes("cpu")
    }


def waves(like: Tensor) -> Tensor:
    """Numbers that are the same each time and nowhere uniform."""
    n = torch.arange(1, like.numel() + 1, dtype=torch.float32)
    return torch.sin(n * n + 0.5 * n).reshape(like.shape).to(like.dtype)


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def is_smooth(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


@dataclass
class Problem:
    """An operator as a function of its differentiable arguments, at one sample.

    cotangents: one for each output, None for those that have no derivative.
    """

    function: Callable[..., list[Tensor]]
    primals: tuple[Tensor, ...]
    others: list[Tensor]
    cotangents: list[Tensor | None]

    def smooth_outputs(self, *primals: Tensor) -> list[Tensor]:
        outputs = self.function(*primals)
        return [y for y, c in zip(outputs, self.cotangents, strict=True) if c is not None]

    def loss(self, *primals: Tensor) -> Tensor:
        total = torch.zeros(())
        for y, c in zip(self.function(*primals), self.cotangents, strict=True):
            if c is not None and y.is_complex():
                total = total + (y.real * c).sum() - 0.5 * (y.imag * c).sum()
            elif c is not None:
                total = total + (y * c).sum()
        return total

    @property
    def has_derivative(self) -> bool:
        return any(c is not None and c.numel() for c in self.cotangents)

    @property
    def gradient(self) -> Callable[..., tuple[Tensor, ...]]:
        return grad(self.loss, argnums=tuple(range(len(self.primals))))

    def in_one(self, function: Callable[..., Any]) -> Callable[[Tensor], Any]:
        """A function of the first argument: the others are constants, as a module's weights are."""
        return lambda x: function(x, *self.primals[1:])

    @property
    def tangents(self) -> tuple[Tensor, ...]:
        return tuple(waves(x) for x in self.primals)

    @property
    def batched(self) -> tuple[Tensor, ...]:
        # A positive multiple: positive definite and triangular matrices stay what they are.
        return tuple(torch.stack([x, 0.75 * x]) for x in self.primals)


# name: the arguments of the transform, and the transform as a function of them
TRANSFORMS: dict[str, tuple[Callable[[Problem], Any], Callable[[Problem], Callable[..., Any]]]] = {
    "grad": (lambda p: p.primals, lambda p: p.gradient),
    "jvp": (
        lambda p: p.primals + p.tangents,
        lambda p: lambda *xs: jvp(p.smooth_outputs, *halves(xs)),
    ),
    "jvp-in-one": (
        lambda p: p.primals[:1] + p.tangents[:1],
        lambda p: lambda *xs: jvp(p.in_one(p.smooth_outputs), *halves(xs)),
    ),
    "vmap": (lambda p: p.batched, lambda p: vmap(p.function, randomness="different")),
    "vmap-of-grad": (lambda p: p.batched, lambda p: vmap(p.gradient, randomness="different")),
    "jvp-of-grad": (
        lambda p: p.primals + p.tangents,
        lambda p: lambda *xs: jvp(p.gradient, *halves(xs)),
    ),
    "jvp-of-grad-in-one": (
        lambda p: p.primals[:1] + p.tangents[:1],
        lambda p: lambda *xs: jvp(grad(p.in_one(p.loss)), *halves(xs)),
    ),
}


def halves(xs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return xs[: len(xs) // 2], xs[len(xs) // 2 :]


Bound = tuple["Callable[..., list[Tensor]]", "tuple[Tensor, ...]", "list[Tensor]"]


def bind(op: OpInfo, sample: SampleInput) -> Bound:
    """The operator as a function of its differentiable arguments, these, and the other tensors.

    All are copies: an operator may write to its arguments, as batch_norm does. Raises ValueError
    if nothing in the sample can be differentiated or batched.
    """
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [i for i, leaf in enumerate(leaves) if is_smooth(leaf) and leaf.requires_grad]
    at = at or [i for i, leaf in enumerate(leaves) if is_smooth(leaf)]
    if not at:
        raise ValueError("no floating-point tensor among the arguments")
    leaves = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), leaves)
    compute, finish = op.op, sample.output_process_fn_grad

    def function(*primals: Tensor) -> list[Tensor]:
        filled = list(leaves)
        for i, primal in zip(at, primals, strict=True):
            filled[i] = primal
        first, args, kwargs = tree_unflatten(filled, spec)
        results = tree_leaves(finish(compute(first, *args, **kwargs)))
        return [y for y in results if isinstance(y, torch.Tensor)]

    others = [t for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and i not in at]
    return function, tuple(leaves[i] for i in at), others


def as_problem(op: OpInfo, sample: SampleInput) -> Problem:
    """A problem on fresh copies. Raises what the operator raises."""
    function, primals, _ = bind(op, sample)
    seed()
    outputs = function(*primals)
    cotangents = [waves(y).real if is_smooth(y) else None for y in outputs]
    if op.name in WITH_STATISTICS:
        cotangents[1:] = [None] * (len(outputs) - 1)
    return Problem(*bind(op, sample), cotangents)


def samples(op: OpInfo) -> list[SampleInput]:
    seed()
    return list(islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), SAMPLES_TRIED))


def usable_sample(op: OpInfo) -> SampleInput:
    """The first sample that has a derivative with numbers in it, else the first that runs.

    Raises ValueError with the reason of the first sample if there is none.
    """
    runs, refusals = [], []
    for sample in samples(op):
        try:
            problem = as_problem(op, sample)
        except Exception as error:  # whatever it is, the next sample may do
            refusals.append(first_line(error))
            continue
        if problem.has_derivative:
            return sample
        runs.append(sample)
    if not runs:
        raise ValueError(refusals[0] if refusals else "no samples")
    return runs[0]


Results = list[Any]


def results(
    op: OpInfo, sample: SampleInput, transform: str, wrap: Callable[[Any], Any] = lambda f: f
) -> Results:
    """What a transform gives, and what it leaves in the other arguments, from fresh copies."""
    problem = as_problem(op, sample)
    if transform != "vmap" and not problem.has_derivative:
        raise ValueError("no floating-point numbers among the results")
    if transform.endswith("in-one") and len(problem.primals) == 1:
        raise ValueError("it has one such argument only")
    arguments, transformed = TRANSFORMS[transform]
    xs = arguments(problem)
    call = wrap(transformed(problem))
    seed()
    outputs = [y for y in tree_leaves(call(*xs)) if isinstance(y, torch.Tensor)]
    return [outputs, problem.others]


def difference(found: Results, expected: Results) -> str:
    """Where two results differ by more than rounding; nothing if they do not."""
    if len(found[0]) != len(expected[0]):
        return f"{len(found[0])} outputs instead of {len(expected[0])}"
    for ours, theirs in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        atol = ABSOLUTE
        if is_smooth(theirs) and theirs.layout == torch.strided and theirs.numel():
            finite = theirs.detach().abs().nan_to_num(0, 0, 0)
            atol *= max(1.0, finite.max().item())
        try:
            assert_close(ours, theirs, rtol=RELATIVE, atol=atol, equal_nan=True)
        except AssertionError as error:
            return " ".join(str(error).split())[:160]
    return ""


def is_nearer(found: Results, expected: Results, exact: Results) -> bool:
    """Whether results are at least as near to those of float64 as eager's are, NaN where they are.

    found, expected: in float32. exact: eager's of the same numbers in float64.
    """
    ours, eagers, right = (some[0] + some[1] for some in (found, expected, exact))
    if [(y.shape, y.dtype) for y in ours] != [(y.shape, y.dtype) for y in eagers]:
        return False
    for y, eager, e in zip(ours, eagers, right, strict=True):
        if not y.is_floating_point() or not torch.equal(y.isnan(), e.isnan()):
            return False
        finite = e.isfinite()
        if not torch.equal(y[~finite].nan_to_num(0), e[~finite].to(y.dtype).nan_to_num(0)):
            return False
        away, allowed = ((v.double() - e)[finite].abs() for v in (y, eager))
        if away.numel() and not away.max() <= allowed.max():
            return False
    return True


def in_float64(sample: SampleInput) -> SampleInput:
    def double(value: Any) -> Any:
        is_single = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.detach().double().requires_grad_(value.requires_grad) if is_single else value

    return sample.transform(double)


def like_their_primals(outputs: Sequence[Tensor]) -> bool:
    """Whether tangents, the second half, have the dtypes of what they are tangents of. Eager's of
    ldexp, of two tensors without dimensions, is float64 for a float32.
    """
    half = len(outputs) // 2
    return all(
        y.dtype == t.dtype or not is_smooth(y)
        for y, t in zip(outputs[:half], outputs[half:], strict=True)
    )


def first_line(error: BaseException) -> str:
    """The error's first line, and the reason that Dynamo gives further down."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    if reason := re.search(r"got (\w+\(.*)|Developer debug context: (.+)", "\n".join(lines[1:])):
        text += f": {reason[1] or reason[2]}"
    return re.sub(r"0x[0-9a-f]+", "0x...", " ".join(text.split()))[:240]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def unseeded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def is_excused(
    op: OpInfo,
    sample: SampleInput,
    transform: str,
    rules: Callable[[], AbstractContextManager[Any]],
    found: Results,
    expected: Results,
) -> bool:
    """Whether results that are not eager's are eager's in float64, and nearer to those in float32.
    Nothing excuses what fails there.
    """
    try:
        sample = in_float64(sample)
        exact = results(op, sample, transform)
        with rules():
            torch._dynamo.reset()
            ours = results(op, sample, transform, compiled)
    except Exception:
        return False
    return not difference(ours, exact) and is_nearer(found, expected, exact)


# The database seeds random operators within the function itself, which cannot be compiled.
@mock.patch.object(database, "wrapper_set_seed", unseeded)
def outcome(op: OpInfo, transform: str, rules: Callable[[], AbstractContextManager[Any]]) -> str:
    """What becomes of a transform of an operator when it is compiled inside of `rules()`.

    Right is what eager gives; or what gives it in float64, and in float32 is nearer to that.
    """
    if op.full_name in WRONG_TANGENTS and "jvp" in transform:
        return f"{NOT_COUNTED}: eager's tangent is wrong"
    if UNINITIALIZED.match(op.name):
        return f"{NOT_COUNTED}: the result is uninitialized memory"
    try:
        sample = usable_sample(op)
        expected = results(op, sample, transform)
        again = results(op, sample, transform)
    except Exception as error:  # what eager cannot do is not asked of the compiler
        return f"{NOT_COUNTED}: {first_line(error)}"
    if not expected[0]:
        return f"{NOT_COUNTED}: no tensor comes out"
    if difference(again, expected):
        return f"{NOT_COUNTED}: two eager runs from one seed differ"
    if transform in ("jvp", "jvp-in-one") and not like_their_primals(expected[0]):
        return f"{NOT_COUNTED}: eager's tangent has another dtype than its primal"
    try:
        with rules():
            found = results(op, sample, transform, compiled)
        away = difference(found, expected)
    except Exception as error:  # what fails is what this finds out
        return f"{FAILS}: {first_line(error)}"
    if not away or is_excused(op, sample, transform, rules, found, expected):
        return RIGHT
    return f"{WRONG}: {away}"


def warm_up(rules: Callable[[], AbstractContextManager[Any]]) -> None:
    """Has this process import what compiling imports: seconds that each fork of it saves."""
    add = operators()["add"]
    for transform in ("jvp-of-grad", "vmap"):
        found = outcome(add, transform, rules)
        if found != RIGHT:
            raise RuntimeError(f"{transform} of add cannot be compiled here, {found}")
    torch._dynamo.reset()
