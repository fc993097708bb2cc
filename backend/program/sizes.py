"""What a plan counts on of the sizes that are only known at run time.

One kernel for all sizes would be planned for none of them. So they are told apart by how large they
are, to the next power of two, and by which of a few powers divides them. Those of one class have a
kernel in common, which is planned for the largest of them and chosen when a region is launched. Two
classes that are planned alike are the same text, and compiled once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import sympy

from normpass.passes.sizes import ASSUMED_EXTENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from normpass.passes.region import Region

# A row is written in aligned vectors if lines of memory divide it, and axes are divided into blocks
# of 64 elements or 512 and more.
MULTIPLES = (512, 64, 16, 8)


@dataclass(frozen=True)
class SizeClass:
    """Sizes of at most `most` that `multiple` divides."""

    most: int
    multiple: int = 1


def size_class(size: int) -> SizeClass:
    """The class that a size is in."""
    if size < 1:
        return SizeClass(2)  # there is not even a first element
    multiple = next((multiple for multiple in MULTIPLES if size % multiple == 0), 1)
    return SizeClass(1 << (size - 1).bit_length(), multiple)


def size_classes(sizes: Sequence[int]) -> tuple[SizeClass, ...]:
    """Those of a region's run-time sizes."""
    return tuple(map(size_class, sizes))


@dataclass(frozen=True)
class Sizes:
    """The classes of run-time sizes, by their symbol. Empty where nothing is known of them."""

    classes: Mapping[sympy.Symbol, SizeClass] = field(default_factory=dict)

    @classmethod
    def of(cls, region: Region, classes: Sequence[SizeClass]) -> Sizes:
        """Those of a region's sizes, in order."""
        names = region.runtime_sizes if classes else ()
        return cls(dict(zip(map(symbol, names), classes, strict=True)))

    def most(self, expression: sympy.Expr | int) -> int | None:
        """The largest that a product of sizes can be; None if one of them is not known."""
        expression = sympy.sympify(expression)
        if not expression.free_symbols <= self.classes.keys():
            return None
        return int(expression.subs({size: of.most for size, of in self.classes.items()}))

    def expected(self, expression: sympy.Expr | int) -> int:
        """A product of sizes in decisions."""
        expression = sympy.sympify(expression)
        assumed = dict.fromkeys(expression.free_symbols, ASSUMED_EXTENT)
        return int(expression.subs(assumed | {s: of.most for s, of in self.classes.items()}))

    def divisor(self, expression: sympy.Expr | int) -> int:
        """A number that divides a product of sizes, the largest that is known to."""
        factors = {size: of.multiple * size for size, of in self.classes.items()}
        coefficient, _ = sympy.sympify(expression).subs(factors, simultaneous=True).as_coeff_Mul()
        return int(coefficient)


def symbol(name: str) -> sympy.Symbol:
    """A run-time size in the extents and strides of a plan."""
    return sympy.Symbol(name, integer=True, positive=True)
