"""What the norms' backward operators are for autograd, so that a third derivative is right.

torch differentiates them by layer_norm_double_backward and batchnorm_double_backward, in which the
saved statistics are constants; here they are the functions of the input that they were.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.axes import all_but, outer_and_inner
from normpass.decomps.conventions import working
from normpass.decomps.norms.spellings import BACKWARD, in_order, own_names, tensors
from normpass.decomps.operators import is_concrete, is_differentiated
from normpass.decomps.registry import derivative, find_op, register_rule

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    Grads = Sequence[Tensor | None]
    Mask = Sequence[bool]

aten = torch.ops.aten

SOURCE = "tools/autograd/derivatives.yaml"
ALL = (True, True, True)
_NEEDS = ("input", "weight", "grad_out")
# Of the statistics that tests save: the rules are not told it.
_EPS = 0.25


def statistics(x: Tensor, rstd: Tensor, reduced: Sequence[int]) -> tuple[Tensor, Tensor]:
    """mean = mean_d(x) and rstd = (mean_d((x - mean)^2) + eps)^(-1/2), with x's derivatives.

    A backward operator is not told eps; rstd^-2 - var is that constant, and added to var it gives
    rstd^-2 again without loss.
    """
    x, axes = x.to(working(x.dtype)), list(reduced)
    mean = x.mean(axes, keepdim=True)
    var = (x - mean).square().mean(axes, keepdim=True)  # torch.var warns of an empty x
    eps = (rstd.to(x.dtype).view(var.shape).pow(-2) - var).detach()
    return mean, torch.rsqrt(var + eps)


def _may_be_differentiated(input: Tensor, *others: Tensor | None) -> bool:
    """Whether a derivative of the result is asked for, or may be, of a trace."""
    return not is_concrete(input) or is_differentiated((input, *others))


@register_rule(
    "double_backward",
    aten.native_layer_norm_backward.default,
    source=f"{SOURCE}: native_layer_norm_backward",
    shapes="grad_out: *n *d, input: *n *d, mean: *n 1, rstd: *n 1, weight: *d, bias: *d "
    "-> dgrad_out: *n *d, dinput: *n *d, dweight: *d",
    sample=lambda input, normalized_shape: dict(
        zip(
            ("mean", "rstd"),
            aten.native_layer_norm(input, normalized_shape, None, None, _EPS)[1:],
            strict=True,
        )
    ),
)
def layer_norm(
    grads: Grads,
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Mask,
    needs: Collection[str] = _NEEDS,
) -> dict[str, Tensor | None]:
    """The gradients of the arguments, by name: see layer_norm_double_backward."""
    if _may_be_differentiated(input, *grads, grad_out, weight):
        mean, rstd = statistics(input, rstd, outer_and_inner(input, normalized_shape)[1])
    formula = derivative("layer_norm_double_backward")
    wanted, stats = [name in needs for name in _NEEDS], (mean, rstd)
    found = formula(input, weight, *grads, grad_out, *stats, normalized_shape, wanted)
    return dict(zip(_NEEDS, found, strict=True))


def _batch_norm(
    grads: Grads,
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Mask,
    needs: Collection[str] = _NEEDS,
) -> dict[str, Tensor | None]:
    """The gradients of the arguments, by name: see batchnorm_double_backward."""
    differentiated = _may_be_differentiated(input, *grads, grad_out, weight)
    if train and save_invstd is not None and differentiated:
        rank = input.dim()
        stats = statistics(input, save_invstd.view(-1, *(1,) * (rank - 2)), all_but(input, 1))
        save_mean, save_invstd = (value.flatten() for value in stats)
    formula = derivative("batchnorm_double_backward")
    wanted, running = [name in needs for name in _NEEDS], (running_mean, running_var)
    found = formula(
        input, weight, *grads, grad_out, *running, train, eps, save_mean, save_invstd, wanted
    )
    return dict(zip(_NEEDS, found, strict=True))


def _rule(name: str, **fixed: Any) -> None:
    """Enters `_batch_norm` for an operator; fixed: the arguments that it does not have."""
    op = find_op(name)
    if op is None:
        return
    own = own_names(op)
    axes = {"grad_out": "n c *s", "input": "n c *s", "weight": "c"}
    results = ", ".join(f"d{own[name]}: {axes[name]}" for name in axes)

    def saved(input: Tensor) -> dict[str, Tensor]:
        _, mean, rstd = aten.native_batch_norm(input, None, None, None, None, True, 0, _EPS)
        return {own["save_mean"]: mean, own["save_invstd"]: rstd}

    @register_rule(
        "double_backward",
        op,
        source=f"{SOURCE}: {name.split('.')[1]}",
        shapes=f"{tensors(op)} -> {results}",
        sample=saved,
    )
    @wraps(_batch_norm)
    def rule(
        grads: Grads, *args: Any, needs: Collection[str] = tuple(own[name] for name in _NEEDS)
    ) -> dict[str, Tensor | None]:
        wanted = [name for name in _NEEDS if own[name] in needs]
        given = dict(zip(BACKWARD, in_order(op, args, BACKWARD, **fixed), strict=True))
        found = _batch_norm(grads, **given, needs=wanted)
        return {own[name]: value for name, value in found.items()}


_rule("aten.native_batch_norm_backward.default")
_rule("aten.batch_norm_backward.default")
_rule("aten.cudnn_batch_norm_backward.default", train=True, output_mask=ALL)
_rule("aten.miopen_batch_norm_backward.default", train=True, output_mask=ALL)
