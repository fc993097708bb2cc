"""What cuDNN's wrapper says of arguments that it refuses, by our rules: upstream's own texts.

They are those of aten/src/ATen/native/cudnn/BatchNorm.cpp and of aten/src/ATen/TensorUtils.cpp.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from normpass.decomps.activation import registered
from normpass.decomps.norms.cudnn_checks import Argument, Checks
from normpass.decomps.registry import by_op, decompositions

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten

N, C, S = 4, 3, 5
SHAPE = (N, C, S, 2)
HALF, BFLOAT = torch.float16, torch.bfloat16
FORWARD = by_op("autograd")[aten.cudnn_batch_norm.default]
BACKWARD = decompositions()[aten.cudnn_batch_norm_backward.default]

Values = dict[str, Any]


def forward_values() -> Values:
    return {
        "input": torch.randn(SHAPE),
        **{name: torch.randn(C) for name in ("weight", "bias", "running_mean")},
        "running_var": torch.rand(C) + 0.5,
        "training": True,
        "exponential_average_factor": 0.3,
        "epsilon": 0.25,
    }


def backward_values() -> Values:
    return {
        "input": torch.randn(SHAPE),
        "grad_output": torch.randn(SHAPE),
        "weight": torch.randn(C),
        "running_mean": None,
        "running_var": None,
        "save_mean": torch.randn(C),
        "save_var": torch.rand(C) + 0.5,
        "epsilon": 0.25,
        "reserveSpace": torch.empty(0, dtype=torch.uint8),
    }


def message_of(function: Callable[..., Any], values: Values) -> str:
    """Of the error that a call raises, without where in C++ it was raised."""
    with pytest.raises(RuntimeError) as raised:
        function(*values.values())
    return str(raised.value).partition("\nException raised from")[0]


def wide(size: int = C) -> Tensor:
    """Every second of twice as many numbers."""
    return torch.randn(2 * size)[::2]


NOT_DENSE = (
    "Expected input->is_contiguous(input->suggest_memory_format()) to be true, but got false.  "
    "(Could this error message be improved?  If so, please report an enhancement request to "
    "PyTorch.)"
)

# What is changed in a call of the forward, and what cuDNN's wrapper says.
OF_FORWARD: dict[str, tuple[Values, str]] = {
    "no bias": (
        {"bias": None},
        "Expected tensor for argument #3 'bias' to be non-null, but it was undefined  (while "
        "checking arguments for cudnn_batch_norm)",
    ),
    "no mean in eval": (
        {"running_mean": None, "running_var": None, "training": False},
        "Expected tensor for argument #4 'running_mean' to be non-null, but it was undefined  "
        "(while checking arguments for cudnn_batch_norm)",
    ),
    "no variance in eval": (
        {"running_var": None, "training": False},
        "Expected tensor for argument #5 'running_var' to be non-null, but it was undefined  "
        "(while checking arguments for cudnn_batch_norm)",
    ),
    "half weight of a half": (
        {"input": torch.randn(SHAPE).half(), "weight": torch.randn(C).half()},
        "Expected tensor for argument #2 'weight' to have scalar type Float; but got "
        "torch.HalfTensor instead (while checking arguments for cudnn_batch_norm)",
    ),
    "bfloat16 weight of a half": (
        {"input": torch.randn(SHAPE).half(), "weight": torch.randn(C).bfloat16()},
        "Expected tensor for argument #2 'weight' to have scalar type Float; but got "
        "CPUBFloat16Type instead (while checking arguments for cudnn_batch_norm)",
    ),
    "double weight": (
        {"weight": torch.randn(C).double()},
        "Expected tensor for argument #1 'input' to have the same type as tensor for argument #2 "
        "'weight'; but type torch.FloatTensor does not equal torch.DoubleTensor (while checking "
        "arguments for cudnn_batch_norm)",
    ),
    "double weight of a bfloat16": (
        {"input": torch.randn(SHAPE).bfloat16(), "weight": torch.randn(C).double()},
        "Expected tensor for argument #1 'input' to have the same type as tensor for argument #2 "
        "'weight'; but type CPUBFloat16Type does not equal torch.DoubleTensor (while checking "
        "arguments for cudnn_batch_norm)",
    ),
    "double bias": (
        {"bias": torch.randn(C).double()},
        "Expected tensor for argument #2 'weight' to have the same type as tensor for argument #3 "
        "'bias'; but type torch.FloatTensor does not equal torch.DoubleTensor (while checking "
        "arguments for cudnn_batch_norm)",
    ),
    "half statistics": (
        {"running_mean": torch.randn(C).half()},
        "Expected tensor for argument #2 'weight' to have the same type as tensor for argument #4 "
        "'running_mean'; but type torch.FloatTensor does not equal torch.HalfTensor (while "
        "checking arguments for cudnn_batch_norm)",
    ),
    "strided weight": (
        {"weight": wide()},
        "Expected contiguous tensor, but got non-contiguous tensor for argument #2 'weight' (while "
        "checking arguments for cudnn_batch_norm)",
    ),
    "strided variance": (
        {"running_var": wide().abs() + 0.5, "bias": torch.randn(C), "running_mean": wide()},
        "Expected contiguous tensor, but got non-contiguous tensor for argument #4 'running_mean' "
        "(while checking arguments for cudnn_batch_norm)",
    ),
    "strided input": ({"input": torch.randn(SHAPE[::-1]).permute(3, 2, 1, 0)}, NOT_DENSE),
    "an axis": (
        {"input": torch.randn(C)},
        "Expected 2 to 5 dimensions, but got 1-dimensional tensor for argument #1 'input' (while "
        "checking arguments for cudnn_batch_norm)",
    ),
    "six axes": (
        {"input": torch.randn(2, C, 2, 2, 2, 2)},
        "Expected 2 to 5 dimensions, but got 6-dimensional tensor for argument #1 'input' (while "
        "checking arguments for cudnn_batch_norm)",
    ),
    "weights of another number": (
        {"weight": torch.randn(C + 1)},
        "Expected tensor for argument #2 'weight' to have 3 elements; but it actually has 4 "
        "elements (while checking arguments for cudnn_batch_norm)",
    ),
    "one variance": (
        {"running_var": torch.ones(1)},
        "Expected tensor for argument #5 'running_var' to have 3 elements; but it actually has 1 "
        "elements (while checking arguments for cudnn_batch_norm)",
    ),
}
OF_BACKWARD: dict[str, tuple[Values, str]] = {
    "no mean": (
        {"save_mean": None},
        "Expected tensor for argument #4 'save_mean' to be non-null, but it was undefined  (while "
        "checking arguments for cudnn_batch_norm_backward)",
    ),
    "no variance": (
        {"save_var": None},
        "Expected tensor for argument #5 'save_var' to be non-null, but it was undefined  (while "
        "checking arguments for cudnn_batch_norm_backward)",
    ),
    "half weight of a half": (
        {"input": torch.randn(SHAPE).half(), "weight": torch.randn(C).half()},
        "Expected tensor for argument #3 'weight' to have scalar type Float; but got "
        "torch.HalfTensor instead (while checking arguments for cudnn_batch_norm_backward)",
    ),
    "integer weight": (
        {"weight": torch.ones(C, dtype=torch.int64)},
        "Expected tensor for argument #1 'input' to have the same type as tensor for argument #3 "
        "'weight'; but type torch.FloatTensor does not equal torch.LongTensor (while checking "
        "arguments for cudnn_batch_norm_backward)",
    ),
    "half gradient": (
        {"grad_output": torch.randn(SHAPE).half()},
        "Expected tensor for argument #1 'input' to have the same type as tensor for argument #2 "
        "'grad_output'; but type torch.FloatTensor does not equal torch.HalfTensor (while checking "
        "arguments for cudnn_batch_norm_backward)",
    ),
    "double variance": (
        {"save_var": torch.rand(C).double()},
        "Expected tensor for argument #3 'weight' to have the same type as tensor for argument #5 "
        "'save_var'; but type torch.FloatTensor does not equal torch.DoubleTensor (while checking "
        "arguments for cudnn_batch_norm_backward)",
    ),
    "strided mean": (
        {"save_mean": wide()},
        "Expected contiguous tensor, but got non-contiguous tensor for argument #4 'save_mean' "
        "(while checking arguments for cudnn_batch_norm_backward)",
    ),
    "strided input": ({"input": torch.randn(SHAPE[::-1]).permute(3, 2, 1, 0)}, NOT_DENSE),
    "an axis": (
        {"input": torch.randn(C), "grad_output": torch.randn(C)},
        "Expected 2 to 5 dimensions, but got 1-dimensional tensor for argument #1 'input' (while "
        "checking arguments for cudnn_batch_norm_backward)",
    ),
    "gradient of another size": (
        {"grad_output": torch.randn(N, C, S, 1)},
        "Expected tensor for argument #1 'input' to have same size as tensor for argument #2 "
        "'grad_output'; but [4, 3, 5, 2] does not equal [4, 3, 5, 1] (while checking arguments for "
        "cudnn_batch_norm_backward)",
    ),
    "statistics of another number": (
        {"save_mean": torch.randn(C - 1)},
        "Expected tensor for argument #4 'save_mean' to have 3 elements; but it actually has 2 "
        "elements (while checking arguments for cudnn_batch_norm_backward)",
    ),
}


@pytest.mark.parametrize(("changes", "text"), OF_FORWARD.values(), ids=OF_FORWARD)
def test_the_forward_says_what_cudnns_does(changes: Values, text: str) -> None:
    """As a composition, and in eager mode where the rules are asked for."""
    values = {**forward_values(), **changes}
    assert message_of(FORWARD, values) == text
    with registered(eager=True):
        assert message_of(aten.cudnn_batch_norm, values) == text


@pytest.mark.parametrize(("changes", "text"), OF_BACKWARD.values(), ids=OF_BACKWARD)
def test_the_backward_says_what_cudnns_does(changes: Values, text: str) -> None:
    values = {**backward_values(), **changes}
    assert message_of(BACKWARD, values) == text
    with registered(eager=True):
        assert message_of(aten.cudnn_batch_norm_backward, values) == text


@pytest.mark.parametrize("name", ["no bias", "double weight", "strided input", "one variance"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_trace_of_the_forward_says_it(name: str, requires_grad: bool) -> None:
    changes, text = OF_FORWARD[name]
    values = {**forward_values(), **changes}
    values["input"].requires_grad_(requires_grad)
    torch._dynamo.reset()
    with registered(), pytest.raises(RuntimeError, match=re.escape(text)):
        torch.compile(lambda *v: aten.cudnn_batch_norm(*v), backend="aot_eager")(*values.values())


@pytest.mark.parametrize("name", ["half gradient", "gradient of another size", "strided mean"])
def test_a_trace_of_the_backward_says_it(name: str) -> None:
    changes, text = OF_BACKWARD[name]
    values = {**backward_values(), **changes}
    torch._dynamo.reset()
    compiled = torch.compile(lambda *v: aten.cudnn_batch_norm_backward(*v), backend="aot_eager")
    with registered(), pytest.raises(RuntimeError, match=re.escape(text)):
        compiled(*values.values())


def test_the_backend_says_it_by_itself() -> None:
    """Without register(), of what Dynamo lets through."""
    changes, text = OF_FORWARD["no bias"]
    values = {**forward_values(), **changes}
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=re.escape(text)):
        torch.compile(lambda *v: aten.cudnn_batch_norm(*v), backend="normpass")(*values.values())


def test_the_checks_come_in_upstreams_order() -> None:
    """All is wrong at first; what is complained of is mended, until nothing is wrong."""
    bad = torch.randn(C + 1, 2).double()[:, 0]
    values = {**forward_values(), "input": torch.randn(C, 2)[:, 0], "training": False}
    values |= {"weight": bad, "bias": None, "running_mean": None, "running_var": bad}
    strided = torch.randn(C + 1, 2)[:, 0]
    mended: list[tuple[str, Values]] = [
        ("argument #3 'bias' to be non-null", {"bias": bad}),
        ("argument #4 'running_mean' to be non-null", {"running_mean": bad}),
        ("argument #1 'input' to have the same type", {"weight": strided}),
        ("argument #2 'weight' to have the same type", {"bias": strided}),
        ("for argument #4 'running_mean'; but type", {"running_mean": strided}),
        ("for argument #5 'running_var'; but type", {"running_var": strided}),
        ("non-contiguous tensor for argument #2", {"weight": torch.randn(C + 1)}),
        ("non-contiguous tensor for argument #3", {"bias": torch.randn(C + 1)}),
        ("non-contiguous tensor for argument #4", {"running_mean": torch.randn(C + 1)}),
        ("non-contiguous tensor for argument #5", {"running_var": torch.rand(C + 1)}),
        ("input->is_contiguous(input->suggest_memory_format())", {"input": torch.randn(C)}),
        ("Expected 2 to 5 dimensions", {"input": torch.randn(N, C)}),
        ("argument #2 'weight' to have 3 elements", {"weight": torch.randn(C)}),
        ("argument #3 'bias' to have 3 elements", {"bias": torch.randn(C)}),
        ("argument #4 'running_mean' to have 3 elements", {"running_mean": torch.randn(C)}),
        ("argument #5 'running_var' to have 3 elements", {"running_var": torch.rand(C)}),
    ]
    for text, changes in mended:
        assert text in message_of(FORWARD, values)
        values |= changes
    assert FORWARD(*values.values())[0].shape == (N, C)


def on(device: str, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, device=device, dtype=dtype)


def test_tensors_on_several_devices() -> None:
    """All of them on the CPU is what the wrapper does not take, and the rules are there for."""
    end = " (while checking arguments for cudnn_batch_norm)"
    with FakeTensorMode():
        values = [on("cuda", *SHAPE), *(on("cuda", C) for _ in range(4)), False, 0.3, 0.25]
        assert FORWARD(*values)[0].device == values[0].device
        with pytest.raises(RuntimeError) as raised:
            FORWARD(*values[:2], on("cpu", C), *values[3:])
        text = "Tensor for argument #3 'bias' is on CPU, but expected it to be on GPU"
        assert str(raised.value) == text + end
        with pytest.raises(RuntimeError) as raised:
            FORWARD(on("cpu", *SHAPE), *values[1:])
        text = "Tensor for argument #1 'input' is on CPU, but expected it to be on GPU"
        assert str(raised.value) == text + end
        with pytest.raises(RuntimeError) as raised:
            FORWARD(*values[:3], on("cuda:1", C), *values[4:])
        assert str(raised.value) == (
            "Expected tensor for argument #1 'input' to have the same device as tensor for "
            "argument #4 'running_mean'; but device 0 does not equal 1" + end
        )
        halves = [on("cuda", *SHAPE, dtype=HALF), on("cuda", C, dtype=HALF)]
        with pytest.raises(RuntimeError, match=r"but got torch\.cuda\.HalfTensor "):
            FORWARD(*halves, *values[2:])
        halves = [on("cuda", *SHAPE, dtype=HALF), on("cuda", C, dtype=BFLOAT)]
        with pytest.raises(RuntimeError, match="but got CUDABFloat16Type instead"):
            FORWARD(*halves, *values[2:])


@pytest.mark.parametrize(
    "dtype",
    [
        *(HALF, BFLOAT, torch.float32, torch.float64, torch.float8_e5m2, torch.complex64),
        *(torch.int8, torch.int16, torch.uint8, torch.uint16, torch.bool),
    ],
    ids=str,
)
def test_dtypes_have_the_names_that_torchs_own_messages_have(dtype: torch.dtype) -> None:
    """embedding's come from the same function of C++, and through the same translation."""
    indices = torch.zeros(2).to(dtype)
    with pytest.raises(RuntimeError) as theirs:
        aten.embedding(torch.randn(3, 2), indices)
    with pytest.raises(RuntimeError) as ours:
        Checks("embedding").scalar_type(Argument(1, "indices", indices), torch.int64)
    got = [re.search(r"but got (\S+) instead", str(error.value)) for error in (ours, theirs)]
    assert got[0] is not None
    assert got[1] is not None
    assert got[0][1] == got[1][1]


