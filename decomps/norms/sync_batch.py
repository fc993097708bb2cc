"""Batch norm over the images of all processes of a group, as a graph: `normpass.SyncBatchNorm`.

torch.nn.SyncBatchNorm is an autograd.Function that calls torch.distributed itself: a graph breaks
there, and on CPUs it refuses to run. Here what a process computes of its own images are operators
like any other, and what processes tell each other goes through a functional collective, which
stands in the graph and has a derivative:

    moments of own images -> all_gather -> moments of all images -> y

In the backward that is a reduce_scatter of the moments' gradients, between sums over own images and
what these add to the gradient of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from normpass.decomps.activation.torch_internals import (
    AnyBatchNorm,
    MissingInternal,
    all_gather,
    all_gather_before,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed import ProcessGroup


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    eps: float,
    group: ProcessGroup,
) -> Tensor:
    """y = (x - mean) (var + eps)^(-1/2) weight + bias,  mean and var over n * of all processes.

    As torch/nn/modules/_functions.py: SyncBatchNorm. Processes may have different numbers of
    images, and none.

    x: n c *, weight, bias, running_mean, running_var: c -> y: n c *, in the dtype of x; moments are
    in float32 at least. The running statistics are written to, with the variance whose correction
    is 1.
    """
    channels = x.size(1)
    over = [dim for dim in range(x.dim()) if dim != 1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = x.numel() // channels
    if count:
        var, mean = torch.var_mean(wide, over, correction=0)
    else:  # still of x: without a gradient that leads here its backward would not take part
        var = mean = wide.sum(over)
    own = torch.cat([mean, var, mean.new_full((1,), count)])
    gather = all_gather or all_gather_before
    if gather is None:
        raise MissingInternal(
            "expected all_gather_single_autograd or all_gather_tensor_autograd among torch's "
            f"functional collectives, found neither in torch {torch.__version__}"
        )
    every = gather(own, 0, group).view(-1, 2 * channels + 1)
    means, variances, counts = every.split([channels, channels, 1], dim=1)
    total = counts.sum()
    part = counts / total
    mean = (part * means).sum(0)
    var = (part * (variances + (means - mean).square())).sum(0)
    with torch.no_grad():
        _follow(running_mean, mean, momentum)
        _follow(running_var, var * (total / (total - 1)), momentum)
    shape = [1, channels, *[1] * (x.dim() - 2)]
    y = (wide - mean.view(shape)) * (var + eps).rsqrt().view(shape)
    if weight is not None:
        y = y * weight.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    return y.to(x.dtype)


def _follow(running: Tensor | None, now: Tensor, momentum: float | Tensor) -> None:
    """The exponential average of a statistic, with what it is now."""
    if running is not None:
        running.mul_(1 - momentum).add_(momentum * now)


def forward(norm: Any, x: Tensor, alone: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """What a module that is a synchronized batch norm, ours or torch's, computes: n c * -> n c *

    alone: what it computes where there is nobody to synchronize with.
    """
    norm._check_input_dim(x)
    group = _group(norm)
    if group is None:
        return alone(norm, x)
    tracks = norm.training and norm.track_running_stats
    momentum: float | Tensor | None = norm.momentum
    if tracks and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1 / norm.num_batches_tracked
    return sync_batch_norm(
        x,
        norm.weight,
        norm.bias,
        norm.running_mean if tracks else None,
        norm.running_var if tracks else None,
        0.0 if momentum is None else momentum,
        norm.eps,
        group,
    )


def _group(norm: Any) -> ProcessGroup | None:
    """The processes whose images are normalized together, if they are several."""
    if not (norm.training and distributed.is_available() and distributed.is_initialized()):
        return None
    group = norm.process_group or distributed.group.WORLD
    return group if distributed.get_world_size(group) > 1 else None


class SyncBatchNorm(AnyBatchNorm):
    """torch.nn.SyncBatchNorm, with the same arguments and state, that torch.compile takes into one
    graph with what is around it, under any backend, and that runs on CPUs too.

    In evaluation, without torch.distributed and in a group of one process it is a batch norm.

    Args:
        process_group: of the processes whose images are normalized together; None for all.

    Raises:
        ValueError: where x has fewer than two dimensions, or no channels.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        **factory: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **factory)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or not input.size(1):
            raise ValueError(
                f"expected at least two dimensions, images and some channels, found {input.shape}"
            )

    def forward(self, input: Tensor) -> Tensor:
        """n c * -> n c *"""
        return forward(self, input, AnyBatchNorm.forward)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: ProcessGroup | None = None
    ) -> nn.Module:
        """The module, with one of these in place of every batch norm in it, torch.nn.SyncBatchNorm
        too; parameters and buffers are the same tensors. A module that is a batch norm itself is
        not changed: what is returned is in its place.

        process_group: as for this class; a torch.nn.SyncBatchNorm's own where None.
        """
        if isinstance(module, AnyBatchNorm):
            return cls._in_place_of(module, process_group)
        for name, child in module.named_children():
            module.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return module

    @classmethod
    def _in_place_of(cls, norm: Any, process_group: ProcessGroup | None) -> SyncBatchNorm:
        group = process_group or getattr(norm, "process_group", None)
        arguments = norm.num_features, norm.eps, norm.momentum
        made = cls(*arguments, norm.affine, norm.track_running_stats, group, device="meta")
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(made, name, getattr(norm, name))
        made.training = norm.training
        return made
