"""cuDNN's batch norm on a machine without cuDNN: in eager mode where the rules are asked for, and
compiled. The numbers are those of native_batch_norm and of float64.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import oracles
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import normpass
from normpass.decomps.activation import registered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

aten = torch.ops.aten

N, C, S = 4, 3, 5
EPS, MOMENTUM = 0.25, 0.3
# Of x, and of everything else.
DTYPES = {
    "float64": (torch.float64, torch.float64),
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float32),
    "bfloat16": (torch.bfloat16, torch.float32),
    "bfloat16 throughout": (torch.bfloat16, torch.bfloat16),
}
SUBSETS = [s for s in itertools.product([True, False], repeat=3) if any(s)]
by_dtypes = pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
by_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
LAYOUTS = {
    "2-d": ((N, C), torch.contiguous_format),
    "3-d": ((N, C, S), torch.contiguous_format),
    "contiguous": ((N, C, S, 2), torch.contiguous_format),
    "channels last": ((N, C, S, 2), torch.channels_last),
    "volume, channels last": ((N, C, S, 2, 3), torch.channels_last_3d),
}


@pytest.fixture
def rules() -> Iterator[None]:
    with registered(eager=True):
        yield


def arguments(
    training: bool,
    dtypes: tuple[torch.dtype, torch.dtype] = DTYPES["float64"],
    layout: str = "contiguous",
    statistics: bool = True,
) -> list[Any]:
    """New ones, of the same numbers each time."""
    generator = torch.Generator().manual_seed(0)
    shape, form = LAYOUTS[layout]

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    x = (numbers(*shape) * 2 + 1).to(dtypes[0]).contiguous(memory_format=form)
    values = numbers(C), numbers(C), numbers(C), numbers(C) ** 2 + 0.5
    weight, bias, mean, var = (value.to(dtypes[1]) for value in values)
    running = [mean, var] if statistics else [None, None]
    return [x, weight, bias, *running, training, MOMENTUM, EPS]


def cotangent(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(like.shape, generator=generator, dtype=torch.float64) + 0.2
    return numbers.to(like.dtype)


def doubles(values: Sequence[Any]) -> list[Any]:
    """Copies in float64."""
    return [
        v.detach().to(torch.float64, copy=True) if isinstance(v, torch.Tensor) else v
        for v in values
    ]


# --- forward ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rules")
@by_mode
@by_dtypes
def test_results_are_cudnns(dtypes: tuple[torch.dtype, torch.dtype], training: bool) -> None:
    """y in the input's dtype; statistics in the weight's, of nothing in eval mode; a reserve of
    nothing; running statistics in place.
    """
    ours, theirs = arguments(training, dtypes), arguments(training, dtypes)
    exact = doubles(theirs)
    y, mean, rstd, reserve = aten.cudnn_batch_norm(*ours)
    sizes = (C,) if training else (0,)
    assert (y.dtype, y.shape) == (dtypes[0], ours[0].shape)
    assert [(v.dtype, v.shape) for v in (mean, rstd)] == [(dtypes[1], sizes)] * 2
    assert (reserve.dtype, reserve.shape) == (torch.uint8, (0,))
    replaced, reference = aten.native_batch_norm(*theirs), aten.native_batch_norm(*exact)
    found = zip(
        (y, mean, rstd, *ours[3:5]),
        (*replaced, *theirs[3:5]),
        (*reference, *exact[3:5]),
        strict=True,
    )
    for number, (value, theirs_i, reference_i) in enumerate(found):
        oracles.assert_no_less_accurate(value, theirs_i, reference_i, f"result {number}")


@pytest.mark.usefixtures("rules")
@by_mode
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_format_is_the_inputs(layout: str, training: bool) -> None:
    form = LAYOUTS[layout][1]
    given = arguments(training, DTYPES["float16"], layout)
    leaves = [v.requires_grad_() for v in given[:3]]
    y = aten.cudnn_batch_norm(*given)[0]
    dx = torch.autograd.grad(y, leaves, cotangent(y))[0]
    assert y.is_contiguous(memory_format=form)
    assert dx.is_contiguous(memory_format=form)
    x, w, b, mean, var = doubles(given[:5])
    running = (None, None) if training else (mean, var)
    exact = oracles.batch_norm(x, w, b, EPS, *running)
    torch.testing.assert_close(y.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("rules")
def test_running_statistics_follow_cudnns_conventions() -> None:
    """An average that moves by exponential_average_factor, towards the unbiased variance."""
    given = arguments(True)
    mean, var = given[3].clone(), given[4].clone()
    rows = given[0].movedim(1, 0).flatten(1)
    aten.cudnn_batch_norm(*given)
    want = (1 - MOMENTUM) * mean + MOMENTUM * rows.mean(1)
    torch.testing.assert_close(given[3], want, rtol=1e-12, atol=1e-12)
    want = (1 - MOMENTUM) * var + MOMENTUM * rows.var(1, correction=1)
    torch.testing.assert_close(given[4], want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("rules")
def test_without_running_statistics() -> None:
    ours = aten.cudnn_batch_norm(*arguments(True, statistics=False))
    theirs = aten.native_batch_norm(*arguments(True, statistics=False))
    for value, want in zip(ours[:3], theirs, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("shape", [(1, C), (C, 1, 1), (1, C, 1, 1)], ids=str)
def test_parameters_of_other_shapes(shape: tuple[int, ...]) -> None:
    """The wrapper counts their elements; gradients have the weight's shape."""
    given, flat = arguments(True), arguments(True)
    given[1:5] = [value.view(shape) for value in given[1:5]]
    for values in (given, flat):
        values[0].requires_grad_()
        values[1].requires_grad_()
    ours, theirs = aten.cudnn_batch_norm(*given), aten.native_batch_norm(*flat)
    g = cotangent(ours[0])
    found = torch.autograd.grad(ours[0], given[:2], g)
    want = torch.autograd.grad(theirs[0], flat[:2], g)
    assert found[1].shape == shape
    pairs = zip((ours[0], *found, *given[3:5]), (theirs[0], *want, *flat[3:5]), strict=True)
    for value, right in pairs:
        torch.testing.assert_close(value.flatten(), right.flatten(), rtol=1e-12, atol=1e-12)


