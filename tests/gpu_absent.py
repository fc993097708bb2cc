"""A GPU that is not there: torch and Triton are told of one of capability 9.0, so that Inductor
prints its code and kernels are compiled; nothing runs.

Autograd asks for more than Python can answer: `library` is to be loaded before torch is
(gpu_absent/device.cpp), in a process of its own.

Private, checked on torch 2.11 and 2.13: what Inductor asks of torch.cuda while it compiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_driver import fake_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch._inductor.graph import GraphLowering

needs_cpu_build = pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None,
    reason="needs torch without CUDA: with it torch asks the driver, which is not there",
)
SOURCE = Path(__file__).with_suffix("") / "device.cpp"
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
ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
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


def answer_of(program: str, *arguments: str) -> Any:
    """What a program prints in its last line, as JSON: in a process of its own, because torch and
    this package keep what they were told of a GPU.
    """
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def library(folder: Path) -> Path:
    """What has to be loaded before torch, built."""
    torch_folder, built = Path(torch.__file__).parent, folder / "device.so"
    libraries = torch_folder / "lib"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", "-w", str(SOURCE)]
    command += [f"-I{torch_folder / 'include'}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command += ["-lc10", "-ltorch_cpu", "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    return built


def convolved(image: Tensor, weight: Tensor, _: object) -> torch.memory_format:
    """The memory format of what cuDNN computes: channels are last if they are in either."""
    last = torch.channels_last
    for tensor in (image, weight):
        if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last):
            return last
    return torch.contiguous_format


@contextmanager
def told_of_a_gpu(spilled: Callable[[bytes], int] = lambda _: 0) -> Iterator[None]:
    """A block in which torch and Triton take it that there is one. spilled: see `fake_gpu`."""
    with ExitStack() as stack:
        for name, answer in ANSWERS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer, create=True))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        # Where there is no cuDNN it would be contiguous.
        name = "_conv_determine_backend_memory_format"
        stack.enter_context(mock.patch.object(torch._C, name, convolved))
        stack.enter_context(fake_gpu(spilled=spilled))
        yield


@contextmanager
def printing(found: list[str]) -> Iterator[None]:
    """A block in which Inductor prints its code, and what it compiled returns tensors of no values.

    found: the code of each graph.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.graph import GraphLowering

    def compile_to_module(graph: GraphLowering) -> Any:
        found.append(graph.codegen()[0].value)
        (output,) = graph.module.graph.find_nodes(op="output")
        values = [getattr(node, "meta", {}).get("val", node) for node in output.args[0]]

        def call(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            return [empty(v) if isinstance(v, torch.Tensor) else v for v in values]

        return SimpleNamespace(__file__="", __path__=None, call=call, recursively_apply_fns=None)

    # Folding computes constants on the device.
    patches = {"force_disable_caches": True, "joint_graph_constant_folding": False}
    with (
        told_of_a_gpu(),
        config.patch(patches),
        # Its patterns are traced there too.
        mock.patch.object(joint_graph, "lazy_init", return_value=None),
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
    ):
        yield


def empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def printed(function: Callable[..., Sequence[Tensor]], *shapes: Sequence[int]) -> str:
    """Inductor's code of a function of tensors of these shapes on the GPU: a module's text."""
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch.fx.experimental.proxy_tensor import make_fx

    mode, found = FakeTensorMode(), list[str]()
    with printing(found):
        with mode:
            tensors = [torch.empty(*shape, device="cuda") for shape in shapes]
            module = make_fx(function)(*tensors)
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            compile_fx_inner(module, tensors, cpp_wrapper=inductor_config.cpp_wrapper)
    return found[0]
