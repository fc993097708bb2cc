"""Which derivatives of which norms a library has right: in float64, against the norm in primitives.

Each case of PyTorch's has a process of its own: where compiling fails, levels of transforms stay
entered. JAX, which does not go with forks, comes after them.
"""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # once, before processes are forked
from rich.progress import Progress

from normpass.benchmarks.peers_norms import FROM_OUTSIDE, MIXES, NORMS, Library
from normpass.benchmarks.peers_ways import WAYS, as_it_is, in_jax, load_jax, to_jax, to_torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from torch import Tensor

    from normpass.benchmarks.peers_norms import Function
    from normpass.benchmarks.peers_ways import Way

    Case = tuple[str, str, str]

SHAPE = (4, 6, 5)
NEAR = 1e-8  # of the largest number that is right
SECONDS = 600  # how long a case may take
ASKED = (*MIXES, FROM_OUTSIDE)


def fixed(*shape: int) -> Tensor:
    """Numbers that are the same each time and nowhere uniform, in float64."""
    n = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return torch.sin(n * n + 0.5 * n).reshape(shape)


def in_torch() -> Library:
    """PyTorch's transforms and arrays."""
    return Library(torch.func, torch, fixed(*SHAPE).flip(0), fixed(*SHAPE).flip(2))


def parameters_of(norm: str) -> list[Tensor]:
    """Of a norm of x: 4 6 5."""
    return [fixed(*shape) + 1.5 for shape in NORMS[norm].parameters(SHAPE)]


def right_answer(norm: str, mix: str) -> Tensor:
    """By PyTorch's autograd and transforms of the norm in primitives."""
    formula, given = NORMS[norm].primitives(torch), parameters_of(norm)
    answer: Tensor = asked(mix, in_torch(), lambda x: formula(x, *given), as_it_is)(start())
    return answer


def start() -> Tensor:
    """x"""
    return fixed(*SHAPE) * 2 + 0.5


def asked(mix: str, library: Library, norm: Function, compiled: Function) -> Function:
    """The function of x that answers a mix, compiled as a whole or, from outside, in part."""
    if mix != FROM_OUTSIDE:
        function: Function = compiled(MIXES[mix](library, norm))
        return function
    inner = compiled(library.loss(norm))
    if library.arrays is not torch:
        gradient: Function = library.transforms.grad(library.slope(inner))
        return gradient

    def twice(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(inner(x), x, create_graph=True)
        return torch.autograd.grad((slope * library.along).sum(), x)[0]

    return twice


def answer_of(way: Way, norm: str, mix: str) -> Tensor:
    """What a way answers."""
    given = parameters_of(norm)
    if way.is_jax:
        jax, to = load_jax(), in_torch()
        library = Library(jax, jax.numpy, to_jax(to.along), to_jax(to.cotangent))
        function = in_jax(norm, NORMS[norm].primitives(jax.numpy))
        arrays = [to_jax(each) for each in given]
        x: Any = to_jax(start())
        return to_torch(asked(mix, library, lambda x: function(x, *arrays), way.compiled)(x))
    with way.around():
        operator = NORMS[norm].in_torch
        answer = asked(mix, in_torch(), lambda x: operator(x, *given), way.compiled)(start())
    return to_torch(answer)


def outcome(case: Case) -> str:
    """Of a way, a norm and a mix: right, wrong with the distance, or fails with the error."""
    name, norm, mix = case
    want = right_answer(norm, mix)
    try:
        got = answer_of(WAYS[name], norm, mix)
    except Exception as error:  # what fails is what this finds out
        first = (str(error).strip() or "no message").splitlines()[0]
        return f"fails: {type(error).__name__}: {first[:160]}"
    if got.shape != want.shape:
        return f"wrong: expected the shape {list(want.shape)}, found {list(got.shape)}"
    away = float((got - want).abs().max()) / (float(want.abs().max()) or 1.0)
    return "right" if away < NEAR else f"wrong: {away:.1e} of the largest number away"


def _alone(case: Case) -> str:
    """The outcome in a process of its own."""
    import torch._inductor.config as inductor_config

    # Several would hang: the threads of GCC's OpenMP stay behind in the process that is forked.
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    # Else each process would start others, to compile one kernel.
    with inductor_config.patch(compile_threads=1):
        return outcome(case)


def outcomes(
    names: Sequence[str], jobs: int, console: Console
) -> dict[str, dict[str, dict[str, str]]]:
    """way -> norm -> mix -> outcome, of the ways that are there."""
    cases = list(product(names, NORMS, ASKED))
    forked = [case for case in cases if not WAYS[case[0]].is_jax]
    last = [case for case in cases if WAYS[case[0]].is_jax]
    here = ((case, outcome(case)) for case in last)
    found: dict[Case, str] = {}
    with Progress(console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(cases))
        for case, said in chain(_in_processes(forked, jobs), here):
            found[case] = said
            progress.update(task, description=", ".join(case), advance=1, refresh=True)
    return {
        name: {norm: {mix: found[name, norm, mix] for mix in ASKED} for norm in NORMS}
        for name in names
    }


def _in_processes(cases: Sequence[Case], jobs: int) -> Iterable[tuple[Case, str]]:
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        waiting = [(case, pool.apply_async(_alone, (case,))) for case in cases]
        for case, result in waiting:
            try:
                yield case, result.get(SECONDS)
            except multiprocessing.TimeoutError:  # of a process that has died, too
                yield case, f"fails: no answer within {SECONDS} seconds"
