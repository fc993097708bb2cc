"""Regions whose Triton kernels are given addresses alone, as NVIDIA's driver is: the interpreter
takes its place.

    TRITON_INTERPRET=1 python tests/triton_direct.py

prints how many kernels it launched, or raises AssertionError.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import triton_oracles as mathematics
import triton_regions as regions
from compared import compare
from triton_cases import Case
from triton_regions import fill

from normpass.backend.codegen.triton_program import STAGES
from normpass.backend.run import triton_launches
from normpass.backend.run.launch_triton import TritonKernel
from normpass.backend.run.prepared import Prepared
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from normpass.backend.run.prepared import Parameters


def cases() -> Iterator[Case]:
    layer_norm = mathematics.layer_norm_backward
    text = fill(regions.LAYER_NORM_BACKWARD, c="64", t="f16", w="f32")
    yield Case("rows", text, ((7,), (5,)), layer_norm)
    yield Case("run-time columns", fill(regions.LAYER_NORM_BACKWARD, c="?"), ((3, 70),), layer_norm)
    batch_norm = mathematics.channels_last(mathematics.batch_norm_backward)
    text = fill(regions.BATCH_NORM_BACKWARD, c="6", x="r s c")
    yield Case("channels", text, ((13,),), batch_norm)
    text = fill(regions.SOFTMAX_BACKWARD, t="f64")
    yield Case("double", text, ((5,),), mathematics.softmax_backward)
    yield Case("a mask", fill(regions.MASKED), ((3,),), mathematics.masked)


class Interpreted:
    """A kernel of the interpreter, launched by addresses."""

    launches = 0

    def __init__(self, function: int, threads: int, shared: int, binary: Any, owner: Any) -> None:
        self.kernel = owner

    def __call__(self, blocks: int, parameters: Parameters, stream: ctypes.c_void_p) -> None:
        Interpreted.launches += 1
        kernel = self.kernel
        own = [kind for kind in kernel.src.signature.values() if kind != "constexpr"]
        values = [ctypes.c_int64.from_address(at).value for at in parameters]
        given = [
            element(value, kind) if isinstance(kind, torch.dtype) else value
            for kind, value in zip(own, values, strict=False)  # more is scratch memory
        ]
        kernel.interpreted[(blocks,)](*given, **kernel.constants)


def element(address: int, dtype: torch.dtype) -> torch.Tensor:
    """The first element of what lies at an address; the interpreter reads the others from there."""
    memory = (ctypes.c_uint8 * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


class Compiled:
    """Stands for what a kernel of the interpreter would be compiled to."""

    function = 1
    asm: ClassVar = {"cubin": b""}

    def __init__(self, interpreted: Any, arguments: tuple[Any, ...]) -> None:
        pairs = list(zip(interpreted.arg_names, arguments, strict=True))
        self.interpreted = interpreted
        self.constants = {name: value for name, value in pairs if name == STAGES}
        kinds = {name: getattr(value, "dtype", "i64") for name, value in pairs}
        self.src = SimpleNamespace(signature=kinds | dict.fromkeys(self.constants, "constexpr"))
        target = SimpleNamespace(backend="cuda")
        name = interpreted.__name__
        self.metadata = SimpleNamespace(target=target, num_ctas=1, num_warps=4, shared=0, name=name)


def main() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    triton_launches._is_kernel = lambda value: isinstance(value, InterpretedFunction)
    InterpretedFunction.warmup = lambda self, *arguments, **_: Compiled(self, arguments)
    triton_launches.Loaded = Interpreted
    expected = 0
    for case in cases():
        kernel = TritonKernel(parse(case.text))
        for sizes in case.sizes:
            compare(case, kernel, sizes, "cpu", case.oracle)
        expected += len(kernel.source.kernels) * len(case.sizes)
        assert all(isinstance(ready.run, Prepared) for ready in kernel._ready.values())
    assert Interpreted.launches == expected
    print(expected)


if __name__ == "__main__":
    main()
