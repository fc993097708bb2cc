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
OF_SIZES = ("C", "HxW", "N", "normalized_shape", "shape", "sizes", "mat1_sizes", "mat1_strides")

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
    "C": lambda at: [at.sizes["c"]],
    "HxW": lambda at: [math.prod(at.sizes["*s"])],
    "N": lambda at: [at.sizes["n"]],
    "alpha": lambda at: [2],
    "approximate": lambda at: ["none", "tanh"],
    "B_requires_grad": lambda at: [True],
    "correction_opt": lambda at: [1, 0, None],
    "beta": lambda at: [0.75],
    "delta": lambda at: [1.25],
    "device": lambda at: [None],
    "dtype": lambda at: [None],
    "eps": lambda at: [0.25],
    "epsilon": lambda at: [0.25],
    "exponential_average_factor": lambda at: [0.3],
    "group": lambda at: [2],
    "groups": lambda at: [2],
    "input_scale": lambda at: [1.5],
    "is_result": lambda at: [False, True],
    "keepdim": lambda at: [False],
    "layout": lambda at: [None],
    "left": lambda at: [True],
    "mat1_layout": lambda at: [torch.strided],
    "mat1_sizes": lambda at: [list(at.of_result)],
    "mat1_strides": lambda at: [_strides(at.of_result)],
    "momentum": lambda at: [0.3],
    "normalized_shape": lambda at: [list(at.sizes["*d"])],
    "numel": lambda at: [1],
    "p_": lambda at: [2.0, 3.0, 1.5],
    "pin_memory": lambda at: [None],
    "reduction": lambda at: [1, 2],
    "rounding_mode": lambda at: [None],
    "scalar_ord": lambda at: [2.0, 3.0],
    "scale": lambda at: [1.3],
    "shape": lambda at: [list(at.of_result)],
    "sizes": lambda at: [list(at.of_result)],
    "threshold": lambda at: [1.0],
    "train": lambda at: [True, False],
    "training": lambda at: at.training(),
    "update": lambda at: [True, False],
    "upper": lambda at: [False, True],
}
