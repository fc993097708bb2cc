"""Rows of our own, in the language of derivatives.yaml: where upstream's says what only C++ can."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from normpass.decomps.table.derivatives_yaml import DEFAULT, Entry, entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Of a matrix without an inverse infinite, and no error.
_TRACE = "std::get<0>(linalg_solve_ex(A_p, A_t)).diagonal(0, -2, -1).sum(-1)"

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
    # upstream's asks the result for the angle, which it does not tell where abs is negative or zero
    "polar": {
        ("abs", "angle"): (
            "{real(grad * polar(ones_like(abs), -angle)), imag(grad * result.conj())}"
        )
    },
    # upstream's leaves out the scale: how often each word is there
    "embedding_dense_backward": {
        ("grad_output",): (
            "embedding_dense_double_backward(scale_grad_by_freq ? grad / embedding_dense_backward("
            "ones_like(grad_output), indices, num_weights, padding_idx, false).clamp_min(1) : grad,"
            " indices, padding_idx)"
        )
    },
    # upstream's formulas read the tangents from within the tensors of the list
    "cat": {("result",): "cat_jvp(tensors, tensors_t, dim)"},
    "stack": {("result",): "stack_jvp(tensors, tensors_t, dim)"},
    "block_diag": {("result",): "block_diag_jvp(tensors, tensors_t)"},
    # upstream's solve with an LU that is a constant to autograd: exact to first order alone
    "_linalg_det": {
        ("result",): (
            "(linalg_det_backward(ones_like(result), result, A_p, LU, pivots).conj() * A_t)"
            ".sum({-2, -1})"
        )
    },
    "_linalg_slogdet": {
        ("sign", "logabsdet"): (
            f"{{sign.is_complex() ? sign * ({_TRACE} - real({_TRACE})) : zeros_like(sign), "
            f"real({_TRACE})}}"
        )
    },
    "_linalg_solve_ex": {
        ("result",): (
            "left ? solve_jvp(result, A_p, A_t, B_t) "
            ": solve_jvp(result.mT(), A_p.mT(), A_t.mT(), B_t.mT()).mT()"
        )
    },
    # upstream's adds the bound to the tangent
    **{
        f"_foreach_{name}.{overload}": {
            ("result",): (
                f"self_t * at::where(self_p == {bound}, "
                f"at::scalar_tensor(0.5, result[i].options()), self_p {sign} {bound})"
            )
        }
        for name, sign in (("maximum", ">"), ("minimum", "<"))
        for overload, bound in (("Scalar", "scalar"), ("ScalarList", "scalars[i]"))
    },
}


# Rows that upstream has in C++ alone, or of what functionalization makes of a write.
ADDED = {
    "copy": Entry(
        "copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor",
        {
            ("self",): "zeros_like(grad)",
            ("src",): "grad",
            ("result",): "copy(zeros_like(self_p), src_t)",
        },
    )
}


def with_own(entry: Entry) -> Entry:
    """A row with what this file says instead."""
    own = OWN.get(entry.op)
    if own is None:
        return entry
    return Entry(entry.schema, {**entry.fields, **own}, entry.differentiable)


def of_functional(name: str, results: Sequence[str]) -> Mapping[str, Entry]:
    """The rows, by dispatch key, of an operator that returns what another writes to its arguments,
    as functionalization has it: those of the other. What is written has no derivative, but where
    it is the only result.

    results: their names, those that are written being called running_mean_out and the like.
    """
    if name in ADDED:
        return {DEFAULT: ADDED[name]}
    base, is_functional, overload = name.partition("_functional")
    rows = entries().get(base + overload, {}) if is_functional else {}
    written = tuple(not result.endswith("_out") for result in results)
    return {key: replace(row, differentiable=written) for key, row in rows.items()}
