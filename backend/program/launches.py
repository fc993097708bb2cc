"""From a plan to launches on a GPU: which loops each runs, and what crosses from one to the next.

Every loop at the top of the plan's tree is a launch of its own. What such a loop adds up over its
programs leaves it as partial results, one set a program; a launch after it combines them in fixed
order. That one also does what the plan does with the results alone, such as storing dgamma."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from normpass.backend.program.tree import (
    Accumulate,
    Accumulator,
    Begin,
    Compute,
    Finish,
    Keep,
    Launch,
    Leaf,
    Load,
    Loop,
    LoopAxis,
    Node,
    Plan,
    Recall,
    Store,
    definition,
    uses,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class UnsupportedPlanError(NotImplementedError):
    """A plan that launches cannot be made of: the message says what stood in the way."""


def with_launches(plan: Plan) -> Plan:
    """The plan with its launches.

    Raises:
        UnsupportedPlanError: if something at the top of the tree is neither a loop nor a value.
    """
    return replace(plan, launches=_Splitter(plan).launches())


class _Splitter:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loops: list[Loop] = []
        self.scalars: dict[str, Leaf] = {}
        self.stores: list[Store] = []
        self.finished: dict[int, list[Accumulator]] = {}  # by the number of loops before
        self.combined: set[str] = set()
        for node in plan.body:
            self.sort(node)

    def sort(self, node: Node) -> None:
        match node:
            case Loop():
                self.loops.append(node)
            case Finish(accumulator):
                self.finished.setdefault(len(self.loops), []).append(accumulator)
                if not accumulator.axes:
                    self.scalars[accumulator.op.name] = Recall(accumulator.op.name, (), True)
            case Load(access):
                self.scalars[access.buffer.name] = node
            case Compute(op):
                self.scalars[op.name] = node
            case Store():
                self.stores.append(node)
            case Begin():
                pass
            case _:
                raise UnsupportedPlanError(
                    f"region {self.plan.region.name}: expected a loop or a value at the top of the "
                    f"plan, found {type(node).__name__}"
                )

    def launches(self) -> tuple[Launch, ...]:
        launches: list[Launch] = []
        taken: set[int] = set()
        for k in range(len(self.loops) + 1):
            groups: dict[tuple[str, ...], list[Accumulator]] = {}
            for accumulator in self.finished.get(k, ()):
                groups.setdefault(accumulator.axes, []).append(accumulator)
            for axes, group in groups.items():
                launches.append(self.combination(axes, group, k, taken))
            if k < len(self.loops) and k not in taken:
                launches.append(self.launch(*flatten(self.loops[k])))
        if self.stores:
            launches.append(self.launch((), tuple(self.stores)))
        return tuple(launches)

    def launch(
        self,
        outer: tuple[LoopAxis, ...],
        body: tuple[Node, ...],
        combined: tuple[Accumulator, ...] = (),
    ) -> Launch:
        shared = {
            node.accumulator.op.name: node.accumulator
            for node in walk(*body)
            if isinstance(node, Accumulate) and node.accumulator.shared
        }
        return Launch(outer, body, self.needed(body), tuple(shared.values()), combined)

    def needed(self, body: Sequence[Node]) -> tuple[Leaf, ...]:
        """The values of no axes that a body uses and does not define."""
        wanted: set[str] = set()
        defined = {d for node in walk(*body) if (d := definition(node))}
        stack = [use for node in walk(*body) for use in uses(node) if use not in defined]
        while stack:
            name = stack.pop()
            if name in self.scalars and name not in wanted:
                wanted.add(name)
                stack += uses(self.scalars[name])
        return tuple(leaf for name, leaf in self.scalars.items() if name in wanted)

    def combination(
        self, axes: tuple[str, ...], group: list[Accumulator], position: int, taken: set[int]
    ) -> Launch:
        """The launch that combines partial results, with later loops that only use them."""
        names = [accumulator.op.name for accumulator in group]
        self.combined |= set(names)
        body: list[Node] = [Recall(name, axes, True) for name in names]
        for k in range(position, len(self.loops)):
            outer, leaves = flatten(self.loops[k])
            if k not in taken and axes and self.is_epilogue(outer, leaves, axes):
                taken.add(k)
                body += [node for node in leaves if node not in body]
        later = [self.loops[k] for k in range(position, len(self.loops)) if k not in taken]
        recalled = {node.value for node in walk(*later) if isinstance(node, Recall)}
        body += [Keep(name, axes, True) for name in names if name in recalled or not axes]
        return self.launch(tuple(self.plan.axis[axis] for axis in axes), tuple(body), tuple(group))

    def is_epilogue(
        self,
        outer: tuple[LoopAxis, ...],
        leaves: tuple[Node, ...],
        axes: tuple[str, ...],
    ) -> bool:
        """Whether a loop needs nothing but inputs and results that are combined by then."""
        recalled = {node.value for node in leaves if isinstance(node, Recall)}
        return (
            tuple(axis.name for axis in outer) == axes
            and not any(isinstance(node, (Loop, Accumulate)) for node in leaves)
            and recalled <= self.combined
            and not any(isinstance(leaf, Recall) for leaf in self.needed(leaves))
        )


def flatten(loop: Loop) -> tuple[tuple[LoopAxis, ...], tuple[Node, ...]]:
    """A loop's perfect nest: its axes while only values stand between, and what is within."""
    axes: list[LoopAxis] = [loop.axis]
    between: list[Node] = []
    while True:
        loops = [node for node in loop.body if isinstance(node, Loop)]
        others = [node for node in loop.body if not isinstance(node, Loop)]
        if len(loops) != 1 or not all(isinstance(n, (Load, Compute, Recall)) for n in others):
            return tuple(axes), (*between, *loop.body)
        between += others
        (loop,) = loops
        axes.append(loop.axis)
