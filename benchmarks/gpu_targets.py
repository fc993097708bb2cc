"""The figures that are aimed at on a GPU, and what was found of each: passed, missed, or not there.

They are read off results as they stand in the file, so that a file can be judged again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from normpass.benchmarks.cases import geometric_mean
from normpass.benchmarks.gpu_measure import COPY
from normpass.benchmarks.gpu_peers import PEERS
from normpass.benchmarks.gpu_variants import EAGER, OURS, STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from normpass.benchmarks.gpu_cases import GpuCase

    Found = Mapping[str, Any]

ROW_NORMS = ("layer_norm", "rms_norm")
IMAGE_NORMS = ("group_norm", "batch_norm")
LARGE_BYTES = 256 * 10**6
OF_COPY, OF_COPY_AIM = 0.85, 0.90
OVER_STOCK = 1.3
IMAGES_OVER_STOCK, IMAGES_OVER_EAGER = 1.5, 1.2
DOUBLE_OVER_STOCK = 2.0
HOST_SECONDS = 5e-6
# Whole steps that differ by less are as fast as one another: Inductor's differ so from its own.
NOISE = 0.01


@dataclass(frozen=True)
class Target:
    """One figure. passed: None where nothing was measured. found: the figure, in words; cases: that
    of each case it is made of, with what missed it first.
    """

    name: str
    found: str
    passed: bool | None
    cases: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """For people."""
        return {True: "pass", False: "FAIL", None: "not measured"}[self.passed]


def is_about_a_target(case: GpuCase) -> bool:
    """Whether one of the targets is about a case."""
    if case.phase == "double backward":
        return case.norm == "layer_norm" and case.dtype == "bfloat16"
    return case.phase == "backward" and case.dtype == "bfloat16"


def targets(document: Found) -> list[Target]:
    """All of them, from what a file of results has."""
    cases, host = document.get("cases", []), document.get("host", [])
    rows = of(cases, ROW_NORMS, "backward")
    large = [each for each in rows if each["least_bytes"] > LARGE_BYTES]
    return [
        each_at_least(
            f"layer and RMS norm backward, bfloat16, over {LARGE_BYTES // 10**6} MB: at least "
            f"{OF_COPY:.0%} of a copy's bandwidth (aim {OF_COPY_AIM:.0%})",
            {label(each): f for each in large if (f := fraction(each)) is not None},
            OF_COPY,
            "{:.0%}",
        ),
        each_at_least(
            "layer and RMS norm backward, bfloat16: at least as fast as the best peer",
            speedups(rows, lambda each: best(each, peers())),
            1.0,
        ),
        mean_at_least(
            f"layer and RMS norm backward, bfloat16: {OVER_STOCK}x Inductor, geometric mean",
            speedups(rows, of_stock),
            OVER_STOCK,
        ),
        *image_targets(cases),
        mean_at_least(
            f"layer norm double backward, bfloat16: {DOUBLE_OVER_STOCK}x Inductor, geometric mean",
            speedups(of(cases, ("layer_norm",), "double backward"), of_stock),
            DOUBLE_OVER_STOCK,
        ),
        host_target(host),
        each_at_least(
            f"whole training steps: never slower than Inductor (but for {NOISE:.0%})",
            {
                each["model"]: each["speedup_over_inductor"]
                for each in document.get("models", [])
                if each.get("speedup_over_inductor")
            },
            1.0 - NOISE,
        ),
    ]


def image_targets(cases: Sequence[Found]) -> Iterator[Target]:
    """Of group and batch norm."""
    for norm in IMAGE_NORMS:
        found = of(cases, (norm,), "backward")
        name = f"{norm.replace('_', ' ')} backward, bfloat16"
        yield mean_at_least(
            f"{name}: {IMAGES_OVER_STOCK}x Inductor, geometric mean",
            speedups(found, of_stock),
            IMAGES_OVER_STOCK,
        )
        yield mean_at_least(
            f"{name}: {IMAGES_OVER_EAGER}x the better of eager mode and cuDNN, geometric mean",
            speedups(found, lambda each: best(each, (EAGER, "cudnn"))),
            IMAGES_OVER_EAGER,
        )


def host_target(host: Sequence[Found]) -> Target:
    """Seconds that a call costs the host more than Inductor's."""
    more = {
        each["program"]: each["seconds"][OURS]["median"] - each["seconds"][STOCK]["median"]
        for each in host
        if {OURS, STOCK} <= each["seconds"].keys()
    }
    name = f"host time of a call: at most {HOST_SECONDS * 1e6:.0f} us more than Inductor's"
    if not more:
        return Target(name, "-", None)
    most = max(more.values())
    return Target(name, f"{most * 1e6:+.1f} us", most <= HOST_SECONDS, by_size(more, down=True))


