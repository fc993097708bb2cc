"""torch.ops.normpass.region: a fused region as one functional operator.

The region travels as text in the operator's argument, so that Inductor's caches can keep a graph
that contains it and a fresh process can run it.

    region(Tensor[] inputs, SymInt[] sizes, str text) -> Tensor[]

inputs: as the text's `input` lines say. sizes: its run-time integers. Returns its `output`s, new
tensors all; those that are `joined` are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normpass.backend.program.sizes import size_classes
from normpass.backend.run.layouts import Layout
from normpass.backend.run.reference import evaluate
from normpass.backend.run.runtime import kernel, print_kernel
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_library = torch.library.Library("normpass", "FRAGMENT")
# Strides are part of the text, so whoever calls the operator must keep those it was traced with.
_library.define(
    "region(Tensor[] inputs, SymInt[] sizes, str text) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)


def _cpu(inputs: Sequence[Tensor], sizes: Sequence[int], text: str) -> list[Tensor]:
    return kernel(text, tuple(sizes))(inputs, sizes)


def _gpu(inputs: Sequence[Tensor], sizes: Sequence[int], text: str) -> list[Tensor]:
    from normpass.backend.run import launch_gpu

    return launch_gpu.kernel(text, tuple(sizes), inputs[0].device.index)(inputs, sizes)


def print_for(text: str, sizes: Sequence[int], device: str) -> None:
    """A region's kernel in the dialect of a device; kept for when it is launched.

    sizes: its run-time sizes in the example that the graph was traced with.

    Raises:
        NotImplementedError: where there is none; the message says why.
    """
    if device == "cpu":
        print_kernel(text, size_classes(sizes))
    elif device == "cuda":
        from normpass.backend.run import launch_gpu

        current = torch.cuda.current_device() if torch.cuda.is_available() else None
        launch_gpu.kernel(text, tuple(sizes), current)


def _anywhere(inputs: Sequence[Tensor], sizes: Sequence[int], text: str) -> list[Tensor]:
    return evaluate(parse(text), inputs, sizes)


def _fake(inputs: Sequence[Tensor], sizes: Sequence[int], text: str) -> list[Tensor]:
    """Outputs of the right shape, strides and dtype; sizes may be symbolic."""
    region = parse(text)
    extents, device = region.extents(sizes), inputs[0].device
    return [Layout.of_result(region, each, extents).empty(device) for each in region.results]


_library.impl("region", _cpu, "CPU")
_library.impl("region", _gpu, "CUDA")
_library.impl("region", _anywhere, "CompositeExplicitAutograd")
_library.impl("region", _fake, "Meta")

region_op = torch.ops.normpass.region.default
