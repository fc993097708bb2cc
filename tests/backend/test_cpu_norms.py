"""Norms through `torch.compile(backend="normpass")` on the CPU: fused, and no less accurate than
eager.

The reference is the norm written from primitives in float64 (oracles.py); the error allowed is
eager's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from compiled import compile_fused, count_fused, no_recompiles
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
DRAWS = 10
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


class LlamaRMSNorm(nn.Module):
    """As transformers writes it: float32 inside, the weight applied to the cast result."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class T5LayerNorm(LlamaRMSNorm):
    """The variance alone in float32."""

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in HALVES:
            x = x.to(self.weight.dtype)
        return self.weight * x


class GemmaRMSNorm(LlamaRMSNorm):
    """One plus the weight, and the cast last."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


@dataclass(frozen=True)
class Norm:
    """A module, the shape of its input, and the same mathematics from primitives."""

    module: Callable[[], nn.Module]
    shape: tuple[int, ...]
    oracle: Callable[..., Tensor]  # of x, weight, bias


def layer(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return oracles.layer_norm(x, x.shape[-1:], w, b)


def rms(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return oracles.rms_norm(x, x.shape[-1:], w)


def softmax(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return oracles.softmax(x, -1)


def group(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return oracles.group_norm(x, 3, w, b)


NORMS = {
    "LayerNorm": Norm(lambda: nn.LayerNorm(67), (5, 7, 67), layer),
    "RMSNorm": Norm(lambda: nn.RMSNorm(67, eps=1e-5), (5, 7, 67), rms),
    "LlamaRMSNorm": Norm(lambda: LlamaRMSNorm(67), (5, 7, 67), rms),
    "T5LayerNorm": Norm(lambda: T5LayerNorm(67), (5, 7, 67), rms),
    "GemmaRMSNorm": Norm(lambda: GemmaRMSNorm(67), (5, 7, 67), lambda x, w, b: rms(x, 1 + w)),
    "GroupNorm": Norm(lambda: nn.GroupNorm(3, 12), (5, 12, 7, 9), group),
    "BatchNorm1d": Norm(lambda: nn.BatchNorm1d(19), (35, 19), oracles.batch_norm),
    "BatchNorm2d": Norm(lambda: nn.BatchNorm2d(12), (5, 12, 7, 9), oracles.batch_norm),
    "Softmax": Norm(lambda: nn.Softmax(-1), (5, 7, 67), softmax),
}
by_norm = pytest.mark.parametrize("name", NORMS)


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An input and a gradient."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 1.3 + 0.4
    g = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(dtype), g.to(dtype)


def module_of(norm: Norm, dtype: torch.dtype) -> nn.Module:
    module = norm.module().to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise)
    return module


def results(function: Callable[..., Tensor], module: nn.Module, x: Tensor, g: Tensor) -> list[Any]:
    """Output, then the gradients of x and of the parameters; None where there is none."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = function(x)
    y.backward(g.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def check(
    function: Callable[..., Tensor],
    eager: Callable[..., Tensor],
    module: nn.Module,
    oracle: Callable[..., Tensor],
    x: Tensor,
    g: Tensor,
) -> None:
    """Holds the compiled function against the oracle, with eager's error as measure."""
    parameters = list(module.parameters())
    expected = oracles.gradients(oracle, g, x, *(p.detach() for p in parameters))
    forward = oracle(x.double(), *(p.detach().double() for p in parameters))
    ours, theirs = results(function, module, x, g), results(eager, module, x, g)
    for k, reference in enumerate([forward, *expected]):
        if ours[k] is None:
            assert theirs[k] is None
            continue
        oracles.assert_no_less_accurate(ours[k], theirs[k], reference.detach(), f"result {k}")
        assert ours[k].dtype is theirs[k].dtype
        if x.is_contiguous():
            assert ours[k].stride() == theirs[k].stride()


@pytest.mark.one_in(15)
@by_dtype
@by_norm
def test_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    norm = NORMS[name]
    module = module_of(norm, dtype)
    x, g = tensors(norm.shape, dtype)
    check(compile_fused(module), module, module, _oracle(norm, module), x, g)
    assert count_fused() >= 1


@by_dtype
def test_weight_norm(dtype: torch.dtype) -> None:
    """A kernel for each direction, before the product and behind it."""
    norm = Norm(
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(67, 67)),
        (5, 7, 67),
        lambda x, b, g, v: F.linear(x, g * v / v.square().sum(1, keepdim=True).sqrt(), b),
    )
    module = module_of(norm, dtype)
    x, g = tensors(norm.shape, dtype)
    check(compile_fused(module), module, module, norm.oracle, x, g)
    assert (count_fused("forward"), count_fused("backward")) == (1, 1)


