"""`normpass bench --calibrate`: what work costs on this machine, for passes/cost.py.

Small loops of both kinds, kernels of ours and Inductor's code, in alternation. Each constant is the
difference of two times that differ by what it stands for: an exponential more, or as many elements
in more rows. All but the start of a call and memory is measured where data lies in cache.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from normpass.backend.program.machine import ELEMENTS_PER_WORKER
from normpass.backend.run import calibration
from normpass.backend.run.caches import caches_of, private_cache
from normpass.backend.run.clocks import cpu_seconds
from normpass.backend.run.runtime import CallSite, kernel
from normpass.benchmarks.measure import keep_freed_memory
from normpass.passes.cost import Calibration, Costs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console
    from torch import Tensor

REPEATS = 200
SAMPLE_SECONDS = 2e-4
# Enough for every worker, and little enough for its own cache.
ROWS, WIDTH = 512, 256
# So many elements in rows of so few.
NARROW = 32
# Rows in pieces of one number of elements for each example.
EXAMPLES, CHANNELS, PIECE = 8, 64, 64
# Each element of one example: of the sums over examples, and of what comes of them.
REGROUPED_NUMBERS = 2 * CHANNELS * PIECE
# As many rows for a column's sum.
TALL, ACROSS = 2048, 256

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "pow": lambda x: x.pow(1.7),
    "div": lambda x: 3.0 / x,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
}
# The same in a region's words.
CALLS = {
    **{name: f"{name}(x)" for name in FUNCTIONS},
    "pow": "pow(x, 1.7)",
    "div": "div(3.0, x)",
}
PLAIN = "mul(x, 1.5)"


def pointwise(name: str, call: str) -> str:
    """A region of one function."""
    return "\n".join(
        (
            f"region calibrate_{name}",
            f"axes    r=? c={WIDTH}",
            "input   x: f32[r c]",
            f"y       = {call}",
            "output  y0: f32[r c] = y",
        )
    )


def centred(width: int) -> str:
    """A region that reads its rows twice: x - sum(x)."""
    return "\n".join(
        (
            "region calibrate_rows",
            f"axes    r=? c={width}",
            "input   x: f32[r c]",
            "sum     = sum[c](x)",
            "y       = sub(x, sum)",
            "output  y0: f32[r c] = y",
        )
    )


def minus_sum(x: Tensor) -> Tensor:
    return x - x.sum(-1, keepdim=True)


# The same of few rows in short pieces, which are looked at as longer ones and regrouped.
REGROUPED = "\n".join(
    (
        "region calibrate_pieces",
        f"axes    n={EXAMPLES} r={CHANNELS} c={PIECE}",
        "input   x: f32[n r c]",
        "sum     = sum[n c](x)",
        "y       = sub(x, sum)",
        "output  y0: f32[n r c] = y",
    )
)


def times(
    steps: Mapping[str, Callable[[], object]], before: Callable[[], object] | None = None
) -> dict[str, float]:
    """The shortest time of each step, in alternation: whatever else runs here only adds to one, and
    seldom to all of many short ones. before: what runs before each call; None for warm ones.
    """
    shortest = dict.fromkeys(steps, math.inf)
    for step in steps.values():
        step()
    calls = {
        name: 1 if before else max(1, round(SAMPLE_SECONDS / cpu_seconds(step, 1)))
        for name, step in steps.items()
    }
    for _ in range(REPEATS):
        for name, step in steps.items():
            (before or step)()
            shortest[name] = min(shortest[name], cpu_seconds(step, calls[name]) / calls[name])
    return shortest


def our_steps() -> dict[str, Callable[[], object]]:
    """Kernels of ours; all of them compile at once."""

    def step(text: str, x: Tensor) -> Callable[[], object]:
        kernel(text)
        site, sizes = CallSite(), [x.shape[0]] * text.count("=?")
        return lambda: site([x], sizes, text)

    x = positive(ROWS, WIDTH)
    steps = {name: step(pointwise(name, call), x) for name, call in CALLS.items()}
    steps["plain"] = step(pointwise("plain", PLAIN), x)
    steps["wide"] = step(centred(WIDTH), x)
    steps["narrow"] = step(centred(NARROW), x.view(-1, NARROW))
    pieces = positive(EXAMPLES, CHANNELS, PIECE)
    steps["pieces"] = step(REGROUPED, pieces)
    steps["whole"] = step(centred(WIDTH), pieces.view(-1, WIDTH))
    return steps


def their_steps() -> dict[str, Callable[[], object]]:
    """The same compiled by stock Inductor, and a sum over rows, a sum over columns, a variance."""
    x, tall = positive(ROWS, WIDTH), positive(TALL, ACROSS)

    def step(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
        return compiled(function, x, "inductor")

    steps = {name: step(function, x) for name, function in FUNCTIONS.items()}
    steps["plain"] = step(lambda x: x * 1.5, x)
    steps["wide"] = step(minus_sum, x)
    steps["narrow"] = step(minus_sum, x.view(-1, NARROW))
    steps["sum"] = step(lambda x: x.sum(-1), tall)
    steps["columns"] = step(lambda x: x.sum(0), tall)
    steps["summed"] = step(lambda x: x.sum(-1), x)
    steps["variance"] = step(lambda x: x.var(-1, correction=0), x)
    return steps


def compiled(
    function: Callable[[Tensor], object], x: Tensor, backend: str, **options: Any
) -> Callable[[], object]:
    call: Any = torch.compile(function, backend=backend, dynamic=False, **options)
    call(x)
    return lambda: call(x)


def graphs() -> dict[str, Callable[[], object]]:
    """A graph with a region, the same left to Inductor, and that in two groups of loops."""

    def two_groups(x: Tensor) -> tuple[Tensor, Tensor]:
        return minus_sum(x), x.amax(0)

    def one_group(x: Tensor) -> tuple[Tensor, Tensor]:
        return minus_sum(x), x.amax(1)

    x = positive(torch.get_num_threads() * ELEMENTS_PER_WORKER // WIDTH, WIDTH)
    return {
        "ours": compiled(minus_sum, x, "normpass", options={"least_bytes": 0}),
        "theirs": compiled(minus_sum, x, "inductor"),
        "one": compiled(one_group, x, "inductor"),
        "two": compiled(two_groups, x, "inductor"),
    }


def positive(*shape: int) -> Tensor:
    """Numbers that every function takes."""
    return torch.rand(shape) + 0.5


def machine_steps() -> dict[str, Callable[[], object]]:
    """Memory and cache, by additions into memory that is there; and numbers and truth values
    that Inductor writes.
    """

    def step(elements: int) -> Callable[[], object]:
        x, y, z = (positive(elements) for _ in range(3))
        return lambda: torch.add(x, y, out=z)

    near, x = elements_near(), positive(ROWS, WIDTH)
    return {
        "memory": step(elements_far()),
        "cache": step(2 * near),
        "half the cache": step(near),
        "numbers": compiled(lambda x: x - 1.0, x, "inductor"),
        "truths": compiled(lambda x: x > 1.0, x, "inductor"),
    }


def elements_far() -> int:
    """So many that no cache holds them."""
    return max(4 * 1024 * 1024, caches_of("cpu").shared // 4)


def elements_near() -> int:
    """So many that three tensors of twice as many stay in the workers' own caches."""
    return torch.get_num_threads() * private_cache() // 32


