"""Hand-made arguments for every norm operator: what PyTorch's own samples leave out.

`samples(op, dtype)` yields (label, arguments). Saved statistics come from eager's forward, so they
have the dtype and the rounding that a backward meets in practice.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch._prims_common import suggest_memory_format

from normpass.decomps.torch_versions import GROUP_NORM_NEEDS_EXTENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch._ops import OpOverload

aten = torch.ops.aten
EPS = 1e-5
HALVES = (torch.float16, torch.bfloat16)
MASKS = tuple(itertools.product([True, False], repeat=3))

Sample = tuple[str, tuple[Any, ...]]


def uniform(*shape: int, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    """Reproducible numbers without symmetry: mean `offset`, deviation one."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values + 0.3 * values.pow(2) + offset).to(dtype)


def pair(shape: tuple[int, ...], dtype: torch.dtype, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """A gradient and an input that have nothing to do with each other."""
    x = uniform(*shape, dtype=dtype, offset=offset)
    return uniform(*shape, 1, dtype=dtype).squeeze(-1) * 0.7 + 0.1, x


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(label, gradient, input) in all the ways in which tensors of one shape lie in memory."""
    g, x = pair(shape, dtype)
    yield "contiguous", g, x
    swapped = [v.transpose(0, 1).contiguous().transpose(0, 1) for v in (g, x)]
    yield "transposed", swapped[0], swapped[1]
    yield "last two swapped", g, x.transpose(-1, -2).contiguous().transpose(-1, -2)
    yield "sliced", g, torch.stack([x, x], -1).select(-1, 0)
    yield "expanded gradient", g[:1, :1].expand(shape), x
    yield "offset input", *pair(shape, dtype, offset=1000.0)
    if len(shape) == 4:
        last = torch.channels_last
        yield "channels last", g.contiguous(memory_format=last), x.contiguous(memory_format=last)
        yield "channels last input", g, x.contiguous(memory_format=last)
        yield "channels last gradient", g.contiguous(memory_format=last), x
        yield (
            "channels last, sliced",
            g,
            torch.cat([x, x], 1).contiguous(memory_format=last)[:, : shape[1]],
        )


def parameter_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (dtype, torch.float32) if dtype in HALVES else (dtype,)


# --- layer and rms norm -------------------------------------------------------------------------


def _rows(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor, list[int]]]:
    for label, g, x in layouts((5, 6, 32), dtype):
        yield label, g, x, [32]
    for label, g, x in layouts((2, 3, 4, 6), dtype):
        yield f"4-d {label}", g, x, [4, 6]
    yield "no leading axes", *pair((32,), dtype), [32]
    yield "wide rows", *pair((3, 4099), dtype), [4099]
    yield "tall", *pair((700, 3), dtype), [3]
    yield "one element", *pair((5, 1), dtype), [1]
    yield "empty batch", *pair((0, 7), dtype), [7]
    yield "empty rows", *pair((4, 0), dtype), [0]


def _row_cases(
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor, Tensor, list[int], Tensor | None, Tensor | None]]:
    for label, g, x, d in _rows(dtype):
        for p in parameter_dtypes(dtype):
            yield f"{label}, {p}", g, x, d, uniform(*d, dtype=p), uniform(*d, dtype=p)
    g, x = pair((5, 6, 32), dtype)
    w = uniform(32, dtype=dtype)
    yield "no weight", g, x, [32], None, w
    yield "no bias", g, x, [32], w, None
    yield "no parameters", g, x, [32], None, None
    g, x = pair((5, 4, 8), dtype)
    w = uniform(8, 4, dtype=dtype).t()
    yield "transposed weight", g, x, [4, 8], w, w
    g[0, 0, 0], x[1, 2, 3], x[2, 0, 0] = torch.nan, torch.nan, torch.inf
    yield "nan and inf", g, x, [4, 8], w, w


def layer_norm(dtype: torch.dtype) -> Iterator[Sample]:
    for label, _, x, d, w, b in _row_cases(dtype):
        yield label, (x, d, w, b, EPS)


def layer_norm_backward(dtype: torch.dtype) -> Iterator[Sample]:
    for label, g, x, d, w, b in _row_cases(dtype):
        _, mean, rstd = aten.native_layer_norm(x, d, w, b, EPS)
        masks = MASKS if label.startswith("contiguous") else MASKS[:1]
        for mask in masks:
            allowed = [mask[0], mask[1] and w is not None, mask[2] and b is not None]
            yield f"{label} {mask}", (g, x, d, mean, rstd, w, b, allowed)


def rms_norm(dtype: torch.dtype) -> Iterator[Sample]:
    for label, _, x, d, w, _ in _row_cases(dtype):
        yield label, (x, d, w, EPS)
        yield f"{label}, default eps", (x, d, w, None)


def rms_norm_backward(dtype: torch.dtype) -> Iterator[Sample]:
    for label, g, x, d, w, _ in _row_cases(dtype):
        _, rstd = aten._fused_rms_norm(x, d, w, EPS)
        for mask in ([True, True], [True, False], [False, True]):
            yield f"{label} {mask}", (g, x, d, rstd, w, mask)


# --- group norm ---------------------------------------------------------------------------------


def _groups(
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor, Tensor, int, Tensor | None, Tensor | None]]:
    w = uniform(6, dtype=dtype)
    for label, g, x in layouts((4, 6, 5, 3), dtype):
        for p in parameter_dtypes(dtype):
            for k in (1, 3, 6):
                yield f"{label}, {k} groups, {p}", g, x, k, w.to(p), w.to(p)
    shapes = [(4, 6), (4, 6, 7), (2, 6, 3, 2, 4), (0, 6, 5, 3), (1, 6, 1, 1)]
    for shape in shapes + [(4, 6, 0, 3)] * (not GROUP_NORM_NEEDS_EXTENT):
        yield str(shape), *pair(shape, dtype), 3, w, w
    volume = [
        v.contiguous(memory_format=torch.channels_last_3d) for v in pair((2, 6, 3, 2, 4), dtype)
    ]
    yield "channels last, volume", volume[0], volume[1], 2, w, w
    g, x = pair((4, 6, 5, 3), dtype)
    yield "no parameters", g, x, 3, None, None
    g[0, 0, 0, 0], x[1, 2, 3, 0] = torch.nan, torch.inf
    yield "nan and inf", g, x, 3, w, w


def _sizes(x: Tensor) -> tuple[int, int, int]:
    n, c = x.shape[:2]
    return n, c, x.shape[2:].numel()


def group_norm(dtype: torch.dtype) -> Iterator[Sample]:
    for label, _, x, k, w, b in _groups(dtype):
        if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last):
            yield label, (x, w, b, *_sizes(x), k, EPS)


def group_norm_backward(dtype: torch.dtype) -> Iterator[Sample]:
    for label, g, x, k, w, b in _groups(dtype):
        if not x[:1, :1].numel() and len(x):
            continue  # no spatial extent: torch 2.13's NaN is tested on its own
        _, mean, rstd = aten.native_group_norm(x.contiguous(), w, b, *_sizes(x), k, EPS)
        masks = MASKS if label.startswith("contiguous, 3") else MASKS[:1]
        for mask in masks:
            allowed = [mask[0], *(m and w is not None for m in mask[1:])]
            yield f"{label} {mask}", (g, x, mean, rstd, w, *_sizes(x), k, allowed)


# --- batch norm ---------------------------------------------------------------------------------


def _batches(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor, torch.dtype]]:
    for p in parameter_dtypes(dtype):
        for label, g, x in layouts((4, 6, 5, 3), dtype):
            yield f"{label}, {p}", g, x, p
        for shape in ((8, 6), (4, 6, 7), (2, 6, 3, 2, 4), (4, 6, 5, 1)):
            yield f"{shape}, {p}", *pair(shape, dtype), p
    g, x = pair((4, 6, 5, 3), dtype)
    g[0, 0, 0, 0], x[1, 2, 3, 0] = torch.nan, torch.inf
    for p in parameter_dtypes(dtype):
        yield f"nan and inf, {p}", g, x, p


def _batch_arguments(
    g: Tensor, x: Tensor, p: torch.dtype, train: bool, weighted: bool, mask: list[bool]
) -> tuple[Any, ...]:
    w = uniform(6, dtype=p)
    running = (w * 0.5, w.abs() + 0.5)
    _, mean, rstd = aten.native_batch_norm(x, w, w, *running, train, 0.0, EPS)
    return (g, x, w if weighted else None, *running, mean, rstd, train, EPS, mask)


def native_batch_norm_backward(dtype: torch.dtype) -> Iterator[Sample]:
    for label, g, x, p in _batches(dtype):
        for train, weighted in itertools.product([True, False], repeat=2):
            masks = MASKS if label.startswith("contiguous") and weighted else MASKS[:1]
            for mask in masks:
                title = f"{label} train={train} weight={weighted} {mask}"
                yield title, _batch_arguments(g, x, p, train, weighted, list(mask))


def batch_norm_backward(dtype: torch.dtype) -> Iterator[Sample]:
    reserve = torch.empty(0, dtype=torch.uint8)
    for label, arguments in native_batch_norm_backward(dtype):
        if arguments[2] is not None:
            yield label, (*arguments, reserve)


def miopen_batch_norm_backward(dtype: torch.dtype) -> Iterator[Sample]:
    for label, g, x, p in _batches(dtype):
        g, x, *rest, _, eps, _ = _batch_arguments(g, x, p, True, True, [True] * 3)
        yield label, (x, g, *rest, eps)


def cudnn_batch_norm_backward(dtype: torch.dtype) -> Iterator[Sample]:
    reserve = torch.empty(0, dtype=torch.uint8)
    for label, arguments in miopen_batch_norm_backward(dtype):
        x, _, weight, *_ = arguments
        dense = x.is_contiguous(memory_format=suggest_memory_format(x))
        if dense and (x.dtype, weight.dtype) != (torch.float16, torch.float16):  # else it raises
            yield label, (*arguments, reserve)


# --- softmax ------------------------------------------------------------------------------------


def safe_softmax(dtype: torch.dtype) -> Iterator[Sample]:
    for label, _, x in layouts((5, 6, 32), dtype):
        for dim in (-1, 0, 1):
            yield f"{label}, dim {dim}", (x, dim, None)
    x = uniform(4, 6, 8, dtype=dtype)
    hidden = torch.ones(6, 8, dtype=torch.bool).tril(-1)  # of the first row all, then less
    yield "masked", (x.masked_fill(~hidden, -torch.inf), -1, None)
    yield "masked columns", (x.masked_fill(~hidden, -torch.inf), 1, None)
    yield "all masked", (torch.full_like(x, -torch.inf), -1, None)
    yield "the lowest number", (torch.full_like(x, torch.finfo(dtype).min), -1, None)
    seen = torch.arange(8) == 3
    for label, value in (("not a number", torch.nan), ("infinity", torch.inf)):
        yield f"{label} and masked", (x.masked_fill(~seen, -torch.inf).masked_fill(seen, value), -1)
    yield "in float64", (x, -1, torch.float64)
    yield "no rows", (x[:0], -1, None)
    yield "empty rows", (x[..., :0], -1, None)
    yield "one number", (x[0, 0, 0], 0, None)


# --- weight norm --------------------------------------------------------------------------------


def weight_norm_backward(dtype: torch.dtype) -> Iterator[Sample]:
    """ATen's kernels know the first and the last axis, of weights without gaps."""
    for shape in ((5, 6), (5, 4, 3), (5, 4, 3, 6), (3, 4099), (700, 3), (1, 5), (5, 1)):
        for dim in (0, len(shape) - 1):
            gw, v = pair(shape, dtype)
            g = uniform(*(n if i == dim else 1 for i, n in enumerate(shape)), dtype=dtype)
            _, norms = aten._weight_norm_interface(v, g, dim)
            yield f"{shape}, dim {dim}", (gw, v, g, norms, dim)


# --- all of them --------------------------------------------------------------------------------

_BUILDERS: dict[str, Callable[[torch.dtype], Iterator[Sample]]] = {
    "aten.native_layer_norm.default": layer_norm,
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten._fused_rms_norm.default": rms_norm,
    "aten._fused_rms_norm_backward.default": rms_norm_backward,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
    "aten.native_batch_norm_backward.default": native_batch_norm_backward,
    "aten.batch_norm_backward.default": batch_norm_backward,
    "aten.cudnn_batch_norm_backward.default": cudnn_batch_norm_backward,
    "aten.miopen_batch_norm_backward.default": miopen_batch_norm_backward,
    "aten._safe_softmax.default": safe_softmax,
    "aten._weight_norm_interface_backward.default": weight_norm_backward,
}


def samples(op: OpOverload, dtype: torch.dtype) -> Iterator[Sample]:
    """Every hand-made sample of an operator. Raises LookupError where there are none, so that none
    is forgotten.
    """
    if str(op) not in _BUILDERS:
        raise LookupError(
            f"{op} has a decomposition and no samples: write a function that yields more than ten "
            "and enter it in _BUILDERS (tests/norm_samples.py)"
        )
    return _BUILDERS[str(op)](dtype)
