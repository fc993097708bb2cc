"""Generated C++ for ARM processors: cross-compiled with the flags that kernels get there, linked
into one program, and run in an emulator.
"""

from __future__ import annotations

import platform
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from piecewise import SIZE, gated, heads, rms_rope
from piecewise import inputs as rows_of_heads
from torch import Tensor
from torch._inductor import config, cpu_vec_isa

from normpass.backend.codegen.cpp import generate_within
from normpass.backend.program.machine import machine_of
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes
from normpass.backend.run import toolchain
from normpass.backend.run.layouts import Layout, pieces
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from normpass.backend.program.machine import Machine
    from normpass.backend.program.sizes import SizeClass

COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
LIMIT = 300  # seconds for a compiler, or an emulated program
CPU = torch.device("cpu")

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)"
)
needs_emulator = pytest.mark.skipif(
    EMULATOR is None, reason="no qemu-aarch64 (Debian: qemu-user-static)"
)


@dataclass(frozen=True)
class Processor:
    """One to compile for.

    isa: what torch picks on it. capability: what torch calls it. march: in place of native.
    emulated: as QEMU calls it.
    """

    name: str
    isa: Callable[[], Any]
    capability: str
    march: str
    emulated: str

    @property
    def machine(self) -> Machine:
        """What is planned for there."""
        with mock.patch.object(
            torch.backends.cpu, "get_cpu_capability", return_value=self.capability
        ):
            return machine_of.__wrapped__("cpu")


def _sve(bits: int) -> Any:
    """Under the name that this torch has for it; None where it has none."""
    if named := getattr(cpu_vec_isa, f"VecSVE{bits}", None):
        return named()
    one = getattr(cpu_vec_isa, "VecSVE", None)
    return one and one(bits)


NEON = Processor("neon", cpu_vec_isa.VecNEON, "DEFAULT", "armv8-a", "max,sve=off")
# With arithmetic in half precision: at::vec has other code for it.
NEWER_NEON = Processor(
    "neon, half precision", cpu_vec_isa.VecNEON, "DEFAULT", "armv8.6-a+fp16", "max,sve=off"
)
SVE256 = Processor(
    "sve256", lambda: _sve(256), "SVE256", "armv8-a+sve+bf16", "max,sve256=on,sve512=off"
)
# All that have vectors so short are of the ninth architecture.
SVE128 = Processor(
    "sve128", lambda: _sve(128), "SVE128", "armv9-a+bf16", "max,sve128=on,sve256=off"
)


def command(processor: Processor, source: Path, include: Path) -> list[str]:
    """How toolchain.py has a kernel compiled on such a processor, for the cross compiler.

    Native is the processor meant. Sleef is left out: torch brings it for its own processor only, so
    that its functions are libm's here.
    """
    with (
        config.patch({"cpp.cxx": (None, COMPILER)}),
        mock.patch.object(platform, "machine", return_value="aarch64"),
        mock.patch.object(cpu_vec_isa, "pick_vec_isa", processor.isa),
    ):
        builder = toolchain._builder(source, "kernel", source.parent, include)
        words = re.sub(r"-D +", "-D", builder.get_command_line()).split()
    left_out = {"-DAT_BUILD_ARM_VEC256_WITH_SLEEF", "-march=native", "-shared"}
    kept = [x for x in words if x not in left_out and not x.startswith(("-l", "-L"))]
    kept[kept.index("-o") : kept.index("-o") + 2] = []
    return [*kept, f"-march={processor.march}"]


def run(*words: object) -> None:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[:4000]}"


MAIN = """
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

// Reads calls, runs them one after the other, and writes all their results.
int main(int, char** files) {
  std::ifstream file(files[1], std::ios::binary);
  const std::vector<char> content{std::istreambuf_iterator<char>(file), {}};
  std::ofstream results(files[2], std::ios::binary);
  const char* at = content.data();
  const auto next = [&] {
    int64_t number;
    std::memcpy(&number, at, sizeof(number));
    at += sizeof(number);
    return number;
  };
  while (at < content.data() + content.size()) {
    const int64_t which = next(), workers = next(), past_caches = next();
    std::vector<int64_t> sizes(next());
    for (int64_t& size : sizes) size = next();
    std::vector<void*> places;
    const auto place = [&](int64_t bytes) {
      return places.emplace_back(std::aligned_alloc(64, (bytes / 64 + 1) * 64));
    };
    std::vector<int64_t> inputs(next()), outputs(next());
    for (int64_t& bytes : inputs) bytes = next();
    for (int64_t& bytes : outputs) bytes = next();
    for (const int64_t bytes : inputs) {
      std::memcpy(place(bytes), at, bytes);
      at += bytes;
    }
    std::vector<void*> tensors = places;
    std::vector<char*> returned;
    for (const int64_t bytes : outputs) {
      returned.push_back(static_cast<char*>(place(bytes)));
      std::memset(returned.back(), 0xff, bytes);
    }
    for (int64_t left = next(); left > 0; --left) {
      const int64_t result = next();
      tensors.push_back(returned[result] + next());
    }
    kernels[which](tensors.data(), sizes.data(), workers, past_caches);
    for (size_t k = 0; k < outputs.size(); ++k) results.write(returned[k], outputs[k]);
    for (void* each : places) std::free(each);
  }
}
"""


@dataclass
class Call:
    """One of a kernel. sizes: the region's, at run time."""

    text: str
    inputs: Sequence[Tensor]
    sizes: Sequence[int] = ()
    workers: int = 1
    past_caches: bool = False


