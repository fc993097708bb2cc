"""The mathematics of each region of triton_regions.py, in PyTorch's primitives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def variance(x: Tensor) -> Tensor:
    return ((x - x.mean(1, keepdim=True)) ** 2).mean(1, keepdim=True)


def layer_norm_backward(g: Tensor, w: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Any:
    x_hat, gw = (x - mean) * rstd, g * w
    a, b = gw.mean(1, keepdim=True), (gw * x_hat).mean(1, keepdim=True)
    return rstd * (gw - a - x_hat * b), (g * x_hat).sum(0), g.sum(0)


def modulated_backward(g: Tensor, w: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Any:
    x_hat, gw = (x - mean) * rstd, g * w[:, None]
    a, b = gw.mean(2, keepdim=True), (gw * x_hat).mean(2, keepdim=True)
    return rstd * (gw - a - x_hat * b), (g * x_hat).sum(1), g.sum(1)


def rms_norm_backward(g: Tensor, w: Tensor, x: Tensor, rstd: Tensor) -> Any:
    x_hat, gw = x * rstd, g * w
    return rstd * (gw - x_hat * (gw * x_hat).mean(1, keepdim=True)), (g * x_hat).sum(0)


def layer_norm(x: Tensor, w: Tensor, bias: Tensor) -> Any:
    mean = x.mean(1, keepdim=True)
    rstd = (variance(x) + 1e-5).rsqrt()
    return (x - mean) * rstd * w + bias, mean, rstd


def softmax(x: Tensor) -> Any:
    return (torch.softmax(x, 1),)


def softmax_backward(g: Tensor, y: Tensor) -> Any:
    return (g * y - y * (g * y).sum(1, keepdim=True),)


def group_norm_backward(dy: Tensor, w: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Any:
    """dy, x: r (g d) s"""
    grouped = (x.shape[0], 3, x.shape[1] // 3, x.shape[2])
    mean, rstd = mean[:, :, None, None], rstd[:, :, None, None]
    x_hat = (x.reshape(grouped) - mean) * rstd
    dy_ = dy.reshape(grouped)
    gw = dy_ * w.reshape(3, -1, 1)
    b, a = gw.mean((2, 3), keepdim=True), (gw * x_hat).mean((2, 3), keepdim=True)
    dx = rstd * (gw - b - x_hat * a)
    return dx.reshape(x.shape), (dy_ * x_hat).sum((0, 3)).flatten(), dy.sum((0, 2))


def batch_norm_backward(dy: Tensor, w: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Any:
    """dy, x: r c s"""
    x_hat = (x - mean[:, None]) * rstd[:, None]
    b, a = dy.mean((0, 2), keepdim=True), (dy * x_hat).mean((0, 2), keepdim=True)
    dx = (dy - b - x_hat * a) * (rstd * w)[:, None]
    return dx, (dy * x_hat).sum((0, 2)), dy.sum((0, 2))


def two_ways(x: Tensor) -> Any:
    """x: v r c"""
    y = x - x.mean(2, keepdim=True)
    return y, y.sum(0), y.sum(1)


def batch_norm(x: Tensor) -> Any:
    """x: r c s"""
    var, mean = torch.var_mean(x, (0, 2), correction=0)
    rstd = (var + 1e-5).rsqrt()
    return (x - mean[:, None]) * rstd[:, None], mean, rstd


def batch_norm_channels_last(x: Tensor) -> Any:
    y, mean, rstd = batch_norm(x.movedim(-1, 1))
    return y.movedim(1, -1), mean, rstd


def channels_last(oracle: Callable[..., Any]) -> Callable[..., Any]:
    """The oracle for activations r s c."""

    def moved(dy: Tensor, w: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        dx, dw, db = oracle(dy.movedim(-1, 1), w, x.movedim(-1, 1), mean, rstd)
        return dx.movedim(1, -1), dw, db

    return moved


def three_levels(x: Tensor, v: Tensor, w: Tensor) -> Any:
    rstd = (variance(x) + 0.1).rsqrt()
    x_hat = (x - x.mean(1, keepdim=True)) * rstd
    y = rstd * (v * w - x_hat * (x_hat * v * w).mean(1, keepdim=True))
    return y, (v * y).sum(0)


def masked(x: Tensor, keep: Tensor) -> Any:
    dropped = torch.where(keep, 2 * x, 0.0)
    y = dropped - dropped.mean(1, keepdim=True)
    both = (y > 0) & keep
    return torch.where(both, y, 0.1), both, both.to(x.dtype).sum(0)


def one_hot(i: Tensor, word: Tensor, x: Tensor) -> Any:
    hot = torch.where(word == i, x, 0.0)
    return (hot - x.exp() * hot.sum(1, keepdim=True),)


def strided(g: Tensor, x: Tensor, w: Tensor, one: Tensor) -> Any:
    gw = g * w
    return (gw - x * (gw * x).sum(-1, keepdim=True)) * one, (g * x).sum((0, 1))


def global_norm(x: Tensor, scale: Tensor) -> Any:
    norm = (x * x).sum().sqrt()
    return x / (norm + 0.5) * scale, norm


def sums_of_sums(x: Tensor) -> Any:
    total = x.sum(0)
    return total, (total * total).sum().view(1)


def extremes(x: Tensor) -> Any:
    return x.amax(1), x.amin(1), x.amax(0), (x * 0.05 + 1).prod(1)


def names(n_n: Tensor, program: Tensor) -> Any:
    product = n_n * program
    y = product - product.sum(1, keepdim=True)
    return y, y.sum(0)
