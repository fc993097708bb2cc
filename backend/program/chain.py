"""Two reductions over the same axes, of which the second needs the first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from normpass.passes.region import Op, Region


@dataclass(frozen=True)
class Chain(ABC):
    """The second is of what is made of x - m, and the first, of x, is on the way to m."""

    x: str
    m: str
    first: Op
    second: Op

    @abstractmethod
    def in_blocks(
        self, near: tuple[str, ...], far: tuple[str, ...], count: int
    ) -> Mapping[str, Sequence[Op]]:
        """What the first and the second are made of, by their names. near: the axes of a block, of
        `count` elements. far: of the blocks.
        """

    @classmethod
    def found(cls, region: Region, fn: str, difference: Op, second: Op) -> Chain | None:
        """The chain of a region's second reduction, if a difference below it is of an x and an m
        that `fn` of x is on the way to.
        """
        x, m = map(str, difference.args)
        first = next((op for op in region.behind(m) if op.fn == fn and op.args == (x,)), None)
        if first is None or set(first.axes) != set(second.axes):
            return None
        return cls(x, m, first, second) if region.varies[m].isdisjoint(first.axes) else None
