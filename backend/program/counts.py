"""Numbers of launches: integers, or expressions of run-time sizes where code without Python works
them out (run/gpu_function.py).

torch.utils._sympy (Max, Min, FloorDiv, CppPrinter) is private; checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min
from torch.utils._sympy.printers import CppPrinter

if TYPE_CHECKING:
    from collections.abc import Mapping

Count: TypeAlias = int | sympy.Expr


def size_symbol(name: str, *, is_some: bool = False) -> sympy.Symbol:
    """A run-time size of which only a call knows how large it is. It may be 0, unless `is_some`."""
    sign = "positive" if is_some else "nonnegative"
    return sympy.Symbol(f"n_{name}", integer=True, **{sign: True})


def counted(expression: sympy.Expr, sizes: Mapping[sympy.Symbol, Count]) -> Count:
    """An expression of sizes for those of a call: an integer if they are."""
    found = expression.subs(sizes)
    return int(found) if found.is_Integer else found


def larger(one: Count, other: Count) -> Count:
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    return Max(one, other)


def smaller(one: Count, other: Count) -> Count:
    if isinstance(one, int) and isinstance(other, int):
        return min(one, other)
    return Min(one, other)


def divide_up(one: Count, other: Count) -> Count:
    """A quotient, rounded up."""
    return -(-one // other)


def cpp(count: Count) -> str:
    """The text of an int64_t in C++."""
    if isinstance(count, int):
        return f"INT64_C({count})"
    text: str = CppPrinter().doprint(count.replace(sympy.floor, _quotient))
    return text


def _quotient(expression: sympy.Expr) -> sympy.Expr:
    """A quotient that is rounded down, in integers alone."""
    return FloorDiv(*sympy.together(expression).as_numer_denom())