def traced(function: Callable[..., Any], *values: Any) -> Any:
    return make_fx(function, tracing_mode="symbolic")(*values)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("training", [True, False])
def test_a_trace_has_no_conditions_that_the_mathematics_has_not(training: bool, form: Any) -> None:
    """The guards of the operator are those of native_batch_norm, which asks nothing."""
    x, *rest = list(forward_values().values())[:5]
    x = x.contiguous(memory_format=form)
    native = by_op("autograd")[aten.native_batch_norm.default]
    guards = []
    for rule in (FORWARD, native):
        graph = traced(lambda *v, rule=rule: rule(*v, training, 0.3, 0.25)[0], x, *rest)
        guards.append([str(guard.expr) for guard in graph.shape_env.guards])
        assert not graph.shape_env.replacements
    assert guards[0] == guards[1]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_sizes_that_nobody_knows(form: Any) -> None:
    """mark_unbacked: whether such a tensor is contiguous cannot be asked; it is taken to be."""
    torch._dynamo.reset()
    count = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal count
        count += 1
        return graph

    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y: Tensor = aten.cudnn_batch_norm(x, w, b, None, None, True, 0.3, 0.25)[0]
        return y

    with registered(eager=True):
        compiled = torch.compile(norm, backend=backend, fullgraph=True)
        w, b = torch.randn(C), torch.randn(C)
        for shape in (SHAPE, (1, C, 2, 7)):
            x = torch.randn(shape).contiguous(memory_format=form)
            for axis in (0, 2, 3):
                torch._dynamo.decorators.mark_unbacked(x, axis)
            want = aten.native_batch_norm(x, w, b, None, None, True, 0.3, 0.25)[0]
            torch.testing.assert_close(compiled(x, w, b), want)
    assert count == 1


@pytest.mark.parametrize("dim", [0, 2, -1])
def test_vmap_asks_nothing(dim: int) -> None:
    """functorch calls the wrapper with contiguous tensors, and parameters of its own making."""
    x = torch.randn(2, *SHAPE).double().movedim(0, dim)
    w = torch.randn(C).double()

    def loss(v: Tensor, op: Any) -> Tensor:
        value: Tensor = op(v, w, w, None, None, True, 0.3, 0.25)[0].sin().sum()
        return value

    with registered(eager=True):
        ours = vmap(grad(loss), in_dims=(dim, None))(x, aten.cudnn_batch_norm)
        native = vmap(grad(loss), in_dims=(dim, None))(x, aten.native_batch_norm)
    torch.testing.assert_close(ours, native, rtol=1e-10, atol=1e-10)
    torch._dynamo.reset()
    with registered():
        mapped = vmap(grad(lambda v: loss(v, aten.cudnn_batch_norm)), in_dims=dim)
        compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), native, rtol=1e-10, atol=1e-10)
