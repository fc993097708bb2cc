"""What is kept in arrays rather than computed again, and when it is computed.

Inner results that would need a reduction again, or a transcendental function, are read back by
later phases of their body. What lanes differ in and rows do not is computed before the loop over
the rows, where that takes longer than reading it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from normpass.backend.program.places import Places
from normpass.backend.program.tree import Accumulate, Keep, Store
from normpass.passes.region import REGROUP
from normpass.passes.vocabulary import COSTLY, EXPENSIVE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Effect:
    """Something a loop's body is there for: a store, an accumulation, or a value kept for later."""

    node: Store | Accumulate | Keep
    value: str
    axes: frozenset[str]


class Arrays(Places):
    """Chooses the values that are kept."""

    def keeps(
        self,
        depth: int,
        todo: Sequence[tuple[int, Effect]],
        ready: Mapping[str, int],
        known: frozenset[str],
    ) -> list[tuple[int, Effect]]:
        """Values of earlier phases that a later one should read back rather than compute again."""
        kept: dict[str, tuple[int, Effect]] = {}
        work = [(phase, effect.value) for phase, effect in todo]
        seen: set[tuple[int, str]] = set()
        while work:
            phase, value = work.pop()
            if (phase, value) in seen or value in known or value in self.arrays:
                continue
            seen.add((phase, value))
            if self.computed_here(value, depth):
                continue
            axes = self.inside(self.region.varies[value], depth)
            if ready.get(value, 0) < phase and axes and self.worth_keeping(value, axes, depth):
                if self.region.producer[value].fn in EXPENSIVE:
                    value = self.stands_for(value, depth, phase, todo, ready, known)
                keep = Keep(value, axes, shared=depth == 0)
                kept[value] = (ready[value], Effect(keep, value, self.region.varies[value]))
                phase = ready[value]
            work += [(phase, operand) for operand in self.operands(value)]
        return list(kept.values())

    def stands_for(
        self,
        value: str,
        depth: int,
        phase: int,
        todo: Sequence[tuple[int, Effect]],
        ready: Mapping[str, int],
        known: frozenset[str],
    ) -> str:
        """What a phase reads back instead of a value: the last one that an earlier phase computes
        from it, over the same axes, and that is all this phase needs it for.
        """
        axes = self.inside(self.region.varies[value], depth)
        later = [effect.value for p, effect in todo if p == phase]
        before = self.closure([e.value for p, e in todo if p < phase], known)
        for candidate in reversed(before):
            op = self.region.producer.get(candidate)
            if (
                op
                and not op.is_reduction
                and ready[candidate] == ready[value]
                and self.inside(self.region.varies[candidate], depth) == axes
                and value in self.closure([candidate], known)
                and value not in self.closure(later, known | {candidate})
            ):
                return candidate
        return value

    def worth_keeping(self, value: str, axes: tuple[str, ...], depth: int) -> bool:
        op = self.region.producer.get(value)
        if op is None:
            return False
        if value in self.regrouped:
            return self.regrouped[value] == depth
        if op.is_reduction:
            return self.closes(op) > depth
        return depth > 0 and op.fn in EXPENSIVE and self.fits(axes)

    def ahead(self, depth: int, effects: list[Effect], known: frozenset[str]) -> list[Effect]:
        """Values that would be computed for each element although they do not vary along some loop
        around the lanes (rstd of channels that are last in memory): once, in a nest of their own.
        """
        needed = self.closure([effect.value for effect in effects], known)
        uses = [(effect.value, effect.axes) for effect in effects]
        uses += [(arg, self.region.varies[v]) for v in needed for arg in self.operands(v)]
        found = dict.fromkeys(
            value
            for value, axes in uses
            if value in needed
            and value not in self.arrays
            and self.vector in self.region.varies[value]
            and not self.region.varies[value].issuperset(self.inside(axes, depth))
            and self.fits(self.inside(self.region.varies[value], depth))
            and self.is_costly(value, known)
        )
        return [
            Effect(
                Keep(value, self.inside(self.region.varies[value], depth), shared=depth == 0),
                value,
                self.region.varies[value],
            )
            for value in found
        ]

    def is_costly(self, value: str, known: frozenset[str]) -> bool:
        """Whether a value takes longer to compute than to read, and needs no sums for it that are
        not there yet.
        """
        made = [self.region.producer.get(each) for each in self.closure([value], known)]
        ops = [op for op in made if op and op.name not in self.arrays]
        return any(op.fn in COSTLY for op in ops) and not any(
            op.is_reduction or op.fn == REGROUP for op in ops
        )
