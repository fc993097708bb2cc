"""What a region's kernel takes, and what Inductor's kernels for the same nodes take.

Both get the same random tensors, of the shapes, strides and dtypes of the graph. Their results are
compared first; then they are timed in alternation, call by call as Inductor's code makes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Interpreter

from normpass.backend.explain import stock
from normpass.backend.explain.words import failure
from normpass.backend.run.clocks import calls_per_sample, cpu_seconds, cuda_seconds
from normpass.backend.run.layouts import Laid, Layout, lie_as_planned
from normpass.backend.run.op import region_op
from normpass.backend.run.runtime import CallSite
from normpass.backend.run.runtime import kernel as cpu_kernel
from normpass.passes.region_text import parse
from normpass.passes.sizes import hint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.fx import Graph, Node

    from normpass.backend.explain.cut_out import CutOut
    from normpass.backend.run.clocks import Clock, Step
    from normpass.passes.pipeline import Fused

ROUNDS = 9
# How far results may be apart, relative to the largest: roundings of the result itself, and for one
# that sums n numbers so many times sqrt(n) roundings of what it is computed in.
ROUNDINGS = 4
OF_SUMS = 8
# Of truth values that compare what is rounded, so many may differ.
MOST_FLIPPED = 1e-3


@dataclass(frozen=True)
class Times:
    """Seconds a call, the median of several rounds. ours: the region's kernel. stock: Inductor's,
    for the same nodes.
    """

    ours: float
    stock: float


class NotTimed(Exception):
    """Why a region is not timed."""


def timed(fused: Fused, cut: CutOut | str, settings: Mapping[str, Any]) -> Times | str:
    """The times of a region, or why there are none.

    settings: of torch._inductor.config, for Inductor's kernels.
    """
    if isinstance(cut, str):
        return cut
    try:
        return _timed(fused, cut, settings)
    except NotTimed as reason:
        return str(reason)
    except Exception as error:  # of whatever kind: it is Inductor's or ours, and no measurement
        return failure(error)


def _timed(fused: Fused, cut: CutOut, settings: Mapping[str, Any]) -> Times:
    if fused.device == "cpu" and cpu_kernel(fused.text, fused.sizes).launch(fused.sizes) is None:
        raise NotTimed("its kernel could not be built")
    with torch.no_grad():
        inputs = random_inputs(fused, cut)
        theirs, stock_step = _stock(cut.stock, inputs, settings)
        mine, our_step = _ours(fused, cut.ours, inputs)
        largest = max((x.numel() for x in inputs), default=1)
        if difference := different(mine, theirs, largest):
            raise NotTimed(difference)
        clock = cuda_seconds if fused.device == "cuda" else cpu_seconds
        ours, other = alternately((our_step, stock_step), clock)
    return Times(ours, other)


# ---- what is timed


def _stock(graph: Graph, inputs: Sequence[Tensor], settings: Mapping[str, Any]) -> tuple[Any, Step]:
    """The results of Inductor's code, and the code itself as a step."""
    from torch._inductor.compile_fx import compile_fx_inner

    codes: list[Any] = []

    def kept(*args: Any, **kwargs: Any) -> Any:
        codes.append(compile_fx_inner(*args, **kwargs))
        return codes[-1]

    module = GraphModule(torch.nn.Module(), graph)
    results = stock.compiled(module, inputs, settings, kept)(*inputs)
    if len(codes) != 1:
        raise NotTimed(f"Inductor made {len(codes)} graphs of its nodes, where one was expected")
    # It takes the list apart that it gets.
    return results, lambda: codes[0](list(inputs))


def _ours(fused: Fused, graph: Graph, inputs: Sequence[Tensor]) -> tuple[Any, Step]:
    """The results of the region's call, and that alone as a step."""
    caught = _Caught(GraphModule(torch.nn.Module(), graph))
    results = caught.run(*inputs)
    tensors, sizes, text = caught.arguments
    if not lie_as_planned(tensors, Laid.of(parse(text), sizes).inputs):
        raise NotTimed("its tensors lie otherwise when it stands alone")
    if fused.device == "cuda":
        from normpass.backend.run import launch_gpu

        launch = launch_gpu.kernel(text, tuple(sizes), tensors[0].device.index)
        return results, lambda: launch(tensors, sizes)
    site = CallSite()
    return results, lambda: site(tensors, sizes, text)


class _Caught(Interpreter):
    """Runs a graph, and keeps what its region is called with."""

    arguments: tuple[list[Tensor], list[int], str]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is region_op:
            tensors, sizes, text = args
            self.arguments = list(tensors), list(sizes), text
        return super().call_function(target, args, kwargs)


