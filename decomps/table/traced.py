"""Operators whose derivatives are the table's while something is traced: where PyTorch's own are
wrong, slow, or a graph that grows with a size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from normpass.decomps.activation.kernels import recorded, weighted
from normpass.decomps.activation.levels import in_transform
from normpass.decomps.norms.weight_norm import weight_norm
from normpass.decomps.registry import DECLARED, by_op, declared_derivatives, find_op
from normpass.decomps.table.nodes import differentiated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from normpass.decomps.activation.torch_internals import OpOverload

    Function = Callable[..., Any]

# Operator -> why.
BETTER = {
    "aten.linalg_householder_product.default": "a graph of 20 nodes a column, and a loop over them",
    "aten.ormqr.default": "a graph of 20 nodes a column, and a loop over them",
    "aten._linalg_det.default": "an svd for every matrix, and NaN from the third order on: its "
    "factors are orthogonal, with singular values that are all the same",
    "aten.logcumsumexp.default": "logarithms of positive and negative gradients apart; NaN after "
    "the second order",
    "aten.scatter_reduce.two": "a wrong tangent of a product of several, half a gradient of a "
    "maximum without self",
    "aten.index_reduce.default": "no forward mode",
    "aten.convolution_backward.default": "a weight's gradient as a convolution of whole images",
}
# The same below levels of torch.func alone: for the tape PyTorch's own is as short, and as fast.
BETTER_IN_TRANSFORMS = {
    "aten.cumprod.default": "a graph of 10 nodes a column",
}

# Operator -> what it is made of, which is differentiated in its place: while something is traced,
# and by register(eager=True) wherever a derivative may be asked for.
TAKEN_APART: dict[str, Function] = {"aten._weight_norm_interface.default": weight_norm}


def kernels() -> dict[OpOverload, Callable[[Function], Function]]:
    """Operators and, of what the dispatcher would call for Autograd, what stands before it."""
    found = {op: partial(_instead, differentiated(op)) for op in _there(BETTER)}
    found |= {
        op: partial(_in_transforms, differentiated(op)) for op in _there(BETTER_IN_TRANSFORMS)
    }
    found |= {op: partial(_backward, op) for op in by_op("double_backward") if _is_torchs(op)}
    found |= {op: partial(_instead, kernel) for op, kernel in taken_apart().items()}
    return found | {op: partial(_instead, kernel) for op, kernel in of_users().items()}


def _there(names: Iterable[str]) -> list[OpOverload]:
    return [op for op in map(find_op, names) if op is not None]


def taken_apart() -> dict[OpOverload, Function]:
    """Operators of TAKEN_APART and what they are made of."""
    return {op: TAKEN_APART[str(op)] for op in _there(TAKEN_APART)}


def _is_torchs(op: OpOverload) -> bool:
    return op.namespace == "aten"  # the formulas are operators of ours


def _backward(op: OpOverload, own: Function) -> Function:
    """A norm's backward, for torch.autograd.grad(create_graph=True) in what is traced. torch's own
    node takes what was saved for constants, and batch norm's sizes for known.
    """
    node, given = differentiated(op), weighted(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return node(*given(args, kwargs)) if recorded() else own(*args, **kwargs)

    return kernel


def _instead(kernel: Function, _: Function) -> Function:
    return kernel


def _in_transforms(kernel: Function, own: Function) -> Function:
    return lambda *args, **kwargs: (kernel if in_transform() else own)(*args, **kwargs)


def of_users() -> dict[OpOverload, Function]:
    """The kernels for Autograd of torch's own operators whose derivative somebody has declared."""
    ops = {op for _, op in DECLARED if not isinstance(op, str) and op.namespace == "aten"}
    return {op: differentiated(op) for op in ops if declared_derivatives(op)}