# --- backward -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("layout", LAYOUTS)
@by_dtypes
def test_the_backward_alone(dtypes: tuple[torch.dtype, torch.dtype], layout: str) -> None:
    """Called by its name, with a gradient that lies otherwise than the input."""
    x, w, *_ = given = arguments(True, dtypes, layout)
    _, mean, rstd = aten.native_batch_norm(*given)
    g = cotangent(x.transpose(0, -1)).transpose(0, -1)
    reserve = torch.empty(0, dtype=torch.uint8)
    ours = aten.cudnn_batch_norm_backward(x, g, w, None, None, mean, rstd, EPS, reserve)
    assert [v.dtype for v in ours] == [dtypes[0], dtypes[1], dtypes[1]]
    assert ours[0].is_contiguous(memory_format=LAYOUTS[layout][1])
    rest = (True, EPS, [True] * 3)
    theirs = aten.native_batch_norm_backward(
        g.contiguous(memory_format=LAYOUTS[layout][1]), x, w, None, None, mean, rstd, *rest
    )
    exact = doubles((g, x, w, None, None, mean, rstd))
    reference = aten.native_batch_norm_backward(*exact, *rest)
    for number, values in enumerate(zip(ours, theirs, reference, strict=True)):
        oracles.assert_no_less_accurate(*values, f"gradient {number}")


