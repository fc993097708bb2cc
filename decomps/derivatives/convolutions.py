"""Convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normpass.decomps.axes import all_but
from normpass.decomps.conventions import absent
from normpass.decomps.manual import Gradient, Ints, Mask, Tangent, manual
from normpass.decomps.neutral import ZERO

aten = torch.ops.aten


def _tangent(primals: tuple[Tensor, Tensor], tangents: tuple[Any, Any, Any], *numbers: Any) -> Any:
    """The tangent of what is linear in input and weight each, and in both and the bias."""
    (x, w), (x_t, w_t, b_t) = primals, tangents
    pairs = [(a, b) for a, b in ((x_t, w), (x, w_t)) if not (absent(a) or absent(b))]
    bias = None if absent(b_t) else b_t
    if bias is not None and not pairs:
        pairs = [(x, torch.zeros_like(w))]
    terms = zip(pairs, (bias, None), strict=False)
    return sum((aten.convolution(a, b, c, *numbers) for (a, b), c in terms), ZERO)


_OF_CONVOLUTION = (
    "input_p: n c s, input_t: n c s, weight_p: d c 3, weight_t: d c 3, bias_p: d, bias_t: d "
    "-> y_t: n d s"
)


def _numbers() -> dict[str, Any]:
    """Of a convolution in one axis whose result is as long as its input."""
    one, no = [1], [0]
    known: dict[str, Any] = {"stride": one, "padding": one, "dilation": one, "output_padding": no}
    return {**known, "transposed": False, "groups": 1}


def _numbers_and_flags() -> dict[str, Any]:
    flags = ("benchmark", "deterministic", "cudnn_enabled", "allow_tf32")
    return {**_numbers(), **dict.fromkeys(flags, False)}


@manual(_OF_CONVOLUTION, sample=_numbers, of="convolution", as_given=True)
def convolution_jvp(
    input_p: Tensor,
    input_t: Tangent,
    weight_p: Tensor,
    weight_t: Tangent,
    bias_p: Tensor | None,
    bias_t: Tangent,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Tensor:
    """y = x * w + b, a convolution:  y_t = x_t * w + x * w_t + b_t"""
    primals, tangents = (input_p, weight_p), (input_t, weight_t, bias_t)
    return _tangent(
        primals, tangents, stride, padding, dilation, transposed, output_padding, groups
    )


@manual(
    _OF_CONVOLUTION,
    sample=_numbers_and_flags,
    of="_convolution",
    as_given=True,
    why="the flags choose a kernel, and are not passed on, as upstream does in reverse mode",
)
def _convolution_jvp(
    input_p: Tensor,
    input_t: Tangent,
    weight_p: Tensor,
    weight_t: Tangent,
    bias_p: Tensor | None,
    bias_t: Tangent,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    benchmark: bool,
    deterministic: bool,
    cudnn_enabled: bool,
    allow_tf32: bool,
) -> Tensor:
    """As above"""
    primals, tangents = (input_p, weight_p), (input_t, weight_t, bias_t)
    return _tangent(
        primals, tangents, stride, padding, dilation, transposed, output_padding, groups
    )


@manual(
    "grad_out_t: n d *s, grad_bias: d -> y_t: d",
    of=lambda grad_out: grad_out.movedim(1, 0).flatten(1).sum(1),
)
def convolution_backward_jvp_grad_bias(grad_out_t: Tangent, grad_bias: Tensor | None) -> Tensor:
    """db = sum(g), over all but the channels: so is its tangent"""
    if grad_bias is None or absent(grad_out_t):
        return ZERO
    return grad_out_t.sum(all_but(grad_out_t, 1))


@manual(
    "self: n c s, grad_output: n d s, weight: d c 3 -> dself: n c s, dweight: d c 3",
    sample=_numbers,
    of=lambda self, weight, stride, padding, dilation, transposed, output_padding, groups: (
        aten.convolution(
            self, weight, None, stride, padding, dilation, transposed, output_padding, groups
        )
    ),
    as_given=True,
)
def _cudnn_convolution_backward(
    self: Tensor,
    grad_output: Gradient,
    weight: Tensor,
    padding: Ints,
    output_padding: Ints,
    stride: Ints,
    dilation: Ints,
    transposed: bool,
    groups: int,
    output_mask: Mask,
) -> tuple[Tensor, Tensor]:
    """y = x * w, a convolution without a bias: its gradients"""
    numbers = (stride, padding, dilation, transposed, output_padding, groups)
    found = aten.convolution_backward(
        grad_output, self, weight, None, *numbers, [*output_mask, False]
    )
    return found[0], found[1]
