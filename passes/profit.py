"""Whether a region is worth a kernel of its own: what that would do, against what Inductor does
with the same nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from normpass.passes.cost import parts, seconds
from normpass.passes.made import (
    is_read_in_loops,
    is_truth,
    only_computed_for,
    only_used_beside,
    sharers,
    sources,
)
from normpass.passes.rewrite import examples
from normpass.passes.sizes import elements, human, nbytes
from normpass.passes.vocabulary import Kind, kind_of, step_of_sum, without_views

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from torch.fx import Node

    from normpass.passes.cost import Calibration, Conditions, Work
    from normpass.passes.lower import Lowered
    from normpass.passes.region import Buffer

DEVICES = ("cpu", "cuda")
# Where nothing was measured: smaller regions stay with Inductor, and so do those for whose sake
# alone more than this part of what they move at least would be moved.
UNMEASURED_LEAST_BYTES = 4 * 1024 * 1024
UNMEASURED_MOST_FOR_ITS_SAKE = 0.1


@dataclass(frozen=True)
class Estimate:
    """Bytes to and from memory, at the sizes the graph was traced with.

    least: every input read once, every output written once. What a kernel really moves depends on
    its plan: backend/program/traffic.py. levels: how many reductions wait for one another. sizes:
    the region's run-time sizes in the example. for_its_sake: what Inductor would compute where it
    is used, and one of both has to write and the other to read. written: the names of those that
    are inputs. made: what Inductor moves for that, and truths: truth values among it; of what
    others need too, a region's share.
    """

    least: int
    levels: int
    sizes: tuple[int, ...]
    for_its_sake: int = 0
    made: int = 0
    truths: int = 0
    written: tuple[str, ...] = ()


def estimate(lowered: Lowered, nodes: Sequence[Node]) -> Estimate:
    """The estimate of a region that stands for these nodes."""
    least = sum(nbytes(node) for node in (*lowered.inputs, *lowered.outputs))
    sizes = examples(lowered.sizes, lowered.inputs)
    inside = {*nodes, *lowered.parts}
    whole = dict.fromkeys(lowered.parts.get(x, x) for x in lowered.inputs)
    made = [x for x in whole if only_computed_for(x, inside)]
    of = {node for x in made for node in sources(x, inside).read}
    read = [x for x in lowered.outputs if is_truth(x) and is_read_in_loops(x, inside)]
    beside = [x for x in lowered.outputs if x in read or only_used_beside(x, inside)]
    return Estimate(
        least,
        levels(nodes),
        sizes,
        for_its_sake=sum(2 * nbytes(x) for x in (*made, *beside)),
        # A line is read before it is overwritten.
        made=sum(2 * nbytes(x) // sharers(x, inside) for x in made)
        + sum(map(nbytes, (*of, *beside))),
        truths=sum(elements(x) // sharers(x, inside) for x in made if is_truth(x))
        + sum(map(elements, read)),
        written=tuple(x.name for x in made),
    )


def levels(nodes: Sequence[Node]) -> int:
    """How many of the graph's reductions wait for one another."""
    depth: dict[Node, int] = {}
    inside = set(nodes)
    for node in nodes:
        before = max((depth.get(arg, 0) for arg in node.all_input_nodes), default=0)
        depth[node] = before + (kind_of(node) is Kind.REDUCTION and not step_of_sum(node, inside))
    return max(depth.values(), default=0)


def refusal(
    lowered: Lowered,
    estimate: Estimate,
    kernel: Callable[[], Work],
    inductor: Callable[[Conditions], Work],
    conditions: Conditions | None,
    *,
    least_bytes: int | None = None,
) -> str | None:
    """Why a region stays with Inductor, or None if it does not.

    kernel, inductor: what a kernel of its own would do, and Inductor with the same nodes, asked for
    when nothing cheaper decides. conditions: what that is compared by. least_bytes: of the user,
    who wants all that moves so much fused where no more passes are needed; None for what is faster.
    """
    device, least = lowered.device, estimate.least
    if device not in DEVICES:
        return f"no kernels for {device} tensors (expected cpu or cuda)"
    if least_bytes is None and conditions and conditions.calibration:
        theirs, costs = inductor(conditions), conditions.calibration
        if seconds(theirs, costs.theirs) <= costs.ours.launch:
            return too_small(least, None)
        return slower(estimate, kernel(), theirs, costs)
    floor = UNMEASURED_LEAST_BYTES if least_bytes is None else least_bytes
    if least < floor:
        return f"too small: it moves {human(least)}, a kernel of its own pays from {human(floor)}"
    sake = estimate.for_its_sake
    if least_bytes is None and sake > UNMEASURED_MOST_FOR_ITS_SAKE * least:
        return more_memory(estimate)
    passes, needed = kernel().passes, estimate.levels + 1
    return more_passes(passes, needed) if passes > needed else None


