"""What all dialects write alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import sympy
import torch

if TYPE_CHECKING:
    from normpass.backend.program.tree import LoopAxis
    from normpass.passes.region import Region


class Spelling(NamedTuple):
    """What dialects call a type of elements. bits: what Triton makes of it, where it is read and
    written as its bits.
    """

    cpp: str
    triton: str
    bits: str = ""


TYPES = {
    torch.float64: Spelling("double", "fp64"),
    torch.float32: Spelling("float", "fp32"),
    torch.float16: Spelling("c10::Half", "fp16"),
    torch.bfloat16: Spelling("c10::BFloat16", "bf16"),
    torch.bool: Spelling("bool", "i1"),
    torch.int32: Spelling("int32_t", "i32"),
    torch.int64: Spelling("int64_t", "i64"),
    torch.int8: Spelling("int8_t", "i8"),
    torch.uint8: Spelling("uint8_t", "u8"),
    torch.float8_e4m3fn: Spelling("c10::Float8_e4m3fn", "u8", "float8_e4m3fn"),
    torch.float8_e5m2: Spelling("c10::Float8_e5m2", "u8", "float8_e5m2"),
}


def index_expression(expression: sympy.Expr, over: str = "/") -> str:
    """A size as text: sums of products of integers and `n_<name>`, divided by an integer if need
    be. over: the operator that divides integers, `//` in Python.
    """
    expression = sympy.expand(expression)
    terms = []
    for term in sympy.Add.make_args(expression):
        numerator, divisor = term.as_numer_denom()
        factors = []
        for factor in sympy.Mul.make_args(numerator):
            base, power = factor.as_base_exp()
            factors += [f"n_{base}" if base.is_Symbol else str(base)] * int(power)
        terms.append(" * ".join(factors) + (f" {over} {divisor}" if divisor != 1 else ""))
    return " + ".join(terms)


def extent_name(axis: LoopAxis, region: Region) -> str:
    """What an extent is called. That of a block of a run-time size is not the size's."""
    is_size = axis.blocks is not None and axis.name in region.runtime_sizes
    return f"block_{axis.name}" if is_size else f"n_{axis.name}"


def factor(text: str) -> str:
    """An expression's text as a factor of a product."""
    return f"({text})" if " + " in text else text
