"""The operators that are batch norm: one order of arguments for all of them.

They differ in the names and the order of arguments, in what they leave out, and in what they
return besides. A rule is written once, for native_batch_norm or its backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._ops import OpOverload

FORWARD = (
    "input",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "training",
    "momentum",
    "eps",
)
BACKWARD = (
    "grad_out",
    "input",
    "weight",
    "running_mean",
    "running_var",
    "save_mean",
    "save_invstd",
    "train",
    "eps",
    "output_mask",
)

# What other operators call the same argument. The save_var of a backward is no variance.
_SAME = {
    "exponential_average_factor": "momentum",
    "epsilon": "eps",
    "grad_output": "grad_out",
    "reserveSpace": "reserve",
    "save_var": "save_invstd",
    "update": "train",
}

# What is no c.
_AXES = {"grad_out": "n c *s", "input": "n c *s", "reserve": "r"}


def in_order(
    op: OpOverload, values: Sequence[Any], names: Sequence[str], **fixed: Any
) -> list[Any]:
    """The arguments `names`, from the values of this operator's and from what it takes as fixed."""
    given = {**fixed, **dict(zip(own_names(op), values, strict=True))}
    return [given[name] for name in names]


def own_names(op: OpOverload) -> dict[str, str]:
    """What this operator calls each of the common arguments, in its own order."""
    names = [argument.name for argument in op._schema.arguments]
    return {_SAME.get(name, name): name for name in names}


def tensors(op: OpOverload, batch: str = "") -> str:
    """The left of a rule's shapes: this operator's tensors. batch: the axis of vmap before all."""
    types = {argument.name: str(argument.type) for argument in op._schema.arguments}
    return ", ".join(
        f"{own}: {batch}{_AXES.get(name, 'c')}"
        for name, own in own_names(op).items()
        if "Tensor" in types[own]
    )


def has_reserve(op: OpOverload) -> bool:
    """Whether a fourth result is a buffer of cuDNN's own, which rules leave empty."""
    return len(op._schema.returns) in (4, 6)


def is_functional(op: OpOverload) -> bool:
    """Whether new running statistics are results, instead of an update in place."""
    return len(op._schema.returns) > 4


def is_vendors(op: OpOverload) -> bool:
    """Whether this is cuDNN's or MIOpen's, which save nothing in evaluation mode."""
    return op._schema.name.startswith(("aten::cudnn", "aten::miopen"))
