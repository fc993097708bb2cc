"""A launch over rows of segments in CUDA C++: each band of a team's threads goes through its own.

What is the same for a segment lies in registers, an element for each of a band's turns. A band
without a segment in the last turn computes like the others, from zeros: of its results nothing is
added or written.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from normpass.backend.codegen.cuda_rows import RowsPrinter
from normpass.backend.codegen.cuda_team import UNROLL
from normpass.backend.program.team import groups
from normpass.backend.program.team_segments import of_segments
from normpass.backend.program.tree import (
    Accumulate,
    Begin,
    Compute,
    Finish,
    Keep,
    Load,
    Loop,
    Recall,
    Store,
    definition,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from normpass.backend.program.tree import Accumulator, Launch, Node, Plan

SEGMENT_HAS = "row.has(turn)"


class SegmentsPrinter(RowsPrinter):
    """Prints one launch over rows of segments."""

    counters = ("turn", "k")
    slot = "row.slot(turn, k)"

    def __init__(self, plan: Plan, launch: Launch, number: int) -> None:
        super().__init__(plan, launch, number)
        self.segments = launch.inner[0]
        loops = [node for node in launch.body if isinstance(node, Loop)]
        self.inside = [node for loop in loops for node in loop.body if isinstance(node, Loop)]
        shares = set(launch.blocks.shares)
        read = of_segments(launch)
        # What is the same for all rows of a team is read before them.
        self.once = [node for node in read if shares.isdisjoint(self.axes_of(node))]
        self.for_each = [node for node in read if node not in self.once]

    def row_type(self) -> None:
        team = self.team
        sizes = (team.threads, team.blocks, team.bands, team.turns, team.vectors, team.lanes)
        self.row("Segments", self.segments.extent, self.axis.extent, *sizes)

    def adding_up(self) -> int:
        first = super().adding_up()
        if self.team.exchange_of_bands:
            self.line(f"Bands<scalar, Row, {self.team.apart}> bands(chip + {first});")
        return first + self.team.exchange_of_bands

    # -- turns

    @contextmanager
    def turns(self) -> Iterator[None]:
        """The loop over a band's segments."""
        self.line(UNROLL)
        with self.block("for (int turn = 0; turn < Row::turns; ++turn)"):
            self.index_inside()
            yield

    def index_inside(self) -> None:
        self.line(f"const int64_t {self.index(self.segments.name)} = row.segment(turn);")

    @contextmanager
    def each_vector(self) -> Iterator[None]:
        with ExitStack() as loops:
            loops.enter_context(self.turns())
            loops.enter_context(self.vectors())
            yield

    # -- what is the same for a segment

    def asking(self) -> None:
        super().asking()
        self.read(self.once)

    @staticmethod
    def axes_of(node: Load | Recall) -> Iterable[str]:
        return node.access.strides if isinstance(node, Load) else node.axes

    def read(self, nodes: Sequence[Load | Recall]) -> None:
        """Begins to read what there is of each segment, long before it is needed."""
        if not nodes:
            return
        for node in nodes:
            self.line(f"scalar {self.of_turns(str(definition(node)))}[Row::turns] = {{}};")
        with self.turns():
            for node in nodes:
                match node:
                    case Load(access):
                        address = self.address(access)
                    case Recall(value, _, _):
                        address = self.kept(value)
                to = f"{self.of_turns(str(definition(node)))}[turn]"
                self.line(f"if ({SEGMENT_HAS}) {to} = get<scalar>({address});")

    def of_turns(self, value: str) -> str:
        """A value of a band's segments."""
        return f"turns_{value}"

    def from_turns(self, value: str) -> None:
        text = f"{self.of_turns(value)}[turn]"
        self.define(value, f"mask_of({text})" if value in self.truth else text)

    # -- rows

    def row_begins(self) -> None:
        self.read(self.for_each)
        kept = {
            node.value: None
            for node in walk(*self.launch.body)
            if isinstance(node, Keep) and not node.shared
        }
        for value in kept:
            self.line(f"scalar {self.of_turns(value)}[Row::turns];")

    def loop(self, loop: Loop, *, is_first: bool, is_last: bool) -> None:
        sums, number = groups(loop.body), 0
        with self.turns():
            for node in loop.body:
                if isinstance(node, Loop):
                    # The loops over segments before the first one may need nothing of a row.
                    is_first, is_last = node is self.inside[0], node is self.inside[-1]
                    self.phase(node, is_first=is_first, is_last=is_last)
                    number += 1
                    self.add_up_segments([each.accumulator for each in sums[number]])
                else:
                    self.of_segment(node)

    def add_up_segments(self, accumulators: list[Accumulator]) -> None:
        """Sums along a segment over all of its band."""
        if not accumulators:
            return
        names = ", ".join(f"acc_{each.op.name}" for each in accumulators)
        where = "bands.all" if self.team.exchange_of_bands else "all_of_warp"
        self.line(f"{where}<{', '.join(map(self.fn, accumulators))}>({names});")

    def of_segment(self, node: Node) -> None:
        """What happens once for a segment."""
        match node:
            case Load(access):
                self.from_turns(access.buffer.name)
            case Recall(value, axes, _) if self.segments.name in axes:
                self.from_turns(value)
            case Keep(value, _, shared):
                to = f"*({self.kept(value)})" if shared else f"{self.of_turns(value)}[turn]"
                guard = "if (row.leads(turn)) " if shared else ""
                self.line(f"{guard}{to} = {self.as_number(value)};")
            case Accumulate(accumulator):
                self.add_segment(accumulator)
            case Store(output, access):
                text = f"put({self.address(access)}, {self.as_number(output.value)});"
                self.line(f"if (row.leads(turn)) {text}")
            case Compute() | Begin() | Finish() | Recall():
                self.leaf(node)
            case _:
                raise AssertionError(f"expected what happens once for a segment, found {node}")

    def add_segment(self, accumulator: Accumulator) -> None:
        """A segment's value to a sum: one thread of its band adds it to what threads add up."""
        name, text = f"acc_{accumulator.op.name}", self.as_number(accumulator.operand)
        guard = "if (row.leads(turn)) "
        if self.segments.name in accumulator.axes:
            name, guard = f"{name}[turn]", ""
        self.line(f"{guard}accumulate<{self.fn(accumulator)}>({name}, {text});")

    # -- sums over rows

    def begin_shared(self, accumulator: Accumulator) -> None:
        if not self.is_of_segments(accumulator):
            super().begin_shared(accumulator)
            return
        name = f"acc_{accumulator.op.name}"
        self.line(f"scalar {name}[Row::turns];")
        self.line(UNROLL)
        self.line(f"for (scalar& sum : {name}) sum = {self.fn(accumulator)}::neutral<scalar>();")

    def is_of_segments(self, accumulator: Accumulator) -> bool:
        """Whether a sum over rows has one element for each segment."""
        return self.segments.name in accumulator.axes and self.axis.name not in accumulator.axes

    def leave_sum(self, accumulator: Accumulator) -> None:
        if not self.is_of_segments(accumulator):
            super().leave_sum(accumulator)
            return
        with self.turns():
            where, name = self.partial(accumulator), f"acc_{accumulator.op.name}"
            self.line(f"if (row.leads(turn)) *({where}) = {name}[turn];")
