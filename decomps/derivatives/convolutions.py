"""Convolutions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from normpass.decomps.axes import all_but
from normpass.decomps.conventions import absent
from normpass.decomps.manual import Gradient, Tangent, manual
from normpass.decomps.neutral import ZERO

aten = torch.ops.aten


_NUMBERS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
    "SymInt[] output_padding, int groups"
)
_FLAGS = "bool benchmark, bool deterministic, bool cudnn_enabled, bool allow_tf32"


def _numbers() -> dict[str, Any]:
    """Of a convolution in one axis whose result is as long as its input."""
    one, no = [1], [0]
    known: dict[str, Any] = {"stride": one, "padding": one, "dilation": one, "output_padding": no}
    return {**known, "transposed": False, "groups": 1}


def _numbers_and_flags() -> dict[str, Any]:
    flags = ("benchmark", "deterministic", "cudnn_enabled", "allow_tf32")
    return {**_numbers(), **dict.fromkeys(flags, False)}


def _images(weight: Tensor) -> dict[str, Any]:
    """Of two examples in one axis: an input and a gradient of its convolution with this weight."""
    channels, inputs, _ = weight.shape
    x, g = (
        torch.arange(2 * k * 5, dtype=torch.float64).sin().view(2, k, 5).to(weight.dtype)
        for k in (inputs, channels)
    )
    return {"input": x, "grad_output": g, "bias_sizes": [channels]}


_of_convolution = partial(
    manual,
    "input_p: n c s, input_t: n c s, weight_p: d c 3, weight_t: d c 3, bias_p: d, bias_t: d "
    "-> y_t: n d s",
    as_given=True,
)


@_of_convolution(
    name="_convolution_jvp",
    rest=f"{_NUMBERS}, {_FLAGS}",
    sample=_numbers_and_flags,
    of="_convolution",
    why="the flags choose a kernel, and are not passed on, as upstream does in reverse mode",
)
@_of_convolution(rest=_NUMBERS, sample=_numbers, of="convolution")
def convolution_jvp(
    input_p: Tensor,
    input_t: Tangent,
    weight_p: Tensor,
    weight_t: Tangent,
    bias_p: Tensor | None,
    bias_t: Tangent,
    *numbers: Any,
) -> Tensor:
    """y = x * w + b, a convolution:  y_t = x_t * w + x * w_t + b_t"""
    pairs = [(input_t, weight_p), (input_p, weight_t)]
    pairs = [(x, w) for x, w in pairs if not (absent(x) or absent(w))]
    bias = None if absent(bias_t) else bias_t
    if bias is not None and not pairs:
        pairs = [(input_p, torch.zeros_like(weight_p))]
    terms = zip(pairs, (bias, None), strict=False)
    return sum((aten.convolution(x, w, b, *numbers[:6]) for (x, w), b in terms), ZERO)


@manual(
    "grad_out_t: n d *s, grad_bias: d -> y_t: d",
    of=lambda grad_out: grad_out.movedim(1, 0).flatten(1).sum(1),
)
def convolution_backward_jvp_grad_bias(grad_out_t: Tangent, grad_bias: Tensor | None) -> Tensor:
    """db = sum(g), over all but the channels: so is its tangent"""
    return ZERO if grad_bias is None else grad_out_t.sum(all_but(grad_out_t, 1))


@manual(
    "self: n c s, grad_output: n d s, weight: d c 3 -> dself: n c s, dweight: d c 3",
    rest="SymInt[] padding, SymInt[] output_padding, SymInt[] stride, SymInt[] dilation, "
    "bool transposed, int groups, bool[] output_mask",
    sample=_numbers,
    of=lambda self, weight, stride, padding, dilation, transposed, output_padding, groups: (
        aten.convolution(
            self, weight, None, stride, padding, dilation, transposed, output_padding, groups
        )
    ),
    as_given=True,
)
def _cudnn_convolution_backward(
    self: Tensor, grad_output: Gradient, weight: Tensor, *numbers: Any
) -> tuple[Tensor, Tensor]:
    """y = x * w, a convolution without a bias: its gradients"""
    padding, output_padding, stride, dilation, transposed, groups, mask = numbers
    numbers = (stride, padding, dilation, transposed, output_padding, groups)
    found = aten.convolution_backward(grad_output, self, weight, None, *numbers, [*mask, False])
    return found[0], found[1]


@manual(
    "ggI: n c s, ggW: d c 3, ggb: d, gO: n d s, weight: d c 3, self: n c s "
    "-> dgO: n d s, dself: n c s, dweight: d c 3",
    rest=f"{_NUMBERS}, bool[] output_mask",
    sample=lambda weight: {**_numbers(), **_images(weight)},
    of="convolution_backward",
    source="aten/src/ATen/native/Convolution.cpp: _convolution_double_backward",
    why="upstream's dweight is a convolution whose kernel is an image and whose channels are the "
    "examples, which takes several times as long",
    as_given=True,
)
def _convolution_double_backward(
    ggI: Gradient,
    ggW: Gradient,
    ggb: Gradient,
    gO: Tensor,
    weight: Tensor,
    self: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = x * w + b, a convolution, whose gradients dx and dw are bilinear in gO and w, gO and x

    dgO = ggI * w + x * ggW + ggb,  dself = dx of gO and ggW,  dweight = dw of gO and ggI
    """
    *numbers, mask = rest
    dgO = dself = dweight = ZERO
    if mask[0]:
        dgO = convolution_jvp(self, ggI, weight, ggW, None, ggb, *numbers)
    if mask[1] and not absent(ggW):
        backward = aten.convolution_backward(gO, self, ggW, None, *numbers, [True, False, False])
        dself = backward[0]
    if mask[2] and not absent(ggI):
        backward = aten.convolution_backward(gO, ggI, weight, None, *numbers, [False, True, False])
        dweight = backward[1]
    return dgO, dself, dweight
