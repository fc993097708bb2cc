"""One table: each pointwise function of a region and its expression in every dialect.

The functions' names and the ATen ops that mean them are in passes/pointwise.py. A row here says how
C++ (normpass.h supplies what numbers and vectors spell differently), Triton and eager PyTorch write
it. `{0}`, `{1}`, ... stand for the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from normpass.passes.region import Region


@dataclass(frozen=True)
class Expression:
    """cpp, triton: expressions. eager: the function on tensors. truth: which arguments are truth
    values ("0" for the first, ...), and "r" if the result is one.
    """

    cpp: str
    triton: str
    eager: Callable[..., torch.Tensor]
    truth: str = ""


def _same(expression: str, eager: Callable[..., torch.Tensor], truth: str = "") -> Expression:
    return Expression(expression, expression, eager, truth)


def _rounding(cpp: str, triton: str, dtype: torch.dtype) -> Expression:
    """What a type keeps of a number, as a number again. triton: how it is one of the type."""
    return Expression(
        f"round_to<{cpp}>({{0}})", f"{triton}.to({{0}}.dtype)", lambda x: x.to(dtype).to(x.dtype)
    )


POINTWISE: dict[str, Expression] = {
    # arithmetic
    "add": _same("{0} + {1}", torch.add),
    "sub": _same("{0} - {1}", torch.sub),
    "mul": _same("{0} * {1}", torch.mul),
    "div": Expression("{0} / {1}", "lib.divide({0}, {1})", torch.div),
    "neg": Expression("neg_({0})", "{0} * -1.0", torch.neg),
    "abs": Expression("abs_({0})", "tl.abs({0})", torch.abs),
    "maximum": Expression("maximum_({0}, {1})", "lib.maximum({0}, {1})", torch.maximum),
    "minimum": Expression("minimum_({0}, {1})", "lib.minimum({0}, {1})", torch.minimum),
    # powers and exponentials
    "sqrt": Expression("sqrt_({0})", "lib.sqrt({0})", torch.sqrt),
    "rsqrt": Expression("rsqrt_({0})", "tl.rsqrt({0})", torch.rsqrt),
    "reciprocal": Expression("reciprocal_({0})", "lib.reciprocal({0})", torch.reciprocal),
    "pow": Expression("pow_({0}, {1})", "libdevice.pow({0}, {1})", torch.pow),
    "exp": Expression("exp_({0})", "libdevice.exp({0})", torch.exp),
    "expm1": Expression("expm1_({0})", "libdevice.expm1({0})", torch.expm1),
    "log": Expression("log_({0})", "libdevice.log({0})", torch.log),
    "log1p": Expression("log1p_({0})", "libdevice.log1p({0})", torch.log1p),
    # sigmoids and waves
    "tanh": Expression("tanh_({0})", "libdevice.tanh({0})", torch.tanh),
    "sigmoid": Expression("sigmoid_({0})", "lib.sigmoid({0})", torch.sigmoid),
    "erf": Expression("erf_({0})", "libdevice.erf({0})", torch.erf),
    "sin": Expression("sin_({0})", "libdevice.sin({0})", torch.sin),
    "cos": Expression("cos_({0})", "libdevice.cos({0})", torch.cos),
    "round": Expression("round_({0})", "libdevice.rint({0})", torch.round),
    "floor": Expression("floor_({0})", "libdevice.floor({0})", torch.floor),
    "ceil": Expression("ceil_({0})", "libdevice.ceil({0})", torch.ceil),
    "trunc": Expression("trunc_({0})", "libdevice.trunc({0})", torch.trunc),
    # rounding; of doubles by way of float32, as torch does
    "to_bfloat16": _rounding("c10::BFloat16", "{0}.to(tl.float32).to(tl.bfloat16)", torch.bfloat16),
    "to_float16": _rounding("c10::Half", "{0}.to(tl.float32).to(tl.float16)", torch.float16),
    "to_int8": _rounding("int8_t", "{0}.to(tl.int32).to(tl.int8)", torch.int8),
    "to_uint8": _rounding("uint8_t", "{0}.to(tl.int32).to(tl.uint8)", torch.uint8),
    "to_float8_e4m3fn": _rounding(
        "c10::Float8_e4m3fn",
        "lib.from_float8_e4m3fn(lib.to_float8_e4m3fn({0}))",
        torch.float8_e4m3fn,
    ),
    "to_float8_e5m2": _rounding(
        "c10::Float8_e5m2", "lib.from_float8_e5m2(lib.to_float8_e5m2({0}))", torch.float8_e5m2
    ),
    # comparisons and choices
    "eq": _same("{0} == {1}", torch.eq, "r"),
    "ne": _same("{0} != {1}", torch.ne, "r"),
    "lt": _same("{0} < {1}", torch.lt, "r"),
    "le": _same("{0} <= {1}", torch.le, "r"),
    "gt": _same("{0} > {1}", torch.gt, "r"),
    "ge": _same("{0} >= {1}", torch.ge, "r"),
    "logical_and": Expression("both_({0}, {1})", "lib.both({0}, {1})", torch.logical_and, "01r"),
    "logical_or": Expression("either_({0}, {1})", "lib.either({0}, {1})", torch.logical_or, "01r"),
    "logical_not": Expression("not_({0})", "~({0})", torch.logical_not, "0r"),
    "where": Expression("where_({0}, {1}, {2})", "tl.where({0}, {1}, {2})", torch.where, "0"),
}


def truth_values(region: Region) -> frozenset[str]:
    """The names of a region's values that are truth values: boolean inputs, comparisons and what
    combines them.
    """
    truth = {buffer.name for buffer in region.inputs if buffer.dtype is torch.bool}
    truth |= {op.name for op in region.ops if op.fn in POINTWISE and "r" in POINTWISE[op.fn].truth}
    return frozenset(truth)
