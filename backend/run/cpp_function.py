"""A region as a function of a C++ file that somebody else writes, with no Python in it: what
runtime.py does in front of a launch is done there in C++.

Inductor writes such files for `cpp_wrapper` and for AOTInductor's packages. The kernel's text goes
into them, and normpass.h in front of the first one, so that a package holds all that it calls and a
file is known by all that is in it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from normpass.backend.codegen import cpp
from normpass.backend.codegen.text import TYPES, index_expression
from normpass.backend.program.machine import ELEMENTS_PER_WORKER, machine_of
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes, symbol
from normpass.backend.run.caches import private_cache
from normpass.backend.run.layouts import Work, pieces
from normpass.backend.run.toolchain import HEADERS
from normpass.passes.region import product
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from normpass.backend.program.sizes import SizeClass
    from normpass.passes.region import Buffer, Region

# Kernels contract a*b+c wherever they are compiled (EXTRA_FLAGS in toolchain.py); Inductor's code
# around them is compiled without.
CONTRACTED = """\
#if defined(__clang__)
#pragma clang fp contract(fast)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif"""
AS_BEFORE = """\
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif"""


@dataclass(frozen=True)
class Function:
    """extern "C" void name(inputs, results, sizes): pointers, and run-time sizes as int64_t.

    source: its definition, which `header()` has to stand in front of.
    """

    name: str
    parameters: tuple[str, ...]
    source: str

    @property
    def declaration(self) -> str:
        return declaration(self.name, self.parameters)

    @property
    def types(self) -> list[str]:
        """Of its parameters."""
        return [parameter.rpartition(" ")[0] for parameter in self.parameters]


def declaration(name: str, parameters: Sequence[str]) -> str:
    return f'extern "C" void {name}({", ".join(parameters)})'


def parameters_of(region: Region) -> tuple[str, ...]:
    """Those of a region's function."""
    return (
        *(f"const void* input_{k}" for k in range(len(region.inputs))),
        *(f"void* result_{k}" for k in range(len(region.results))),
        *(f"int64_t n_{size}" for size in region.runtime_sizes),
    )


@cache
def header() -> str:
    """What kernels are written in, as text that may stand in one file more than once."""
    texts = [path.read_text() for path in reversed(HEADERS)]
    own = {"#pragma once", *(f'#include "{path.name}"' for path in HEADERS)}
    lines = [line for text in texts for line in text.splitlines() if line not in own]
    return once("NORMPASS_WITHOUT_PYTHON", (CONTRACTED, *lines, AS_BEFORE))


@cache
def function(text: str, sizes: tuple[int, ...]) -> Function:
    """The function of a region's text.

    sizes: its run-time sizes in the example that the graph was traced with. The kernel that is
    planned for sizes such as these runs for them, and one that holds for all sizes for others.
    """
    region, classes = parse(text), size_classes(sizes)
    plans = [make_plan(region, machine_of("cpu"), each) for each in dict.fromkeys(((), classes))]
    kernels = list(dict.fromkeys(map(cpp.generate_within, plans)))
    digest = hashlib.sha256("".join((header(), *kernels)).encode()).hexdigest()
    name, parameters = f"normpass_{region.name}_{digest[:16]}", parameters_of(region)
    spaces = [f"normpass::{name}_{k}" for k in range(len(kernels))]
    lines = []
    for space, kernel in zip(spaces, kernels, strict=True):
        lines += [f"namespace {space} {{", *kernel.splitlines(), "}"]
    lines += [f"{declaration(name, parameters)} {{", *_launch(region, classes, spaces), "}"]
    return Function(name, parameters, once(f"HAS_{name}", (CONTRACTED, *lines, AS_BEFORE)))


def once(guard: str, lines: Sequence[str]) -> str:
    """Text that may stand in a file more than once."""
    return "\n".join((f"#ifndef {guard}", f"#define {guard}", *lines, "#endif", ""))


def _launch(region: Region, classes: Sequence[SizeClass], spaces: Sequence[str]) -> Iterator[str]:
    """What the function does: where everything lies, how many workers there are, which kernel.

    spaces: the namespaces of the kernel for all sizes, and of that for sizes of these classes.
    """
    extents: Mapping[str, Any] = region.extents([symbol(n) for n in region.runtime_sizes])
    work = Work.of(region, extents)
    tensors = []
    for k, buffer in enumerate(region.inputs):
        read = f"input_{k}"
        if nothing := _of_nothing(region, buffer, extents):
            yield f"  const std::vector<char> no_{read}({nothing});"
            read = f"no_{read}.empty() ? {read} : no_{read}.data()"
        tensors.append(f"const_cast<void*>({read})")
    for piece in pieces(region, extents):
        kind, offset = TYPES[piece.layout.dtype].cpp, index_expression(piece.offset)
        tensors.append(f"static_cast<{kind}*>(result_{piece.result}) + ({offset})")
    sizes = ", ".join(f"n_{size}" for size in region.runtime_sizes) or "0"
    most, traffic = index_expression(work.elements), index_expression(work.traffic)
    yield f"  void* const tensors[] = {{{', '.join(tensors)}}};"
    yield f"  const int64_t sizes[] = {{{sizes}}};"
    yield f"  const int64_t most = std::max<int64_t>(1, ({most}) / {ELEMENTS_PER_WORKER});"
    yield "  const int workers = std::min<int64_t>(omp_get_max_threads(), most);"
    yield f"  const bool past_caches = {traffic} > workers * {private_cache()}L;"
    call = "kernel(tensors, sizes, workers, past_caches);"
    for space in spaces[1:]:
        yield f"  if ({are_of(region, classes)}) return {space}::{call}"
    yield f"  {spaces[0]}::{call}"


def are_of(region: Region, classes: Sequence[SizeClass]) -> str:
    """Whether a call's sizes are of some classes, as text."""
    return " && ".join(
        f"n_{size} <= {each.most} && n_{size} % {each.multiple} == 0"
        for size, each in zip(region.runtime_sizes, classes, strict=True)
    )


def _of_nothing(region: Region, buffer: Buffer, extents: Mapping[str, Any]) -> str:
    """Bytes that are read in place of a tensor that has no elements. No text where it has some."""
    if (repeats := repeated(buffer, extents)) is None:
        return ""
    count = index_expression(count_in_memory(region, buffer, extents))
    room = f"std::max<int64_t>(0, {count}) * sizeof({TYPES[buffer.dtype].cpp})"
    is_empty = f"{index_expression(repeats)} == 0"
    return f"{is_empty} ? {room} : 0"


def repeated(buffer: Buffer, extents: Mapping[str, Any]) -> Any:
    """How often a tensor repeats its elements, where that may be never: it has none then, and a
    kernel reads them all the same, once, in front of the loop. None where it has some.
    """
    others = {axis for dim in buffer.dims for axis in dim} - buffer.axes
    sizes = [extents[axis] for axis in sorted(others)]
    empty = [size for size in sizes if not (isinstance(size, int) and size > 0)]
    return product(empty) if empty else None


def count_in_memory(region: Region, buffer: Buffer, extents: Mapping[str, Any]) -> Any:
    """Elements from a tensor's first to its last, where it repeats none too seldom."""
    shape, strides = region.shape(buffer, extents), region.strides(buffer, extents)
    pairs = zip(shape, strides, strict=True)
    return 1 + sum((size - 1) * step for size, step in pairs if step != 0)
