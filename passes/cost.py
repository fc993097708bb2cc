"""What work costs: one currency, seconds, for a kernel of ours and for what Inductor would do.

What a unit of work takes is measured (backend/run/calibration.py); here it is put together.
"""

from __future__ import annotations

from dataclasses import dataclass

# What one function costs that none was measured for.
LIKE = {
    "expm1": "exp",
    "log1p": "log",
    "cos": "sin",
    "reciprocal": "div",
}
PRICED = frozenset(
    ("exp", "log", "tanh", "erf", "sigmoid", "sin", "pow", "div", "sqrt", "rsqrt", "welford", *LIKE)
)


@dataclass(frozen=True)
class Caches:
    """Bytes that stay within reach: of one worker inside the parallel loop, and of all together."""

    worker: int
    shared: int


@dataclass(frozen=True)
class Work:
    """What has to be done. Bytes, and counts of elements.

    read, written: from and to memory. passes: how often it goes over its largest input. again: read
    once more, from cache. columns: of what is read, down columns, so that neighbours in memory are
    not read one after the other. for_its_sake: moved by others, so that it can be read. truths:
    truth values that Inductor writes, for that or because it is asked for them. functions: how
    often each is computed, for an element. rows: how often a loop over neighbours in memory begins,
    and piece: of how many. regrouped: elements that are gone through one by one, because pieces are
    short. launches: calls of a kernel, or groups of Inductor's loops. workers: how many can be
    busy. over: the names of the inputs that a result may be written over.
    """

    read: int
    written: int
    passes: int = 1
    again: int = 0
    columns: int = 0
    for_its_sake: int = 0
    truths: int = 0
    functions: tuple[tuple[str, int], ...] = ()
    rows: int = 0
    regrouped: int = 0
    piece: int = 0
    launches: int = 1
    workers: int = 1
    over: frozenset[str] = frozenset()

    @property
    def moved(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Costs:
    """Seconds for each unit of work of one kind of code.

    launch: a call. The others are one worker's, while all are busy: memory, cache: a byte. column:
    a byte of a column, more than that. truth: a truth value that Inductor writes: it does so one by
    one. row: the start of one. regroup: an element that is gone through by itself. functions: one
    of an element, more than an addition.
    """

    launch: float
    memory: float
    cache: float
    column: float
    truth: float
    row: float
    regroup: float
    functions: tuple[tuple[str, float], ...]

    def of(self, function: str) -> float:
        """What a function costs."""
        known = dict(self.functions)
        return known.get(function, known.get(LIKE.get(function, ""), 0.0))


@dataclass(frozen=True)
class Calibration:
    """Costs of kernels of ours, and of Inductor's code."""

    ours: Costs
    theirs: Costs


@dataclass(frozen=True)
class Conditions:
    """What a decision depends on besides the region: the machine's caches, of which `private` are
    a core's own, its threads or multiprocessors, and what work costs on it; None where nobody has
    measured. capability: of a GPU for which CUDA C++ can be compiled, 90 for 9.0.
    """

    caches: Caches
    private: int
    threads: int
    calibration: Calibration | None
    capability: int = 0


def parts(work: Work, costs: Costs) -> dict[str, float]:
    """What a work's parts take, in seconds."""
    shared = {
        "memory": work.moved * costs.memory,
        "for its sake": work.for_its_sake * costs.memory + work.truths * costs.truth,
        "cache": work.again * costs.cache,
        "columns": work.columns * costs.column,
        "functions": sum(count * costs.of(name) for name, count in work.functions),
        "rows": work.rows * costs.row + work.regrouped * costs.regroup,
    }
    return {
        "launches": work.launches * costs.launch,
        **{part: seconds / work.workers for part, seconds in shared.items()},
    }


def seconds(work: Work, costs: Costs) -> float:
    """What a work takes."""
    return sum(parts(work, costs).values())
