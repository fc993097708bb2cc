"""The operators that are batch norm: what batch.py computes, entered for each of them.

They differ in the names and the order of arguments, in what they leave out, and in what they
return besides. A rule is written once, for native_batch_norm or its backward.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.batching import batching_rule, outputs
from normpass.decomps.conventions import Result, as_input, like
from normpass.decomps.norms.batch import (
    NEEDS,
    batch_norm,
    batch_norm_backward,
    batch_norm_backward_batch_rule,
    batch_norm_backward_derivative,
    batch_norm_batch_rule,
)
from normpass.decomps.norms.cudnn_checks import CHECKS
from normpass.decomps.norms.standardized import ALL, EPS
from normpass.decomps.registry import decomposition, find_op, register_rule

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor
    from torch._ops import OpOverload

    from normpass.decomps.batching import Outputs

RULES = "aten/src/ATen/functorch/BatchRulesNorm.cpp"
NATIVE = "aten/src/ATen/native/Normalization.cpp"
CUDNN = "aten/src/ATen/native/cudnn/BatchNorm.cpp"


def _names(op: OpOverload) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


# The common names of the arguments, in their common order.
FORWARD = _names(torch.ops.aten.native_batch_norm.default)
BACKWARD = _names(torch.ops.aten.native_batch_norm_backward.default)

# What other operators call the same argument. The save_var of a backward is no variance.
_SAME = {
    "exponential_average_factor": "momentum",
    "epsilon": "eps",
    "grad_output": "grad_out",
    "reserveSpace": "reserve",
    "save_var": "save_invstd",
    "update": "train",
}
# The libraries whose own operators these are.
VENDORS = ("cudnn", "miopen")
# What the mathematics calls them.
_SHORT = {"grad_out": "g", "input": "x", "save_invstd": "save_rstd"}
# What is no c.
_AXES = {"grad_out": "n c *s", "input": "n c *s", "reserve": "r"}


def _own_names(op: OpOverload) -> dict[str, str]:
    """What this operator calls each of the common arguments, in its own order."""
    return {_SAME.get(name, name): name for name in _names(op)}


def _in_order(
    op: OpOverload, values: Sequence[Any], names: Sequence[str], fixed: Mapping[str, Any]
) -> list[Any]:
    """The arguments `names`, from the values of this operator's and from what it takes as fixed."""
    given = {**fixed, **dict(zip(_own_names(op), values, strict=True))}
    return [given[name] for name in names]


def _tensors(op: OpOverload, names: Mapping[str, str], batch: str = "") -> str:
    """The left of a rule's shapes: this operator's tensors. batch: the axis of vmap before all."""
    types = {argument.name: str(argument.type) for argument in op._schema.arguments}
    return ", ".join(
        f"{names[name]}: {batch}{_AXES.get(name, 'c')}"
        for name, own in _own_names(op).items()
        if "Tensor" in types[own]
    )


def _flat(values: Sequence[Any]) -> list[Any]:
    """Parameters as c: the vendors' wrappers count their elements, of whatever shape."""
    return [v if v is None or v.dim() == 1 else v.flatten() for v in values]


def _shaped(gradient: Tensor | None, weight: Tensor | None) -> Tensor | None:
    """The gradient of a parameter with the weight's shape."""
    if gradient is None or weight is None or weight.dim() == 1:
        return gradient
    return gradient.view(weight.shape)


# --- forward ------------------------------------------------------------------------------------

_CHECKED = "what the wrapper refuses is its error here"
_RESERVE = "the reserve, which is cuDNN's own, stays empty"


