"""Whether the rules break anything that torch.compile could do without them.

Every operator of PyTorch's operator database is compiled (fullgraph, aot_eager) under grad, jvp,
vmap, vmap of grad and jvp of grad, once with stock PyTorch and once with normpass.register(), and
compared with eager: tests/operator_cases.py. "in-one" takes the first argument only for a variable,
as a layer with closed-over weights does. Printed is what differs between the two runs; the exit
status is 1 if anything is broken.

    python tests/operator_database.py                          about an hour a run
    python tests/operator_database.py --only 'norm$'           some operators
    python tests/operator_database.py --before stock.txt       one run, against one that was stored

A run is stored as OUT/stock.txt or OUT/registered.txt, one case per line; it grows while it runs.

Each case has a process of its own, forked from one that has imported everything: a compile that
fails in jvp leaves torch (2.13) tracing later functions of its process wrongly.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import platform
import re
import resource
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # A fork keeps one thread only: libraries must not start pools of them before.
    for pool in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[pool] = "1"

import torch
from operator_cases import FAILS, NOT_COUNTED, RIGHT, TRANSFORMS, WRONG, operators, outcome, warm_up

import normpass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection

    Case = tuple[str, str]  # operator, transform
    Outcomes = dict[Case, str]

# By name: what is registered while compiling.
RULES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "stock": contextlib.nullcontext,
    "registered": normpass.registered,
}
FORK = multiprocessing.get_context("fork")
# Seconds on the clock for each second of the limit, which counts the processor's: others may be
# using it, and a process that sleeps forever uses none.
PATIENCE = 5


def kind(text: str) -> str:
    return text.partition(":")[0]


@dataclass
class Comparison:
    """What became of the cases of one run in another."""

    broken: list[Case]
    repaired: list[Case]

    @classmethod
    def of(cls, before: Outcomes, after: Outcomes) -> Comparison:
        """Broken is what was right and is not any more, and what failed and now is wrong."""
        broken, repaired = [], []
        for case in sorted(before):
            was, now = kind(before[case]), kind(after.get(case, "missing"))
            if (was == RIGHT and now != RIGHT) or (was == FAILS and now == WRONG):
                broken.append(case)
            elif was in (FAILS, WRONG) and now == RIGHT:
                repaired.append(case)
        return cls(broken, repaired)


def write(file: Path, outcomes: Outcomes) -> None:
    lines = ["\t".join([*case, text]) for case, text in sorted(outcomes.items())]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read(file: Path) -> Outcomes:
    lines = file.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t", 2) for line in lines if not line.startswith("#")]
    return {(name, transform): text for name, transform, text in rows}


def answer(case: Case, rules: str, seconds: int, reply: Connection) -> None:
    """Sends a case's outcome: the whole life of a forked process."""
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    # The signal at the limit ends the process, wherever it is.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    name, transform = case
    reply.send(outcome(operators()[name], transform, RULES[rules]))


def ending(process: multiprocessing.process.BaseProcess, seconds: int) -> str:
    """The outcome of a process that is not there to tell it."""
    process.join()
    code = process.exitcode or 0
    late = code in (-9, -24)  # SIGKILL, SIGXCPU
    return f"{FAILS}: " + (f"not ready after {seconds} s" if late else f"died, exit status {code}")


def forked(
    cases: Iterable[Case], rules: str, jobs: int, seconds: int
) -> Iterator[tuple[Case, str]]:
    """The outcome of each case, from a process of its own, `jobs` at a time."""
    waiting = iter(cases)
    running: dict[Any, tuple[Case, Any, float]] = {}
    while True:
        for case in itertools.islice(waiting, jobs - len(running)):
            receive, send = FORK.Pipe(duplex=False)
            process = FORK.Process(target=answer, args=(case, rules, seconds, send))
            process.start()
            send.close()  # so that the death of the process ends the pipe
            running[receive] = (case, process, time.monotonic() + PATIENCE * seconds)
        if not running:
            return
        ready = wait(list(running), timeout=1)
        for reply, (case, process, deadline) in list(running.items()):
            if reply in ready:
                try:
                    text = reply.recv()
                except EOFError:
                    text = ending(process, seconds)
            elif time.monotonic() > deadline:
                process.kill()
                text = ending(process, seconds)
            else:
                continue
            process.join()
            reply.close()
            del running[reply]
            yield case, text


