"""torch.nn.SyncBatchNorm while something is traced: the graph of norms/sync_batch.py, in place of
an autograd.Function that calls torch.distributed and that no graph holds.

Eager mode keeps torch's, but under `register(eager=True)`, where it runs on CPUs as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normpass.decomps.activation.torch_internals import AnyBatchNorm
from normpass.decomps.norms.sync_batch import forward

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(eq=False)
class Modules:
    """What is changed in torch, with what was there before."""

    before: Callable[..., Tensor]
    ours: Callable[..., Tensor] | None = None
    eager: bool = False

    @classmethod
    def apply(cls) -> Modules:
        """Puts it in."""
        changed = cls(nn.SyncBatchNorm.forward)
        torchs = changed.before

        def synchronized(self: Any, input: Tensor) -> Tensor:
            if torch.compiler.is_compiling() or changed.eager:
                return forward(self, input, AnyBatchNorm.forward)
            return torchs(self, input)

        changed.ours = synchronized
        nn.SyncBatchNorm.forward = synchronized  # type: ignore[method-assign]
        return changed

    def revert(self) -> None:
        """Takes it out, unless somebody has put another in its place."""
        if nn.SyncBatchNorm.forward is self.ours:
            nn.SyncBatchNorm.forward = self.before  # type: ignore[method-assign]
