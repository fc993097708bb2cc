"""Whether a region is worth a kernel of its own: what that would do, against what Inductor does
with the same nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normpass.passes.rewrite import locate
from normpass.passes.sizes import hint, human, nbytes
from normpass.passes.vocabulary import IDENTITY, VIEWS, Kind, kind_of, step_of_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from torch.fx import Node

    from normpass.passes.lower import Lowered

# Calling a kernel of ours costs what moving about this many bytes does: smaller regions stay with
# Inductor. Measured on a CPU with layer norm and softmax, forward and backward, float32 and
# bfloat16, against Inductor's kernels: 0.8x to 1.1x as fast at 0.8 to 1.5 MB, as fast or faster
# from 2 MiB.
LEAST_BYTES = {"cpu": 2 * 1024 * 1024, "cuda": 4 * 1024 * 1024}


# What fusing saves is seldom more than this part of what is moved at least: so much may at most be
# moved for the region's sake alone.
MOST_FOR_ITS_SAKE = 0.1
# Rows in pieces shorter than this leave lanes idle and loops short: a ResNet's step on images of
# 8x8 pixels took 1.09x Inductor's with its batch norms fused.
SHORT_PIECE = 256


@dataclass(frozen=True)
class Traffic:
    """What a kernel moves. read, written: bytes from and to memory. passes: how often it goes over
    its largest input. piece: how many elements lie together where rows come in pieces; 0 where they
    do not.
    """

    read: int
    written: int
    passes: int
    piece: int = 0

    @property
    def moved(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Estimate:
    """Bytes to and from memory, at the sizes the graph was traced with.

    least: every input read once, every output written once. What a kernel really moves depends on
    its plan: backend/traffic.py. levels: how many reductions wait for one another. sizes: the
    region's run-time sizes in the example. for_its_sake: what Inductor would compute where it is
    used, and has to write and the region to read. written: the names of those inputs.
    """

    least: int
    levels: int
    sizes: tuple[int, ...]
    for_its_sake: int = 0
    written: tuple[str, ...] = ()


def estimate(lowered: Lowered, nodes: Sequence[Node]) -> Estimate:
    """The estimate of a region that stands for these nodes."""
    least = sum(nbytes(node) for node in (*lowered.inputs, *lowered.outputs))
    measures = [locate(size, lowered.inputs) for size in lowered.sizes]
    sizes = tuple(hint(measure.value) // measure.divisor for measure in measures)
    inside = set(nodes)
    written = [x for x in lowered.inputs if only_computed_for(x, inside)]
    for_its_sake = sum(2 * nbytes(x) for x in written)
    return Estimate(least, levels(nodes), sizes, for_its_sake, tuple(x.name for x in written))


def only_computed_for(node: Node, inside: Container[Node]) -> bool:
    """Whether a region's input is pointwise and needed by nothing that would have it in memory."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return is_loop(node) and all(_reads_in_a_loop(user, inside) for user in node.users)


def _reads_in_a_loop(user: Node, inside: Container[Node]) -> bool:
    if user.target in VIEWS:
        return all(_reads_in_a_loop(each, inside) for each in user.users)
    return user in inside or is_loop(user) or kind_of(user) is Kind.REDUCTION


def is_loop(node: Node) -> bool:
    """Whether Inductor computes a node where it is used, or in one loop with what uses it."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in IDENTITY


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
    kernel: Callable[[], Traffic],
    *,
    least_bytes: int | None = None,
) -> str | None:
    """Why a region stays with Inductor, or None if it does not.

    kernel: what a kernel of its own would do, asked for when nothing cheaper decides. least_bytes:
    of the user, who wants all that moves so much fused where no more passes are needed; None for
    what was measured to pay.
    """
    device = lowered.device
    floor = LEAST_BYTES.get(device) if least_bytes is None else least_bytes
    least, for_its_sake = estimate.least, estimate.for_its_sake
    if floor is None:
        return f"no kernels for {device} tensors (expected cpu or cuda)"
    if least < floor:
        return f"too small: it moves {human(least)}, a kernel of its own pays from {human(floor)}"
    if least_bytes is None and for_its_sake > MOST_FOR_ITS_SAKE * least:
        return (
            f"more memory: {human(for_its_sake)} of {human(least)} would hold what Inductor "
            "computes where it is used"
        )
    moves = kernel()
    if least_bytes is None and device == "cpu" and 0 < moves.piece < SHORT_PIECE:
        return (
            f"short rows: they lie in pieces of {moves.piece} elements, a kernel of its own pays "
            f"from {SHORT_PIECE}"
        )
    if moves.passes > estimate.levels + 1:
        needed = estimate.levels + 1
        return f"more passes: {moves.passes} over memory, where Inductor needs {needed}"
    return None


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
