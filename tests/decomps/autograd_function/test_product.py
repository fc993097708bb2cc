"""Programs with an autograd.Function, asked for every derivative, batch and nesting, compiled.

The oracle is uncompiled eager mode; where that fails, so does compiled code, except where torch's
own rule is at fault (BY_HAND). All by `make sweep ARGS="-k test_product"`, some here; the tables of
what is right, with the rules and without, are expect/autograd_function.txt.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from autograd_function_transforms import EVERY, FROM_OUTSIDE, OF_ONE, compiled, numbers
from autograd_functions import PROGRAMS
from snapshots import assert_snapshot
from torch import func

import normpass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Dynamo makes an instance of Function to trace a call.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # Inductor, in a Jacobian.
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning"),
]

TABLE = Path(__file__).parents[2] / "autograd_function_table.py"
SAMPLED = {"aot_eager": 36, "inductor": 4, "normpass": 6}


class Combination(NamedTuple):
    program: str
    asked: str
    backend: str


def combinations(backend: str) -> list[Combination]:
    asked = [name for name in EVERY if name != "double backward" or backend == "normpass"]
    return [Combination(*one, backend) for one in itertools.product(PROGRAMS, asked)]


def _jvp_by_examples(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        each = [
            func.jvp(lambda x, v=v: f(x, v), (u,), (v.cos(),)) for u, v in zip(x, w, strict=True)
        ]
        return tuple(torch.stack(results) for results in zip(*each, strict=True))

    return run


# torch's generated rule for vmap fails in eager mode: it takes a tangent that is None for a number.
BY_HAND: dict[tuple[str, str], Callable[..., Any]] = {
    ("mark_non_differentiable", "jvp of vmap"): _jvp_by_examples,
}


def oracle(one: Combination) -> Callable[..., Any]:
    ask = BY_HAND.get((one.program, one.asked), EVERY[one.asked])
    return ask(PROGRAMS[one.program])


def check(one: Combination) -> None:
    torch._dynamo.reset()
    found = compiled(PROGRAMS[one.program], one.asked, one.backend)
    try:
        right = oracle(one)(*numbers(one.asked))
    except Exception:
        with pytest.raises(Exception, match=r"."):
            found(*numbers(one.asked))
        return
    torch.testing.assert_close(found(*numbers(one.asked)), right, rtol=1e-9, atol=1e-12)


def sample() -> list[Combination]:
    draw = random.Random(0)
    return [one for b, n in SAMPLED.items() for one in draw.sample(combinations(b), n)]


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    with normpass.registered():
        yield
    torch._dynamo.reset()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("one", sample(), ids=", ".join)
def test_some_of_the_product(one: Combination) -> None:
    check(one)


@pytest.mark.sweep
@pytest.mark.parametrize("one", [*itertools.chain(*map(combinations, SAMPLED))], ids=", ".join)
def test_the_product(one: Combination) -> None:
    check(one)


@pytest.mark.sweep
def test_the_tables() -> None:
    done = subprocess.run([sys.executable, str(TABLE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_snapshot("autograd_function.txt", done.stdout)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_rules_in_eager_mode(program: str) -> None:
    """register(eager=True): ours in eager mode, too, with the results of torch's."""
    for asked in (*OF_ONE, "vmap", "vmap of grad, shared w", "grad of vmap, shared w", *AGAIN):
        arguments = numbers(asked)
        try:
            normpass.unregister()
            right = EVERY[asked](PROGRAMS[program])(*arguments)
        except Exception:
            continue
        with normpass.registered(eager=True):
            found = EVERY[asked](PROGRAMS[program])(*numbers(asked))
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


AGAIN = ("vmap of vmap", "vmap of jvp", "vmap of hessian", *FROM_OUTSIDE)
