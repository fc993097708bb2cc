"""Recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normpass.decomps.conventions import absent
from normpass.decomps.manual import Gradient, manual
from normpass.decomps.neutral import ZERO

_NUMBERS = (
    "bool reverse, int mode, int hidden_size, int num_layers, bool has_biases, bool train, "
    "bool bidirectional, SymInt[] batch_sizes, bool batch_first, Tensor workspace"
)
_OF_LSTM: dict[str, Any] = {
    "mode": 2,
    "hidden_size": 0,
    "num_layers": 1,
    "has_biases": True,
    "bidirectional": False,
    "batch_sizes": [],
    "batch_first": False,
}


def _layer(
    input: Tensor,
    weight0: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight3: Tensor,
    hx_: Tensor,
    cx_tmp: Tensor,
    reverse: bool,
) -> Any:
    """An LSTM's output and states at the end."""
    weights = [weight0, weight1, weight2, weight3]
    states = [hx_.unsqueeze(0), cx_tmp.unsqueeze(0)]
    x = input.flip(0) if reverse else input
    y, h, c = torch._VF.lstm(x, states, weights, True, 1, 0.0, True, False, False)
    return (y.flip(0) if reverse else y), h.squeeze(0), c.squeeze(0)


@manual(
    "input: k n c, weight0: 4d c, weight1: 4d d, weight2: 4d, weight3: 4d, hx_: n d, cx_tmp: n d, "
    "output: k n d, hy_: n d, cy_: n d, grad_output_r_opt: k n d, grad_hy_r_opt: n d, "
    "grad_cy_r_opt: n d, workspace: 0 -> dinput: k n c, dweight0: 4d c, dweight1: 4d d, "
    "dweight2: 4d, dweight3: 4d, dhx_: n d, dcx_tmp: n d",
    rest=_NUMBERS,
    sample=lambda: _OF_LSTM,
    of=_layer,
    why="of an LSTM alone, as the kernel; the loop is over time, of what depends on the state",
)
def mkldnn_rnn_layer_differentiable_backward(
    input: Tensor,
    weight0: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight3: Tensor,
    hx_: Tensor,
    cx_tmp: Tensor,
    output: Tensor,
    hy_: Tensor,
    cy_: Tensor,
    grad_output_r_opt: Gradient,
    grad_hy_r_opt: Gradient,
    grad_cy_r_opt: Gradient,
    *numbers: Any,
) -> tuple[Tensor, ...]:
    """z = W_i x + W_h h + b = (i, f, g, o)
    c' = sigmoid(f) * c + sigmoid(i) * tanh(g),  h' = sigmoid(o) * tanh(c')

    and back, from the last step to the first: dz from dh' and dc', then dh and dc.
    """
    reverse, _, _, _, has_biases, *_ = numbers
    gy, gh, gc = grad_output_r_opt, grad_hy_r_opt, grad_cy_r_opt
    x = input.flip(0) if reverse else input
    gy = gy.flip(0) if reverse else gy
    z = x @ weight0.mT
    if has_biases:
        z = z + (weight2 + weight3)
    steps, states = _forward(z, weight1, hx_, cx_tmp)
    gys = [gy] * len(steps) if absent(gy) else gy.unbind(0)
    gh = torch.zeros_like(hx_) if absent(gh) else gh
    gc = torch.zeros_like(cx_tmp) if absent(gc) else gc
    slopes = []
    for step, g in zip(reversed(steps), reversed(gys), strict=True):
        dz, gc = _back(step, gh + g, gc)
        gh = dz @ weight1
        slopes.append(dz)
    gz = torch.stack(slopes[::-1])
    rows = gz.flatten(0, 1).mT
    gx, gb = gz @ weight0, gz.sum([0, 1])
    return (
        *(gx.flip(0) if reverse else gx, rows @ x.flatten(0, 1)),
        rows @ torch.stack(states).flatten(0, 1),
        *((gb, gb.clone()) if has_biases else (ZERO, ZERO)),
        *(gh, gc),
    )


_Step = tuple["Tensor", ...]


def _forward(z: Tensor, w: Tensor, h: Tensor, c: Tensor) -> tuple[list[_Step], list[Tensor]]:
    """z: m n 4d, without what comes of the state -> i, f, g, o, c, tanh(c') and h of each step"""
    steps: list[_Step] = []
    states: list[Tensor] = []
    for new in z.unbind(0):
        states.append(h)
        i, f, g, o = (new + h @ w.mT).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        after = f * c + i * g
        size = after.tanh()
        steps.append((i, f, g, o, c, size))
        h, c = o * size, after
    return steps, states


def _back(step: _Step, gh: Tensor, gc: Tensor) -> tuple[Tensor, Tensor]:
    """dh', dc' -> dz, dc"""
    i, f, g, o, c, size = step
    gc = gc + gh * o * (1 - size * size)
    gates = (gc * g * i * (1 - i), gc * c * f * (1 - f), gc * i * (1 - g * g))
    return torch.cat([*gates, gh * size * o * (1 - o)], -1), gc * f