class Calls(TorchDispatchMode):
    """The backward operators that run, each with its mask, if it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "batch_norm_backward" in func.name():
            masked = "output_mask" in [argument.name for argument in func._schema.arguments]
            self.seen.append((func, tuple(args[-1]) if masked else None))
        return func(*args, **(kwargs or {}))


def norm_of(given: Sequence[Any], subset: Sequence[bool]) -> Callable[..., Tensor]:
    """By primitives, as a function of those that are asked for."""
    x, w, b, mean, var, training = given[:6]
    running = (None, None) if training else (mean, var)

    def norm(*leaves: Tensor) -> Tensor:
        left = iter(leaves)
        chosen = (next(left) if s else v for s, v in zip(subset, (x, w, b), strict=True))
        return oracles.batch_norm(*chosen, EPS, *running)

    return norm


def orders(norm: Callable[..., Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The first gradients, and those of a sum of their sines."""
    y = norm(*leaves)
    first = torch.autograd.grad(y, leaves, cotangent(y), create_graph=True)
    taped = [g.sin().sum() for g in first if g.requires_grad]
    if not taped:
        return [*first, *map(torch.zeros_like, leaves)]
    second = torch.autograd.grad(torch.stack(taped).sum(), leaves, materialize_grads=True)
    return [*first, *second]


@pytest.mark.usefixtures("rules")
@by_mode
@pytest.mark.parametrize("subset", SUBSETS, ids=str)
def test_gradients_of_every_subset_twice(subset: tuple[bool, ...], training: bool) -> None:
    """Of input, weight and bias, with what derivatives.yaml calls: in eval mode a mask."""
    given = arguments(training)
    leaves = [v.requires_grad_() for v, s in zip(given[:3], subset, strict=True) if s]

    def operator(*_: Tensor) -> Tensor:
        y: Tensor = aten.cudnn_batch_norm(*given)[0]
        return y

    want = orders(norm_of(given, subset), leaves)
    with Calls() as calls:
        y = operator()
        torch.autograd.grad(y, leaves, cotangent(y))
    if training:
        assert calls.seen == [(aten.cudnn_batch_norm_backward.default, None)]
    else:
        assert calls.seen == [(aten.native_batch_norm_backward.default, subset)]
    for number, (value, right) in enumerate(zip(orders(operator, leaves), want, strict=True)):
        torch.testing.assert_close(
            value,
            right,
            rtol=1e-10,
            atol=1e-10,
            msg=lambda text, number=number: f"gradient {number}: {text}",
        )


@by_mode
@pytest.mark.parametrize("subset", SUBSETS, ids=str)
def test_a_trace_asks_for_no_more_than_it_needs(subset: tuple[bool, ...], training: bool) -> None:
    """The mask of the backward in the graph that a compiler gets, and its results."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    given, masks = arguments(training, statistics=not training), []
    leaves = [v.requires_grad_() for v, s in zip(given[:3], subset, strict=True) if s]

    def backward(graph: Any, _: Any) -> Any:
        target = aten.native_batch_norm_backward.default
        masks.extend(tuple(n.args[-1]) for n in graph.graph.nodes if n.target is target)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward
    )
    torch._dynamo.reset()
    with registered():
        y = torch.compile(lambda *v: aten.cudnn_batch_norm(*v)[0], backend=backend)(*given)
        found = torch.autograd.grad(y, leaves, cotangent(y))
    assert masks == [subset]
    want = orders(norm_of(given, subset), leaves)[: len(leaves)]
    for value, right in zip(found, want, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("rules")
@by_mode
def test_its_vjp_by_the_table(training: bool) -> None:
    """derivatives.yaml makes the gradient contiguous in the input's memory format."""
    given = arguments(training, layout="channels last")
    results = aten.cudnn_batch_norm(*given)
    g = cotangent(results[0])
    grads = normpass.vjp(aten.cudnn_batch_norm.default)(
        [g, None, None, None], given, results, ["input", "weight", "bias"]
    )
    exact = oracles.gradients(norm_of(given, (True, True, True)), g, *given[:3])
    for name, right in zip(("input", "weight", "bias"), exact, strict=True):
        torch.testing.assert_close(grads[name], right, rtol=1e-10, atol=1e-10)


# --- compiled -----------------------------------------------------------------------------------


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def ways(backend: str) -> AbstractContextManager[None]:
    """A block in which the rules hold: normpass's own backend has them of itself."""
    return registered() if backend == "inductor" else contextlib.nullcontext()


