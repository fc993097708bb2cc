"""What numbers, flags and axes of a rule may be, by their names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.shapes import Shapes, put

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Numbers that say of sizes what tensors say too.
OF_SIZES = (
    *("C", "HxW", "N", "last_dim_size", "m", "mat1_sizes", "mat1_strides", "n"),
    *("normalized_shape", "shape", "sizes", "split_size", "sym_sizes"),
)

MASKS = {
    2: ([True] * 2, [True, False], [False, True]),
    3: ([True] * 3, [True, False, False], [False, True, True]),
}


@dataclass(frozen=True)
class Place:
    """Where numbers are looked for: the sizes of axes, the shape of every name, and the names of
    the tensors that may be None.
    """

    sizes: Mapping[str, Any]
    shapes: Shapes
    optional: frozenset[str]

    def shape(self, name: str) -> tuple[Any, ...]:
        return put({**self.shapes.arguments, **self.shapes.results}[name], self.sizes)

    @property
    def of_result(self) -> tuple[Any, ...]:
        return self.shape(next(iter(self.shapes.results)))

    def training(self) -> list[bool]:
        """Training first, unless it would write to running statistics that have to be there."""
        if "running_mean" not in self.shapes.arguments:
            return [True]
        return [True, False] if "running_mean" in self.optional else [False]

    def reduced(self) -> list[int]:
        """The places of the axes d, 2d or *d, counted from the end, where most axes are."""
        every = [*self.shapes.arguments.values(), *self.shapes.results.values()]
        for axes in sorted(every, key=len, reverse=True):
            marked = [a for a in axes if a.lstrip("*0123456789") == "d"]
            if marked:
                after = len(put(axes[axes.index(marked[0]) + 1 :], self.sizes))
                count = len(put(tuple(marked), self.sizes))
                return list(range(-after - count, -after))
        return [-1]


def _strides(shape: Sequence[Any]) -> list[Any]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


# Numbers by their names: the first is taken, and each of the others once.
NUMBERS: dict[str, Callable[[Place], Sequence[Any]]] = {
    "adjoint": lambda at: [True, False],
    "align_corners": lambda at: [False, True],
    "alpha": lambda at: [2],
    "approximate": lambda at: ["none", "tanh"],
    "bias_sizes": lambda at: [[at.sizes["d"]]],
    "B_requires_grad": lambda at: [True],
    "beta": lambda at: [0.75],
    "C": lambda at: [at.sizes["c"]],
    "correction_opt": lambda at: [1, 0, None],
    "delta": lambda at: [1.25],
    "device": lambda at: [None],
    "dtype": lambda at: [None],
    "eps": lambda at: [0.25],
    "epsilon": lambda at: [0.25],
    "expand1": lambda at: [[1, 3]],
    "expand2": lambda at: [[0]],
    "expand3": lambda at: [[1, 2]],
    "exponent": lambda at: [3, 0, 1.5],
    "exponential_average_factor": lambda at: [0.3],
    "full_matrices": lambda at: [False],
    "group": lambda at: [2],
    "groups": lambda at: [2],
    "HxW": lambda at: [math.prod(at.sizes["*s"])],
    "include_self": lambda at: [True, False],
    "input_scale": lambda at: [1.5],
    "interpolation_mode": lambda at: [0, 1],
    "is_hermitian": lambda at: [True, False],
    "is_result": lambda at: [False, True],
    "keepdim": lambda at: [False],
    "last_dim_size": lambda at: [at.sizes["m"]],
    "layout": lambda at: [None],
    "left": lambda at: [True],
    "m": lambda at: [at.of_result[-2]],
    "mat1_layout": lambda at: [torch.strided],
    "mat1_sizes": lambda at: [list(at.of_result)],
    "mat1_strides": lambda at: [_strides(at.of_result)],
    "maxnorm": lambda at: [2.5],
    "mode": lambda at: ["reduced"],
    "momentum": lambda at: [0.3],
    "N": lambda at: [at.sizes["n"]],
    "n": lambda at: [at.of_result[-1]],
    "normalization": lambda at: [0, 1, 2],
    "normalized_shape": lambda at: [list(at.sizes["*d"])],
    "numel": lambda at: [1],
    "onesided": lambda at: [True, False],
    "p": lambda at: [2.0, 1.0, 3.0, math.inf],
    "p1m": lambda at: [0.75],
    "p_": lambda at: [2.0, 3.0, 1.5],
    "padding_idx": lambda at: [1, -1],
    "padding_mode": lambda at: [0, 1, 2],
    "pin_memory": lambda at: [None],
    "pivot": lambda at: [True],
    "reduce": lambda at: ["prod", "mean", "amax", "amin"],
    "reduction": lambda at: [1, 2],
    "reverse": lambda at: [False, True],
    "rounding_mode": lambda at: [None],
    "scalar_ord": lambda at: [2.0, 3.0],
    "scale": lambda at: [1.3],
    "scale_grad_by_freq": lambda at: [False],
    "shape": lambda at: [list(at.of_result)],
    "sizes": lambda at: [list(at.of_result)],
    "split_size": lambda at: [at.sizes["d"]],
    "sumdim": lambda at: [[2, 3]],
    "sym_sizes": lambda at: [list(at.of_result)],
    "threshold": lambda at: [1.0],
    "train": lambda at: [True, False],
    "training": lambda at: at.training(),
    "transpose": lambda at: [False, True],
    "unitriangular": lambda at: [False, True],
    "update": lambda at: [True, False],
    "upper": lambda at: [False, True],
    "zero_infinity": lambda at: [True, False],
}
