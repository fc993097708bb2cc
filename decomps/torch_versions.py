"""Facts that differ between the versions of torch that normpass supports: 2.11 to 2.15.

One name for each, which rules and tests ask in place of a version. A fact says what torch itself
does. Tried on 2.11.0, 2.13.0 and 2.15.0; of 2.14 what is derivatives, on 2.14.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


def release(version: str) -> tuple[int, int]:
    """(2, 15) of "2.15.0+cu132" and of "2.15.0a0+git1234": major and minor."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


RELEASE = release(torch.__version__)

# The subgradient of clamp, clamp_min and clamp_max at a bound that is a number: one, and from 2.14
# on zero, the smallest, as relu and hardtanh have it (pytorch 184574, 191142).
CLAMP_PASSES_AT_BOUNDS = RELEASE < (2, 14)

# Bessel functions (special.bessel_*, special.modified_bessel_*) have derivatives (pytorch 189872).
# Before, autograd takes them for constants, so that a derivative of a slope made of them is lost.
BESSEL_HAS_DERIVATIVES = RELEASE >= (2, 15)

# The derivatives of special.i1 and special.i1e at NaN are 1/2. The rules say NaN in every version.
I1_LOSES_NAN = RELEASE < (2, 15)

# The gradient of group norm's mean and deviation is undefined where its result has none.
GROUP_MEAN_ALONE_IS_LOST = RELEASE < (2, 14)

# Inputs can be kept as hooks for saved tensors keep them (_make_saved_tensor): a checkpoint around
# compiled code has second derivatives.
CHECKPOINTS_KEEP_INPUTS = RELEASE >= (2, 12)

# Dynamo refuses an input with a tangent, and runs it in eager mode where that is allowed.
DUAL_INPUTS_ARE_REFUSED = RELEASE >= (2, 14)

# Group norm's backward decomposes into other products of the same factors.
GROUP_NORM_BACKWARD_REWRITTEN = RELEASE >= (2, 15)

# Group norm refuses an input without spatial extent.
GROUP_NORM_NEEDS_EXTENT = RELEASE >= (2, 14)

# grid_sampler's second derivatives are formulas, and not refused.
GRID_SAMPLER_TWICE = RELEASE >= (2, 13)

# make_fx with symbolic sizes gives the states of an LSTM an axis of size one too many.
LSTM_TRACE_HAS_AN_AXIS_MORE = RELEASE <= (2, 11)

# The meta function of miopen_batch_norm says for saved statistics what MIOpen does: the weight's
# dtype. 2.11's says the input's.
MIOPEN_META_IS_RIGHT = RELEASE > (2, 11)

# Dynamo traces a Hessian of several arguments.
HESSIAN_OF_SEVERAL_COMPILES = RELEASE > (2, 11)

# Dynamo can be told to leave a whole frame to eager mode, and not to go on after a graph break.
FRAMES_CAN_BE_SKIPPED = RELEASE > (2, 11)

# autograd.Function.apply takes arguments by name.
FUNCTION_TAKES_KEYWORDS = RELEASE > (2, 11)

# c10/core/ScalarType.h: numbers of the dtypes that torch 2.11 hands to an operator in Python as
# such where its schema says ScalarType[] (later versions hand it dtypes).
_SCALAR_TYPES = {
    **dict(
        enumerate(
            (
                *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
                *(torch.float16, torch.float32, torch.float64),
                *(torch.complex32, torch.complex64, torch.complex128, torch.bool),
            )
        )
    ),
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    25: torch.float8_e5m2fnuz,
    26: torch.float8_e4m3fnuz,
    27: torch.uint16,
    28: torch.uint32,
    29: torch.uint64,
}


def dtypes(given: Iterable[torch.dtype | int]) -> list[torch.dtype]:
    """The dtypes of a ScalarType[] argument."""
    return [_SCALAR_TYPES[each] if isinstance(each, int) else each for each in given]
