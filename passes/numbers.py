"""Numbers known only at run time, as arithmetic on how many elements axes span.

    2 / s77       ->  div(2.0, numel[c])             where s77 is the extent of c
    s3 * s77 - 1  ->  add(numel[r c], -1.0)

The formulas of variances divide by such numbers; so does any mean that is written as a sum and a
division.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from typing import TYPE_CHECKING

import sympy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Count:
    """The number of elements that axes span."""

    axes: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A pointwise function of numbers."""

    fn: str
    args: tuple[Number, ...]


Number = float | Count | Call

# torch's own arithmetic (torch.utils._sympy.functions), by name, as plain mathematics. What rounds
# (FloorDiv, Mod) is not among it.
PLAIN: dict[str, Callable[..., sympy.Expr]] = {
    "ToFloat": lambda x: x,
    "IntTrueDiv": lambda x, y: x / y,
    "FloatTrueDiv": lambda x, y: x / y,
    "PowByNatural": lambda x, y: x**y,
    "FloatPow": lambda x, y: x**y,
}
FUNCTIONS = {"Add": "add", "Mul": "mul", "Pow": "pow", "Max": "maximum", "Min": "minimum"}
MOST_AXES = 3  # that one factor is looked for among


def express(expr: sympy.Expr, extents: Mapping[int, sympy.Expr]) -> Number | None:
    """An expression as a number, given the extents of axes; None if they do not tell it."""
    return _express(
        expr.replace(
            lambda part: type(part).__name__ in PLAIN,
            lambda part: PLAIN[type(part).__name__](*part.args),
        ),
        extents,
    )


def _express(expr: sympy.Expr, extents: Mapping[int, sympy.Expr]) -> Number | None:
    if expr.is_number:
        return float(expr)
    axes = spanning(expr, extents)
    if axes is not None:
        return Count(axes)
    numerator, denominator = sympy.fraction(expr)
    fn, parts = "div", (numerator, denominator)
    if denominator == 1:
        fn, parts = FUNCTIONS.get(type(expr).__name__, ""), _parts(expr)
    numbers = [_express(part, extents) for part in parts] if fn else []
    known = [number for number in numbers if number is not None]
    if not known or len(known) < len(numbers):
        return None
    return reduce(lambda left, right: Call(fn, (left, right)), known)


def _parts(expr: sympy.Expr) -> tuple[sympy.Expr, ...]:
    """Operands: of a product its coefficient and all the rest, which may be one count."""
    if expr.is_Mul and expr.args[0].is_number:
        return expr.as_two_terms()
    if expr.is_Add:
        return tuple(sorted(expr.args, key=lambda part: bool(part.is_number)))
    return expr.args


def spanning(expr: sympy.Expr, extents: Mapping[int, sympy.Expr]) -> tuple[int, ...] | None:
    """The axes whose extents multiply to an expression."""
    for count in range(1, MOST_AXES + 1):
        for some in combinations(sorted(extents), count):
            total = sympy.prod([extents[axis] for axis in some])
            if sympy.expand(total - expr) == 0:
                return some
    return None
