"""Stock Inductor, beside which ours is put: compiled without our pass, and what it would move.

Uses of torch._inductor here (compile_fx with inner_compile and config_patches) were checked on
torch 2.11 and 2.13.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from normpass.backend.run.calibration import conditions_of
from normpass.decomps.activation import without_ours
from normpass.passes import faults
from normpass.passes.axis_table import NotExpressible
from normpass.passes.inductor_work import theirs
from normpass.passes.lower import lower
from normpass.passes.one_hot import is_iota
from normpass.passes.pieces import Cuts, fits
from normpass.passes.regions import Grower, seeds
from normpass.passes.rewrite import SizeUnknown, examples
from normpass.passes.values import NotLowered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import Graph, GraphModule

    from normpass.backend.explain.cut_out import CutOut


def compiled(
    graph: GraphModule,
    inputs: Sequence[Any],
    settings: Mapping[str, Any],
    inner: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A graph compiled by Inductor as `torch.compile(backend="inductor")` does it, whatever
    `normpass.register` has put there.

    settings: of torch._inductor.config. inner: what compiles each of its graphs of ATen; None for
    Inductor's own.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    before = settings.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    patches = {**settings, "post_grad_custom_pre_pass": without_ours(before)}
    whole: Any = compile_fx(
        graph, list(inputs), inner_compile=inner or compile_fx_inner, config_patches=patches
    )
    return whole


def bytes_moved(cut: CutOut | str, device: str) -> int | None:
    """What Inductor's loops for a region's nodes would move through memory, as estimated where
    regions are weighed; None where that is not known: on GPUs, and of nodes that do not grow
    together again when they stand alone.
    """
    if isinstance(cut, str) or device != "cpu":
        return None
    with faults.survived("the estimate of Inductor's bytes", "a region", "The report lacks it"):
        return _estimated(cut.stock, device)
    return None


def _estimated(graph: Graph, device: str) -> int | None:
    nodes = {node for node in graph.nodes if node.op == "call_function" and not is_iota(node)}
    for seed, in_pieces in product(seeds(graph), (False, True)):
        cuts = Cuts(graph)
        try:
            grown = Grower(graph).grow(seed, in_pieces=in_pieces)
            if grown is None or set(grown.nodes) != nodes or (in_pieces and not fits(grown)):
                continue
            if in_pieces:
                cuts.make(grown)
            lowered = lower("region", grown.nodes, grown.domain, cuts.of)
            sizes = examples(lowered.sizes, lowered.inputs)
            return theirs(grown.nodes, grown.domain, lowered, sizes, conditions_of(device)).moved
        except (NotLowered, NotExpressible, SizeUnknown):
            continue
        finally:
            cuts.take_out()
    return None
