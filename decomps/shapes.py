"""The notation of shapes, read and put to sizes: "x: *n d, weight: d -> y: *n d".

    d         an axis
    2d        an axis twice as long as d
    d/2+1     an axis of the quotient, rounded down, and one: half a spectrum
    min(s,n)  an axis as long as the shorter of the two
    *n        any number of axes
    1, 0      an axis of this length

A list of tensors has the shape of each of them. A batching rule's `v` is the axis of vmap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Axes = tuple[str, ...]

_AXIS = re.compile(r"\*[a-z]\w*|\d*[a-z]\w*|\d+")
_QUOTIENT = re.compile(r"([a-z]\w*)/(\d+)(?:\+(\d+))?")
_SHORTER = re.compile(r"min\(([a-z]\w*),([a-z]\w*)\)")
_NOTATION = (_AXIS, _QUOTIENT, _SHORTER)


@dataclass(frozen=True)
class Shapes:
    """What a rule takes and what it returns: names, each with its axes."""

    arguments: dict[str, Axes]
    results: dict[str, Axes]


def parse(text: str) -> Shapes:
    """Raises ValueError where the text is not in the notation."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"expected 'arguments -> results', found {text!r}")
    return Shapes(_tensors(left), _tensors(right))


def _tensors(text: str) -> dict[str, Axes]:
    found: dict[str, Axes] = {}
    for part in re.split(r",(?![^(]*\))", text):  # at no comma in brackets
        name, colon, axes = part.strip().partition(":")
        terms = tuple(axes.split())
        wrong = [t for t in terms if not any(kind.fullmatch(t) for kind in _NOTATION)]
        if not colon or not name.isidentifier() or wrong or name in found:
            raise ValueError(f"expected 'name: axes', such as 'x: *n 2d', found {part.strip()!r}")
        found[name] = terms
    return found


def put(axes: Axes, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
    """The shape that has these axes: sizes["d"] is a number, sizes["*n"] a tuple of them."""
    shape: list[Any] = []
    for term in axes:
        if term.startswith("*"):
            shape.extend(sizes[term])
        else:
            shape.append(_length(term, sizes))
    return tuple(shape)


def _length(term: str, sizes: Mapping[str, Any]) -> Any:
    if found := _QUOTIENT.fullmatch(term):
        axis, by, more = found.groups("0")
        return sizes[axis] // int(by) + int(more)
    if found := _SHORTER.fullmatch(term):
        return torch.sym_min(*(sizes[axis] for axis in found.groups()))
    times, axis = _split(term)
    return times * sizes[axis] if axis else times


def bind(axes: Axes, shape: Sequence[Any], ranks: Mapping[str, int]) -> dict[str, Any]:
    """The sizes with which these axes have this shape. ranks: how many axes "*n" stands for.

    A quotient or the shorter of two tells no size.

    Raises ValueError where the numbers of axes differ.
    """
    count = sum(ranks[term] if term.startswith("*") else 1 for term in axes)
    if count != len(shape):
        raise ValueError(f"({' '.join(axes)}) has {count} axes, the tensor's are {tuple(shape)}")
    left, found = list(shape), dict[str, Any]()
    for term in axes:
        if term.startswith("*"):
            found[term], left = tuple(left[: ranks[term]]), left[ranks[term] :]
        elif not _AXIS.fullmatch(term):
            left.pop(0)
        else:
            times, axis = _split(term)
            size = left.pop(0)
            if axis:
                found[axis] = size // times if times != 1 else size
    return found


def _split(term: str) -> tuple[int, str]:
    """ "2d" -> 2, "d"; "d" -> 1, "d"; "1" -> 1, "" """
    axis = term.lstrip("0123456789")
    times = term[: len(term) - len(axis)]
    return int(times) if times else 1, axis