def _oracle(norm: Norm, module: nn.Module) -> Callable[..., Tensor]:
    """Of as many arguments as the module has parameters."""
    missing = 2 - len(list(module.parameters()))
    return lambda *arguments: norm.oracle(*arguments, *[None] * missing)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["LayerNorm", "LlamaRMSNorm", "GemmaRMSNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_with_float32_weights(name: str, dtype: torch.dtype) -> None:
    if name in ("LayerNorm", "RMSNorm"):
        norm = NORMS[name]
        module = module_of(norm, torch.float32)
        call = F.layer_norm if name == "LayerNorm" else F.rms_norm

        def eager(x: Tensor) -> Tensor:
            return call(x.float(), (67,), *module.parameters(), eps=1e-5).to(dtype)
    else:
        norm, module = NORMS[name], module_of(NORMS[name], torch.float32)
        eager = module
    x, g = tensors(norm.shape, dtype)
    check(compile_fused(eager), eager, module, _oracle(norm, module), x, g)
    assert count_fused("backward") == 1


@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm", "RMSNorm"])
def test_autocast(name: str) -> None:
    norm = NORMS[name]
    module = module_of(norm, torch.float32)

    def eager(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x)

    x, g = tensors(norm.shape, torch.bfloat16 if name != "RMSNorm" else torch.float32)
    check(compile_fused(eager), eager, module, _oracle(norm, module), x, g)
    assert count_fused("backward") == 1


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_functional_with_and_without_parameters(weight: bool, bias: bool) -> None:
    module = nn.Module()
    if weight:
        module.weight = nn.Parameter(torch.randn(67))
    if bias:
        module.bias = nn.Parameter(torch.randn(67))

    def eager(x: Tensor) -> Tensor:
        w, b = getattr(module, "weight", None), getattr(module, "bias", None)
        return F.layer_norm(x, (67,), w, b)

    def oracle(x: Tensor, *parameters: Tensor) -> Tensor:
        rest = iter(parameters)
        return layer(x, next(rest) if weight else None, next(rest) if bias else None)

    x, g = tensors((5, 7, 67), torch.float32)
    check(compile_fused(eager), eager, module, oracle, x, g)
    assert count_fused("backward") == 1


def test_frozen_weights_get_no_gradient() -> None:
    module = module_of(NORMS["LayerNorm"], torch.float32).requires_grad_(False)
    x, g = tensors((5, 7, 67), torch.float32)
    check(compile_fused(module), module, module, _oracle(NORMS["LayerNorm"], module), x, g)
    assert count_fused("backward") == 1


def test_neighbours_come_along() -> None:
    """A residual before the norm and an activation after it: one region a direction."""
    module = module_of(NORMS["LayerNorm"], torch.float32)

    def eager(x: Tensor) -> Tensor:
        return F.silu(module(x + torch.sin(x)))

    def oracle(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = layer(x + torch.sin(x), w, b)
        return y * torch.sigmoid(y)

    x, g = tensors((5, 7, 67), torch.float32)
    check(compile_fused(eager), eager, module, oracle, x, g)
    assert count_fused("backward") == 1
    assert count_fused() == 2


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every other": lambda x: torch.stack([x, x], -1)[..., 0],
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm", "BatchNorm2d"])
def test_layouts(name: str, layout: str) -> None:
    norm = NORMS[name]
    if layout == "channels last" and len(norm.shape) != 4:
        return
    module = module_of(norm, torch.float32)
    x, g = (LAYOUTS[layout](v) for v in tensors(norm.shape, torch.float32))
    check(compile_fused(module), module, module, _oracle(norm, module), x, g)
    assert count_fused("backward") == 1


def test_tokens_of_one_image() -> None:
    """They give batch norm a gradient whose strides are (8, 1, 32, 8), which PyTorch's kernel reads
    as if it were contiguous (2.11 to 2.15): eager's gradient is wrong without the hook.
    """
    norm = nn.BatchNorm2d(8, dtype=torch.float64)

    def tokens(x: Tensor) -> Tensor:
        x = norm(x)
        if not torch.compiler.is_compiling():
            x.register_hook(torch.Tensor.contiguous)
        return F.layer_norm(x.flatten(2).transpose(1, 2), (8,))

    x = tensors((1, 8, 4, 4), torch.float64)[0].requires_grad_()
    g = tensors((1, 16, 8), torch.float64)[1]
    (right,) = torch.autograd.grad(tokens(x), x, g)
    (found,) = torch.autograd.grad(compile_fused(tokens)(x), x, g)
    torch.testing.assert_close(found, right)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "name", ["LayerNorm", "LlamaRMSNorm", "GroupNorm", "BatchNorm2d", "Softmax"]
)
def test_a_dynamic_batch_compiles_once(name: str) -> None:
    norm = NORMS[name]
    module = module_of(norm, torch.float32)
    function = compile_fused(module, dynamic=None)
    for n in (4, 6):  # the second size makes it dynamic
        x, g = tensors((n, *norm.shape[1:]), torch.float32)
        torch._dynamo.mark_dynamic(x, 0)
        results(function, module, x, g)
    with no_recompiles():
        for n in (2, 5, 33):
            x, g = tensors((n, *norm.shape[1:]), torch.float32)
            check(function, module, module, _oracle(norm, module), x, g)
    assert count_fused("backward") >= 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", [(0, 67), (1, 67), (67,), (3, 1)], ids=str)
def test_few_rows(shape: tuple[int, ...]) -> None:
    module = module_of(Norm(lambda: nn.LayerNorm(shape[-1]), shape, layer), torch.float32)
    x, g = tensors(shape, torch.float32)
    check(compile_fused(module), module, module, layer, x, g)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "Softmax", "GroupNorm", "BatchNorm2d"])
