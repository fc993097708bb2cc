"""A launch over rows in CUDA C++: a team goes through its share of them.

Everything that is read along a row has slots on chip. What the next rows need is asked for as soon
as the last loop over a row has read a slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normpass.backend.codegen.cuda_team import UNROLL, TeamPrinter
from normpass.backend.codegen.text import index_expression
from normpass.backend.program.reductions import REDUCTIONS
from normpass.backend.program.team import groups
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
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from normpass.backend.program.tree import (
        Access,
        Accumulator,
        Launch,
        Leaf,
        Node,
        Plan,
    )


class RowsPrinter(TeamPrinter):
    """Prints one launch over rows."""

    def __init__(self, plan: Plan, launch: Launch, number: int) -> None:
        super().__init__(plan, launch, number)
        shares = set(launch.blocks.shares)
        self.ahead = [
            node
            for node in launch.body
            if isinstance(node, Load) and not shares.isdisjoint(node.access.strides)
        ]

    def source(self) -> list[str]:
        self.indent = 1
        self.places()
        self.share()
        self.asking()
        for accumulator in self.launch.shared:
            self.begin_shared(accumulator)
        if self.team.staged:
            self.line("int stage = 0;")
        with self.block(f"for ({self.kind} number = first; number < last; ++number)"):
            self.body()
            self.row_ends()
            if self.team.staged and self.team.stages > 1:
                self.line(f"stage = stage + 1 < {self.team.stages} ? stage + 1 : 0;")
        self.leave()
        return [*self.head(), *self.lines, "}"]

    # -- before rows

    def asking(self) -> None:
        """What is on its way before the first row, and how later rows are asked for."""
        team = self.team
        for load in self.launch.held:
            with self.each_vector():
                self.ask(load.access, "0")
        if team.asked:
            counters = ", ".join(f"int {counter}" for counter in self.counters)
            head = f"const auto ask = [&]({self.kind} number, int stage, {counters})"
            with self.block(head, "};"):
                self.indices()
                self.index_inside()
                for load in team.asked:
                    self.ask(load.access, "stage")
        if self.copied:
            self.line(f"for (int stage = 0; stage < {team.stages}; ++stage)")
            self.indent += 1
            with self.each_vector():
                if team.asked:
                    self.line(
                        f"if (first + stage < last && {self.has}) "
                        f"ask(first + stage, stage, {self.counted});"
                    )
                self.line("device::group();")
            self.indent -= 1
        if self.ahead:
            names = ", ".join(f"next_{load.access.buffer.name} = 0" for load in self.ahead)
            self.line(f"scalar {names};")
            head = f"const auto ask_values = [&]({self.kind} number)"
            with self.block(head, "};"):
                self.indices()
                for load in self.ahead:
                    name = load.access.buffer.name
                    self.line(f"next_{name} = get<scalar>({self.address(load.access)});")
            self.line("if (first < last) ask_values(first);")

    def ask(self, access: Access, stage: str) -> None:
        """Begins to copy a vector of a tensor's row."""
        name = access.buffer.name
        where = self.vector_at(access)
        guard = "" if stage == "stage" else f"if ({self.has}) "
        self.line(f"{guard}slots_{name}.ask({where}, {stage}, {self.slot});")

    def vector_at(self, access: Access) -> str:
        """The address of a vector's first element."""
        return f"{self.address(access, [self.axis.name])} + row.at(k)"

    def each_vector(self) -> AbstractContextManager[None]:
        """The loops over all of a thread's vectors."""
        return self.vectors()

    def index_inside(self) -> None:
        """Those of a vector along other axes than that one."""

    # -- rows

    def body(self) -> None:
        """One row: its values and its loops."""
        self.indices()
        for load in self.ahead:
            name = load.access.buffer.name
            text = f"next_{name}"
            self.define(name, f"mask_of({text})" if name in self.truth else text)
        if self.ahead:
            self.line("if (number + 1 < last) ask_values(number + 1);")
        self.row_begins()
        sums, phase = groups(self.launch.body), 0
        loops = [node for node in self.launch.body if isinstance(node, Loop)]
        for node in self.launch.body:
            if isinstance(node, Loop):
                self.line(f"// {f'phase {phase}, ' if len(loops) > 1 else ''}over {node.axis.name}")
                self.loop(node, is_first=phase == 0, is_last=phase == len(loops) - 1)
                phase += 1
                self.add_up([each.accumulator for each in sums[phase]])
            else:
                self.leaf(node)

    def row_begins(self) -> None:
        """What else is read of a row before its loops."""

    def row_ends(self) -> None:
        """What happens after its loops."""

    def loop(self, loop: Loop, *, is_first: bool, is_last: bool) -> None:
        """One loop over a row."""
        self.phase(loop, is_first=is_first, is_last=is_last)

    def phase(self, loop: Loop, *, is_first: bool, is_last: bool) -> None:
        """One loop over neighbours, vector by vector."""
        on_chip = {load.access.buffer.name for load in self.on_chip}
        loads = [node for node in loop.body if isinstance(node, Load)]
        names = {load.access.buffer.name for load in loads} & on_chip
        stores = [node for node in loop.body if isinstance(node, Store)]
        lanes = self.team.lanes
        # Where it is waited for vectors one by one their numbers have to be known.
        with self.vectors(UNROLL if is_first else self.unroll(loop)):
            if is_first and self.copied:
                # Where there is one loop alone, each turn of it makes one more group.
                self.line(f"row.wait<{self.team.stages}>({'0' if is_last else self.slot});")
            with self.block(f"if ({self.has})"):
                for load in loads:
                    if load.access.buffer.name in on_chip:
                        self.read_vector(load.access)
                    else:
                        names |= self.read_aside(load)
                for store in stores:
                    self.line(f"scalar out_{store.access.buffer.name}[{lanes}];")
                self.indexed |= names
                self.line(UNROLL)
                with self.block(f"for (int j = 0; j < {lanes}; ++j)"):
                    for node in loop.body:
                        if not isinstance(node, Load):
                            self.in_lanes(node)
                self.indexed -= names
                for store in stores:
                    where = self.vector_at(store.access)
                    self.line(f"Row::write({where}, out_{store.access.buffer.name});")
                if is_last and self.team.asked:
                    ahead = f"number + {self.team.stages}"
                    self.line(f"if ({ahead} < last) ask({ahead}, stage, {self.counted});")
            if is_last and self.copied:
                self.line("device::group();")

    def read_aside(self, load: Load) -> set[str]:
        """What is read of a vector's row and does not go on chip. Its values that have an index."""
        if load not in self.team.aside:
            self.leaf(load)
            return set()
        name = load.access.buffer.name
        values = self.vector_of(name)
        self.line(f"Row::read({self.vector_at(load.access)}, {values});")
        return {name}

    def unroll(self, loop: Loop) -> str:
        """How a loop over vectors is unrolled that waits for nothing."""
        return UNROLL

    def read_vector(self, access: Access) -> None:
        """What has come of a tensor."""
        name = access.buffer.name
        stage = "0" if name in self.held else "stage"
        values = self.vector_of(name)
        self.line(f"slots_{name}.read({values}, {stage}, {self.slot});")

    def vector_of(self, name: str) -> str:
        """A tensor's elements in one vector: an array, of this name."""
        kind, values = "bool" if name in self.truth else "scalar", self.free.value[name]
        self.line(f"{kind} {values}[{self.team.lanes}];")
        return values

    def in_lanes(self, node: Node) -> None:
        """A leaf of a loop over a row, of one element."""
        match node:
            case Compute(op):
                self.compute(op)
            case Accumulate(accumulator):
                self.accumulate(accumulator)
            case Store(output, access):
                self.line(f"out_{access.buffer.name}[j] = {self.as_number(output.value)};")
            case _:
                raise AssertionError(f"expected an operation on elements of a row, found {node}")

    def leaf(self, node: Leaf) -> None:
        """What happens once for a row."""
        match node:
            case Load(access):
                name = access.buffer.name
                if node not in self.ahead:
                    self.define(name, self.number_at(name, self.address(access)))
            case Compute(op):
                self.compute(op)
            case Begin(accumulator) if not accumulator.shared:
                neutral = f"{self.fn(accumulator)}::neutral<scalar>()"
                self.line(f"scalar acc_{accumulator.op.name} = {neutral};")
            case Accumulate(accumulator):
                self.accumulate(accumulator)
            case Finish(accumulator) if not accumulator.shared:
                self.define(accumulator.op.name, f"acc_{accumulator.op.name}")
            case Keep(value, _, _):
                self.line(f"if ({self.is_first}) *({self.kept(value)}) = {self.as_number(value)};")
            case Recall(value, axes, _):
                self.recall(value, axes)
            case Store(output, access):
                text = f"put({self.address(access)}, {self.as_number(output.value)});"
                self.line(f"if ({self.is_first}) {text}")

    # -- sums

    def fn(self, accumulator: Accumulator) -> str:
        return REDUCTIONS[accumulator.op.fn].cpp

    def accumulate(self, accumulator: Accumulator) -> None:
        name = f"acc_{accumulator.op.name}"
        if self.axis.name in accumulator.axes:
            name += f"[{self.slot} * {self.team.lanes} + j]"
        text = self.as_number(accumulator.operand)
        self.line(f"accumulate<{self.fn(accumulator)}>({name}, {text});")

    def add_up(self, accumulators: list[Accumulator]) -> None:
        """Sums along a row over all of its team."""
        if accumulators:
            names = ", ".join(f"acc_{each.op.name}" for each in accumulators)
            self.line(f"exchange.all<{', '.join(map(self.fn, accumulators))}>({names});")

    def begin_shared(self, accumulator: Accumulator) -> None:
        """A sum over the rows of a team, in registers."""
        name = f"acc_{accumulator.op.name}"
        neutral = f"{self.fn(accumulator)}::neutral<scalar>()"
        if self.axis.name not in accumulator.axes:
            self.line(f"scalar {name} = {neutral};")
            return
        self.line(f"scalar {name}[Row::elements];")
        self.line(UNROLL)
        self.line(f"for (scalar& sum : {name}) sum = {neutral};")

    def leave(self) -> None:
        """Writes a team's parts of the sums over rows; of a team without rows something may be on
        its way still.
        """
        if self.copied:
            self.line("device::wait<0>();")
        along = [each for each in self.launch.shared if self.axis.name in each.axes]
        if along:
            with self.each_vector(), self.block(f"if ({self.has})"):
                self.line(f"scalar part[{self.team.lanes}];")
                for each in along:
                    self.line(UNROLL)
                    lanes, name = self.team.lanes, f"acc_{each.op.name}"
                    text = f"part[j] = {name}[{self.slot} * {lanes} + j];"
                    self.line(f"for (int j = 0; j < {lanes}; ++j) {text}")
                    self.line(f"Row::write({self.partial(each)} + row.at(k), part);")
        for each in self.launch.shared:
            if each not in along:
                self.leave_sum(each)

    def leave_sum(self, accumulator: Accumulator) -> None:
        """Writes a part of a sum that does not vary along rows."""
        if not {axis.name for axis in self.launch.inner}.isdisjoint(accumulator.op.axes):
            self.add_up([accumulator])
        self.line(
            f"if ({self.is_first}) *({self.partial(accumulator)}) = acc_{accumulator.op.name};"
        )

    def partial(self, accumulator: Accumulator) -> str:
        """Where a team's own part is, or its first element along rows."""
        index = "share"
        for axis in self.tiles:
            if axis.name not in accumulator.axes:
                extent = index_expression(axis.extent)
                index = f"({index} * {extent} + {self.index(axis.name)})"
        strides = self.plan.array_strides(accumulator.axes)
        left = {axis: step for axis, step in strides.items() if axis != self.axis.name}
        return f"{self.part(accumulator, index)} + {self.offset(left)}".removesuffix(" + 0")