def _forward(
    name: str, source: str, why: str = "", *, composition: bool = False, **fixed: Any
) -> None:
    """Enters an operator as a batching rule and, if asked, as what it is for autograd.

    source, why: of the batching rule. fixed: the arguments that the operator does not have.
    """
    op = find_op(f"aten.{name}")
    if op is None:
        return
    own, returns = _own_names(op), len(op._schema.returns)
    # A fourth result is cuDNN's buffer; running statistics that are no results are updated in
    # place; cuDNN and MIOpen save nothing in evaluation mode.
    reserve, functional = returns in (4, 6), returns > 4
    vendors, check = name.startswith(VENDORS), CHECKS.get(op)
    constants = range(1, returns)

    @wraps(batch_norm)
    def autograd(*args: Any) -> tuple[Tensor, ...]:
        if check is not None:
            check(*args)
        x, *rest = _in_order(op, args, FORWARD, fixed)
        y, *saved = batch_norm(x, *_flat(rest[:4]), *rest[4:], vendors=vendors)
        return y, *saved, *([y.new_empty(0, dtype=torch.uint8)] if reserve else [])

    if composition:
        register_rule(
            "autograd",
            op,
            source=f"{NATIVE}: batch_norm_cpu" if check is None else f"{CUDNN}: cudnn_batch_norm",
            shapes=f"{_tensors(op, own)} -> y: n c *s, save_mean: c, save_invstd: c"
            + ", reserve: 0" * reserve,
            why="; ".join([_RESERVE] * reserve + [_CHECKED] * (check is not None)),
            constants=constants,
        )(autograd)

    unasked = f"{_RESERVE}: no backward of ours asks for it" * reserve

    @batching_rule(
        op,
        source=source,
        shapes=f"{_tensors(op, own, 'v ')} -> y: v n c *s, mean: v c, rstd: v c"
        + ", reserve: 0" * reserve
        + ", new_mean: v c, new_var: v c" * functional,
        why="; ".join(filter(None, (why, unasked))),
        constants=constants,
    )
    @wraps(batch_norm_batch_rule)
    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> Outputs:
        dims = _in_order(op, in_dims, FORWARD, dict.fromkeys(fixed))
        values = _in_order(op, args, FORWARD, fixed)
        y, mean, rstd, *running = batch_norm_batch_rule(
            dims, *values, vendors=vendors, functional=functional
        )
        empty = [(y[0].new_empty((1, 0), dtype=torch.uint8), False)] if reserve else []
        return outputs(y, mean, rstd, *empty, *running)


_FOLDED = f"{RULES}: batch_norm_batch_rule"
_LEGIT = f"{RULES}: _native_batch_norm_legit"
_UPDATE = f"{NATIVE}: _batch_norm_with_update_cpu"
_IN_PLACE = "running statistics are written through views, so that the update is not lost in a copy"
_NONE = "torch has no rule for this operator"
_TRAIN: dict[str, Any] = {"training": True}
_EVAL: dict[str, Any] = {"training": False}
_NO_STATS: dict[str, Any] = {"running_mean": None, "running_var": None}

_forward("native_batch_norm.default", _FOLDED, _IN_PLACE, composition=True)
_forward("cudnn_batch_norm.default", _FOLDED, composition=True)
_forward("miopen_batch_norm.default", _FOLDED, composition=True)
_legit = "_native_batch_norm_legit"
_forward(f"{_legit}.default", f"{_LEGIT}_batch", composition=True)
_forward(f"{_legit}.no_stats", f"{_LEGIT}_no_stats_batch", composition=True, **_NO_STATS)
_forward(f"{_legit}_functional.default", f"{NATIVE}: batch_norm_cpu", _NONE)
_forward(
    f"{_legit}_no_training.default", f"{NATIVE}: _batch_norm_legit_no_training", _NONE, **_EVAL
)
_forward("_batch_norm_with_update.default", _UPDATE, _NONE, composition=True, **_TRAIN)
_forward("_batch_norm_with_update_functional.default", _UPDATE, _NONE, **_TRAIN)
_forward("_batch_norm_no_update.default", f"{NATIVE}: _batch_norm_no_update", _NONE, **_EVAL)


# --- backward -----------------------------------------------------------------------------------

_PARAMETER = Result(like("weight", "running_mean", "save_mean", "input"))
_RESULTS = (Result(like("input"), as_input), _PARAMETER, _PARAMETER)


