"""Which inputs of a region Inductor is done with after the call, so that results may be written
over them: less memory, and lines that are in cache already.

Inductor does that with loops of its own and with what it allocates itself, by when each buffer is
read for the last time. What it would keep for later results of the same size is taken from it here.

Uses of torch._inductor (V.graph.scheduler.current_node and its last_usage, V.graph.try_get_buffer,
and of the wrapper can_reuse, freed and writeline; ir.FixedLayout, ir.InputBuffer and
get_inputs_that_alias_output) were checked on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def dying(text: str, inputs: Sequence[Any], wrapper: Any) -> list[tuple[int, int]]:
    """Pairs of a result and an input of its size that dies with the call, by their numbers.

    text: the region's. inputs: Inductor's, of the call whose code is being written.
    """
    region = parse(text)
    names = [x.get_name() for x in inputs]
    times = Counter(names)
    dead = [j for j, x in enumerate(inputs) if times[names[j]] == 1 and _dies(x, wrapper)]
    return [
        (k, j)
        for k, result in enumerate(region.results)
        for j in dead
        if not result.is_joined
        and region.inputs[j].dtype is result.buffers[0].dtype
        and region.inputs[j].axes == result.buffers[0].axes
    ]


def _dies(x: Any, wrapper: Any) -> bool:
    """Whether an input is all of a buffer that nobody reads after this call, and whose memory is
    its own. Nor is what lies in that memory read later: Inductor counts it as the buffer.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    name = x.get_name()
    buffer, call = V.graph.try_get_buffer(name), V.graph.scheduler.current_node
    if buffer is None or call is None or name not in call.last_usage:
        return False
    if x.get_numel() != buffer.get_numel():
        return False
    if type(buffer.get_output_spec()) is not ir.FixedLayout or not wrapper.can_reuse(buffer):
        return False
    return not buffer.get_inputs_that_alias_output()


def keep(names: Iterable[str], wrapper: Any) -> None:
    """Takes buffers from Inductor, which would give their memory to later results."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    for name in names:
        if not isinstance(V.graph.try_get_buffer(name), ir.InputBuffer):
            wrapper.freed.add(name)
            wrapper.writeline(f"del {name}")
