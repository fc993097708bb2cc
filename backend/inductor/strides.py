"""The strides of a region's tensors: as they are written, and as they are to be.

Some are given: those of the inputs, and of outputs that somebody wants to lie so. Of the others
nobody minds where they lie, and they follow the rest: a kernel runs along one axis, and what lies
across it is gathered and scattered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy

from normpass.passes.region import Buffer, Region, Result, Stride, product, verify
from normpass.passes.sizes import expected

if TYPE_CHECKING:
    from collections.abc import Sequence

Strides = tuple[sympy.Expr, ...]


class Layouts:
    """The strides of a region's tensors, as they are and as they are to be."""

    def __init__(self, region: Region, sizes: Sequence[Any]) -> None:
        self.region = region
        self.extents: dict[str, Any] = region.extents([sympy.sympify(size) for size in sizes])
        self.new: dict[sympy.Expr, str] = {}  # strides that need a name: run-time sizes to be added

    def laid_out(self, inputs: Sequence[Strides], results: Sequence[Strides | None]) -> Region:
        """The region with its tensors laid out so. results: None is for those that follow the rest;
        the parts of one have its strides, and follow nobody.
        """
        region = self.region
        wanted = list(zip(region.results, results, strict=True))
        given = [*zip(region.inputs, inputs, strict=True)]
        given += [
            (each.buffers[0], _of_parts(each, strides))
            for each, strides in wanted
            if strides is not None
        ]
        buffers = [buffer for each in wanted for buffer in self.result(*each, given)]
        outputs = [
            replace(output, buffer=buffer)
            for output, buffer in zip(region.outputs, buffers, strict=True)
        ]
        laid_out = replace(
            region,
            inputs=tuple(map(self.buffer, region.inputs, inputs)),
            outputs=tuple(outputs),
            sizes=(*region.sizes, *self.new.values()),
        )
        verify(laid_out)
        return laid_out

    def result(
        self, result: Result, strides: Strides | None, given: Sequence[tuple[Buffer, Strides]]
    ) -> list[Buffer]:
        """The outputs that a result is made of, laid out so."""
        first, *others = result.buffers
        if not others:
            return [self.buffer(first, strides or self.following(first, given))]
        parts = tuple(
            map(self.named, _of_parts(result, strides) if strides else self.strides(first))
        )
        return [replace(buffer, strides=parts) for buffer in result.buffers]

    def following(self, buffer: Buffer, given: Sequence[tuple[Buffer, Strides]]) -> Strides:
        """Strides for an output along the axis along which most bytes of whole tensors lie:
        contiguous or as it was traced if that does, else like a tensor that does.
        """
        votes: dict[str, int] = {}
        like: dict[str, Strides] = {}
        for other, strides in given:
            axis = self.innermost(other, strides)
            if axis and self.is_whole(other):
                votes[axis] = votes.get(axis, 0) + other.dtype.itemsize
                like.setdefault(axis, self.ordered_as(buffer, other, strides))
        now = self.strides(buffer)
        if not votes or not self.is_whole(buffer):
            return now
        choices = self.contiguous(buffer), now, like[max(votes, key=lambda axis: votes[axis])]
        return max(choices, key=lambda strides: votes.get(self.innermost(buffer, strides), 0))

    def is_whole(self, buffer: Buffer) -> bool:
        """Whether it varies over all axes of the region."""
        return len(buffer.axes) == len(self.region.axes)

    def innermost(self, buffer: Buffer, strides: Strides) -> str:
        """The axis along which a tensor's elements are neighbours; empty if there is none."""
        for axes, step in zip(buffer.dims, strides, strict=True):
            long = [axis for axis in axes if self.extents[axis] != 1]
            if step == 1 and long:
                return long[-1]
        return ""

    def ordered_as(self, buffer: Buffer, other: Buffer, strides: Strides) -> Strides:
        """Strides of a dense tensor whose dimensions lie in the order that another's axes do."""
        steps: dict[str, sympy.Expr] = {}
        for axes, step in zip(other.dims, strides, strict=True):
            for axis in reversed(axes):
                steps[axis] = step
                step = step * self.extents[axis]

        def distance(k: int) -> int:
            """Elements between neighbours of the other tensor along a dimension."""
            gaps = (expected(steps[axis]) for axis in buffer.dims[k] if axis in steps)
            return max(gaps, default=0)

        shape, step = self.shape(buffer), sympy.Integer(1)
        dense = [step] * len(shape)
        for k in sorted(range(len(shape)), key=lambda k: (distance(k), -k)):
            dense[k], step = step, step * shape[k]
        return tuple(dense)

    def buffer(self, buffer: Buffer, strides: Strides) -> Buffer:
        """A buffer with other strides; as it is where they mean the same or elements repeat."""
        now = self.strides(buffer)
        if 0 in now or 0 in strides or self.same(buffer, now, strides):
            return buffer
        if self.same(buffer, strides, self.contiguous(buffer)):
            return replace(buffer, strides=None)
        return replace(buffer, strides=tuple(map(self.named, strides)))

    def same(self, buffer: Buffer, one: Strides, other: Strides) -> bool:
        """Whether strides lead to the same elements: those of single ones do not count."""
        sizes = zip(self.shape(buffer), one, other, strict=True)
        return all(size == 1 or sympy.expand(a - b) == 0 for size, a, b in sizes)

    def shape(self, buffer: Buffer) -> tuple[sympy.Expr, ...]:
        return tuple(map(sympy.sympify, self.region.shape(buffer, self.extents)))

    def contiguous(self, buffer: Buffer) -> Strides:
        shape = self.shape(buffer)
        return tuple(sympy.sympify(product(shape[k + 1 :])) for k in range(len(shape)))

    def strides(self, buffer: Buffer) -> Strides:
        if buffer.strides is None:
            return self.contiguous(buffer)
        return tuple(
            sympy.sympify(self.extents[step] if isinstance(step, str) else step)
            for step in buffer.strides
        )

    def named(self, stride: sympy.Expr) -> Stride:
        """A stride as a number, or as the name of a size that is known at run time."""
        if stride.is_Integer:
            return int(stride)
        for name in self.region.sizes:
            if sympy.expand(self.extents[name] - stride) == 0:
                return name
        return self.new.setdefault(stride, f"t{len(self.region.sizes) + len(self.new)}")


def _of_parts(result: Result, strides: Strides) -> Strides:
    """The strides of the parts of a result that has these."""
    count = result.stride_of_parts
    return tuple(step * count if k == result.dim else step for k, step in enumerate(strides))
