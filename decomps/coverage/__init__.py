"""The rules against the functions they are to replace: what is ported, what is open.

ledger.tsv has one row for each definition and registration of five files of PyTorch: the batching
rules of norms and convolutions, the derivative formulas, autograd.Function under functorch, and
cuDNN's batch norm. Whether a row is ported is asked of the registry, never written down:

    name       a derivative formula has the row's name (and an overload of its own or none); where
               upstream overloads the name, it takes the row's parameters
    source     a rule names the row's file and function as its source
    operators  every operator:input whose derivative the function is in derivatives.yaml has a vjp
               rule; for registrations and wrappers, the operator has a rule of that kind

A row with a reason is no rule to be ported; it is out of scope unless a rule has it all the same.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Literal, get_args

from normpass.decomps import registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from normpass.decomps.registry import Rule

Status = Literal["ported", "open", "out of scope"]
STATUSES: tuple[Status, ...] = get_args(Status)

# The kinds of rules that do for an operator what a row of this kind does.
_BY_OPERATOR: dict[str, tuple[registry.Kind, ...]] = {
    "backward": ("vjp",),
    "double-backward": ("vjp",),
    "batch-rule": ("batching",),
    "registration": ("batching",),
    "kernel-wrapper": ("decomposition", "autograd"),
}


@dataclass(frozen=True)
class Row:
    """One row of the ledger.

    name       upstream's name; overloads after the first carry #2, #3
    kind       what it is there: backward, double-backward, jvp, batch-rule, registration, ...
    family     norm, linalg, loss, ...
    file       file of PyTorch
    signature  upstream's parameters and results
    operators  "pow.Tensor_Scalar:self": the operators (and inputs) that it serves
    reason     why there is no rule to be ported; empty where there is one
    """

    name: str
    kind: str
    family: str
    file: str
    signature: str
    operators: tuple[str, ...]
    reason: str

    @property
    def function(self) -> str:
        """The name without the number of the overload."""
        return self.name.partition("#")[0]

    @property
    def parameters(self) -> frozenset[tuple[str, bool]]:
        """Each parameter and whether it is a tensor, as the signature says. A T is that too, or a
        number, which is a tensor here.
        """
        inside = self.signature.partition("(")[2].rpartition(") ->")[0]
        pairs = (part.partition(":") for part in inside.split(", "))
        tensors = ("", " Tensor", " T")
        return frozenset((_parameter(name), type[:7] in tensors) for name, _, type in pairs)


@dataclass(frozen=True)
class Entry:
    """A row of the ledger and the rules that have it."""

    row: Row
    rules: tuple[Rule, ...]

    @property
    def status(self) -> Status:
        if self.rules:
            return "ported"
        return "out of scope" if self.row.reason else "open"


@cache
def ledger() -> tuple[Row, ...]:
    """The rows of ledger.tsv."""
    text = files(__package__).joinpath("ledger.tsv").read_text(encoding="utf-8")
    return tuple(
        Row(name, kind, family, file, signature, tuple(operators.split()), reason)
        for name, kind, family, file, signature, operators, reason in (
            line.split("\t") for line in text.splitlines()[1:]
        )
    )


def rows(rules: Sequence[Rule] | None = None) -> tuple[Entry, ...]:
    """Every row of the ledger with the rules that have it. rules: by default all there are."""
    found = _Index(registry.rules() if rules is None else rules)
    return tuple(Entry(row, found.of(row)) for row in ledger())


class _Index:
    """Rules by what a row can name them by."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.named: dict[str, list[Rule]] = {}
        self.sourced: dict[tuple[str, str], list[Rule]] = {}
        self.serving: dict[tuple[str, str], list[Rule]] = {}
        for rule in rules:
            if rule.kind in registry.DERIVATIVES:
                self.named.setdefault(rule.name.partition(".")[0], []).append(rule)
            for place in sources(rule):
                self.sourced.setdefault(place, []).append(rule)
            for operator in served(rule):
                self.serving.setdefault((rule.kind, operator), []).append(rule)

    def of(self, row: Row) -> tuple[Rule, ...]:
        found = [
            rule
            for rule in self.named.get(row.function, []) + self._by_source(row)
            if row.function not in _overloaded() or _takes(rule, row)
        ]
        return tuple(dict.fromkeys(found + self._by_operator(row)))

    def _by_source(self, row: Row) -> list[Rule]:
        # A name with a number that is a word ("#no-cuDNN") is another build's, not an overload.
        if "#" in row.name and not row.name[-1].isdigit():
            return []
        return self.sourced.get((row.file, row.function), [])

    def _by_operator(self, row: Row) -> list[Rule]:
        kinds = _BY_OPERATOR.get(row.kind, ())
        found = [
            [rule for kind in kinds for rule in self.serving.get((kind, operator), [])]
            for operator in row.operators
        ]
        return [rule for rules in found for rule in rules] if all(found) else []


@cache
def _overloaded() -> frozenset[str]:
    return frozenset(row.function for row in ledger() if row.name.endswith("#2"))


def _takes(rule: Rule, row: Row) -> bool:
    """Whether the rule has every parameter of the row, tensors where the row has tensors, or serves
    one of its operators.
    """
    if rule.op is None:
        return False
    arguments = rule.op._schema.arguments
    have = {(_parameter(a.name), "Tensor" in str(a.type)) for a in arguments}
    return row.parameters <= have or not set(row.operators).isdisjoint(served(rule))


def _parameter(name: str) -> str:
    """A parameter's name without what upstream marks an overload's copy or an optional with."""
    return name.strip("_?! ").removeprefix("opt_")


def sources(rule: Rule) -> list[tuple[str, str]]:
    """The places that a rule names: (file, function), one or several."""
    places = []
    for part in rule.source.split(";"):
        file, _, functions = part.strip().partition(": ")
        places += [(file, function.strip()) for function in functions.split(",")]
    return places


def served(rule: Rule) -> list[str]:
    """The operator of a rule as the ledger names it: "tanh", for a vjp "pow.Tensor_Scalar:self"."""
    if rule.op is None or rule.op.namespace != "aten":
        return []
    name = rule.op._schema.name.removeprefix("aten::")
    overload = rule.op._schema.overload_name
    operator = f"{name}.{overload}" if overload else name
    if rule.kind != "vjp":
        return [operator]
    results = re.findall(r"\bd(\w+):", rule.shapes.partition("->")[2])
    return [f"{operator}:{tensor}" for tensor in results]


def table(entries: Iterable[Entry]) -> str:
    """Rows counted by family and kind, with a total."""
    counts = Counter((e.row.family, e.row.kind, e.status) for e in entries)
    groups = sorted({(family, kind) for family, kind, _ in counts})
    lines: list[tuple[str, ...]] = [("family", "kind", *STATUSES)]
    for family, kind in groups:
        lines.append((family, kind, *(str(counts[family, kind, status]) for status in STATUSES)))
    totals = [sum(n for key, n in counts.items() if key[2] == status) for status in STATUSES]
    lines.append(("total", "", *map(str, totals)))
    return "\n".join(
        f"{family:<17}{kind:<16}" + "".join(f"{n:>14}" for n in numbers)
        for family, kind, *numbers in lines
    )
