"""ZERO and ONE: what stands in a formula for a gradient or a weight that is not there.

PyTorch hands None to a derivative for a gradient that nobody needs and for a weight that a norm
does not have. With ZERO for the one and ONE for the other a formula is written as its mathematics,
without a branch, and a term that is nothing costs nothing: neither is ever a node of a graph.
"""

from __future__ import annotations

from typing import Any

import torch


class _Neutral:
    """What both have in common: tensors meet them through __torch_function__."""

    name = ""

    def __repr__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        raise TypeError(f"{self.name} stands for a tensor that is not there and has no truth value")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """`tensor + ZERO` and the like: the tensor's operators ask here."""
        operator = _OPERATORS.get(func)
        if operator is None or len(args) != 2 or kwargs:
            raise TypeError(f"{func} of {args}: only + - * / @ know a tensor that is not there")
        left, right = args
        if operator == "rsub":
            left, right, operator = right, left, "sub"
        if isinstance(right, _Neutral):
            return right._right_of(operator, left)
        if operator == "add":
            return left + right
        if operator == "sub":
            return left - right
        if operator == "matmul":
            return left @ right
        return left * right if operator == "mul" else left / right

    def _right_of(self, operator: str, left: Any) -> Any:
        raise NotImplementedError


def _operators() -> dict[Any, str]:
    """The functions that `+ - * / @` of a tensor become, and their names in torch."""
    spelled = {
        "add": ("add", "__add__", "__radd__"),
        "sub": ("sub", "__sub__", "subtract"),
        "rsub": ("rsub", "__rsub__"),
        "mul": ("mul", "__mul__", "__rmul__", "multiply"),
        "div": ("div", "__truediv__", "true_divide"),
        "matmul": ("matmul", "__matmul__"),
    }
    homes: tuple[Any, ...] = (torch, torch.Tensor)
    return {
        getattr(home, name): operator
        for operator, names in spelled.items()
        for name in names
        for home in homes
        if hasattr(home, name)
    }


_OPERATORS = _operators()


class _Zero(_Neutral):
    """Zero of any shape: whatever is linear in it is zero."""

    name = "ZERO"

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return -other

    def __rsub__(self, other: Any) -> Any:
        return other

    def __mul__(self, other: Any) -> Any:
        return self

    __rmul__ = __truediv__ = __matmul__ = __mul__

    def __neg__(self) -> Any:
        return self

    @property
    def mH(self) -> Any:
        return self

    mT = mH

    def _right_of(self, operator: str, left: Any) -> Any:
        if operator == "div":
            raise ZeroDivisionError(f"{left} / ZERO")
        return self if operator in ("mul", "matmul") else left

    def __getattr__(self, name: str) -> Any:
        """Tensor methods that are linear: sums, views, casts."""
        if name not in _LINEAR:
            raise AttributeError(f"{name} of a gradient that is not there")
        return lambda *args, **kwargs: self


class _One(_Neutral):
    """One of any shape: whatever it multiplies stays as it is."""

    name = "ONE"

    def __mul__(self, other: Any) -> Any:
        return other

    __rmul__ = __mul__

    def _right_of(self, operator: str, left: Any) -> Any:
        if operator not in ("mul", "div"):
            raise TypeError(f"{left} {operator} ONE: a weight that is not there only multiplies")
        return left

    def __getattr__(self, name: str) -> Any:
        """Tensor methods that only move elements."""
        if name not in _MOVES:
            raise AttributeError(f"{name} of a weight that is not there")
        return lambda *args, **kwargs: self


_VIEWS = {
    *("expand", "flatten", "movedim", "narrow", "permute", "reshape", "select", "squeeze"),
    "transpose",
}
_MOVES = _VIEWS | {"conj", "contiguous", "resolve_conj", "to", "unflatten", "unsqueeze", "view"}
_LINEAR = _MOVES | {
    "cumsum",
    "diag_embed",
    "diagonal",
    "flip",
    "masked_fill",
    "mean",
    "neg",
    "sum",
    "tril",
    "triu",
}

# They stand for tensors in formulas that say what they return.
ZERO: Any = _Zero()
ONE: Any = _One()
