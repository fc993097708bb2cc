"""Rows of our own, in the language of derivatives.yaml: where upstream's says what only C++ can."""

from __future__ import annotations

from normpass.decomps.table.derivatives_yaml import Entry

# Operator -> the fields that take the place of upstream's.
OWN: dict[str, dict[tuple[str, ...], str]] = {
    # upstream hands a lambda to a loop
    "roll": {("self",): "grad.roll(negated(reversed_list(shifts)), reversed_list(dims))"},
    # a quotient of integers, which C++ rounds down
    "channel_shuffle": {
        ("self",): "channel_shuffle(grad, floor_divide(grad.sym_size(1), groups))",
        ("result",): "auto_linear",
    },
    # what is exact to any order; from torch 2.14 on a dispatcher chooses between it and a kernel
    "native_group_norm": {
        ("input", "weight", "bias"): (
            "infinitely_differentiable_native_group_norm_backward(grads[0], grads[1], grads[2], "
            "input, result1, result2, weight, N, C, HxW, group, eps, grad_input_mask)"
        )
    },
    # upstream's formulas read the tangents from within the tensors of the list
    "cat": {("result",): "auto_linear"},
    "stack": {("result",): "auto_linear"},
    "block_diag": {("result",): "auto_linear"},
}


def with_own(entry: Entry) -> Entry:
    """A row with what this file says instead."""
    own = OWN.get(entry.op)
    if own is None:
        return entry
    return Entry(entry.schema, {**entry.fields, **own}, entry.differentiable)