def slower(estimate: Estimate, ours: Work, theirs: Work, calibration: Calibration) -> str | None:
    """Why ours takes no less time than theirs, by what costs most of it; None if it does.

    theirs is what Inductor does with the nodes, ours a kernel of its own.
    """
    ours = replace(ours, for_its_sake=estimate.made, truths=estimate.truths)
    one, other = parts(ours, calibration.ours), parts(theirs, calibration.theirs)
    more = {part: one[part] - other[part] for part in one}
    if sum(more.values()) < 0:
        return None
    # What would be saved if all but the worst part were left.
    worst = max(more, key=lambda part: more[part])
    saved = more[worst] - sum(more.values())
    size, needed = estimate.least, theirs.passes
    match worst:
        case "launches":
            return too_small(size, size * more[worst] / saved if saved > 0 else None)
        case "for its sake":
            return more_memory(estimate)
        case "rows":
            return short_rows(ours.piece, ours.piece * more[worst] / saved if saved > 0 else None)
        case "functions":
            return more_functions(ours, theirs, calibration)
    if ours.passes > needed:
        return more_passes(ours.passes, needed)
    return (
        f"more memory: {human(ours.moved)} and {human(ours.again)} within cache, where Inductor "
        f"moves {human(theirs.moved)} and {human(theirs.again)}"
    )


def overwritten(
    lowered: Lowered,
    nodes: Sequence[Node],
    donated: Container[Node],
    kernel: Callable[[], Work],
) -> str | None:
    """Why a region stays with Inductor that would have its result beside what it is computed of,
    where Inductor writes it over that; None if it does not. That is so where it reads that once:
    where no reduction's result meets the domain again.

    Of a cross entropy these are the logits and their gradient, often a model's largest tensors.
    donated: inputs of the graph that Inductor may write over. kernel: what a kernel of its own
    does, which may write over them as well.
    """
    region, inside = lowered.region, set(nodes)
    if has_inner_reduction(lowered):
        return None
    results = {_place(output.buffer) for output in region.outputs}
    for node, buffer in zip(lowered.inputs, region.inputs, strict=True):
        base = without_views(node)
        is_free = base.op == "call_function" or base in donated
        is_free = is_free and _place(buffer) in results and sharers(node, inside) == 1
        if is_free and buffer.name not in kernel().over:
            return f"more memory: {human(nbytes(node))}, where Inductor writes over what it reads"
    return None


def _place(buffer: Buffer) -> tuple[object, ...]:
    """How a tensor lies in memory, whatever its dimensions are joined to."""
    return buffer.dtype, tuple(axis for dim in buffer.dims for axis in dim), buffer.strides


def too_small(size: int, enough: float | None) -> str:
    if enough is None:
        return f"too small: it moves {human(size)}, where a call costs more than it saves"
    return f"too small: it moves {human(size)}, a kernel of its own pays from {human(int(enough))}"


def more_memory(estimate: Estimate) -> str:
    return (
        f"more memory: {human(estimate.for_its_sake)} of {human(estimate.least)} would hold what "
        "Inductor computes where it is used"
    )


def short_rows(piece: int, enough: float | None) -> str:
    pays = "" if enough is None else f", a kernel of its own pays from {math.ceil(enough)}"
    return f"short rows: they lie in pieces of {piece} elements{pays}"


def more_passes(passes: int, needed: int) -> str:
    return f"more passes: {passes} over memory, where Inductor needs {needed}"


def more_functions(ours: Work, theirs: Work, calibration: Calibration) -> str:
    """Names the function that costs most more."""
    before = dict(theirs.functions)
    name, count = max(
        ours.functions,
        key=lambda each: (
            each[1] * calibration.ours.of(each[0])
            - before.get(each[0], 0) * calibration.theirs.of(each[0])
        ),
    )
    return f"more functions: {name} {count} times, where Inductor needs {before.get(name, 0)}"


def has_inner_reduction(lowered: Lowered) -> bool:
    """Whether some reduction's result is used again over the axes it reduced."""
    region = lowered.region
    behind: dict[str, frozenset[str]] = {}
    for op in region.ops:
        reached = frozenset().union(
            *(behind.get(arg, frozenset()) for arg in op.args if isinstance(arg, str))
        )
        if not op.is_reduction and reached & region.varies[op.name]:
            return True
        behind[op.name] = reached | (frozenset(op.axes) if op.is_reduction else frozenset())
    return False
