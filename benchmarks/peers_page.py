"""Puts what `normpass bench --peers` found into docs/comparison.md: between comments that name a
table, and nowhere else.

    python -m normpass.benchmarks.peers_page [RESULTS [PAGE]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normpass.benchmarks.cases import geometric_mean, spell
from normpass.benchmarks.peers import FILE, counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

RESULTS = Path("benchmarks/results") / FILE
PAGE = Path("docs/comparison.md")
PLACES = ("asked", "counts", "cases", "timed", "means", "times")
MARKS = {"right": "=", "wrong": "X", "fails": "-"}


def page(text: str, document: Mapping[str, Any]) -> str:
    """The page with its tables as the results have them.

    Raises:
        ValueError: if the page has no place for a table.
    """
    for name, lines in tables(document).items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        if (found := text.count(begin)) != 1:
            raise ValueError(f"expected one place <!-- {name} --> in the page, found {found}")
        before, _, after = text.partition(begin)
        _, _, after = after.partition(end)
        text = "".join((before, begin, *(f"{line}\n" for line in lines), end, after))
    return text


def tables(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """The lines of each table, by the name of its place."""
    lines = {name: ["Not measured yet."] for name in PLACES}
    if capability := document.get("capability"):
        lines["asked"] = [described(capability)]
        lines["counts"] = [*counted(capability["ways"])]
        lines["cases"] = [*marked(capability["ways"])]
    if times := document.get("times"):
        lines["timed"] = [described(times)]
        lines["means"] = [*averaged(times["cases"])]
        lines["times"] = [*timed(times["cases"])]
    return lines


def described(part: Mapping[str, Any]) -> str:
    """A sentence with versions, processor, date and rounds."""
    machine = part["machine"]
    left_out = " ".join(f"Left out: {why}." for why in dict.fromkeys(part["left_out"].values()))
    asked = {name: machine["versions"].get(name) for name in ("torch", "normpass", "jax")}
    versions = ", ".join(f"{name} {version}" for name, version in asked.items() if version)
    where = f"{machine['cpu']} ({machine['cpu_capability']}), {machine['threads']} threads"
    rounds = f" Medians of {part['repeats']} rounds." if "repeats" in part else ""
    return f"{versions}; {where}; {machine['date'][:10]}.{rounds} {left_out}".strip()


def counted(ways: Mapping[str, Any]) -> Iterator[str]:
    """How many norms are right, and silently wrong in brackets: a row for each mix."""
    yield from _head(["", *ways])
    (first, *_) = ways.values()
    for mix in next(iter(first.values())):
        yield _row([mix, *(counts(by_norm, mix) for by_norm in ways.values())])


def marked(ways: Mapping[str, Any]) -> Iterator[str]:
    """A mark for each way: a row for each mix, a column for each norm."""
    (first, *_) = ways.values()
    yield from _head(["", *first])
    for mix in next(iter(first.values())):
        cells = [_marks([by_norm[norm][mix] for by_norm in ways.values()]) for norm in first]
        yield _row([mix, *cells])


def _marks(said: Sequence[str]) -> str:
    return "`" + "".join(MARKS[each.split(":")[0]] for each in said) + "`"


def timed(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Milliseconds of normpass, and how many times as fast it is as each of the others."""
    others = _others(cases)
    yield from _head(["", "", "", "", "normpass, ms", *(f"against {name}" for name in others)])
    for case in cases:
        ours = case["seconds"].get("normpass")
        cells = [case["phase"], case["norm"], spell(tuple(case["shape"])), case["dtype"]]
        cells.append("wrong" if ours is None else f"{ours['median'] * 1e3:.2f}")
        cells += [_times(ratio) for ratio in _ratios(case, others)]
        yield _row(cells)


def averaged(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Geometric means over the norms that both computed right, and the worst of them."""
    others = _others(cases)
    yield from _head(["", "", *(f"against {name}" for name in others)])
    for phase, dtype in dict.fromkeys((case["phase"], case["dtype"]) for case in cases):
        of_both = [case for case in cases if (case["phase"], case["dtype"]) == (phase, dtype)]
        cells = [phase, dtype]
        for column in zip(*(_ratios(case, others) for case in of_both), strict=True):
            known = [ratio for ratio in column if ratio is not None]
            mean = _times(geometric_mean(known) if known else None)
            cells.append(f"{mean} ({_times(min(known, default=None))})")
        yield _row(cells)


def _others(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for case in cases for name in case["seconds"])
    return [name for name in names if name != "normpass"]


def _ratios(case: Mapping[str, Any], others: Sequence[str]) -> list[float | None]:
    """How many times as fast normpass is; None where one of the two was wrong."""
    medians = {name: timing["median"] for name, timing in case["seconds"].items()}
    ours = medians.get("normpass")
    return [medians[name] / ours if ours and name in medians else None for name in others]


def _times(ratio: float | None) -> str:
    return "wrong" if ratio is None else f"{ratio:.2f}x"


def _head(cells: Sequence[str]) -> Iterator[str]:
    yield _row(cells)
    yield "|---" * len(cells) + "|"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(argv: Sequence[str]) -> int:
    """Writes the page."""
    results, place = (*map(Path, argv), *(RESULTS, PAGE)[len(argv) :])
    document = json.loads(results.read_text(encoding="utf-8"))
    place.write_text(page(place.read_text(encoding="utf-8"), document), encoding="utf-8")
    print(f"wrote the tables of {place} from {results}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