CASES = {
    "train": (True, "float32", True),
    "train, half": (True, "float16", True),
    "train, bfloat16, no statistics": (True, "bfloat16", False),
    "eval, half": (False, "float16", True),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["normpass", "inductor"])
@pytest.mark.parametrize(("training", "dtypes", "statistics"), CASES.values(), ids=CASES)
def test_compiled(backend: str, training: bool, dtypes: str, statistics: bool) -> None:
    """Results, gradients and running statistics, through generated kernels."""
    runs = []
    make = (training, DTYPES[dtypes], "channels last", statistics)
    given, theirs = arguments(*make), arguments(*make)
    exact = doubles(theirs)
    with ways(backend):
        ours = compiled(lambda *v: aten.cudnn_batch_norm(*v), backend)
        for function, values in (
            (ours, given),
            (aten.native_batch_norm, theirs),
            (aten.native_batch_norm, exact),
        ):
            leaves = [v.requires_grad_() for v in values[:3]]
            results = function(*values)
            grads = torch.autograd.grad(results[0], leaves, cotangent(theirs[0]).to(leaves[0]))
            runs.append((*results[:3], *grads, *(v for v in values[3:5] if v is not None)))
            if function is ours:
                assert (results[3].dtype, results[3].shape) == (torch.uint8, (0,))
    x_dtype, parameter = DTYPES[dtypes]
    assert [v.dtype for v in runs[0][:6]] == [x_dtype, *[parameter] * 2, x_dtype, *[parameter] * 2]
    assert [v.shape for v in runs[0][1:3]] == [((C,) if training else (0,))] * 2
    assert all(v.is_contiguous(memory_format=torch.channels_last) for v in runs[0][::3][:2])
    for number, values in enumerate(zip(*runs, strict=True)):
        oracles.assert_no_less_accurate(*values, f"{number}")


@pytest.mark.parametrize("backend", ["normpass", "inductor"])
@pytest.mark.parametrize("dtypes", ["float32", "float16"])
def test_the_backward_alone_compiled(backend: str, dtypes: str) -> None:
    x, w, *_ = given = arguments(True, DTYPES[dtypes])
    _, mean, rstd = aten.native_batch_norm(*given)
    g, reserve = cotangent(x), torch.empty(0, dtype=torch.uint8)
    with ways(backend):
        ours = compiled(lambda *v: aten.cudnn_batch_norm_backward(*v), backend)(
            x, g, w, None, None, mean, rstd, EPS, reserve
        )
    values, rest = (g, x, w, None, None, mean, rstd), (True, EPS, [True] * 3)
    theirs = aten.native_batch_norm_backward(*values, *rest)
    reference = aten.native_batch_norm_backward(*doubles(values), *rest)
    assert [v.dtype for v in ours] == [v.dtype for v in theirs]
    for number, each in enumerate(zip(ours, theirs, reference, strict=True)):
        oracles.assert_no_less_accurate(*each, f"gradient {number}")


# --- MIOpen's ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rules")
@by_mode
def test_miopens_runs_too(training: bool) -> None:
    """What it computes; it has no reserve, and its arguments are not checked."""
    given = arguments(training, DTYPES["float16"])
    leaves = [v.requires_grad_() for v in given[:3]]
    y, mean, rstd = aten.miopen_batch_norm(*given)
    assert [v.dtype for v in (y, mean, rstd)] == [torch.float16, torch.float32, torch.float32]
    found = torch.autograd.grad(y, leaves, cotangent(y))
    exact = oracles.gradients(norm_of(doubles(given), (True,) * 3), cotangent(y), *leaves)
    for value, leaf, right in zip(found, leaves, exact, strict=True):
        assert value.dtype == leaf.dtype
        digits = 2e-3 if leaf.dtype == torch.float16 else 1e-5
        assert right is not None
        assert (value.double() - right).abs().max() <= digits * right.abs().max()
