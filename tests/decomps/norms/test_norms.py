"""The decompositions of the norms, each against the operator it replaces and against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import norm_samples
import oracles
import pytest
import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from normpass.decomps.registry import Rule, decompositions, rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch._ops import OpOverload

# Of the statistics of an empty tensor, when a decomposition is run rather than traced.
pytestmark = pytest.mark.filterwarnings("ignore:var_mean.*degrees of freedom is <= 0:UserWarning")

aten = torch.ops.aten
EPS = norm_samples.EPS
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DECOMPOSITIONS = [rule for rule in rules() if rule.kind == "decomposition"]

by_rule = pytest.mark.parametrize("rule", DECOMPOSITIONS, ids=lambda rule: rule.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def eager(op: OpOverload) -> Callable[..., Any]:
    """The operator as autograd calls it; torch's decomposition where the CPU has no kernel."""
    from torch._decomp import decomposition_table

    if "native_group_norm" in op.name():
        # The kernel takes the layout of its arguments for granted (and reads past the strides of
        # others); autograd's formula makes them contiguous.
        return lambda *arguments: op(*laid_out(op, arguments))
    keys = ("CPU", "CompositeImplicitAutograd")
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys):
        return op
    return decomposition_table[op]


def laid_out(op: OpOverload, arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments with gradient and input contiguous in the memory format of the input."""
    names = [a.name for a in op._schema.arguments]
    memory_format = suggest_memory_format(arguments[names.index("input")])
    return [
        v.contiguous(memory_format=memory_format) if name in ("input", "grad_out") else v
        for name, v in zip(names, arguments, strict=True)
    ]


def in_float64(arguments: Any) -> Any:
    return tree_map_only(
        torch.Tensor, lambda v: v.double() if v.is_floating_point() else v, arguments
    )


def strides_that_matter(v: Tensor) -> list[int]:
    """Strides of axes with more than one element; none of an empty tensor."""
    return [t for n, t in zip(v.shape, v.stride(), strict=True) if n > 1] if v.numel() else []


def meta(v: Tensor | None) -> Any:
    return None if v is None else (v.dtype, tuple(v.shape), strides_that_matter(v))


def tensors(outputs: Any) -> tuple[Tensor | None, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def expected_meta(rule: Rule, arguments: tuple[Any, ...], replaced: Any) -> list[Any]:
    found = [*map(meta, replaced)]
    if rule.op is aten._fused_rms_norm_backward.default:
        # There is no kernel for the CPU. CUDA's gives contiguous results, the weight's gradient in
        # the weight's dtype; torch's decomposition does not.
        _, x, _, _, weight, mask = arguments
        found = [
            meta(torch.empty_like(v, memory_format=torch.contiguous_format))
            if v is not None and wanted
            else None
            for v, wanted in zip((x, weight), mask, strict=True)
        ]
    if rule.name.startswith(("aten.cudnn", "aten.miopen")):
        x = arguments[0]
        like_x = torch.empty_like(x, memory_format=suggest_memory_format(x))
        found[0] = meta(like_x)
    return found


def check(rule: Rule, arguments: tuple[Any, ...], label: str) -> None:
    """Same dtypes, shapes and strides as eager, fake tensors included, and no less accurate."""
    assert rule.op is not None
    run = eager(rule.op)
    ours, replaced = tensors(rule(*arguments)), tensors(run(*arguments))
    assert [*map(meta, ours)] == expected_meta(rule, arguments, replaced), label
    reference = tensors(run(*in_float64(arguments)))
    for index, (ours_i, replaced_i, reference_i) in enumerate(
        zip(ours, replaced, reference, strict=True)
    ):
        if ours_i is None or (
            ours[0] is not None and is_statistic_of_nothing(ours[0], index, rule)
        ):
            continue
        assert replaced_i is not None
        assert reference_i is not None
        oracles.assert_no_less_accurate(ours_i, replaced_i, reference_i, f"{label} [{index}]")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        assert [*map(meta, tensors(rule(*fake)))] == [*map(meta, ours)], label


def is_statistic_of_nothing(y: Tensor, index: int, rule: Rule) -> bool:
    """The statistics of no elements: (0, nan) in eager, NaN in ours as in torch's decomposition."""
    return y.numel() == 0 and index > 0 and "backward" not in rule.name


@pytest.mark.one_in(4)
@by_rule
@by_dtype
def test_hand_made_samples(rule: Rule, dtype: torch.dtype) -> None:
    assert rule.op is not None
    count = 0
    for label, arguments in norm_samples.samples(rule.op, dtype):
        check(rule, arguments, label)
        count += 1
    assert count > 10


class Intercept(TorchDispatchMode):
    """Checks each decomposed operator that runs, then lets eager run it."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = {rule.op: rule for rule in DECOMPOSITIONS}
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.rules:
            assert not kwargs
            self.seen.add(self.rules[func].name)
            detached = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            check(self.rules[func], detached, f"{func} {[*map(meta_of_argument, args)]}")
        return func(*args, **(kwargs or {}))


def meta_of_argument(v: Any) -> Any:
    return meta(v) if isinstance(v, torch.Tensor) else v


# PyTorch's operators with samples, and what has to be met on the way, forward and backward.
INFOS = {
    "nn.functional.layer_norm": {"native_layer_norm", "native_layer_norm_backward"},
    "native_layer_norm": {"native_layer_norm", "native_layer_norm_backward"},
    "nn.functional.group_norm": {"native_group_norm", "native_group_norm_backward"},
    "native_group_norm": {"native_group_norm", "native_group_norm_backward"},
    "nn.functional.batch_norm": {"native_batch_norm_backward"},
    "nn.functional.instance_norm": {"native_batch_norm_backward"},
    "native_batch_norm": {"native_batch_norm_backward"},
    "_native_batch_norm_legit": {"native_batch_norm_backward"},
    "_batch_norm_with_update": {"batch_norm_backward"},
}
OP_INFOS = [
    info for info in op_db if info.name in INFOS and info.variant_test_name != "without_cudnn"
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("info", OP_INFOS, ids=lambda i: f"{i.name}.{i.variant_test_name}")
@by_dtype
def test_samples_of_pytorch(info: Any, dtype: torch.dtype) -> None:
    mode = Intercept()
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        with mode:
            # The output alone: gradients of the statistics take another path through autograd.
            y = tree_leaves(info.op(sample.input, *sample.args, **sample.kwargs))[0]
            y.backward(torch.randn_like(y))
    assert {f"aten.{name}.default" for name in INFOS[info.name]} <= mode.seen


@by_dtype
def test_samples_of_pytorch_for_rms_norm(dtype: torch.dtype) -> None:
    """torch.rms_norm never calls the operator on the CPU: its samples are given to it here."""
    (info,) = (info for info in op_db if info.name == "nn.functional.rms_norm")
    forward, backward = (
        rule for rule in DECOMPOSITIONS if rule.name.startswith("aten._fused_rms_norm")
    )
    count = 0
    for sample in info.sample_inputs("cpu", dtype):
        x, shape = sample.input, list(sample.args[0])
        weight, eps = sample.kwargs.get("weight"), sample.kwargs.get("eps")
        check(forward, (x, shape, weight, eps), str(sample))
        rstd = aten._fused_rms_norm(x, shape, weight, eps)[1]
        g = torch.randn_like(x)
        check(backward, (g, x, shape, rstd, weight, [True, weight is not None]), str(sample))
        count += 1
    assert count


# --- the mathematics: gradients of the oracles ----------------------------------------------------


def chain(forward: Any, backward: Any, case: str, g: Tensor, x: Tensor, w: Tensor) -> Any:
    """(y, dx, dweight, dbias) of one norm through a pair of operators or of their rules."""
    n, c = x.shape[:2]
    if case == "layer":
        y, *saved = forward(x, [*x.shape[2:]], w, w, EPS)
        return y, *backward(g, x, [*x.shape[2:]], *saved, w, w, [True] * 3)
    if case == "rms":
        y, *saved = forward(x, [*x.shape[2:]], w, EPS)
        return y, *backward(g, x, [*x.shape[2:]], *saved, w, [True] * 2)
    if case == "group":
        sizes = (n, c, x.shape[2:].numel())
        y, *saved = forward(x, w, w, *sizes, 2, EPS)
        return y, *backward(g, x, *saved, w, *sizes, 2, [True] * 3)
    y, *saved = forward(x, w, w, None, None, True, 0.1, EPS)
    return y, *backward(g, x, w, None, None, *saved, True, EPS, [True] * 3)


CASES: dict[str, tuple[OpOverload, OpOverload, Callable[..., Tensor], tuple[int, ...]]] = {
    "layer": (
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        lambda x, w, b: oracles.layer_norm(x, x.shape[2:], w, b, EPS),
        (5, 3),
    ),
    "rms": (
        aten._fused_rms_norm.default,
        aten._fused_rms_norm_backward.default,
        lambda x, w: oracles.rms_norm(x, x.shape[2:], w, EPS),
        (5, 3),
    ),
    "group": (
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        lambda x, w, b: oracles.group_norm(x, 2, w, b, EPS),
        (4,),
    ),
    "batch": (
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
        lambda x, w, b: oracles.batch_norm(x, w, b, EPS),
        (4,),
    ),
}


def case_values(case: str, dtype: torch.dtype, offset: float) -> Iterator[tuple[Tensor, ...]]:
    """(ours, replaced, reference) for y, dx, dweight, dbias."""
    forward, backward, oracle, shape = CASES[case]
    g, x = norm_samples.pair((7, 4, 5, 3), dtype, offset)
    w = norm_samples.uniform(*shape, dtype=dtype)
    table = decompositions()
    parameters = (w,) if case == "rms" else (w, w)
    ours = chain(table.get(forward, forward), table[backward], case, g, x, w)
    replaced = chain(eager(forward), eager(backward), case, g, x, w)
    y = oracle(*(v.double() for v in (x, *parameters)))
    reference = (y, *oracles.gradients(oracle, g, x, *parameters))
    yield from zip(ours, replaced, reference, strict=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_gradients_of_the_mathematics(case: str, offset: float, dtype: torch.dtype) -> None:
    for index, (ours, replaced, reference) in enumerate(case_values(case, dtype, offset)):
        oracles.assert_no_less_accurate(ours, replaced, reference, f"{case} [{index}]")
        if dtype == torch.float64 or offset == 0.0:
            scale = reference.abs().max()
            digits = 1e-9 if dtype == torch.float64 else 1e-5
            assert (ours.double() - reference).abs().max() <= digits * scale


def test_group_norm_weight_gradient_is_centred() -> None:
    """(sum(g * x) - mean * sum(g)) * rstd cancels when x has an offset; ours does not."""
    _, _, (ours, replaced, reference), _ = case_values("group", torch.float32, 1000.0)
    error, uncentred = ((v.double() - reference).abs().max() for v in (ours, replaced))
    assert error < uncentred / 2


def test_group_norm_without_spatial_extent() -> None:
    """Nothing was normalized, so the gradients of the parameters are zero.

    torch 2.13 multiplies the NaN that it saves as rstd into the weight's; 2.15 refuses the input.
    """
    x, w = torch.empty(4, 6, 0, 3), torch.ones(6)
    mean, rstd = torch.zeros(4, 3), torch.full((4, 3), torch.nan)
    backward = decompositions()[aten.native_group_norm_backward.default]
    dx, dweight, dbias = backward(x, x, mean, rstd, w, 4, 6, 0, 3, [True] * 3)
    assert dx.shape == x.shape
    assert dweight.eq(0).all()
    assert dbias.eq(0).all()


@pytest.mark.parametrize("shape", [(0, 6, 5, 3), (4, 6, 0, 3)])
def test_batch_norm_of_an_empty_batch(shape: tuple[int, ...]) -> None:
    """Eager's forward refuses it; its gradients, were it traced, are empty and zero."""
    x, w = torch.empty(shape), torch.ones(6)
    backward = decompositions()[aten.native_batch_norm_backward.default]
    dx, *rest = backward(x, x, w, None, None, w, w, True, EPS, [True] * 3)
    assert dx.shape == x.shape
    assert all(v.eq(0).all() and v.shape == (6,) for v in rest)