def costs(
    found: Mapping[str, float], others: Mapping[str, float], threads: int, launch: float
) -> Costs:
    """Costs of one kind of code. found: times of its steps. others: the machine's. launch: a call's
    start.
    """
    elements = ROWS * WIDTH

    def more(name: str, than: str, count: float, where: Mapping[str, float] = found) -> float:
        """Seconds of one worker for each of so many, by which one step is slower."""
        return max(0.0, where[name] - where[than]) * threads / count

    functions = {name: more(name, "plain", elements) for name in FUNCTIONS}
    if "variance" in found:
        functions["welford"] = more("variance", "summed", elements)
    near = 3 * 4 * others["elements near"]
    return Costs(
        launch=launch,
        memory=others["memory"] * threads / (4 * 4 * others["elements far"]),
        cache=more("cache", "half the cache", near, others),
        truth=more("truths", "numbers", elements, others),
        column=more("columns", "sum", 4 * TALL * ACROSS) if "columns" in found else 0.0,
        row=more("narrow", "wide", 2 * (elements // NARROW - ROWS)),
        regroup=more("pieces", "whole", REGROUPED_NUMBERS) if "pieces" in found else 0.0,
        functions=tuple(functions.items()),
    )


def measure() -> Calibration:
    """This machine's."""
    threads = torch.get_num_threads()
    ours, theirs, machine = our_steps(), their_steps(), machine_steps()
    near = {"elements far": elements_far(), "elements near": elements_near(), **times(machine)}
    sides = {f"our {name}": step for name, step in ours.items()}
    sides |= {f"their {name}": step for name, step in theirs.items()}
    found = times(sides)
    one, other = (
        {name.removeprefix(side): time for name, time in found.items() if name.startswith(side)}
        for side in ("our ", "their ")
    )
    # A model's step has swept everything out of the caches before a kernel is called.
    calls = graphs()
    cold, warm = times(calls, before=machine["memory"]), times(calls)
    group = max(0.0, warm["two"] - warm["one"])
    call = group + max(0.0, cold["ours"] - cold["theirs"])
    return Calibration(costs(one, near, threads, call), costs(other, near, threads, group))


def table(measured: Calibration) -> Table:
    """What was measured beside what is shipped."""
    rows = Table(title="seconds of one worker; shipped in parentheses")
    for heading, justify in (("", "left"), ("ours", "right"), ("Inductor's", "right")):
        rows.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    both = [(flat(measured.ours), flat(calibration.SHIPPED.ours))]
    both += [(flat(measured.theirs), flat(calibration.SHIPPED.theirs))]
    for name, (unit, scale) in UNITS.items():
        cells = [f"{new[name] * scale:.3g} ({old[name] * scale:.3g}) {unit}" for new, old in both]
        rows.add_row(name, *cells)
    for name in dict(measured.theirs.functions):
        cells = [
            f"{new.get(name, 0) * 1e9:.3g} ({old.get(name, 0) * 1e9:.3g}) ns" for new, old in both
        ]
        rows.add_row(name, *cells)
    return rows


UNITS = {
    "launch": ("us", 1e6),
    "memory": ("ns/kB", 1e12),
    "cache": ("ns/kB", 1e12),
    "column": ("ns/kB", 1e12),
    "truth": ("ns", 1e9),
    "row": ("ns", 1e9),
    "regroup": ("ns", 1e9),
}


def flat(costs: Costs) -> dict[str, float]:
    """Every constant by its name."""
    return {**asdict(costs), **dict(costs.functions)}


def run(console: Console) -> int:
    """Measures, prints and saves."""
    keep_freed_memory()
    measured = measure()
    file = calibration.path()
    calibration.save(measured, file)
    console.print(table(measured))
    console.print(f"saved {file}")
    return 0
