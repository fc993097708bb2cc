"""Dropout's random numbers on CPUs, as many at a time as a vector holds.

Inductor draws each by a call of ATen's Philox4x32-10, of whose four numbers it takes the first: a
vector's lanes one after the other, which for a GPT-2 is a fifth of a training step. Here is the
same computation over vectors, for the code of graphs of ours; the numbers are the same to the last
bit, and what other graphs compile to is left alone.

Source: J. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011), section 4; what its
inputs are, and which of its numbers is taken: ATen/core/PhiloxRNGEngine.h.

Uses of torch._inductor here (codegen.cpp.CppVecOverrides.rand; CppVecKernel.tiling_factor and
_get_num_vectors; cpu_vec_isa; V.graph.module) were checked on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch

from normpass.passes import faults

if TYPE_CHECKING:
    from torch.fx import Graph

MARK = "normpass_draws_vectors"
ROUNDS = 10


def mark(graph: Graph) -> None:
    """Marks a graph: its code draws vectors."""
    if graph.owning_module is not None:
        graph.owning_module.meta[MARK] = True


@cache
def install() -> None:
    """Tells Inductor, once a process, how to print what draws a number in marked graphs."""
    from torch._inductor.codegen.cpp import CppVecOverrides
    from torch._inductor.virtualized import V

    stock = CppVecOverrides.rand

    @wraps(stock)
    def rand(seed: Any, offset: Any) -> Any:
        graph: Any = V.graph
        bits = _bits_of_a_vector() if graph.module.meta.get(MARK) else 0
        if bits:
            with faults.survived("drawing a vector", "a graph", "Numbers are drawn one by one"):
                return _vector(seed, offset, V.kernel, bits)
        return stock(seed, offset)

    CppVecOverrides.rand = staticmethod(rand)  # type: ignore[method-assign]


def _bits_of_a_vector() -> int:
    """0 where code is compiled for instructions that are not written down here."""
    from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512, pick_vec_isa

    instructions = pick_vec_isa()
    return 512 * isinstance(instructions, VecAVX512) or 256 * isinstance(instructions, VecAVX2)


def _vector(seed: Any, offset: Any, kernel: Any, bits: int) -> Any:
    """C++ that draws a number in [0, 1) of float32 for each offset.

    seed, offset: as ops.rand has them, a number and a vector of integers. kernel: Inductor's, which
    takes as many elements at a time as its narrowest type has in a vector.

    A number is multiplied as the lower half of a word of 64 bits: what is left in the upper half is
    neither multiplied nor read.
    """
    from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
    from torch._inductor.utils import IndentedBuffer

    lanes, vectors = kernel.tiling_factor, kernel._get_num_vectors(dtype=torch.float32)
    result = "Vectorized<float>" if vectors == 1 else f"VectorizedN<float, {vectors}>"
    word, mm = f"__m{bits}i", f"_mm{bits}"
    every = f"{mm}_set1_epi64" + ("" if bits == 512 else "x")
    xor, right = f"{mm}_xor_si{bits}", f"{mm}_srli_epi64"
    code: Any = IndentedBuffer()
    code.splice(
        f"""\
        [&]()
        {{
            {DTYPE_TO_CPP[offset.dtype]} offset[{lanes}];
            uint64_t words[{lanes}];
            float result[{lanes}];
            {offset}.store(offset);
            for (int lane = 0; lane < {lanes}; ++lane)
                words[lane] = static_cast<uint32_t>(offset[lane]);
            for (int lane = 0; lane < {lanes}; lane += {bits // 64})
            {{
                auto part = reinterpret_cast<{word}*>(words + lane);
                {word} c0 = {mm}_loadu_si{bits}(part), c1 = {mm}_setzero_si{bits}();
                {word} c2 = c1, c3 = c1;
                uint32_t key0 = static_cast<uint32_t>({seed}), key1 = 0;
                for (int round = 0; round < {ROUNDS}; ++round)
                {{
                    const {word} a = {mm}_mul_epu32(c0, {every}(0xD2511F53u));
                    const {word} b = {mm}_mul_epu32(c2, {every}(0xCD9E8D57u));
                    c0 = {xor}({xor}({right}(b, 32), c1), {every}(key0));
                    c2 = {xor}({xor}({right}(a, 32), c3), {every}(key1));
                    c1 = b, c3 = a;
                    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
                }}
                {mm}_storeu_si{bits}(part, c0);
            }}
            for (int lane = 0; lane < {lanes}; ++lane)
                result[lane] = uint32_to_uniform_float(static_cast<uint32_t>(words[lane]));
            return at::vec::{result}::loadu(result);
        }}()"""
    )
    return code
