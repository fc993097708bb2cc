"""Oracles: norms written from primitives, to be evaluated in float64, and the rule of comparison.

The rule is that of PyTorch's own test_decomp: measured against float64, what is new may not be
further away than what it replaces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


# test_decomp's 1e-7. In float64 the reference itself is rounded: what is left are the digits that
# tensors with a mean of 1000 can have.
FLOOR = {
    torch.float64: 1e-11,
    torch.float32: 1e-7,
    torch.bfloat16: 1e-7,
    torch.float16: 1e-7,
}


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """x: *n *d, weight and bias: *d -> *n *d"""
    return _affine(_standardize(x, _trailing(x, normalized_shape), eps), weight, bias)


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """x: *n *d, weight: *d -> *n *d"""
    dims = _trailing(x, normalized_shape)
    return _affine(x / ((x**2).mean(dims, keepdim=True) + eps).sqrt(), weight, None)


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """x: n c *s, weight and bias: c -> n c *s"""
    n, c = x.shape[:2]
    size = x[:1].numel() // groups
    y = _standardize(x.reshape(n, groups, size), [2], eps).reshape(x.shape)
    return _affine(y, _channels(weight, c, x.dim()), _channels(bias, c, x.dim()))


def batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
) -> Tensor:
    """x: n c *s, the rest: c -> n c *s; with running statistics those are used (eval mode)."""
    c, rank = x.shape[1], x.dim()
    mean, var = _channels(running_mean, c, rank), _channels(running_var, c, rank)
    if mean is None or var is None:
        y = _standardize(x, [i for i in range(rank) if i != 1], eps)
    else:
        y = (x - mean) / (var + eps).sqrt()
    return _affine(y, _channels(weight, c, rank), _channels(bias, c, rank))


def softmax(x: Tensor, dim: int) -> Tensor:
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def gradients(
    function: Callable[..., Tensor], g: Tensor, *inputs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of sum(g * function(*inputs)) with respect to each input, in float64."""
    leaves = [None if v is None else v.detach().double().requires_grad_() for v in inputs]
    with torch.enable_grad():
        y = function(*leaves)
    wanted = [v for v in leaves if v is not None]
    found = iter(torch.autograd.grad(y, wanted, g.detach().double()))
    return tuple(None if v is None else next(found) for v in leaves)


def assert_no_less_accurate(
    ours: Tensor, replaced: Tensor, reference: Tensor, what: str = "", ulps: float = 4.0
) -> None:
    """Raises AssertionError if `ours` is further from the float64 reference than `replaced`.

    Differences below a few ulp of the output's scale are rounding, not error; so are those below
    FLOOR, for outputs that are small because large terms cancel. Where the reference is not
    finite, ours has to be the same: NaN for NaN, the same infinity for an infinity.
    """
    assert reference.dtype == torch.float64, f"{what}: the reference is {reference.dtype}"
    assert ours.shape == replaced.shape == reference.shape, (
        f"{what}: shapes {tuple(ours.shape)}, {tuple(replaced.shape)}, {tuple(reference.shape)}"
    )
    if reference.numel() == 0:
        return
    finite = reference.isfinite()
    torch.testing.assert_close(
        ours[~finite].double(), reference[~finite], rtol=0, atol=0, equal_nan=True
    )
    if not finite.any():
        return
    scale = reference[finite].abs().max().item()
    floor = max(ulps * torch.finfo(ours.dtype).eps * scale, FLOOR[ours.dtype])
    error = (ours.double() - reference)[finite].abs().max().item()
    allowed = (replaced.double() - reference)[finite].abs().max().item()
    assert error <= allowed + floor, (
        f"{what}: error {error:.3e} against float64, that of the op replaced {allowed:.3e}, "
        f"floor {floor:.3e} (output scale {scale:.3e})"
    )


def _trailing(x: Tensor, normalized_shape: Sequence[int]) -> list[int]:
    return list(range(x.dim() - len(normalized_shape), x.dim()))


def _standardize(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred / ((centred**2).mean(dims, keepdim=True) + eps).sqrt()


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _channels(v: Tensor | None, c: int, rank: int) -> Tensor | None:
    return None if v is None else v.reshape(1, c, *(1,) * (rank - 2))
