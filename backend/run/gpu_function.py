"""A region as a function of a C++ file that somebody else writes, where its tensors lie on a GPU:
what launch_gpu.py does in front of a launch is done there in C++.

The machine code of its kernels lies in the file, in whatever dialect they were written. Grids,
integers and the sizes of arrays are worked out from run-time sizes by the same functions as in
Python, of which here the expressions are printed.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.codegen import text as spelling
from normpass.backend.program.counts import cpp, size_symbol
from normpass.backend.program.sizes import size_classes
from normpass.backend.run import launch_gpu
from normpass.backend.run.cpp_function import (
    Function,
    are_of,
    count_in_memory,
    declaration,
    once,
    parameters_of,
    repeated,
)
from normpass.backend.run.cuda_launch import Loaded
from normpass.backend.run.layouts import pieces
from normpass.backend.run.prepared import OfPiece, OfTensor
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from normpass.backend.program.counts import Count
    from normpass.backend.run.prepared import Argument, Launches
    from normpass.passes.region import Region

HEADER = Path(spelling.__file__).with_name("normpass_launch.h")


@cache
def header() -> str:
    """What functions are written in, as text that may stand in one file more than once."""
    lines = HEADER.read_text(encoding="utf-8").splitlines()
    return once("NORMPASS_LAUNCH", [line for line in lines if line != "#pragma once"])


@cache
def function(
    text: str, sizes: tuple[int, ...], device: torch.device, *, has_others: bool = True
) -> Function:
    """The function of a region's text, which ends with the stream that it launches on.

    sizes: its run-time sizes in the example that the graph was traced with. The kernels that are
    planned for sizes such as these run for them, and those that hold for all sizes for others.
    has_others: whether there will be others; else these are as good as known.

    Raises:
        NotBuiltError: if kernels cannot be built.
        UnsupportedPlanError: if there are none.
    """
    region, classes = parse(text), size_classes(sizes)
    given: Sequence[Count] = sizes
    if has_others:
        given = [size_symbol(name) for name in region.runtime_sizes]
    found = {
        each: launch_gpu.kernel_for(text, each, device.index).launches(given, device)
        for each in (dict.fromkeys((classes, ())) if has_others else (classes,))
    }
    code = Code()
    branches = [
        (are_of(region, each) if each and has_others else "", [*code.of(launches)])
        for each, launches in found.items()
    ]
    signature = *parameters_of(region), "CUstream stream"
    body = [*_tensors(region)]
    for condition, lines in branches:
        body += [f"  if ({condition}) {{"] if condition else ["  {"]
        body += [*(f"    {line}" for line in lines), "    return;", "  }"]
    parts = (header(), *code.definitions.values(), *signature, *body)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    name = f"normpass_{region.name}_{digest[:16]}"
    definitions = ["namespace normpass {", *code.definitions.values(), "}  // namespace normpass"]
    lines = [*definitions, f"{declaration(name, signature)} {{", *body, "}"]
    return Function(name, signature, once(f"HAS_{name}", lines))


class Code:
    """The machine code of a function's kernels. definitions: the C++ of each, by its name."""

    def __init__(self) -> None:
        self.definitions: dict[str, str] = {}

    def of(self, launches: Launches) -> Iterator[str]:
        """The statements that launch kernels."""
        if launches.size != 0:
            yield f"const normpass::Memory arrays({cpp(launches.size)});"
        for launch in launches.launches:
            if not isinstance(launch.function, Loaded):
                raise TypeError(f"expected a kernel that was loaded, found {launch.function}")
            given = cpp(launch.blocks), "stream", *map(_argument, launch.arguments)
            yield f"normpass::launch({self._named(launch.function)}, {', '.join(given)});"

    def _named(self, kernel: Loaded) -> str:
        """A kernel's name in the file."""
        code, name = kernel.binary
        image = f"code_{hashlib.sha256(code).hexdigest()[:16]}"
        own = f"{name}_{image}"
        numbers = f'"{name}", {kernel.threads}, {kernel.shared}'
        self.definitions |= {
            image: f"alignas(64) static const char {image}[] =\n{_literal(code)};",
            own: f"static Kernel {own}({image}, {numbers});",
        }
        return f"normpass::{own}"


def _tensors(region: Region) -> Iterator[str]:
    """A function's first statements: where its tensors lie, as `tensor_<number>`."""
    # A tensor's strides are those of at least one element.
    sizes = [size_symbol(name, is_some=True) for name in region.runtime_sizes]
    extents: Mapping[str, Any] = region.extents(sizes)
    for k, buffer in enumerate(region.inputs):
        size = count_in_memory(region, buffer, extents) * buffer.dtype.itemsize
        repeats = repeated(buffer, extents)
        is_empty = "false" if repeats is None else f"{cpp(repeats)} == 0"
        yield f"  const normpass::Input tensor_{k}(input_{k}, {cpp(size)}, {is_empty}, stream);"
    for k, piece in enumerate(pieces(region, extents), len(region.inputs)):
        offset = cpp(piece.offset * piece.layout.dtype.itemsize)
        yield f"  void* const tensor_{k} = static_cast<char*>(result_{piece.result}) + {offset};"


def _argument(argument: Argument) -> str:
    """A kernel's argument, of 8 bytes."""
    if isinstance(argument, OfTensor):
        return f"static_cast<void*>(tensor_{argument.number})"
    if isinstance(argument, OfPiece):
        return f"arrays.at({cpp(argument.offset)})"
    return f"int64_t({cpp(argument)})"


# What a string of C++ holds as it is; a question mark could begin a trigraph.
_PLAIN = frozenset(range(32, 127)) - frozenset(b'"\\?')
_ESCAPED = [chr(byte) if byte in _PLAIN else f"\\{byte:03o}" for byte in range(256)]


def _literal(code: bytes, width: int = 96) -> str:
    """A string of C++ with these bytes, and one more at the end."""
    pieces = (code[k : k + width] for k in range(0, len(code), width))
    return "\n".join(f'"{"".join(_ESCAPED[byte] for byte in piece)}"' for piece in pieces)


def refused() -> str | None:
    """Why C++ cannot call kernels of GPUs here; None if it can."""
    if torch.version.hip:
        return "expected one of NVIDIA's, whose driver C++ launches kernels with, found AMD's"
    return None if torch.cuda.is_available() else "expected a GPU to compile for, found none"
