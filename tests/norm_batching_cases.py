"""The batching rules of the norms with arguments, and the loop over examples they stand for."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from stand_ins import MASK, RESERVE, cudnn, rms_backward, vendors_backward

from normpass.decomps.registry import batch_rule, find_op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

aten = torch.ops.aten

V, N, C, S, K = 3, 4, 6, 5, 2
INFO = SimpleNamespace(batch_size=V, randomness="error")
SIZES = {"x": (N, C, S), "d": (C, S), "c": (C,), "n1": (N, 1, 1), "group": (N, K)}


class Case(NamedTuple):
    """An operator and arguments for it: the name of a size is a tensor, "c+" a positive one.

    optional  which of the tensors may be None
    oracle    what gives the result for an example, where that is not the operator
    """

    op: Any
    arguments: tuple[Any, ...]
    optional: tuple[int, ...] = ()
    oracle: Callable[..., Any] | None = None

    @property
    def tensors(self) -> int:
        return count(self.arguments)

    @property
    def mask(self) -> int | None:
        """The place of the mask."""
        found = (i for i, kind in enumerate(self.arguments) if kind in (MASK, MASK[:2]))
        return next(found, None)

    def __call__(self, *args: Any) -> Any:
        return (self.oracle or self.op)(*args)


def count(kinds: Sequence[Any]) -> int:
    return sum(isinstance(kind, str) for kind in kinds)


# --- the cases ----------------------------------------------------------------------------------

_TRAIN = ("x", "c", "c", None, None, True, 0.3, 0.25)
_EVAL = ("x", "c", "c", "c", "c+", False, 0.3, 0.25)
_NO_MODE = ("x", "c", "c", "c", "c+", 0.3, 0.25)

# Those that write running statistics in place are in test_running_statistics.py.
_CASES: dict[str, tuple[Any, ...]] = {
    "layer_norm": ("native_layer_norm", ("x", [C, S], "d", "d", 0.25), (2, 3)),
    "layer_norm_backward": (
        "native_layer_norm_backward",
        ("x", "x", [C, S], "n1", "n1+", "d", "d", MASK),
    ),
    "rms_norm": ("_fused_rms_norm", ("x", [C, S], "d", 0.25), (2,)),
    "rms_norm_of_default_eps": ("_fused_rms_norm", ("x", [C, S], "d", None), (2,)),
    "rms_norm_backward": (
        "_fused_rms_norm_backward",
        ("x", "x", [C, S], "n1+", "d", MASK[:2]),
        (),
        rms_backward,
    ),
    "group_norm": ("native_group_norm", ("x", "c", "c", N, C, S, K, 0.25), (1, 2)),
    "group_norm_backward": (
        "native_group_norm_backward",
        ("x", "x", "group", "group+", "c", N, C, S, K, MASK),
    ),
    "batch_norm_train": ("native_batch_norm", _TRAIN, (1, 2)),
    "batch_norm_eval": ("native_batch_norm", _EVAL, (1, 2)),
    "batch_norm_legit": ("_native_batch_norm_legit", _EVAL, (1, 2)),
    "batch_norm_legit_without_statistics": (
        "_native_batch_norm_legit.no_stats",
        ("x", "c", "c", True, 0.3, 0.25),
        (1, 2),
    ),
    "batch_norm_legit_no_training": ("_native_batch_norm_legit_no_training", _NO_MODE, (1, 2)),
    "batch_norm_functional_train": (
        "_native_batch_norm_legit_functional",
        ("x", "c", "c", "c", "c+", True, 0.3, 0.25),
        (1, 2),
    ),
    "batch_norm_functional_eval": ("_native_batch_norm_legit_functional", _EVAL, (1, 2)),
    "batch_norm_with_update_functional": ("_batch_norm_with_update_functional", _NO_MODE, (1, 2)),
    "batch_norm_no_update": ("_batch_norm_no_update", _NO_MODE, (1, 2)),
    "cudnn_batch_norm_train": ("cudnn_batch_norm", _TRAIN, (2,), cudnn),
    "cudnn_batch_norm_eval": ("cudnn_batch_norm", _EVAL, (2,), cudnn),
    "miopen_batch_norm_train": ("miopen_batch_norm", _TRAIN, (2,), aten.native_batch_norm),
    "miopen_batch_norm_eval": ("miopen_batch_norm", _EVAL, (2,), aten.native_batch_norm),
    "batch_norm_backward_train": (
        "native_batch_norm_backward",
        ("x", "x", "c", None, None, "c", "c+", True, 0.25, MASK),
        (2,),
    ),
    "batch_norm_backward_eval": (
        "native_batch_norm_backward",
        ("x", "x", "c", "c", "c+", None, None, False, 0.25, MASK),
        (2,),
    ),
    "batch_norm_backward_with_reserve": (
        "batch_norm_backward",
        ("x", "x", "c", None, None, "c", "c+", True, 0.25, MASK, RESERVE),
    ),
    "batch_norm_backward_with_reserve_eval": (
        "batch_norm_backward",
        ("x", "x", "c", "c", "c+", None, None, False, 0.25, MASK, RESERVE),
    ),
    "cudnn_batch_norm_backward": (
        "cudnn_batch_norm_backward",
        ("x", "x", "c", None, None, "c", "c+", 0.25, RESERVE),
        (),
        vendors_backward,
    ),
    "miopen_batch_norm_backward": (
        "miopen_batch_norm_backward",
        ("x", "x", "c", None, None, "c", "c+", 0.25),
        (),
        vendors_backward,
    ),
}


def _case(name: str, *rest: Any) -> Case | None:
    op = find_op(f"aten.{name}" if "." in name else f"aten.{name}.default")
    return None if op is None else Case(op, *rest)


CASES: dict[str, Case] = {
    name: case for name, row in _CASES.items() if (case := _case(*row)) is not None
}


# --- arguments, and the loop --------------------------------------------------------------------


def tensor(kind: str, dim: int | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor of this kind: v lies first in memory, and last where dim is -1."""
    sizes = SIZES[kind.rstrip("+")]
    value = torch.randn(sizes if dim is None else (V, *sizes), dtype=dtype)
    value = value.abs() + 0.5 if kind.endswith("+") else value
    value = value if dim is None else value.movedim(0, dim)
    return value.contiguous() if dim == -1 else value


