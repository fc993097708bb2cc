"""Norms, and mixes of forward and reverse mode, for the matrix of derivatives to any order.

A case is a scalar function g(t) of a step along a fixed direction, or a function of x, made from a
norm. The oracle is the same transform of the same norm written in float64 primitives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.utils import parametrizations

from normpass import functional_call_with_buffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Function = Callable[[Tensor], Tensor]

EPS = 0.25
SHAPE = (4, 6, 5)


def fixed(*shape: int) -> Tensor:
    """Numbers that are the same each time and nowhere uniform."""
    n = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return torch.sin(n * n + 0.5 * n).reshape(shape)


W5, B5, W6, B6 = fixed(5) + 1.5, fixed(5), fixed(6) + 1.5, fixed(6)
W65, B65 = fixed(6, 5) + 1.5, fixed(6, 5)


def standardized(x: Tensor, dims: list[int]) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred / ((centred * centred).mean(dims, keepdim=True) + EPS).sqrt()


def channels(v: Tensor) -> Tensor:
    return v[:, None]


def group_primitives(x: Tensor) -> Tensor:
    y = standardized(x.reshape(4, 3, 10), [-1]).reshape(x.shape)
    return y * channels(W6) + channels(B6)


def module(
    norm: nn.Module, weight: Tensor, bias: Tensor | None, *, train: bool = True
) -> nn.Module:
    norm = norm.double().train(train)
    with torch.no_grad():
        norm.weight.copy_(weight)
        if bias is not None:
            norm.bias.copy_(bias)
    return norm


MEAN, VAR = fixed(6), fixed(6) ** 2 + 0.5


def eval_module() -> nn.Module:
    norm = module(nn.BatchNorm1d(6, eps=EPS), W6, B6, train=False)
    norm.running_mean.copy_(MEAN)
    norm.running_var.copy_(VAR)
    return norm


def eval_primitives(x: Tensor) -> Tensor:
    return (x - channels(MEAN)) / (channels(VAR) + EPS).sqrt() * channels(W6) + channels(B6)


def in_training() -> Function:
    norm = module(nn.BatchNorm1d(6, eps=EPS), W6, B6)
    return lambda x: functional_call_with_buffers(norm, {}, (x,))[0]


def written_by_hand(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * W5


# Of a linear layer's weight, one row for each of 4 results; the layer is applied to the identity.
ROWS = torch.eye(30, dtype=torch.float64)
LENGTHS, LEFT, RIGHT = fixed(4, 1) + 1.5, fixed(4), fixed(30)


def of_weight(layer: nn.Module, name: str) -> Function:
    return lambda x: functional_call(layer, {name: x.flatten(1)}, (ROWS,)).t().reshape(x.shape)


def weight_norm() -> Function:
    layer = parametrizations.weight_norm(nn.Linear(30, 4, bias=False).double())
    with torch.no_grad():
        layer.parametrizations.weight.original0.copy_(LENGTHS)
    return of_weight(layer, "parametrizations.weight.original1")


def spectral_norm() -> Function:
    layer = parametrizations.spectral_norm(nn.Linear(30, 4, bias=False).double()).eval()
    layer.parametrizations.weight[0]._u.copy_(LEFT)
    layer.parametrizations.weight[0]._v.copy_(RIGHT)
    return of_weight(layer, "parametrizations.weight.original")


# name: (the norm, the same in primitives)
NORMS: dict[str, tuple[Callable[[], Function], Function]] = {
    "layer_norm": (
        lambda: lambda x: F.layer_norm(x, (5,), W5, B5, EPS),
        lambda x: standardized(x, [-1]) * W5 + B5,
    ),
    "layer_norm_2": (
        lambda: lambda x: F.layer_norm(x, (6, 5), W65, B65, EPS),
        lambda x: standardized(x, [-1, -2]) * W65 + B65,
    ),
    "batch_norm": (
        lambda: lambda x: F.batch_norm(x, None, None, W6, B6, True, 0.1, EPS),
        lambda x: standardized(x, [0, 2]) * channels(W6) + channels(B6),
    ),
    "batch_norm_eval": (
        lambda: lambda x: F.batch_norm(x, MEAN, VAR, W6, B6, False, 0.1, EPS),
        eval_primitives,
    ),
    "instance_norm": (
        lambda: lambda x: F.instance_norm(x, None, None, W6, B6, eps=EPS),
        lambda x: standardized(x, [2]) * channels(W6) + channels(B6),
    ),
    "group_norm": (lambda: lambda x: F.group_norm(x, 3, W6, B6, EPS), group_primitives),
    "rms_norm": (
        lambda: lambda x: F.rms_norm(x, (5,), W5, EPS),
        lambda x: x / ((x * x).mean(-1, keepdim=True) + EPS).sqrt() * W5,
    ),
    "LayerNorm": (
        lambda: module(nn.LayerNorm(5, eps=EPS), W5, B5),
        lambda x: standardized(x, [-1]) * W5 + B5,
    ),
    "GroupNorm": (lambda: module(nn.GroupNorm(3, 6, eps=EPS), W6, B6), group_primitives),
    "BatchNorm1d_eval": (eval_module, eval_primitives),
    "RMSNorm": (
        lambda: module(nn.RMSNorm(5, eps=EPS), W5, None),
        lambda x: x / ((x * x).mean(-1, keepdim=True) + EPS).sqrt() * W5,
    ),
    "BatchNorm1d": (
        in_training,
        lambda x: standardized(x, [0, 2]) * channels(W6) + channels(B6),
    ),
    "weight_norm": (
        weight_norm,
        lambda x: x / (x * x).sum([1, 2], keepdim=True).sqrt() * LENGTHS[..., None],
    ),
    "spectral_norm": (spectral_norm, lambda x: x / (LEFT @ x.flatten(1) @ RIGHT)),
    "written by hand": (
        lambda: written_by_hand,
        lambda x: x / ((x * x).mean(-1, keepdim=True) + EPS).sqrt() * W5,
    ),
}

# Norms over the last axis, of size 6, of one example under vmap.
VMAPPED: dict[str, Function] = {
    "layer": lambda x: F.layer_norm(x, (6,), W6, B6),
    "layer, weights batched": lambda x: F.layer_norm(x, (6,), x[0, 0] * 2, x[0, 1]),
    "layer, keywords": lambda x: torch.ops.aten.native_layer_norm(
        x, [6], weight=x[0, 0] * 2, bias=None, eps=1e-3
    )[0],
    "group": lambda x: F.group_norm(x.movedim(-1, 1), 3, W6, B6),
    "batch": lambda x: F.batch_norm(x.movedim(-1, 1), None, None, W6, B6, True),
    "batch, eval": lambda x: F.batch_norm(x.movedim(-1, 1), B6, VAR, W6, B6, False),
    "instance": lambda x: F.instance_norm(x.movedim(-1, 1), None, None, W6, B6),
}

V, C = fixed(*SHAPE).flip(0), fixed(*SHAPE).flip(2)
ONE = torch.ones((), dtype=torch.float64)


def loss(norm: Function) -> Function:
    return lambda x: (norm(x) * C).sum()


def along(f: Function) -> Function:
    """The derivative of f along V."""
    return lambda x: jvp(f, (x,), (V,))[1]


def slope(f: Function) -> Function:
    """The gradient of f, along V."""
    return lambda x: (grad(f)(x) * V).sum()


def of_a_row(f: Function, x: Tensor) -> Function:
    """f where the first row of x, five numbers, is another one."""
    return lambda v: f(torch.cat([v, x.flatten()[5:]]).reshape(x.shape))


def of_the_hessian(f: Function) -> Function:
    """A number of each of a Hessian's numbers."""
    return lambda v: hessian(f)(v).sin().sum()


