"""Every operator with a rule under PyTorch's gradcheck, by the samples of its OpInfos: in eager
mode with the rules and compiled, in four modes.

Which operators these are the registry says. One without an OpInfo is tested by the samples that its
record implies; what is not tested at all stands in LEFT_OUT.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import gradchecks
import pytest
import slope_calls
import torch
import torch._dynamo
from gradchecks import MODES, Compiled, Problem
from samples import elementwise, sample
from torch.testing._internal import common_methods_invocations as database

from normpass.decomps.activation import registered
from normpass.decomps.registry import Rule, rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# What torch itself warns of: variances of one element, forward-mode decompositions that load.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def own_name(rule: Rule) -> str:
    """Of layer norm's backward native_layer_norm_backward."""
    assert rule.op is not None
    return rule.op._schema.name.partition("::")[2]


# Those of autograd.Functions are for no operator: autograd_function/.
RULES = [rule for rule in rules() if rule.op is not None]
LEFT_OUT = {
    "_fused_rms_norm_backward": "no kernel on CPUs",
    **dict.fromkeys(
        ("cudnn_batch_norm", "cudnn_batch_norm_backward"), "no OpInfo: activation/test_eager.py"
    ),
    "miopen_batch_norm": "no kernel on CPUs",
    "miopen_batch_norm_backward": "no kernel on CPUs",
    "_weight_norm_interface_backward": "no OpInfo: norms/test_norms.py, backend/test_cpu_norms.py",
    "_new_zeros_with_same_feature_meta": "no derivative: it makes the memory of a tangent",
    "_reshape_alias": "not called: reshape, in whose OpInfo it is, makes a view",
    "rrelu_with_noise": "writes to its noise, and draws other noise each time",
    "block_diag_jvp": "block_diag has no batching rule: table/test_binding.py",
    **dict.fromkeys(
        ("angle_backward", "sgn_backward"),
        "zero or constant for the real samples: derivatives/test_complex_numbers.py",
    ),
    **dict.fromkeys(
        ("_grouped_mm_mat1_backward", "_grouped_mm_mat2_backward"),
        "the kernel has no doubles: derivatives/test_grouped_products.py",
    ),
    **{
        own_name(rule): f"tensors of layouts of their own: derivatives/test_{name}.py"
        for rule in RULES
        for name in ("sparse", "nested")
        if inspect.unwrap(rule.function).__module__.endswith(f"derivatives.{name}")
    },
    **{
        own_name(rule): "in eager mode torch's own, or for vmap alone: batching/"
        for rule in RULES
        if ".decomps.batching." in inspect.unwrap(rule.function).__module__
    },
}

# OpInfos by which an operator is reached, where they do not have its name.
THROUGH = {
    "native_layer_norm": ("native_layer_norm", "nn.functional.layer_norm"),
    "native_group_norm": ("native_group_norm", "nn.functional.group_norm"),
    "native_batch_norm": (
        *("native_batch_norm", "nn.functional.batch_norm", "nn.functional.instance_norm"),
    ),
    "linalg_cross": ("linalg.cross",),
    "_safe_softmax": ("nn.functional.scaled_dot_product_attention",),
    "_native_batch_norm_legit_no_training": ("nn.functional.batch_norm",),
}
# The derivative of a derivative is checked where that of the forward is checked twice.
THROUGH["native_layer_norm_backward"] = THROUGH["native_layer_norm"]
THROUGH["native_group_norm_backward"] = THROUGH["native_group_norm"]
THROUGH["native_batch_norm_backward"] = THROUGH["native_batch_norm"]
THROUGH["batch_norm_backward"] = ("_batch_norm_with_update",)


def opinfos(name: str) -> list[Any]:
    return [info for info in database.op_db if info.name in THROUGH.get(name, (name,))]


def full_name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}".rstrip(".")


# Slopes and formulas are not what autograd calls: they have cases of their own.
OPERATORS = sorted(
    {own_name(r) for r in RULES if r.op and r.op.namespace == "aten" and not elementwise(r)}
)
INFOS = {full_name(info): info for name in OPERATORS for info in opinfos(name)}
ONLY_TRACED = {
    full_name(info)
    for rule in RULES
    if rule.kind == "zero_tensor"
    for info in opinfos(own_name(rule))
}
SLOPES = [
    rule.name
    for rule in RULES
    if rule.kind == "vjp" and elementwise(rule) and own_name(rule) not in LEFT_OUT
]
RECORDS = {
    rule.name: rule
    for rule in RULES
    if rule.op is not None
    and not elementwise(rule)
    and rule.kind not in ("decomposition", "zero_tensor")
    and not opinfos(own_name(rule))
    and own_name(rule) not in LEFT_OUT
}
FIRST = 1  # samples of each OpInfo; the sweep takes all

# What fails in stock as well. The first two: the gradient of group norm's mean alone is zero, for
# upstream's formula drops it where rstd has none; torch 2.13's own test expects that failure. The
# third: forward mode over as_strided of fake tensors, "!this_view_meta->has_fw_view() INTERNAL
# ASSERT FAILED", and one of its samples reads beside its input, where a copy of it has no memory.
# The fourth: autograd's double backward of layer norm with a bias and no weight, "Expected a proper
# Tensor but got None", which register(eager=True) replaces. The last: the fused attention of CPUs
# has one derivative, and in reverse.
STOCK_FAILS = {
    ("native_group_norm", "gradcheck"),
    ("native_group_norm", "batched"),
    ("as_strided.partial_views", "compiled"),
    ("native_layer_norm", "compiled"),
    *(
        ("nn.functional.scaled_dot_product_attention", how)
        for how in ("gradgradcheck", "forward over reverse", "batched", "compiled")
    ),
}