# ---- figures


def of(cases: Sequence[Found], norms: Sequence[str], phase: str) -> list[Found]:
    """The bfloat16 cases of some norms and a phase."""
    return [
        each
        for each in cases
        if each["case"]["norm"] in norms
        and each["case"]["phase"] == phase
        and each["case"]["dtype"] == "bfloat16"
    ]


def label(found: Found) -> str:
    """A case's."""
    return str(found["label"])


def median(found: Found, variant: str) -> float | None:
    """Seconds of a variant; None where it was not timed."""
    timing = found["seconds"].get(variant)
    return timing["median"] if timing else None


def fraction(found: Found) -> float | None:
    """normpass's part of the copy's bandwidth: 0 where it was wrong or failed."""
    if OURS not in found["seconds"]:
        return 0.0 if is_lost(found) else None
    value = found["fraction_of_copy"].get(OURS)
    return float(value) if value is not None else None


def is_lost(found: Found) -> bool:
    """Whether normpass was wrong or failed."""
    return OURS in found["wrong"] or OURS in found["failed"]


def peers() -> tuple[str, ...]:
    """The libraries' names."""
    return tuple(peer.name for peer in PEERS)


def best(found: Found, variants: Sequence[str]) -> float | None:
    """The fewest seconds of some variants; None where none was timed."""
    known = [seconds for name in variants if (seconds := median(found, name)) is not None]
    return min(known, default=None)


def of_stock(found: Found) -> float | None:
    """Inductor's seconds."""
    return median(found, STOCK)


def speedups(cases: Sequence[Found], against: Callable[[Found], float | None]) -> dict[str, float]:
    """By case, how many times faster normpass is; 0 where it was wrong or failed."""
    found = {}
    for each in cases:
        theirs, ours = against(each), median(each, OURS)
        if theirs is None or (ours is None and not is_lost(each)):
            continue
        found[label(each)] = theirs / ours if ours else 0.0
    return found


def each_at_least(
    name: str, values: Mapping[str, float], least: float, form: str = "{:.2f}x"
) -> Target:
    """Passed if every value is as large."""
    if not values:
        return Target(name, "-", None)
    lowest = min(values.values())
    reached = sum(value >= least for value in values.values())
    found = f"{reached} of {len(values)}, lowest {form.format(lowest)}"
    return Target(name, found, lowest >= least, by_size(values))


def mean_at_least(name: str, values: Mapping[str, float], least: float) -> Target:
    """Passed if the geometric mean is as large, and none is lost."""
    if not values:
        return Target(name, "-", None)
    lost = [key for key, value in values.items() if not value]
    kept = [value for value in values.values() if value]
    mean = geometric_mean(kept) if kept else 0.0
    found = f"{mean:.2f}x of {len(kept)}" + (f", {len(lost)} lost" if lost else "")
    return Target(name, found, mean >= least and not lost, by_size(values))


def by_size(values: Mapping[str, float], *, down: bool = False) -> dict[str, float]:
    """In order, the worst first."""
    return dict(sorted(values.items(), key=lambda item: item[1], reverse=down))


def timed_variants(cases: Sequence[Found]) -> list[str]:
    """Whatever was timed in one of the cases, in order."""
    return list(dict.fromkeys(n for each in cases for n in each["seconds"] if n != COPY))
