"""Inductor's code for a GPU that is not there: torch is told of one, and nothing runs.

Private, checked on torch 2.13: what Inductor asks of torch.cuda while it compiles.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_driver import fake_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    type="cuda",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    L2_cache_size=50 << 20,
    total_memory=140 << 30,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
)


class _Printed(Exception):
    """Inductor has printed its code, which is not loaded."""


@contextmanager
def told_of_a_gpu() -> Iterator[None]:
    """A block in which torch and Triton take it that there is one of capability 9.0."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "_lazy_init": lambda: None,
        "_get_device_properties": lambda *_: PROPERTIES,
        "get_device_properties": lambda *_: PROPERTIES,
        "get_device_capability": lambda *_: (9, 0),
        "get_rng_state": lambda *_: torch.zeros(1),
        "set_rng_state": lambda *_: None,
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=0),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer, create=True))
        stack.enter_context(fake_gpu())
        yield


def printed(function: Callable[..., Sequence[Tensor]], *shapes: Sequence[int]) -> str:
    """Inductor's code of a function of tensors of these shapes on the GPU: a module's text."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering
    from torch.fx.experimental.proxy_tensor import make_fx

    found: list[str] = []

    def compile_to_module(graph: Any) -> None:
        code, _ = graph.codegen()
        found.append(code.value)
        raise _Printed

    mode = FakeTensorMode()
    with told_of_a_gpu():
        with mode:
            tensors = [torch.empty(*shape, device="cuda") for shape in shapes]
            module = make_fx(function)(*tensors)
        context = torch._guards.tracing(torch._guards.TracingContext(mode))
        patched = mock.patch.object(GraphLowering, "compile_to_module", compile_to_module)
        try:
            with context, patched:
                compile_fx_inner(module, tensors)
        except Exception:  # Inductor's own, around this one
            if not found:
                raise
    return found[0]