MIXES: dict[str, Callable[[Function], Function]] = {
    "jvp": lambda n: along(loss(n)),
    "jvp_jvp": lambda n: along(along(loss(n))),
    "jvp_jvp_jvp": lambda n: along(along(along(loss(n)))),
    "jvp_grad": lambda n: along(grad(loss(n))),
    "grad_jvp": lambda n: grad(along(loss(n))),
    "grad": lambda n: grad(loss(n)),
    "grad_grad": lambda n: grad(slope(loss(n))),
    "grad_grad_grad": lambda n: grad(slope(slope(loss(n)))),
    "grad_grad_grad_grad": lambda n: grad(slope(slope(slope(loss(n))))),
    "jvp_grad_grad": lambda n: along(grad(slope(loss(n)))),
    "grad_jvp_grad": lambda n: grad(lambda x: (along(grad(loss(n)))(x) * C).sum()),
    "jvp_jvp_grad": lambda n: along(along(grad(loss(n)))),
    "vmap": lambda n: lambda x: vmap(lambda v: n(v))(torch.stack([x, x + V])),
    "vmap_grad": lambda n: lambda x: vmap(grad(loss(n)))(torch.stack([x, x + V])),
    "vmap_jvp": lambda n: lambda x: vmap(along(loss(n)))(torch.stack([x, x + V])),
    "hessian": lambda n: lambda x: hessian(lambda v: loss(n)(torch.cat([v, x[1:]])))(x[:1]),
    "vmap_hessian": lambda n: lambda x: vmap(hessian(of_a_row(loss(n), x)))(x[:, 0]),
    "hessian_hessian": lambda n: lambda x: hessian(of_the_hessian(of_a_row(loss(n), x)))(x[0, 0]),
    "jacfwd": lambda n: lambda x: jacfwd(lambda v: n(torch.cat([v, x[1:]])))(x[:1]),
    "jacrev": lambda n: lambda x: jacrev(lambda v: n(torch.cat([v, x[1:]])))(x[:1]),
}


def outcome(norm: str, mix: str, wrap: Callable[[Any], Any]) -> str:
    """ "right", "WRONG" with the distance, or the error of one case run through `wrap`."""
    make, primitives = NORMS[norm]
    x = fixed(*SHAPE) * 2 + 0.5
    want = MIXES[mix](primitives)(x)
    try:
        got = wrap(MIXES[mix](make()))(x)
    except Exception as error:  # what fails is what this finds out
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    scale = want.abs().max().item() or 1.0  # a derivative may be zero everywhere
    away = (got - want).abs().max().item() / scale
    return "right" if away < 1e-8 else f"WRONG by {away:.1e}"