def test_nan_and_infinity_go_where_eager_sends_them(name: str) -> None:
    norm = NORMS[name]
    module = module_of(norm, torch.float32)
    x, g = tensors(norm.shape, torch.float32)
    flat = x.view(-1)
    flat[3], flat[700], flat[1500] = torch.nan, torch.inf, -torch.inf
    g.view(-1)[200] = torch.nan
    function = compile_fused(module)
    for mine, other in both(function, module, x, g):
        assert torch.equal(mine.isnan(), other.isnan())
        assert torch.equal(mine.isposinf(), other.isposinf())
        assert torch.equal(mine.isneginf(), other.isneginf())
    # An infinite gradient leaves no finite number in its row; which of them are NaN depends on the
    # order in which infinities of both signs are added.
    g.view(-1)[2000] = torch.inf
    for mine, other in both(function, module, x, g):
        assert torch.equal(mine.isfinite(), other.isfinite())
    assert count_fused() >= 1


def both(
    function: Callable[..., Tensor], module: nn.Module, x: Tensor, g: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Ours and eager's results in pairs."""
    return zip(results(function, module, x, g), results(module, module, x, g), strict=True)


@by_dtype
def test_forward_alone(dtype: torch.dtype) -> None:
    module = module_of(NORMS["LayerNorm"], dtype).requires_grad_(False)
    x, _ = tensors((5, 7, 67), dtype)
    y = compile_fused(module)(x)
    reference = layer(x.double(), *(p.double() for p in module.parameters()))
    oracles.assert_no_less_accurate(y, module(x), reference)
    assert count_fused("forward") == 1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_double_backward(dtype: torch.dtype, dynamic: bool) -> None:
    """The gradient of a function of the gradient, inside the compiled function."""

    def second(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def penalty(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
            inner = torch.func.grad(lambda x: (torch.sin(norm(x, w)) * v).sum())(x)
            return (inner * inner * v).sum()

        return torch.func.grad(penalty, argnums=(0, 1))

    eager = second(lambda x, w: F.layer_norm(x, (67,), w))
    # What is replaced here is no op of eager's but a compiled graph of primitives.
    stock = torch.compile(eager, backend="inductor", dynamic=dynamic)
    fused = compile_fused(eager, dynamic=dynamic)
    errors: dict[str, list[float]] = {"ours": [], "theirs": []}
    # Rows with small variances amplify rounding a hundredfold: one draw is a matter of luck.
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        x, w, v = (torch.randn(shape, dtype=dtype) for shape in ((5, 7, 67), (67,), (5, 7, 67)))
        exact = second(layer)(x.double(), w.double(), v.double())
        for name, compiled in (("ours", fused), ("theirs", stock)):
            for found, right in zip(compiled(x, w, v), exact, strict=True):
                error = (found.double() - right).abs().max() / right.abs().max()
                errors[name].append(error.item())
    ours, theirs = (sum(each) / len(each) for each in (errors["ours"], errors["theirs"]))
    assert ours <= theirs + 4 * torch.finfo(dtype).eps
    assert count_fused() >= 1


@pytest.mark.parametrize("name", ["LayerNorm", "BatchNorm2d"])
def test_many_terms_do_not_lose_accuracy(name: str) -> None:
    """Sums over tens of thousands of elements, which eager's batch norm adds up in float64."""
    norm = NORMS[name]
    shape = (40_000, 67) if name == "LayerNorm" else (16, 12, 56, 56)
    module = module_of(norm, torch.float32)
    x, g = tensors(shape, torch.float32)
    parameters = [p.detach() for p in module.parameters()]
    expected = oracles.gradients(_oracle(norm, module), g, x, *parameters)
    ours, theirs = results(compile_fused(module), module, x, g), results(module, module, x, g)
    for mine, other, exact in zip(ours[1:], theirs[1:], expected, strict=True):
        assert exact is not None
        # The largest of many rounding errors is a matter of luck; their mean is not.
        error, allowed = ((v.double() - exact).abs().mean() for v in (mine, other))
        floor = torch.finfo(torch.float32).eps * exact.abs().mean()
        assert error <= 1.05 * allowed + floor, f"mean error {error:.3e}, eager's {allowed:.3e}"
    assert count_fused("backward") == 1
