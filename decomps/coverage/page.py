"""The reference page: every rule with its shapes, its mathematics and its source, by family."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from normpass.decomps import registry
from normpass.decomps.coverage import rows
from normpass.decomps.slopes import Elementwise

if TYPE_CHECKING:
    from collections.abc import Callable

    from normpass.decomps.registry import Rule

# The command that writes the page; a test that finds the page out of date prints it.
RENEW = "normpass coverage --page docs/rules.md"

_HEAD = f"""# Rules

Written by `{RENEW}` from the registry; not edited by hand.
`normpass coverage` counts what is ported of PyTorch's own rules.

Shapes: one letter is an axis, `*n` any number of axes, `v` the axis of `vmap`. `dx` is the gradient
(in a jvp, the tangent) of `x`.

Elementwise operators stand in tables: the operator `y = f(x)`, the argument that is `x`, and the
slope `f'(x)`, from which both derivatives come: `vjp = g * conj(f'(x))`, `jvp = g * f'(x)`. A slope
that names `g` is that product. Other names are arguments of the operator; a truth value means one
or zero.
"""

_TABLE = """
| operator | x | slope |
|---|---|---|
"""


def page() -> str:
    """The page, as Markdown."""
    return _HEAD + "".join(
        f"\n## {family}\n" + _slopes(rules) + _formulas(rules)
        for family, rules in sorted(by_family().items())
    )


def by_family() -> dict[str, list[Rule]]:
    """Every rule: elementwise, or in the family of its row in the ledger or of its file."""
    known = {rule.name: entry.row.family for entry in rows() for rule in entry.rules}
    of_file: dict[str, str] = {}
    for rule in registry.rules():
        if rule.name in known:
            of_file.setdefault(_file(rule), known[rule.name])
    families: dict[str, list[Rule]] = {}
    for rule in registry.rules():
        file = _file(rule)
        other = "norm" if "norm" in file else of_file.get(file, file.rpartition(".")[2])
        family = "elementwise" if slope_of(rule) else known.get(rule.name, other)
        families.setdefault(family, []).append(rule)
    return families


def _file(rule: Rule) -> str:
    """The module of a rule, such as "derivatives.softmax"."""
    module: str = inspect.unwrap(rule.function).__module__
    return module.removeprefix("normpass.decomps.")


def slope_of(rule: Rule) -> Callable[..., Any] | None:
    """The slope that an elementwise rule is made of; None for other rules."""
    if not hasattr(rule.function, "__closure__"):
        return None
    for cell in rule.function.__closure__ or ():
        if isinstance(cell.cell_contents, Elementwise):
            return cell.cell_contents.slope
    return None


def _slopes(rules: list[Rule]) -> str:
    """The elementwise operators of a family, a row each: both derivatives are of one slope."""
    lines = {
        rule.name: f"| `{rule.name}` | `{rule.shapes.rpartition('-> d')[2].partition(':')[0]}` "
        f"| {_mathematics(slope)} |\n"
        for rule in rules
        if (slope := slope_of(rule)) is not None
    }
    return _TABLE + "".join(lines.values()) if lines else ""


def _mathematics(slope: Callable[..., Any]) -> str:
    """The expression of a lambda as it is written, the lines of a function's docstring."""
    text = inspect.getdoc(slope) or _expression(slope)
    lines = (" ".join(line.split()).replace("|", "\\|") for line in text.splitlines())
    return "<br>".join(f"`{line}`" for line in lines if line)


def _expression(slope: Callable[..., Any]) -> str:
    """What a lambda returns, on one line; the name of any other function."""
    wanted = slope.__code__.co_firstlineno, list(inspect.signature(slope).parameters)
    file = slope.__code__.co_filename
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Lambda):
            found = node.lineno, [argument.arg for argument in node.args.args]
            if found == wanted:
                text = ast.get_source_segment(_source(file), node.body) or ""
                return " ".join(text.split()).replace("( ", "(").replace(" )", ")")
    return slope.__name__


@cache
def _source(file: str) -> str:
    with open(file, encoding="utf-8") as stream:
        return stream.read()


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse(_source(file))


def _formulas(rules: list[Rule]) -> str:
    """The other rules; operators that share a function stand under one heading."""
    shared: dict[tuple[int, str, str], list[Rule]] = {}
    for rule in rules:
        if slope_of(rule) is None:
            key = id(inspect.unwrap(rule.function)), rule.shapes, rule.source
            shared.setdefault(key, []).append(rule)
    return "".join(map(_formula, shared.values()))


def _formula(rules: list[Rule]) -> str:
    """One function: the names it is entered under, shapes, source, mathematics."""
    first = rules[0]
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(rule.name for rule in rules))
    kinds = ", ".join(dict.fromkeys(rule.kind.replace("_", " ") for rule in rules))
    parts = [f"\n### {names}\n", f"{kinds}; `{first.shapes}`\n"]
    parts += [f"{first.why}\n"] if first.why else []
    parts += [f"```text\n{text}\n```\n" for text in _docstrings(first)]
    return "\n".join([*parts, f"Source: {first.source}\n"])


def _docstrings(rule: Rule) -> list[str]:
    """The docstring of a rule, and those of the functions that it says to `see`."""
    function = inspect.unwrap(rule.function)
    text = inspect.getdoc(function) or ""
    seen = re.findall(r"[Ss]ee `(\w+)`", text)
    referred = [getattr(function, "__globals__", {}).get(name) for name in seen]
    return [text, *(inspect.getdoc(other) or "" for other in referred if other is not None)]