def arguments(
    kinds: Sequence[Any], dims: Sequence[int | None], dtype: torch.dtype = torch.float64
) -> tuple[list[Any], list[Any]]:
    """Arguments and in_dims: `dims` are those of the tensors in turn."""
    left = iter(dims)
    in_dims = [next(left) if isinstance(kind, str) else None for kind in kinds]
    pairs = zip(kinds, in_dims, strict=True)
    args = [tensor(k, dim, dtype) if isinstance(k, str) else k for k, dim in pairs]
    return args, in_dims


def example(value: Any, dim: int | None, i: int) -> Any:
    # The operators' own kernels want contiguous examples.
    return value if dim is None else value.select(dim, i).contiguous()


def loop(op: Any, args: Sequence[Any], in_dims: Sequence[Any]) -> list[Tensor | None]:
    """What the operator gives for the examples one by one, stacked along v."""
    rows = [op(*(example(a, d, i) for a, d in zip(args, in_dims, strict=True))) for i in range(V)]
    return [None if r[0] is None else torch.stack(r) for r in zip(*rows, strict=True)]


def stacked(outs: Sequence[Any], out_dims: Sequence[int | None]) -> list[Tensor | None]:
    return [
        o if o is None else o.expand(V, *o.shape) if d is None else o.movedim(d, 0)
        for o, d in zip(outs, out_dims, strict=True)
    ]


def assert_same(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-11)


def check(case: Case, args: list[Any], in_dims: list[Any]) -> None:
    """The rule is the loop; where nothing is batched it is the operator, which has to be there."""
    if case.oracle is not None and not any(dim is not None for dim in in_dims):
        return
    outs, out_dims = batch_rule(case.op)(INFO, tuple(in_dims), *args)
    assert_same(stacked(outs, out_dims), loop(case, args, in_dims))


def every_batching(case: Case) -> list[tuple[int | None, ...]]:
    """Each tensor batched nowhere, first or last; of many tensors each one and each pair."""
    n = case.tensors
    if n <= 3:
        return list(itertools.product((None, 0, -1), repeat=n))
    apart: list[tuple[int | None, ...]] = [(None,) * n, (0,) * n, (-1,) * n, (1,) * n]
    for i, j in itertools.combinations_with_replacement(range(n), 2):
        for a, b in ((0, -1), (-1, 0), (1, 1)):
            apart.append(tuple(a if k == i else b if k == j else None for k in range(n)))
            apart.append(tuple(None if k in (i, j) else (a, b)[k % 2] for k in range(n)))
    return list(dict.fromkeys(apart))
