"""The operators that are batch norm and its backward, each entered as a batching rule."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.batched import batching_rule, outputs
from normpass.decomps.batching.batch_norm import gradients, normalize
from normpass.decomps.norms.spellings import (
    BACKWARD,
    FORWARD,
    has_reserve,
    in_order,
    is_functional,
    is_vendors,
    tensors,
)
from normpass.decomps.registry import find_op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.decomps.batched import Outputs

RULES = "aten/src/ATen/functorch/BatchRulesNorm.cpp"
NATIVE = "aten/src/ATen/native/Normalization.cpp"

_SAVED = "y: v n c *s, mean: v c, rstd: v c"


def _forward(name: str, source: str, why: str = "", **fixed: Any) -> None:
    """Enters `normalize` for an operator; fixed: the arguments that it does not have."""
    op = find_op(name)
    if op is None:
        return
    reserve, functional, vendors = has_reserve(op), is_functional(op), is_vendors(op)
    results = _SAVED + ", reserve: 0" * reserve + ", new_mean: v c, new_var: v c" * functional

    @batching_rule(
        op,
        source=source,
        shapes=f"{tensors(op, 'v ')} -> {results}",
        why=why,
        constants=range(1, len(op._schema.returns)),
    )
    @wraps(normalize)
    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> Outputs:
        dims = in_order(op, in_dims, FORWARD, **dict.fromkeys(fixed))
        values = in_order(op, args, FORWARD, **fixed)
        batched = normalize(dims, *values, functional=functional, vendors=vendors)
        empty = batched.y[0].new_empty((1, 0), dtype=torch.uint8)
        extra = ((empty, False),) if reserve else ()
        return outputs(batched.y, batched.mean, batched.rstd, *extra, *batched.running)


def _backward(name: str, source: str, why: str = "", **fixed: Any) -> None:
    """Enters `gradients` for an operator; fixed: the arguments that it does not have."""
    op = find_op(name)
    if op is None:
        return
    shapes = f"{tensors(op, 'v ')} -> dx: v n c *s, dweight: v c, dbias: v c"

    @batching_rule(op, source=source, shapes=shapes, why=why)
    @wraps(gradients)
    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> Outputs:
        dims = in_order(op, in_dims, BACKWARD, **dict.fromkeys(fixed))
        return outputs(*gradients(dims, *in_order(op, args, BACKWARD, **fixed)))


_FOLDED = f"{RULES}: batch_norm_batch_rule"
_NONE = "torch has no rule for this operator"
_IN_PLACE = "running statistics are written through views, so that the update is not lost in a copy"
_RESERVE = "the reserve, which is cuDNN's own, stays empty: no backward of ours asks for it"

_forward("aten.native_batch_norm.default", _FOLDED, _IN_PLACE)
_forward("aten.cudnn_batch_norm.default", _FOLDED, _RESERVE)
_forward("aten.miopen_batch_norm.default", _FOLDED)
_forward("aten._native_batch_norm_legit.default", f"{RULES}: _native_batch_norm_legit_batch")
_forward(
    "aten._native_batch_norm_legit.no_stats",
    f"{RULES}: _native_batch_norm_legit_no_stats_batch",
    running_mean=None,
    running_var=None,
)
_forward(
    "aten._native_batch_norm_legit_no_training.default",
    f"{NATIVE}: _batch_norm_legit_no_training",
    _NONE,
    training=False,
)
_forward("aten._native_batch_norm_legit_functional.default", f"{NATIVE}: batch_norm_cpu", _NONE)
_forward(
    "aten._batch_norm_with_update.default",
    f"{NATIVE}: _batch_norm_with_update_cpu",
    f"{_NONE}; {_RESERVE}",
    training=True,
)
_forward(
    "aten._batch_norm_no_update.default",
    f"{NATIVE}: _batch_norm_no_update",
    f"{_NONE}; {_RESERVE}",
    training=False,
)
_forward(
    "aten._batch_norm_with_update_functional.default",
    f"{NATIVE}: _batch_norm_with_update_cpu",
    f"{_NONE}; {_RESERVE}",
    training=True,
)

_TRAINING = {"train": True, "output_mask": (True, True, True)}

_backward(
    "aten.native_batch_norm_backward.default",
    f"{RULES}: batch_norm_backward_plumbing",
    "two sums serve the three gradients; the C++ rule takes each of them twice",
)
_backward(
    "aten.batch_norm_backward.default",
    f"{NATIVE}: _new_batch_norm_backward_cpu",
    f"{_NONE}; its save_var is the inverse deviation",
)
_backward(
    "aten.cudnn_batch_norm_backward.default",
    f"{RULES}: batch_norm_backward_plumbing, cudnn_batch_norm_backward_wrapper",
    "only called in train mode; its save_var is the inverse deviation",
    **_TRAINING,
)
_backward(
    "aten.miopen_batch_norm_backward.default",
    f"{RULES}: batch_norm_backward_plumbing, miopen_batch_norm_backward_wrapper",
    "only called in train mode; its save_var is the inverse deviation",
    **_TRAINING,
)