@pytest.fixture(autouse=True)
def unseeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database seeds random operators within the function itself, which cannot be compiled."""
    monkeypatch.setattr(database, "wrapper_set_seed", lambda f, *args, **kwargs: f(*args, **kwargs))


def dtypes(info: Any) -> list[torch.dtype]:
    """As upstream: gradcheck needs double precision."""
    both = (torch.float64, torch.complex128)
    return [dtype for dtype in both if dtype in info.supported_backward_dtypes("cpu")]


def problems(name: str, count: int | None) -> Iterator[Problem]:
    for dtype in dtypes(INFOS[name]):
        yield from gradchecks.of_opinfo(INFOS[name], dtype, count)


@functools.cache
def slope_problems(name: str, count: int | None) -> tuple[Problem, ...]:
    """The samples of an elementwise operator, where its derivative is finite and not large."""
    found = []
    for dtype in (torch.float64, torch.complex128):
        for call in slope_calls.variants(name, dtype)[:count]:
            x = slope_calls.domain(call, 4)
            if x is not None:
                found.append(gradchecks.of_slope(call, x))
    return tuple(found)


def record_problems(name: str) -> Iterator[Problem]:
    rule = RECORDS[name]
    yield gradchecks.of_record(sample(rule))


def fails(run: Callable[[], None]) -> bool:
    try:
        run()
    except Exception:  # whatever it is, stock has it
        return True
    return False


def no_worse(run: Callable[[], None], known: bool, *, eager: bool) -> None:
    """A check with the rules; where stock is known to fail, it may fail as long as stock does."""
    with registered(eager=eager):
        if not known:
            run()
            return
        failed = fails(run)
    torch._dynamo.reset()
    assert not failed or fails(run), "torch is right here by now: so must the rules be"


# --- what is tested -----------------------------------------------------------------------------


def test_no_rule_is_left_out_silently() -> None:
    tested = set(SLOPES) | set(RECORDS)
    for rule in RULES:
        name = own_name(rule)
        assert (name in LEFT_OUT) != bool(rule.name in tested or opinfos(name)), rule.name
    assert set(LEFT_OUT) <= {own_name(rule) for rule in RULES}


EAGER = [name for name in INFOS if name not in ONLY_TRACED]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EAGER)
def test_eager(name: str, mode: str) -> None:
    check_eager(name, mode, FIRST)


def check_eager(name: str, mode: str, count: int | None) -> None:
    """With register(eager=True) a norm passes what it passes without."""
    found = [p for p in problems(name, count) if mode in p.modes]
    for problem in found:
        run = functools.partial(gradchecks.check, problem, mode)
        no_worse(run, (name, mode) in STOCK_FAILS, eager=True)
    if not found:
        pytest.skip(f"torch does not support {mode} of {name}")


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EAGER)
def test_eager_all_samples(name: str, mode: str) -> None:
    check_eager(name, mode, None)


def check_compiled(problem: Problem, name: str) -> None:
    known = (name, "compiled") in STOCK_FAILS
    # Where stock fails, computing what must come out may fail too.
    check = (lambda: Compiled(problem).check()) if known else Compiled(problem).check
    torch._dynamo.reset()
    no_worse(check, known, eager=False)


@pytest.mark.one_in(13)
@pytest.mark.parametrize("name", INFOS)
def test_compiled(name: str) -> None:
    for problem in problems(name, FIRST):
        check_compiled(problem, name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", INFOS)
def test_compiled_all_samples(name: str) -> None:
    for problem in problems(name, None):
        check_compiled(problem, name)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SLOPES)
def test_slopes(name: str) -> None:
    check_slopes(name, FIRST)


def check_slopes(name: str, count: int | None) -> None:
    """The operator with the derivatives of its rules, in every mode."""
    for problem in slope_problems(name, count):
        for mode in MODES:
            gradchecks.check(problem, mode)


@pytest.mark.sweep
@pytest.mark.parametrize("name", SLOPES)
def test_slopes_all_samples(name: str) -> None:
    check_slopes(name, None)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "name", [*SLOPES[::8], *(pytest.param(n, marks=pytest.mark.sweep) for n in SLOPES)]
)
def test_slopes_compiled(name: str) -> None:
    for problem in slope_problems(name, FIRST):
        check_compiled(problem, name)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RECORDS)
def test_records(name: str, mode: str) -> None:
    """Operators without an OpInfo: the formulas, and norms that only have a rule for vmap."""
    for problem in record_problems(name):
        with registered(eager=True):
            gradchecks.check(problem, mode)


# Compiling their graphs takes a quarter or half of a minute each.
LARGE = ("grid_sampler_3d_double_backward", "mkldnn_rnn_layer_differentiable_backward")
SOME = [name for name in list(RECORDS)[::8] if name not in LARGE]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(n, marks=pytest.mark.sweep) for n in RECORDS)]
)
def test_records_compiled(name: str) -> None:
    for problem in record_problems(name):
        check_compiled(problem, name)