# ---- numbers


def random_inputs(fused: Fused, cut: CutOut) -> list[Tensor]:
    """A tensor for each placeholder of a cut-out, as it lies where the region reads it."""
    region = parse(fused.text)
    planned = _planned(cut.ours, Laid.of(region, fused.sizes).inputs)
    extents = region.extents(fused.sizes)
    rank = len(region.axes)
    # What an integer may be compared with, or point to: a place along some axis.
    below = min((n for n in extents.values() if n > 1), default=1)
    tensors = []
    for node in cut.ours.find_nodes(op="placeholder"):
        example = node.meta["val"]
        shape = tuple(map(hint, example.shape))
        strides = planned[node.name].strides if node.name in planned else example.stride()
        layout = Layout(shape, tuple(map(hint, strides)), example.dtype)
        whole = sum(size > 1 for size in shape) >= min(rank, 2)
        tensors.append(_random(layout, example.device, below, whole=whole))
    return tensors


def _planned(graph: Graph, layouts: Sequence[Layout]) -> dict[str, Layout]:
    """The layouts of the placeholders that a region reads as they are."""
    call: Node = next(node for node in graph.nodes if node.target is region_op)
    reads: Any = call.args[0]
    pairs = zip(reads, layouts, strict=True)
    return {node.name: layout for node, layout in pairs if node.op == "placeholder"}


def _random(layout: Layout, device: torch.device, below: int, *, whole: bool) -> Tensor:
    """Random numbers that lie so. whole: normally distributed; else around one, as weights,
    deviations and sums are.
    """
    places = zip(layout.shape, layout.strides, strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in places) if all(layout.shape) else 0
    dtype = layout.dtype
    if dtype is torch.bool:
        memory = torch.rand(count, device=device) < 0.5
    elif not dtype.is_floating_point:
        memory = torch.randint(0, min(below, 127), (count,), device=device).to(dtype)
    elif whole:
        memory = torch.randn(count, device=device).to(dtype)
    else:
        memory = torch.rand(count, device=device).add(0.5).to(dtype)
    return memory.as_strided(layout.shape, layout.strides)


def different(ours: Sequence[Tensor], stock: Sequence[Tensor], largest: int) -> str | None:
    """Where results are further apart than roundings explain, or None.

    largest: the elements of the largest tensor that they are computed of.
    """
    for k, (one, other) in enumerate(zip(ours, stock, strict=True)):
        if one.shape != other.shape or one.dtype is not other.dtype:
            return (
                f"result {k}: expected {other.dtype} of shape {tuple(other.shape)} as Inductor has "
                f"it, found {one.dtype} of shape {tuple(one.shape)}"
            )
        error = _apart(one.double(), other.double(), one.dtype)
        limit = _limit(one.dtype, largest / max(1, one.numel()))
        if not error <= limit:
            return (
                f"result {k} is {error:.1e} of its largest value away from Inductor's, where at "
                f"most {limit:.1e} was expected"
            )
    return None


def _limit(dtype: torch.dtype, summed: float) -> float:
    if not dtype.is_floating_point:
        return MOST_FLIPPED
    computed = torch.float64 if dtype is torch.float64 else torch.float32
    sums = OF_SUMS * math.sqrt(max(1.0, summed)) * torch.finfo(computed).eps
    return ROUNDINGS * torch.finfo(dtype).eps + sums


def _apart(one: Tensor, other: Tensor, dtype: torch.dtype) -> float:
    """The largest difference, relative to the largest value; infinite where one is not finite and
    the other is. Of integers, which part differs.
    """
    if not one.numel():
        return 0.0
    if not dtype.is_floating_point:
        return ((one - other).abs() > (dtype is not torch.bool)).double().mean().item()
    finite = other.isfinite()
    if not torch.equal(one.isfinite(), finite):
        return math.inf
    scale = other[finite].abs().max().item() if finite.any() else 0.0
    apart = (one - other)[finite].abs().max().item() if finite.any() else 0.0
    return apart / scale if scale else apart


# ---- clocks


def alternately(steps: tuple[Step, Step], clock: Clock) -> list[float]:
    """Seconds a call of each step, the median of rounds in which they take turns."""
    counts = [calls_per_sample(step, clock) for step in steps]
    samples: tuple[list[float], ...] = tuple([] for _ in steps)
    for turn in range(ROUNDS):
        for k in (0, 1) if turn % 2 == 0 else (1, 0):
            samples[k].append(clock(steps[k], counts[k]) / counts[k])
    return [median(taken) for taken in samples]
