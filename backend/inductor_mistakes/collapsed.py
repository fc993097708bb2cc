"""What is scattered into an expanded tensor is said to be expanded too.

Checked on torch 2.11: torch._prims_common.clone_preserve_strides, from which the meta functions of
slice_scatter, select_scatter and diagonal_scatter have their strides, and
FakeTensorMode.cache_clear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import _prims_common
from torch._subclasses.fake_tensor import FakeTensorMode

from normpass.backend.inductor_mistakes.mistake import Mistake, together, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from normpass.backend.inductor_mistakes.mistake import Undo


@together
def mend() -> Iterator[Undo]:
    def around(original: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        def clone_preserve_strides(x: torch.Tensor) -> torch.Tensor:
            if torch._debug_has_internal_overlap(x) == 1:
                return x.clone(memory_format=torch.contiguous_format)
            return original(x)

        return clone_preserve_strides

    yield _forgotten()
    yield wrap(_prims_common, "clone_preserve_strides", around)


def _forgotten() -> Undo:
    """Fake tensors keep what meta functions said."""
    FakeTensorMode.cache_clear()
    return FakeTensorMode.cache_clear


MISTAKE = Mistake(
    name="collapsed_scatters",
    issue=180164,
    fix=None,
    wrong=(
        "The gradient of slice_scatter, select_scatter and diagonal_scatter whose result is summed "
        "is scattered into an expanded tensor and gets its strides: one element for all of them."
    ),
    mend=mend,
    fixed="2.13.0",
)
