"""What holds for a program after every pass: a fault of ours is found where it was made, and not in
a kernel's numbers.

A value is used where it is defined, an array has memory before it is written and is read after
that, sums begin before anything is added to them and end, every tensor is written once, and a loop
goes as its axis can.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from normpass.backend.program.listing import listing
from normpass.backend.program.tree import (
    Abreast,
    Accumulate,
    Accumulator,
    Allocate,
    Begin,
    Compute,
    Finish,
    Jam,
    Keep,
    Lanes,
    Load,
    Loop,
    Recall,
    Regroup,
    Store,
    definition,
    uses,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import sympy

    from normpass.backend.program.tree import Leaf, Node, Plan

# Checked in tests, and where the environment asks for it.
VARIABLE = "NORMPASS_VERIFY"


class ProgramError(AssertionError):
    """A program that is none: what was expected, what was found, and the program."""


def verified(plan: Plan, after: str) -> Plan:
    """The plan, looked through if the environment has NORMPASS_VERIFY=1. after: the pass that made
    it.

    Raises:
        ProgramError: where something does not hold.
    """
    if os.environ.get(VARIABLE) == "1":
        verify(plan, after)
    return plan


def verify(plan: Plan, after: str) -> None:
    """Raises ProgramError where something does not hold after a pass."""
    _Reader(plan, after).read()


class _Reader:
    """Goes through a program as a kernel does.

    open: the loops around. defined: the values there are. arrays: what was written to arrays.
    begun: sums that are being added up. parts: those of which launches have left partial results.
    spaces: arrays that have memory; None before there is such.
    """

    def __init__(self, plan: Plan, after: str) -> None:
        self.plan, self.after = plan, after
        self.open: list[str] = []
        self.defined: set[str] = set()
        self.arrays: set[str] = set()
        self.begun: dict[str, Accumulator] = {}
        self.parts: set[str] = set()
        self.stored: Counter[str] = Counter()
        allocated = any(isinstance(node, Allocate) for node in plan.body)
        self.spaces: set[tuple[str, tuple[str, ...]]] | None = set() if allocated else None

    def read(self) -> None:
        names = [axis.name for axis in self.plan.axes]
        self.expect(len(set(names)) == len(names), "axes of different names", f"{names}")
        if self.plan.launches:
            for launch in self.plan.launches:
                self.expect(
                    self.parts.issuperset(each.op.name for each in launch.combined),
                    f"partial results of {[a.op.name for a in launch.combined]}",
                    f"those of {sorted(self.parts)}",
                )
                with self.scope([axis.name for axis in launch.outer]):
                    self.begun = {each.op.name: each for each in launch.shared}
                    self.nodes((*launch.scalars, *launch.body), above=None)
                self.parts |= self.begun.keys()
                self.begun = {}
        else:
            self.nodes(self.plan.body, above=None)
            self.in_one_loop()
        self.expect(not self.begun, "every sum to end", f"{sorted(self.begun)} without an end")
        expected = Counter(output.buffer.name for output in self.plan.region.outputs)
        self.expect(
            self.stored == expected, f"stores of {sorted(expected)}", f"{dict(self.stored)}"
        )

    def in_one_loop(self) -> None:
        """What workers share begins anew in each loop that they divide."""
        shared: Counter[str] = Counter()
        for node in self.plan.body:
            adding = (leaf for leaf in walk(node) if isinstance(leaf, Accumulate))
            shared.update({leaf.accumulator.op.name for leaf in adding if leaf.accumulator.shared})
        twice = sorted(name for name, times in shared.items() if times > 1)
        self.expect(not twice, "shared sums in one loop each", f"several for {twice}")

    def expect(self, holds: bool, expected: str, found: str) -> None:
        if not holds:
            raise ProgramError(
                f"after {self.after}, inside {self.open}: expected {expected}, found {found} in\n"
                f"{listing(self.plan)}"
            )

    @contextmanager
    def scope(self, axes: Sequence[str]) -> Iterator[None]:
        """Loops over some axes: what is defined in them is gone after them."""
        known = {axis.name for axis in self.plan.axes}
        self.expect(
            known.issuperset(axes) and not set(axes) & set(self.open),
            f"loops over others of {sorted(known)}",
            f"some over {list(axes)}",
        )
        before = set(self.defined)
        self.open += axes
        yield
        del self.open[len(self.open) - len(axes) :]
        self.defined = before

    def nodes(self, nodes: Sequence[Node], above: Loop | None) -> None:
        for node in nodes:
            if isinstance(node, Loop):
                self.loop(node, above)
            else:
                self.leaf(node)

    def loop(self, loop: Loop, above: Loop | None) -> None:
        name = loop.axis.name
        alone = above is None or (
            above.parallel
            and all(isinstance(node, Load | Compute) or node is loop for node in above.body)
        )
        self.expect(alone or not loop.parallel, "a loop of one worker", "one for all of them")
        if isinstance(loop.kind, Lanes):
            self.expect(
                name == self.plan.vector, f"lanes along {self.plan.vector}", f"along {name}"
            )
        elif isinstance(loop.kind, Jam | Abreast):
            rows = self.plan.together and self.plan.together.axis
            self.expect(name == rows, f"rows of {rows} together", f"rows of {name}")
        with self.scope([name]):
            self.nodes(loop.body, loop)

    def leaf(self, node: Leaf) -> None:
        needed = uses(node)
        self.expect(
            self.defined.issuperset(needed), f"{needed} to be there", f"{sorted(self.defined)}"
        )
        match node:
            case Begin(accumulator):
                self.begin(accumulator)
            case Accumulate(accumulator):
                self.begun_with(accumulator)
                self.inside(accumulator.axes)
            case Finish(accumulator):
                self.finish(accumulator)
            case Load(access, _):
                self.inside(access.strides)
            case Store(output, access):
                self.inside(access.strides)
                self.stored[output.buffer.name] += 1
            case Keep() | Recall() | Regroup():
                self.array(node)
            case Allocate(space) if self.spaces is not None:
                self.expect(not self.open, "arrays at the top", f"one of {space.value}")
                self.spaces.add((space.value, space.axes))
        name = definition(node)
        if name and not (isinstance(node, Finish) and node.accumulator.axes):
            self.defined.add(name)

    def array(self, node: Keep | Recall | Regroup) -> None:
        match node:
            case Keep(value, axes, _):
                self.inside(axes)
                self.has_memory(value, axes)
                self.arrays.add(value)
            case Recall(value, axes, _):
                self.inside(axes)
                self.there(value)
            case Regroup(_, array):
                self.there(array.value)

    def inside(self, axes: Iterable[str] | Mapping[str, sympy.Expr]) -> None:
        self.expect(set(self.open).issuperset(axes), f"loops over {list(axes)}", "those around")

    def there(self, value: str) -> None:
        known = self.arrays | self.parts
        self.expect(value in known, f"an array of {value}", f"those of {sorted(known)}")

    def has_memory(self, value: str, axes: tuple[str, ...]) -> None:
        known = self.spaces
        self.expect(
            known is None or (value, axes) in known, f"memory of {value}{axes}", f"that of {known}"
        )

    def begin(self, accumulator: Accumulator) -> None:
        name = accumulator.op.name
        if accumulator.axes:
            self.has_memory(name, accumulator.axes)
        self.expect(
            name not in self.begun or bool(self.plan.launches and accumulator.shared),
            f"one beginning of {name}",
            "another",
        )
        self.begun[name] = accumulator

    def begun_with(self, accumulator: Accumulator) -> None:
        begun = self.begun.get(accumulator.op.name)
        self.expect(begun == accumulator, f"{accumulator} to have begun", f"{begun}")

    def finish(self, accumulator: Accumulator) -> None:
        self.begun_with(accumulator)
        del self.begun[accumulator.op.name]
        if accumulator.axes:
            self.arrays.add(accumulator.op.name)
