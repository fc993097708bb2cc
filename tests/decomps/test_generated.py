"""Tests that no one writes: every rule put through what its kind owes, from its record alone.

tests/samples.py makes the arguments; tests/generated.py, tests/generated_values.py and
tests/slope_calls.py hold the checks.
Slow checks are run for a few rules always and for all of them by `make sweep`.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import generated
import generated_values
import pytest
import slope_calls
import torch
from samples import elementwise, of_backward, sample, samples, tensor_names

from normpass.decomps import registry
from normpass.decomps.registry import Rule, rules
from normpass.decomps.shapes import parse
from normpass.decomps.torch_versions import GRID_SAMPLER_TWICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from samples import Sample

ROOT = Path(__file__).parents[2]
TESTS = "tests/decomps"

# Kinds of rules, and rules, whose arguments cannot be generated, why, and the tests by hand.
BY_HAND: dict[str, tuple[str, str]] = {
    "zero_tensor": (
        "they take tensors that have no memory, and are entered at a dispatch key of these alone",
        f"{TESTS}/test_zero_tensors.py",
    ),
    **dict.fromkeys(
        ("_grouped_mm_mat1_backward", "_grouped_mm_mat2_backward"),
        (
            "the kernel multiplies no doubles, and rows of 16 bytes alone",
            f"{TESTS}/derivatives/test_grouped_products.py",
        ),
    ),
    "autograd_function": (
        "they take an autograd.Function and a level",
        f"{TESTS}/autograd_function/test_rules.py",
    ),
}

# Modules of formulas whose arguments have layouts of their own, which no shape says, and their
# tests by hand.
LAYOUTS = {
    "sparse": f"{TESTS}/derivatives/test_sparse.py",
    "nested": f"{TESTS}/derivatives/test_nested.py",
}

# Modules of formulas whose records do not say what they are the derivatives of, and where that is
# tested: the statistics that they take are functions of the input.
VALUES_BY_HAND = {
    **dict.fromkeys(("layer", "group", "batch"), f"{TESTS}/norms/test_norm_formulas.py"),
    "rms": f"{TESTS}/norms/test_rms_norm_formulas.py",
    "variances": f"{TESTS}/derivatives/test_variances.py",
}

# Formulas that are there only where torch has them.
GRID_SAMPLERS = [f"grid_sampler_{d}d_double_backward" for d in (2, 3) if GRID_SAMPLER_TWICE]

# Formulas that are not compared in complex128.
_NO_KERNEL = "the function has no complex kernel"
_PHASES = "LAPACK chooses the phases of the vectors (test_linalg_decompositions.py)"
REAL_ONLY = {
    "_euclidean_dist_backward": _NO_KERNEL,
    "_trilinear_backward": "upstream has no derivative of a complex one (test_linalg.py has)",
    "linear_double_backward": "linear_backward is of real numbers",
    "cholesky_backward": "the diagonal of L is real, a random gradient's is not: upstream and ours "
    "are then Hermitian only in what meets a Hermitian dA (test_linalg.py)",
    "linalg_eig_backward": _PHASES,
    "linalg_eig_jvp": _PHASES,
    "linalg_svd_jvp": _PHASES,
    "svd_backward": _PHASES,
    "atan2_backward": _NO_KERNEL,
    "clamp_backward.Tensor": _NO_KERNEL,
    "clamp_backward_min_max": _NO_KERNEL,
    "clamp_jvp": _NO_KERNEL,
    "copysign_tensor_self_backward": _NO_KERNEL,
    "elu_double_backward": _NO_KERNEL,
    "gelu_double_backward": _NO_KERNEL,
    "huber_loss_double_backward": _NO_KERNEL,
    "infinitely_differentiable_logit_backward": _NO_KERNEL,
    "infinitely_differentiable_mish_backward": _NO_KERNEL,
    "infinitely_differentiable_native_dropout_backward": _NO_KERNEL,
    "infinitely_differentiable_silu_backward": _NO_KERNEL,
    "log_sigmoid_double_backward": _NO_KERNEL,
    "mse_loss_double_backward": _NO_KERNEL,
    "convolution_jvp": _NO_KERNEL,
    "_convolution_jvp": _NO_KERNEL,
    "_convolution_double_backward": _NO_KERNEL,
    "_cudnn_convolution_backward": _NO_KERNEL,
    "mkldnn_rnn_layer_differentiable_backward": _NO_KERNEL,
    "safe_logsumexp_jvp": _NO_KERNEL,
    "nansum_backward": _NO_KERNEL,
    "native_dropout_double_backward": _NO_KERNEL,
    "smooth_l1_loss_double_backward": _NO_KERNEL,
    "soft_margin_loss_double_backward": _NO_KERNEL,
    "softplus_double_backward": _NO_KERNEL,
    "glu_double_backward": _NO_KERNEL,
    "glu_double_backward_grad_output": _NO_KERNEL,
    "softmax_double_backward": _NO_KERNEL,
    "_fused_dropout_backward": _NO_KERNEL,
    "_cudnn_ctc_loss_backward": _NO_KERNEL,
    "_miopen_ctc_loss_backward": _NO_KERNEL,
    "amaxamin_jvp": _NO_KERNEL,
    "aminmax_backward": _NO_KERNEL,
    "aminmax_jvp": _NO_KERNEL,
    "binary_cross_entropy_double_backward": _NO_KERNEL,
    "binary_cross_entropy_double_backward_grad_output": _NO_KERNEL,
    "binary_cross_entropy_double_backward_target": _NO_KERNEL,
    "binary_cross_entropy_target_backward": _NO_KERNEL,
    "binary_cross_entropy_with_logits_backward": _NO_KERNEL,
    "binary_cross_entropy_with_logits_target_backward": _NO_KERNEL,
    "embedding_dense_double_backward": _NO_KERNEL,
    "evenly_distribute_backward": _NO_KERNEL,
    "evenly_read_jvp": _NO_KERNEL,
    "gather_with_keepdimed_indices": _NO_KERNEL,
    "huber_loss_double_backward_grad_output": _NO_KERNEL,
    "index_reduce_backward": _NO_KERNEL,
    "max_pool_double_backward": _NO_KERNEL,
    "scale_grad_by_count": _NO_KERNEL,
    "scatter_reduce_backward": _NO_KERNEL,
    "scatter_reduce_jvp": _NO_KERNEL,
    "soft_margin_loss_double_backward_grad_output": _NO_KERNEL,
    "polar_backward": "size and angle are real",
    **dict.fromkeys(GRID_SAMPLERS, _NO_KERNEL),
}

# Formulas of complex numbers, which have no halves.
NO_HALVES = ("fft_c2r_backward", "fft_r2c_backward", "polar_backward")

# What the slow checks are always run for: of each kind and each way to be made.
ALWAYS = {
    "aten.native_group_norm_backward.default",
    "aten.native_layer_norm.default",
    "aten.pow.Scalar",
    "aten.tanh.default",
    "cat_tensors_backward",
    "gelu_double_backward",
    "group_norm_jvp",
    "norm_backward.dim",
}


def module(rule: Rule) -> str:
    return inspect.unwrap(rule.function).__module__.rpartition(".")[2]


EVERY = [
    r for r in rules() if BY_HAND.keys().isdisjoint((r.kind, r.name)) and module(r) not in LAYOUTS
]
SLOPES = [rule for rule in EVERY if elementwise(rule)]
BATCHING = [rule for rule in EVERY if rule.kind == "batching"]
BACKWARDS = [rule for rule in EVERY if of_backward(rule)]
FUNCTIONS = [rule for rule in EVERY if rule not in SLOPES + BATCHING + BACKWARDS]
FORMULAS = [rule for rule in FUNCTIONS if rule.kind in registry.DERIVATIVES]
COMPOSITIONS = [rule for rule in FUNCTIONS if rule.kind == "autograd"]
DECOMPOSITIONS = [rule for rule in FUNCTIONS if rule.kind == "decomposition"]


def name(rule: Rule) -> str:
    return f"{rule.kind}:{rule.name}"


def each(chosen: Iterable[Rule], *, slow: bool = False, jvps: bool = True) -> pytest.MarkDecorator:
    """A test of each of these rules. slow: most of them only in a sweep; so without jvps, those of
    slopes, which are vjps but for a conjugate.
    """

    def swept(rule: Rule) -> bool:
        return slow or (not jvps and elementwise(rule) and rule.kind == "jvp")

    return pytest.mark.parametrize(
        "rule",
        [
            pytest.param(
                rule,
                marks=[pytest.mark.sweep] if swept(rule) and rule.name not in ALWAYS else [],
                id=name(rule),
            )
            for rule in chosen
        ],
    )


def given(rule: Rule, which: int = 0) -> Sequence[Sample]:
    made = slope_calls.samples_of(rule, which) if elementwise(rule) else samples(rule, which=which)
    return list(made)


# --- the records --------------------------------------------------------------------------------


@each(rule for rule in rules() if rule.op is not None)
def test_shapes_name_every_tensor_in_order(rule: Rule) -> None:
    assert rule.op is not None
    shapes = parse(rule.shapes)
    assert list(shapes.arguments) == tensor_names(rule)
    returns = 1 if elementwise(rule) else len(rule.op._schema.returns)
    # A backward's derivative returns gradients by name: check_backward.
    assert of_backward(rule) or len(shapes.results) == returns


def test_every_rule_is_generated_or_explained() -> None:
    assert BY_HAND.keys() <= {name for rule in rules() for name in (rule.kind, rule.name)}
    assert {rule.name for rule in SLOPES if slope_calls.calls(rule.name)} == {
        rule.name for rule in SLOPES
    }
    files = {file for _, file in BY_HAND.values()}
    files |= {*VALUES_BY_HAND.values(), *LAYOUTS.values()}
    assert all((ROOT / file).is_file() for file in files)
    assert ALWAYS | REAL_ONLY.keys() <= {rule.name for rule in EVERY}


@pytest.mark.parametrize("rule", FORMULAS, ids=name)
def test_every_formula_says_what_it_is_of_or_is_explained(rule: Rule) -> None:
    assert (rule.of is None) == (module(rule) in VALUES_BY_HAND)


# --- every rule ---------------------------------------------------------------------------------


@each(SLOPES + FUNCTIONS + BATCHING)
def test_results_have_the_shapes_of_the_record(rule: Rule) -> None:
    for one in given(rule):
        generated.check_shapes(one)


@each(SLOPES + FUNCTIONS, jvps=False)
def test_fake_tensors_say_what_comes_out(rule: Rule) -> None:
    for one in given(rule):
        generated.check_fake(one)


@pytest.mark.one_in(6)
@each(SLOPES + FUNCTIONS, jvps=False)
def test_a_trace_at_one_size_runs_at_another(rule: Rule) -> None:
    generated.check_trace(given(rule)[0], given(rule, 1)[0])


@pytest.mark.sweep
@each(SLOPES + FUNCTIONS)
def test_every_trace_at_one_size_runs_at_another(rule: Rule) -> None:
    for first, second in zip(given(rule), given(rule, 1), strict=True):
        generated.check_trace(first, second)


@pytest.mark.one_in(4)
@each(SLOPES + FUNCTIONS, jvps=False)
def test_a_rule_can_be_differentiated(rule: Rule) -> None:
    generated.check_derivatives(given(rule)[0])


@pytest.mark.sweep
@each(SLOPES + FUNCTIONS)
def test_every_call_can_be_differentiated(rule: Rule) -> None:
    for one in given(rule)[1:]:
        generated.check_derivatives(one)


@each(SLOPES + FUNCTIONS, slow=True)
def test_derivatives_are_right_to_order_four(rule: Rule) -> None:
    generated.check_orders(given(rule)[0])


@each(SLOPES + FORMULAS + DECOMPOSITIONS, slow=True)
def test_it_compiles(rule: Rule) -> None:
    generated.check_compiled(given(rule)[0])


@each(SLOPES + FORMULAS)
def test_it_is_linear_in_gradients_and_tangents(rule: Rule) -> None:
    assert rule.linear
    for one in given(rule):
        generated.check_linear(one)


# --- elementwise --------------------------------------------------------------------------------

dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)


@dtypes
@each(SLOPES)
def test_a_slope_is_autograds_and_forward_ads(rule: Rule, dtype: torch.dtype) -> None:
    calls = slope_calls.calls(rule.name, dtype)
    assert calls or dtype.is_complex
    for call in calls:
        slope_calls.check_against_autograd(rule, call)


@pytest.mark.one_in(2)
@dtypes
@each([rule for rule in SLOPES if rule.kind == "vjp"])
def test_a_slope_is_that_of_finite_differences(rule: Rule, dtype: torch.dtype) -> None:
    assert rule.op is not None
    for call in slope_calls.variants(rule.name, dtype):
        slope_calls.check_by_differences(rule, registry.rule_of("jvp", rule.op), call)


# --- formulas -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        pytest.param(rule, dtype, id=f"{name(rule)}-{dtype}")
        for rule in FORMULAS
        for dtype in (torch.float64, torch.complex128)
        if rule.of is not None and not (dtype.is_complex and rule.name in REAL_ONLY)
    ],
)
def test_a_formula_is_the_derivative_that_it_says(rule: Rule, dtype: torch.dtype) -> None:
    for one in samples(rule, dtype):
        generated_values.check_derivative_of(one)


@each(FORMULAS, slow=True)
def test_opcheck(rule: Rule) -> None:
    generated.check_operator(given(rule)[0])


@each(FORMULAS)
def test_a_formula_under_vmap_is_a_loop(rule: Rule) -> None:
    # A formula of strides reads them off its tensors: a last axis would change them.
    dim = 0 if module(rule) == "strides" else -1
    generated.check_vmap(given(rule)[0], given(rule)[0], dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each([rule for rule in FORMULAS if rule.name not in NO_HALVES])
def test_half_precision_is_rounded_once(rule: Rule, dtype: torch.dtype) -> None:
    generated.check_half(given(rule)[0], dtype)


# --- derivatives of backward operators ----------------------------------------------------------


@each(BACKWARDS)
def test_a_backwards_derivative_is_that_of_finite_differences(rule: Rule) -> None:
    for one in given(rule):
        generated_values.check_backward(one)


# --- decompositions and compositions ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@each(DECOMPOSITIONS + COMPOSITIONS)
def test_it_is_no_less_accurate_than_what_it_replaces(rule: Rule, dtype: torch.dtype) -> None:
    for one in samples(rule, dtype):
        generated_values.check_replaces(one)


@each(COMPOSITIONS, slow=True)
def test_a_compiled_tangent_is_the_compositions(rule: Rule) -> None:
    generated_values.check_compiled_tangent(given(rule)[0])


# --- batching -----------------------------------------------------------------------------------


@each(BATCHING)
def test_a_batching_rule_is_a_loop_over_examples(rule: Rule) -> None:
    for one in given(rule):
        for dims in generated_values.batchings(one):
            generated_values.check_batched(one, dims)


@each(BATCHING, slow=True)
def test_a_compiled_vmap_is_a_loop_over_examples(rule: Rule) -> None:
    generated_values.check_vmap_compiled(given(rule)[0])


def test_a_number_that_nothing_tells_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sample.__globals__["NUMBERS"], "approximate")
    rule: Any = registry.derivative("gelu_double_backward")
    with pytest.raises(ValueError, match="nothing says what approximate of gelu_double_backward"):
        sample(rule)
