"""The operators that are a convolution: cuDNN's, MIOpen's and oneDNN's, and what backends override.

Each is aten.convolution with the arguments by other names and in another order, without some, and
with flags that choose a kernel. torch has no rules for them and loops over the examples.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from normpass.decomps.batching import batching_rule, front
from normpass.decomps.batching.convolution import (
    RULES,
    Batched,
    Convolution,
    convolution,
    sample,
)
from normpass.decomps.registry import find_op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.decomps.batching import Outputs

_FLAGS = ("benchmark", "deterministic", "cudnn_enabled", "allow_tf32")


def _sample(names: Sequence[str]) -> dict[str, Any]:
    """For the tests: the numbers and flags among these names."""
    known = {**sample(), **dict.fromkeys(_FLAGS, False), "alpha": 2}
    return {name: known[name] for name in names if name in known}


def _spelling(name: str, source: str = "", *, transposed: bool = False) -> None:
    """Enters an operator. transposed: where it has no argument that says so."""
    op = find_op(f"aten.{name}")
    if op is None:
        return
    names = [argument.name for argument in op._schema.arguments]
    x = "self" if "self" in names else "input"
    kernel = "c d 3 3" if transposed else "d c 3 3"
    tensors = {x: "n c s m", "weight": kernel, "bias": "d", "z": "n d s m"}
    shapes = ", ".join(f"{n}: v {tensors[n]}" for n in names if n in tensors)

    @batching_rule(
        op,
        source=source or f"{RULES}: convolution_batch_rule",
        shapes=f"{shapes} -> y: v n d s m",
        why="" if source else "torch has no rule for this operator",
        sample=partial(_sample, names),
    )
    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> Outputs:
        """y_v = x_v * w_v + b_v; of a relu max(0, y), of an add_relu max(0, y + alpha * z)"""
        given, dims = (dict(zip(names, values, strict=True)) for values in (args, in_dims))
        rank = len(given["stride"])
        given = {"transposed": transposed, "output_padding": [0] * rank, **given}
        of = (Batched(given.get(n), dims.get(n)) for n in (x, "weight", "bias"))
        y, dim = convolution(Convolution.of(given), info.batch_size, *of)
        if "z" in names:
            scale = 1 if given["alpha"] is None else given["alpha"]
            y, dim = front(y, dim) + scale * front(given["z"], dims["z"]), 0
        return (y.relu() if "relu" in name else y,), (dim,)


_spelling("_convolution.default", f"{RULES}: _convolution_decomp")
_spelling("convolution_overrideable.default")
_spelling("cudnn_convolution.default")
_spelling("cudnn_convolution_transpose.default", transposed=True)
_spelling("cudnn_convolution_relu.default")
_spelling("cudnn_convolution_add_relu.default")
_spelling("miopen_convolution.default")
_spelling("miopen_convolution_transpose.default", transposed=True)
_spelling("miopen_depthwise_convolution.default")
_spelling("miopen_convolution_relu.default")
_spelling("miopen_convolution_add_relu.default")
_spelling("mkldnn_convolution.default")
