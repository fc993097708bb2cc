"""How long libraries take for derivatives of norms: compared with float64 first, then timed in
alternation.

    backward           of a forward that is kept
    forward+backward   a whole step
    double backward    gradients of x and the weight of sum(dx * v), dx = d/dx sum(norm(x) * dy):
                       forward and both backwards, compiled as one function
    per sample         vmap(grad(sum(sin(norm)))), of x and the parameters, which examples share
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from normpass.benchmarks.cases import DTYPES, spell
from normpass.benchmarks.measure import interleave, kept_buffers, relative_errors, verdict
from normpass.benchmarks.peers_norms import NORMS
from normpass.benchmarks.peers_ways import WAYS, as_it_is, in_jax, load_jax, to_jax, to_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from normpass.benchmarks.measure import Timing
    from normpass.benchmarks.norms import Shape
    from normpass.benchmarks.peers_norms import Function
    from normpass.benchmarks.peers_ways import Way

    Step = Callable[[], Any]

ROWS: tuple[tuple[str, Shape], ...] = (
    ("layer_norm", (4096, 1024)),
    ("layer_norm", (16384, 256)),
    ("rms_norm", (4096, 1024)),
    ("group_norm", (8, 256, 32, 32)),
    ("batch_norm", (16, 64, 56, 56)),
    ("instance_norm", (16, 64, 56, 56)),
    ("softmax", (4096, 1024)),
)
TWICE = tuple(case for case in ROWS if case != ("layer_norm", (16384, 256)))
EXAMPLES: tuple[tuple[str, Shape], ...] = (
    ("layer_norm", (8, 512, 768)),
    ("rms_norm", (8, 512, 768)),
    ("group_norm", (8, 16, 64, 28, 28)),
    ("batch_norm", (8, 16, 64, 28, 28)),
    ("instance_norm", (8, 16, 64, 28, 28)),
)


@dataclass(frozen=True)
class Timed:
    """A norm at a shape, in a dtype, and which derivative."""

    norm: str
    shape: Shape
    dtype: str
    phase: str

    @property
    def label(self) -> str:
        """For people: `layer_norm 4096x1024 float32 backward`."""
        return f"{self.norm} {spell(self.shape)} {self.dtype} {self.phase}"


def cases() -> Iterator[Timed]:
    """All that is timed."""
    for phase in ("backward", "forward+backward"):
        for dtype in DTYPES:
            yield from (Timed(norm, shape, dtype, phase) for norm, shape in ROWS)
    yield from (Timed(norm, shape, "float32", "double backward") for norm, shape in TWICE)
    yield from (Timed(norm, shape, "float32", "per sample") for norm, shape in EXAMPLES)


@dataclass
class Result:
    """times: of a call, by way. wrong: why there are none."""

    case: Timed
    times: dict[str, Timing] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    def ratio(self, against: str) -> float | None:
        """How many times as fast normpass is; None where one of them was not timed."""
        if "normpass" not in self.times or against not in self.times:
            return None
        return self.times[against].median / self.times["normpass"].median


class Problem:
    """x, the parameters, a cotangent and a direction of one case, and what is asked of them."""

    def __init__(self, case: Timed) -> None:
        self.case, self.norm = case, NORMS[case.norm]
        generator = torch.Generator().manual_seed(0)

        def noise(shape: Shape) -> Tensor:
            return torch.randn(shape, generator=generator)

        one = case.shape[1:] if case.phase == "per sample" else case.shape
        inputs = [2 * noise(case.shape) + 0.5]
        inputs += [1 + 0.5 * noise(shape) for shape in self.norm.parameters(one)]
        dtype = DTYPES[case.dtype]
        self.inputs = [each.to(dtype) for each in inputs]
        self.dy, self.along = noise(case.shape).to(dtype), noise(case.shape).to(dtype)

    def arguments(self) -> list[Tensor]:
        """Of `function`."""
        if self.case.phase == "double backward":
            return [*self.inputs, self.dy, self.along]
        return self.inputs

    def function(self, transforms: Any, sine: Function, norm: Function) -> Function:
        """What is compiled as one where derivatives are taken inside of it: of the arguments."""
        count = len(self.inputs)
        if self.case.phase == "per sample":
            every = transforms.grad(lambda *x: sine(norm(*x)).sum(), argnums=tuple(range(count)))
            over: Function = transforms.vmap(every, (0, *[None] * (count - 1)))
            return over

        def slope(*given: Any) -> Any:
            *inputs, dy, along = given
            first = transforms.grad(lambda *x: (norm(*x) * dy).sum())
            return (first(*inputs) * along).sum()

        twice: Function = transforms.grad(slope, argnums=tuple(range(min(count, 2))))
        return twice

    def in_torch(self, norm: Function, compiled: Function, dtype: Any = None) -> Step:
        """One call by PyTorch; the norm and the function are compiled when this is called."""
        given = [each.to(dtype or each.dtype) for each in self.arguments()]
        if self.case.phase in ("double backward", "per sample"):
            function = compiled(self.function(torch.func, torch.sin, norm))
            return lambda: function(*given)
        leaves = [each.detach().requires_grad_() for each in given]
        forward, dy = compiled(norm), self.dy.to(dtype or self.dy.dtype)
        if self.case.phase == "backward":
            y = forward(*leaves)
            return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)
        return lambda: torch.autograd.grad(forward(*leaves), leaves, dy)

    def in_jax(self, compiled: Function) -> Step:
        """One call by JAX, which is over when its results are there."""
        jax = load_jax()
        norm = in_jax(self.case.norm, self.norm.primitives(jax.numpy))
        given, dy = [to_jax(each) for each in self.arguments()], to_jax(self.dy)
        if self.case.phase in ("double backward", "per sample"):
            function = compiled(self.function(jax, jax.numpy.sin, norm))
            return lambda: jax.block_until_ready(function(*given))
        if self.case.phase == "backward":
            _, pullback = compiled(lambda *x: jax.vjp(norm, *x))(*given)
            backward = compiled(lambda pullback, dy: pullback(dy))
            return lambda: jax.block_until_ready(backward(pullback, dy))

        def step(dy: Any, *given: Any) -> Any:
            y, pullback = jax.vjp(norm, *given)
            return y, pullback(dy)

        both = compiled(step)
        return lambda: jax.block_until_ready(both(dy, *given))[1]

    def step(self, way: Way) -> Step:
        """One call of a way."""
        if way.is_jax:
            return self.in_jax(way.compiled)
        return self.in_torch(self.norm.in_torch, way.compiled)

    def right(self) -> dict[str, Tensor]:
        """In float64 from primitives."""
        return named(self.in_torch(self.norm.primitives(torch), as_it_is, torch.float64)())


def named(found: Sequence[Any]) -> dict[str, Tensor]:
    """Gradients of x, the first parameter and the second."""
    names = ("dx", "dweight", "dbias")
    tensors = found if isinstance(found, tuple | list) else (found,)
    return {name: to_torch(each) for name, each in zip(names, tensors, strict=False)}


def measure(case: Timed, names: Sequence[str], repeats: int) -> Result:
    """Checks the ways, eager first, by whose error others are judged, and times the right ones."""
    torch._dynamo.reset()
    problem, result = Problem(case), Result(case)
    right, dtype = problem.right(), DTYPES[case.dtype]
    # y, whose size tells how many terms a sum has, has that of dx.
    sized = {**right, "y": right["dx"]}
    steps: dict[str, Step] = {}
    eager: Mapping[str, float] = {}
    with kept_buffers(case.phase == "backward"):
        for name in names:
            step = problem.step(WAYS[name])
            errors = relative_errors(named(step()), right)
            eager = eager or errors
            wrong = verdict(errors, eager, sized, dtype)
            if wrong or not math.isfinite(max(errors.values())):
                result.wrong[name] = wrong or "results are not finite"
            else:
                steps[name] = step
        result.times = interleave(steps, repeats, "cpu")
    return result