def run(rules: str, cases: list[Case], file: Path, jobs: int, seconds: int) -> None:
    """Stores the outcomes of all cases in a file, line by line as they come, sorted at the end."""
    torch.set_num_threads(1)
    warm_up(RULES[rules])
    outcomes: Outcomes = {}
    start = time.monotonic()
    with file.open("w", encoding="utf-8", buffering=1) as lines:
        for number, (case, text) in enumerate(forked(cases, rules, jobs, seconds), 1):
            outcomes[case] = text
            lines.write("\t".join([*case, text]) + "\n")
            if number % 100 == 0 or number == len(cases):
                took = (time.monotonic() - start) / 60
                print(f"{rules}: {number} of {len(cases)} cases, {took:.0f} min", flush=True)
    write(file, outcomes)


def stored(rules: str, cases: list[Case], options: argparse.Namespace) -> Outcomes:
    """The outcomes of one run, made in a process that shares nothing with those of the other."""
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{rules}.txt"
    process = FORK.Process(target=run, args=(rules, cases, file, options.jobs, options.limit))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"the {rules} run ended with exit status {process.exitcode}")
    return read(file)


def table(before: Outcomes, after: Outcomes) -> list[str]:
    """How many outcomes of each kind, by transform."""
    kinds = (RIGHT, WRONG, FAILS, NOT_COUNTED)
    lines = ["".join([f"{'':20}{'':12}", *(f"{k:>13}" for k in kinds)])]
    for transform in TRANSFORMS:
        for run_name, outcomes in (("stock", before), ("registered", after)):
            counts = Counter(kind(text) for (_, t), text in outcomes.items() if t == transform)
            if counts:
                row = "".join(f"{counts[k]:13}" for k in kinds)
                lines.append(f"{transform:20}{run_name:12}{row}")
    return lines


def listed(title: str, cases: list[Case], before: Outcomes, after: Outcomes) -> list[str]:
    lines = [f"{title}: {len(cases) or 'none'}"]
    for case in cases:
        lines.append("  " + "  ".join(case))
        lines.append(f"    before  {before[case]}")
        lines.append(f"    after   {after.get(case, 'missing')}")
    return lines


def summary(before: Outcomes, after: Outcomes, compared: Comparison) -> str:
    """The page for the repository: the counts, what is broken, and what is repaired."""
    repaired: dict[str, list[str]] = {}
    for name, transform in compared.repaired:
        repaired.setdefault(name, []).append(transform)
    lines = [
        "PyTorch's operator database under torch.compile(fullgraph=True, backend='aot_eager'),",
        "first usable float32 sample on the CPU, without normpass.register() and with it.",
        "Written by `make operators`.",
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}; "
        f"{len({name for name, _ in before})} operators",
        "",
        *table(before, after),
        "",
        *listed("broken", compared.broken, before, after),
        "",
        f"repaired: {len(compared.repaired)}",
        *(f"  {name}: {', '.join(transforms)}" for name, transforms in repaired.items()),
    ]
    return "\n".join(lines) + "\n"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--only", default="", help="operators whose name this regex finds")
    parser.add_argument("--transforms", default=",".join(TRANSFORMS), help="separated by commas")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--limit", type=int, default=60, help="processor seconds for a case")
    parser.add_argument("--out", type=Path, default=Path("build/operators"), help="folder")
    parser.add_argument("--before", type=Path, help="a stored stock run, instead of a new one")
    parser.add_argument("--after", type=Path, help="a stored registered run, likewise")
    parser.add_argument("--summary", type=Path, help="page to write, if all operators were run")
    options = parser.parse_args(arguments)
    options.transforms = options.transforms.split(",")
    if unknown := set(options.transforms) - set(TRANSFORMS):
        parser.error(f"--transforms: expected some of {','.join(TRANSFORMS)}; found {unknown}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    names = [name for name in operators() if re.search(options.only, name)]
    if not names:
        raise SystemExit(f"--only: no operator's name has {options.only!r} in it")
    cases = [(name, transform) for name in names for transform in options.transforms]
    before = read(options.before) if options.before else stored("stock", cases, options)
    after = read(options.after) if options.after else stored("registered", cases, options)
    asked = set(cases)
    before, after = ({c: t for c, t in run.items() if c in asked} for run in (before, after))
    if missing := asked - set(before):
        raise SystemExit(f"{options.before} lacks {len(missing)} cases, {min(missing)} for one")
    compared = Comparison.of(before, after)
    for title, some in (("repaired", compared.repaired), ("broken", compared.broken)):
        print("\n".join(listed(title, some, before, after)))
    print("\n".join(table(before, after)))
    if options.summary and len(asked) == len(operators()) * len(TRANSFORMS):
        options.summary.write_text(summary(before, after, compared), encoding="utf-8")
    return 1 if compared.broken else 0


if __name__ == "__main__":
    sys.exit(main())