@dataclass
class Program:
    """Kernels of regions in one program."""

    processor: Processor
    folder: Path
    sources: dict[tuple[str, tuple[SizeClass, ...]], str] = field(default_factory=dict)

    @classmethod
    def of(cls, processor: Processor, folder: Path) -> Program:
        """An empty one; skips the test where torch has no name for the processor."""
        if processor.isa() is None:
            pytest.skip(f"this torch does not compile for {processor.name}")
        return cls(processor, folder)

    def add(self, text: str, sizes: Sequence[int] = ()) -> None:
        """The kernel that a region gets on such a processor for sizes such as these."""
        classes = size_classes(tuple(sizes))
        plan = make_plan(parse(text), self.processor.machine, classes)
        self.sources[text, classes] = generate_within(plan)

    @property
    def kernels(self) -> list[str]:
        """Different ones: sizes of several classes may be planned alike."""
        return [*dict.fromkeys(self.sources.values())]

    def build(self) -> None:
        spaces = [f"normpass::kernel_{k}" for k in range(len(self.kernels))]
        lines = ["#define NORMPASS_WITHOUT_PYTHON", '#include "normpass.h"']
        for space, source in zip(spaces, self.kernels, strict=True):
            lines += [f"namespace {space} {{", source, "}"]
        table = ", ".join(f"{space}::kernel" for space in spaces)
        lines.append(
            f"void (*const kernels[])(void* const*, const int64_t*, int, bool) = {{{table}}};"
        )
        source = self.folder / "program.cpp"
        source.write_text("\n".join((*lines, MAIN)))
        words = command(self.processor, source, toolchain.FOLDER)
        run(*words, "-static", "-o", self.folder / "program")

    def call(self, *calls: Call) -> list[list[Tensor]]:
        """The results of each call."""
        data = [part for each in calls for part in self.packed(each)]
        (self.folder / "calls").write_bytes(b"".join(data))
        names = (self.folder / name for name in ("program", "calls", "results"))
        run(EMULATOR, "-cpu", self.processor.emulated, *names)
        content = memoryview((self.folder / "results").read_bytes())
        found = []
        for each in calls:
            made = _results(each)
            for tensor in made:
                memory = _memory_of(tensor)
                count = len(memory)
                memory.numpy()[:] = np.frombuffer(content[:count], np.uint8)
                content = content[count:]
            found.append(made)
        assert not content
        return found

    def packed(self, call: Call) -> Iterable[bytes]:
        """As the program reads it."""
        region = parse(call.text)
        extents = region.extents(call.sizes)
        source = self.sources[call.text, size_classes(tuple(call.sizes))]
        given = [_memory_of(tensor).numpy().tobytes() for tensor in call.inputs]
        results = [tensor.untyped_storage().nbytes() for tensor in _results(call)]
        places = []
        for piece in pieces(region, extents):
            places += [piece.result, int(piece.offset) * piece.layout.dtype.itemsize]
        numbers = [
            self.kernels.index(source),
            call.workers,
            call.past_caches,
            len(call.sizes),
            *call.sizes,
        ]
        numbers += [len(given), len(results), *map(len, given), *results]
        yield struct.pack(f"{len(numbers)}q", *numbers)
        yield from given
        yield struct.pack(f"{1 + len(places)}q", len(places) // 2, *places)


def _results(call: Call) -> list[Tensor]:
    region = parse(call.text)
    extents = region.extents(call.sizes)
    return [Layout.of_result(region, each, extents).empty(CPU) for each in region.results]


def _memory_of(tensor: Tensor) -> Tensor:
    """Its bytes, from its first element on."""
    storage, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(storage, start, (storage.nbytes() - start,))


# ---- what is compiled


def drawn(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    numbers = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=numbers) for shape in shapes)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, b)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w)


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 4, w, b)


def batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, b, training=True)


def batch_norm_of_pixels(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Of an image that lies as n h w c."""
    return batch_norm(x.permute(0, 3, 1, 2), w, b)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def cross_entropy(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.cross_entropy(x.to(wide), torch.arange(len(x)) * 20)


def taking_turns(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs."""
    y = F.layer_norm(heads(x), (SIZE,), w).transpose(1, 2)
    turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
    return y * cos + turned * sin


def slope(x: Tensor) -> Tensor:
    """Its backward is a derivative of a derivative."""
    return torch.func.grad(lambda x: F.layer_norm(x, x.shape[-1:]).pow(3).sum())(x)


VECTOR = (203,)
NORMS: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]] = {
    "layer_norm": (layer_norm, drawn((9, 203), VECTOR, VECTOR)),
    "rms_norm": (rms_norm, drawn((9, 203), VECTOR)),
    "rows that go together": (layer_norm, drawn((6, 4100), (4100,), (4100,))),
    "short rows": (rms_norm, drawn((37, 64), (64,))),
    "group_norm": (group_norm, drawn((3, 8, 5, 7), (8,), (8,))),
    "batch_norm": (batch_norm, drawn((5, 6, 5, 7), (6,), (6,))),
    "batch_norm of pixels": (batch_norm_of_pixels, drawn((3, 5, 7, 24), (24,), (24,))),
    "softmax": (softmax, drawn((9, 203))),
    "cross_entropy": (cross_entropy, drawn((9, 203))),
    "halves": (rms_rope, ()),
    "gated": (gated, ()),
    "pairs": (taking_turns, ()),
    "double backward": (slope, drawn((9, 203))),
}
KINDS = {
    **dict.fromkeys(NORMS, (torch.float32, torch.bfloat16)),
    "layer_norm": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "double backward": (torch.float32,),
}


def cases(names: Iterable[str]) -> Iterator[tuple[Callable[..., Tensor], list[Tensor]]]:
    """Functions, and what they are given in each dtype."""
    for name in names:
        f, tensors = NORMS[name]
        for dtype in KINDS[name]:
            given = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
            yield f, given or rows_of_heads(dtype)