def _backward(
    name: str, native: str, rules: str, *, why: str = "", rules_why: str = "", **fixed: Any
) -> None:
    """Enters an operator as a decomposition, a batching rule, and what it is for autograd.

    native, why: source of the decomposition; rules, rules_why: of the batching rule. fixed: the
    arguments that the operator does not have.
    """
    op = find_op(f"aten.{name}")
    if op is None:
        return
    own, short = _own_names(op), {n: _SHORT.get(n, n) for n in _own_names(op)}

    def backward(*args: Any) -> tuple[Tensor | None, ...]:
        g, x, *rest = _in_order(op, args, BACKWARD, fixed)
        dx, *gradients = batch_norm_backward(g, x, *_flat(rest[:5]), *rest[5:])
        return dx, *(_shaped(u, rest[0]) for u in gradients)

    backward.__doc__ = batch_norm_backward.__doc__
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in short.values()]
    backward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    decomposition(
        op,
        source=native,
        shapes=f"{_tensors(op, short)} -> dx: n c *s, dweight: c, dbias: c",
        results=_RESULTS,
        why=why,
        check=CHECKS.get(op),
    )(backward)

    @batching_rule(
        op,
        source=rules,
        shapes=f"{_tensors(op, own, 'v ')} -> dx: v n c *s, dweight: v c, dbias: v c",
        why=rules_why,
    )
    @wraps(batch_norm_backward_batch_rule)
    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> Outputs:
        dims = _in_order(op, in_dims, BACKWARD, dict.fromkeys(fixed))
        values = _in_order(op, args, BACKWARD, fixed)
        return outputs(*batch_norm_backward_batch_rule(dims, *values))

    def saved(input: Tensor) -> dict[str, Tensor]:
        _, mean, rstd = torch.ops.aten.native_batch_norm(
            input, None, None, None, None, True, 0, EPS
        )
        return {own["save_mean"]: mean, own["save_invstd"]: rstd}

    gradients = {"grad_out": "n c *s", "input": "n c *s", "weight": "c"}
    results = ", ".join(f"d{own[n]}: {axes}" for n, axes in gradients.items())

    @register_rule(
        "double_backward",
        op,
        source=f"tools/autograd/derivatives.yaml: {name.partition('.')[0]}",
        shapes=f"{_tensors(op, own)} -> {results}",
        sample=saved,
    )
    @wraps(batch_norm_backward_derivative)
    def derivative(
        grads: Sequence[Tensor | None],
        *args: Any,
        needs: Collection[str] = tuple(own[n] for n in NEEDS),
    ) -> dict[str, Tensor | None]:
        wanted = [n for n in NEEDS if own[n] in needs]
        values = zip(BACKWARD, _in_order(op, args, BACKWARD, fixed), strict=True)
        found = batch_norm_backward_derivative(grads, **dict(values), needs=wanted)
        return {own[n]: value for n, value in found.items()}


_TRAINING = {"train": True, "output_mask": ALL}
_INVERSE = "save_var is the inverse deviation"

_backward(
    "native_batch_norm_backward.default",
    f"{NATIVE}: batch_norm_backward_cpu; "
    "aten/src/ATen/native/cuda/Normalization.cu: batch_norm_backward_cuda",
    f"{RULES}: batch_norm_backward_plumbing",
    rules_why="two sums serve the three gradients; the C++ rule takes each of them twice",
)
_backward(
    "batch_norm_backward.default",
    f"{NATIVE}: _new_batch_norm_backward_cpu; "
    "aten/src/ATen/native/cuda/Normalization.cu: _new_batch_norm_backward_cuda",
    f"{NATIVE}: _new_batch_norm_backward_cpu",
    why=f"the schema's {_INVERSE}; the reserve is cuDNN's own",
    rules_why=f"{_NONE}; its {_INVERSE}",
)
_backward(
    "cudnn_batch_norm_backward.default",
    f"{CUDNN}: cudnn_batch_norm_backward",
    f"{RULES}: batch_norm_backward_plumbing, cudnn_batch_norm_backward_wrapper",
    why=f"only called in train mode; the schema's {_INVERSE}; {_CHECKED}",
    rules_why=f"only called in train mode; its {_INVERSE}",
    **_TRAINING,
)
_backward(
    "miopen_batch_norm_backward.default",
    "aten/src/ATen/native/miopen/BatchNorm_miopen.cpp: miopen_batch_norm_backward",
    f"{RULES}: batch_norm_backward_plumbing, miopen_batch_norm_backward_wrapper",
    why=f"only called in train mode; the schema's {_INVERSE}",
    rules_why=f"only called in train mode; its {_INVERSE}",
    **_TRAINING,
)
