"""Attention's fused kernels for the CPU under vmap: the axis v is more of the batch.

torch has no rules for them: its fallback calls them for each example, and warns of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.batching import batching_rule, example_sizes, front

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from normpass.decomps.batching import Outputs

aten = torch.ops.aten

_SOURCE = "aten/src/ATen/native/transformers/attention.cpp: _scaled_dot_product_flash_attention_cpu"
_WHY = "torch has no rule for this operator"


def _folded(value: Tensor, dim: int | None, size: int) -> Tensor:
    """v b ... -> (v b) ...; what is not batched is the same for all."""
    return front(value, dim).expand(size, *(-1,) * (value.dim() - (dim is not None))).flatten(0, 1)


def _mask(value: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    """A mask: v l s or v b h l s, where b and h may be of size one, for a folded query; where v
    makes no difference to it, it stays as it is.
    """
    if value is None or (dim is None and (value.dim() == 2 or value.shape[0] == 1)):
        return value
    value = front(value, dim)
    if value.dim() == 3:
        value = value[:, None, None]
    return value.expand(size, batch, *value.shape[2:]).flatten(0, 1)


def _outputs(size: int, batch: int, *values: Tensor) -> Outputs:
    return tuple(value.unflatten(0, (size, batch)) for value in values), (0,) * len(values)


@batching_rule(
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    source=_SOURCE,
    shapes="query: v b n s d, key: v b n m d, value: v b n m d, attn_mask: v b n s m "
    "-> output: v b n s d, logsumexp: v b n s",
    why=_WHY,
    sample=lambda: {"dropout_p": 0.0, "is_causal": False, "scale": 0.5},
)
def _scaled_dot_product_flash_attention_for_cpu_batch_rule(
    info: Any,
    in_dims: Sequence[Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> Outputs:
    """softmax_m(scale * query @ key^T + mask) @ value"""
    size = info.batch_size
    q, k, v = (_folded(t, d, size) for t, d in zip((query, key, value), in_dims, strict=False))
    batch = example_sizes(query, in_dims[0])[0]
    mask = _mask(attn_mask, in_dims[5], size, batch)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    return _outputs(size, batch, *op(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale))


@batching_rule(
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    source=f"{_SOURCE}_backward",
    shapes="grad_out: v b n s d, query: v b n s d, key: v b n m d, value: v b n m d, "
    "out: v b n s d, logsumexp: v b n s, attn_mask: v b n s m "
    "-> dquery: v b n s d, dkey: v b n m d, dvalue: v b n m d",
    why=_WHY,
    sample=lambda: {"dropout_p": 0.0, "is_causal": False, "scale": 0.5},
)
def _scaled_dot_product_flash_attention_for_cpu_backward_batch_rule(
    info: Any, in_dims: Sequence[Any], *args: Any
) -> Outputs:
    """The gradients of each example's attention."""
    size = info.batch_size
    tensors = [_folded(t, d, size) for t, d in zip(args[:6], in_dims, strict=False)]
    dropout_p, is_causal, attn_mask, scale = args[6:]
    batch = example_sizes(args[1], in_dims[1])[0]
    mask = _mask(attn_mask, in_dims[8], size, batch)
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return _outputs(size, batch, *op(*tensors, dropout_p, is_causal, attn_mask=mask, scale=scale))
