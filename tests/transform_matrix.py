"""Which derivatives of which norms are right: writes docs/transforms.md, by `make transforms`.

Every case of orders.py in eager mode, compiled by stock torch, and compiled with our rules.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import warnings
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orders
import torch
import torch._dynamo  # once, before processes are forked

from normpass.decomps.activation import registered

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[1] / "docs" / "transforms.md"
WAYS = ("eager", "compiled", "with the rules")
RIGHT, WRONG, FAILS = "=", "X", "-"
HEAD = f"""# Transforms of norms

Written by `make transforms`, with torch {{version}}; not edited by hand.

A row is a mix of transforms of torch.func (`grad_jvp` is the gradient of a jvp), a column a norm,
in float64 against the same norm written in primitives. The three marks of a cell are for eager
mode, for stock `torch.compile(fullgraph=True)` (`backend="aot_eager"`), and for the same after
`normpass.register()`: `{RIGHT}` right, `{WRONG}` wrong numbers and no message, `{FAILS}` an error.

In `BatchNorm1d` the running statistics are new buffers that
`normpass.functional_call_with_buffers` returns; called as a module inside of a transform it is an
error, as torch.func refuses the write to a buffer that it did not make. `weight_norm` and
`spectral_norm` are functions of the weight. `torch.func.linearize` is no call that Dynamo takes,
under any backend; the function that it returns can be compiled once it has been called.

"""


def mark(case: tuple[str, str, str]) -> str:
    """Of one norm and mix, one way, in a process of its own: torch leaves levels of transforms
    entered where compiling fails.
    """
    warnings.simplefilter("ignore")
    logging.disable()
    norm, mix, way = case
    with registered() if way == WAYS[2] else nullcontext():
        outcome = orders.outcome(norm, mix, as_it_is if way == WAYS[0] else compiled)
    return {"right": RIGHT, "WRONG": WRONG}.get(outcome.split()[0], FAILS)


def as_it_is(function: Any) -> Any:
    return function


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def page(found: dict[tuple[str, str], str]) -> str:
    lines = ["| | " + " | ".join(orders.NORMS) + " |", "|---" * (len(orders.NORMS) + 1) + "|"]
    for mix in orders.MIXES:
        cells = (f"`{found[norm, mix]}`" for norm in orders.NORMS)
        lines.append(f"| {mix} | " + " | ".join(cells) + " |")
    head = HEAD.format(version=torch.__version__.partition("+")[0])
    return head + "\n".join(lines) + "\n\n" + "\n".join(_counts(found)) + "\n"


def _counts(found: dict[tuple[str, str], str]) -> Iterator[str]:
    yield f"| of {len(found)} cases | right | wrong | error |"
    yield "|---|---|---|---|"
    for i, way in enumerate(WAYS):
        counts = [sum(cell[i] == mark for cell in found.values()) for mark in (RIGHT, WRONG, FAILS)]
        yield f"| {way} | " + " | ".join(map(str, counts)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    cases = list(product(orders.NORMS, orders.MIXES, WAYS))
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
        marks = dict(zip(cases, pool.map(mark, cases, chunksize=1), strict=True))
    found = {
        (norm, mix): "".join(marks[norm, mix, way] for way in WAYS)
        for norm, mix in product(orders.NORMS, orders.MIXES)
    }
    options.out.write_text(page(found), "utf-8")


if __name__ == "__main__":
    main()
