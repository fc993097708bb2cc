"""Which code a compiled graph's forward is: the first one, or one that hands over what further
derivatives need, from when somebody has asked for them.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from torch._dynamo.convert_frame import compile_lock

from normpass.backend.higher_order import sizes
from normpass.backend.higher_order.derivatives import compiled
from normpass.backend.higher_order.handover import HANDED, handing_over
from normpass.backend.higher_order.kept import has_hooks
from normpass.backend.higher_order.sizes import SomeSizesOnly
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from normpass.backend.higher_order.program import Layout, Program


log = logging.getLogger(__name__)


class Forward:
    """code: the forward that hands over; None until it is needed, or where there is none."""

    def __init__(self, program: Program, layout: Layout, outputs: int) -> None:
        self.program, self.layout, self.outputs = program, layout, outputs
        self.code: Callable[..., Sequence[Any]] | None = None
        self.is_settled = program.handed is not None

    def handing_over(self) -> Callable[..., Sequence[Any]] | None:
        """The code that does, compiled if it is not yet; None where nothing is worth it."""
        if not self.is_settled:
            with compile_lock:
                if not self.is_settled:
                    self.code = self._compiled_if_it_can_be()
                    self.is_settled = True
        return self.code

    def _compiled_if_it_can_be(self) -> Callable[..., Sequence[Any]] | None:
        with faults.survived(
            "compiling a forward for further derivatives", "a graph", "They compute it once more"
        ):
            try:
                return self._compiled()
            except SomeSizesOnly as error:
                log.info("further derivatives of compiled code compute it once more: %s", error)
        return None

    def _compiled(self) -> Callable[..., Sequence[Any]] | None:
        program = self.program
        with sizes.traced(program), program.autocast.restored():
            graph = handing_over(program.graph, program.examples, self.layout.written)
        if graph is None:
            return None
        code = compiled(program, graph, program.examples, higher=True)
        if not graph.meta[HANDED].is_attached:
            raise RuntimeError(
                "expected a forward that can be differentiated again; found it cannot"
            )
        return code

    def around(self, first: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """What Dynamo calls."""

        @functools.wraps(first)
        def call(*inputs: Any) -> Sequence[Any]:
            # A checkpoint runs it twice, and what is saved has to be the same both times.
            if self.code is None or has_hooks():
                return first(*inputs)
            return self.code(*inputs)[: self.outputs]

        return call
