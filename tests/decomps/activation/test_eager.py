"""register(eager=True): derivatives of any order and batching rules without a compiler."""

from __future__ import annotations

import multiprocessing
import threading
from typing import TYPE_CHECKING, Any

import orders
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import workers
from torch._subclasses import FakeTensorMode
from torch.func import grad, jvp, vmap

from normpass.decomps.activation import eager, is_registered, register, registered, unregister
from normpass.decomps.activation.levels import needs_composition_of
from normpass.decomps.registry import by_op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch._ops import OpOverload

aten = torch.ops.aten
CHANGED = sorted(
    {
        op
        for kind in ("autograd", "double_backward", "batching")
        for op, rule in by_op(kind).items()  # type: ignore[arg-type]
        if op.namespace == "aten" and rule.eager
    },
    key=str,
)


@pytest.fixture
def rules() -> Iterator[None]:
    with registered(eager=True):
        yield


def identity(function: Any) -> Any:
    return function


def tables() -> dict[OpOverload, str]:
    """The dispatch tables: which kernel stands at which key, and where it was registered."""
    dump = torch._C._dispatch_dump
    table = torch._C._dispatch_dump_table
    return {op: dump(op.name()) + table(op.name()) for op in CHANGED}


# vmap of weight norm without a derivative stays functorch's, which warns that it is a loop.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("mix", orders.MIXES)
@pytest.mark.parametrize("norm", orders.NORMS)
def test_derivatives_of_every_mix_are_right(norm: str, mix: str) -> None:
    assert orders.outcome(norm, mix, identity) == "right"


def tape(norm: Any, order: int, *leaves: Tensor) -> list[Tensor]:
    """The gradients of this order by torch.autograd.grad alone, all along fixed directions."""
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    value = (norm(*leaves) * orders.C).sum()
    for _ in range(order - 1):
        grads = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
        value = sum((g * orders.fixed(*g.shape)).sum() for g in grads)  # type: ignore[assignment]
    return list(torch.autograd.grad(value, leaves, materialize_grads=True))


EPS, rows = orders.EPS, orders.standardized
TAPED = {
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (5,), w, b, EPS),
        lambda x, w, b: rows(x, [-1]) * w + b,
        5,
    ),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0.1, EPS),
        lambda x, w, b: rows(x, [0, 2]) * w[:, None] + b[:, None],
        6,
    ),
    "instance_norm": (
        lambda x, w, b: F.instance_norm(x, None, None, w, b, eps=EPS),
        lambda x, w, b: rows(x, [2]) * w[:, None] + b[:, None],
        6,
    ),
    "_batch_norm_with_update": (
        lambda x, w, b: aten._batch_norm_with_update(
            x, w, b, torch.zeros(6).double(), torch.ones(6).double(), 0.1, EPS
        )[0],
        lambda x, w, b: rows(x, [0, 2]) * w[:, None] + b[:, None],
        6,
    ),
    "cudnn_batch_norm": (
        lambda x, w, b: aten.cudnn_batch_norm(x, w, b, None, None, True, 0.1, EPS)[0],
        lambda x, w, b: rows(x, [0, 2]) * w[:, None] + b[:, None],
        6,
    ),
    "group_norm": (
        lambda x, w, b: F.group_norm(x, 3, w, b, EPS),
        lambda x, w, b: rows(x.reshape(4, 3, 10), [-1]).reshape(x.shape) * w[:, None] + b[:, None],
        6,
    ),
}


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("norm", TAPED)
def test_orders_of_a_tape_are_right(norm: str, order: int) -> None:
    """Without torch.func: create_graph=True, in all arguments at once."""
    function, primitives, channels = TAPED[norm]
    leaves = orders.fixed(*orders.SHAPE) * 2, orders.fixed(channels) + 1.5, orders.fixed(channels)
    found, right = tape(function, order, *leaves), tape(primitives, order, *leaves)
    for ours, want in zip(found, right, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm"])
def test_reverse_over_a_dual_number(norm: str) -> None:
    """torch.autograd.forward_ad, and the gradient of the tangent by the tape."""
    make, primitives = orders.NORMS[norm]

    def gradient(function: Any) -> Tensor:
        x = (orders.fixed(*orders.SHAPE) * 2).requires_grad_()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, orders.V)
            tangent = torch.autograd.forward_ad.unpack_dual(function(dual)).tangent
            return torch.autograd.grad((tangent * orders.C).sum(), x)[0]

    torch.testing.assert_close(gradient(make()), gradient(primitives), rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("norm", TAPED)
def test_forward_mode_over_a_backward_alone(norm: str) -> None:
    """The norm itself was computed before: its backward, with a graph, meets dual numbers."""
    function, primitives, channels = TAPED[norm]

    def tangents(function: Any) -> list[Tensor]:
        leaves = orders.fixed(*orders.SHAPE) * 2, orders.fixed(channels) + 1.5
        leaves = tuple(leaf.requires_grad_() for leaf in leaves)
        y = function(*leaves, orders.fixed(channels))
        with torch.autograd.forward_ad.dual_level():
            g = torch.autograd.forward_ad.make_dual(orders.C, orders.V)
            found = torch.autograd.grad(y, leaves, g, create_graph=True)
            return [t for g in found for t in torch.autograd.forward_ad.unpack_dual(g)]

    torch.testing.assert_close(tangents(function), tangents(primitives), rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("rules")
def test_orders_up_to_the_second_are_the_operators_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, gradients and nodes are what they were, bit by bit; nothing is composed."""
    norm, x = torch.nn.LayerNorm(5), orders.fixed(4, 5).float().requires_grad_()

    def run() -> list[Tensor]:
        y = norm(x)
        assert type(y.grad_fn).__name__ == "NativeLayerNormBackward0"
        return [y, *torch.autograd.grad(y.square().sum(), [x, *norm.parameters()])]

    def composed(*_: Any) -> None:
        raise AssertionError("a composition was used")

    monkeypatch.setattr(torch, "var_mean", composed)
    ours = run()
    torch.func.grad(lambda v: norm(v).square().sum())(x.detach())
    unregister_blocks()
    for mine, stock in zip(ours, run(), strict=True):
        assert torch.equal(mine, stock)


def unregister_blocks() -> None:
    """`unregister`, which ends open blocks too: the fixture's."""
    unregister()
    assert not is_registered()


@pytest.mark.usefixtures("rules")
def test_a_gradient_that_nobody_asks_for_is_not_there() -> None:
    """Third order in the weight alone, in the input alone, and of a norm without either."""
    x = orders.fixed(*orders.SHAPE) * 2
    w = orders.fixed(5) + 1.5
    only_w = tape(lambda w: F.layer_norm(x, (5,), w, None, EPS) ** 3, 3, w)
    right = tape(lambda w: (orders.standardized(x, [-1]) * w) ** 3, 3, w)
    torch.testing.assert_close(only_w, right, rtol=1e-9, atol=1e-9)
    bare = tape(lambda x: F.layer_norm(x, (5,), None, None, EPS), 3, x)
    right = tape(lambda x: orders.standardized(x, [-1]), 3, x)
    torch.testing.assert_close(bare, right, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """The third order of a half is as far from float64 as its own rounding makes it."""
    leaves = orders.fixed(*orders.SHAPE) * 2, orders.fixed(5) + 1.5, orders.fixed(5)
    function, primitives, _ = TAPED["layer_norm"]

    def third(f: Any, dtype: torch.dtype) -> Tensor:
        x, w, b = (leaf.to(dtype) for leaf in leaves)
        along, cotangent = orders.V.to(dtype), orders.C.to(dtype)
        x = x.requires_grad_()
        value = (f(x, w, b) * cotangent).sum()
        for _ in range(2):
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            assert g.dtype == dtype
            value = (g * along).sum()
        return torch.autograd.grad(value, x)[0]

    right = third(primitives, torch.float64)
    ours = third(function, dtype)
    assert ours.dtype == dtype
    away = (ours.double() - right).abs().max() / right.abs().max()
    assert away < 40 * torch.finfo(dtype).eps


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("norm", orders.VMAPPED)
def test_vmap_is_the_loop_over_examples(norm: str, dim: int) -> None:
    x = torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.movedim(0, dim)

    def loss(v: Tensor) -> Tensor:
        return orders.VMAPPED[norm](v).sin().sum()

    for transform in (loss, grad(loss)):
        want = torch.stack([transform(v) for v in x.unbind(dim)])
        torch.testing.assert_close(vmap(transform, in_dims=dim)(x), want, rtol=1e-10, atol=1e-10)


def test_without_gradients_a_tangent_is_the_operators_own() -> None:
    """The composition takes twice as long, and is for who asks for a gradient of the tangent."""
    asked: list[bool] = []

    def norm(x: Tensor) -> Tensor:
        asked.append(needs_composition_of((x,)))
        return F.layer_norm(x, (4,))

    x = torch.randn(3, 4, requires_grad=True)
    jvp(norm, (x,), (x,))
    with torch.no_grad():
        jvp(norm, (x,), (x,))
    assert asked == [True, False]


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("norm", TAPED)
def test_gradcheck_and_gradgradcheck(norm: str) -> None:
    function, _, channels = TAPED[norm]
    leaves = orders.fixed(*orders.SHAPE), orders.fixed(channels) + 1.5, orders.fixed(channels)
    leaves = tuple(leaf.requires_grad_() for leaf in leaves)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_a_bias_without_a_weight_twice() -> None:
    """PyTorch raises here, or where x needs no gradient says zero (2.13 to 2.15)."""

    def norm(x: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (5,), None, bias, orders.EPS)

    x, bias = orders.fixed(4, 5).requires_grad_(), orders.fixed(5).requires_grad_()
    with pytest.raises(RuntimeError):
        torch.autograd.gradgradcheck(norm, (x, bias))
    with registered(eager=True):
        assert torch.autograd.gradgradcheck(norm, (x, bias))
        assert torch.autograd.gradgradcheck(norm, (x.detach(), bias))


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("norm", ["layer_norm", "group_norm"])
def test_nothing_at_all(norm: str) -> None:
    """An empty batch, up to the third order."""
    function = {
        "layer_norm": lambda x: F.layer_norm(x, (5,)),
        "group_norm": lambda x: F.group_norm(x, 3),
    }[norm]
    x = torch.randn(0, 6, 5, requires_grad=True)
    value = function(x).pow(3).sum()
    for _ in range(3):
        (g,) = torch.autograd.grad(value, x, create_graph=True)
        assert g.shape == x.shape
        value = g.pow(2).sum()


@pytest.mark.usefixtures("rules")
def test_elsewhere_than_on_the_tape() -> None:
    """Inference mode, autocast, fake and meta tensors, subclasses, checkpoints."""

    class Tagged(torch.Tensor):
        pass

    norm, x = torch.nn.LayerNorm(5), orders.fixed(4, 5).float()
    want = norm(x).detach()
    with torch.inference_mode():
        assert norm(x).is_inference()
    assert type(norm(x.as_subclass(Tagged))) is Tagged
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(x.bfloat16()).dtype == torch.bfloat16  # with float32 weights
    assert torch.nn.LayerNorm(5, device="meta")(x.to("meta")).shape == want.shape
    with FakeTensorMode():
        fake = torch.nn.BatchNorm1d(5)(torch.randn(4, 5, requires_grad=True))
        fake.sum().backward()
    leaf = x.clone().requires_grad_()
    kept = torch.utils.checkpoint.checkpoint(norm, leaf, use_reentrant=False)
    assert torch.equal(kept, want)
    kept.square().sum().backward()
    plain = x.clone().requires_grad_()
    norm(plain).square().sum().backward()
    assert torch.equal(leaf.grad, plain.grad)  # type: ignore[arg-type]


def test_everything_is_put_back() -> None:
    before = tables()
    with registered(eager=True):
        changed = tables()
        register()
        assert tables() == changed, "register() adds to what is there and takes nothing away"
        unregister()
        assert tables() == before
    with registered():
        assert tables() == before, "eager mode is left alone unless it is asked for"
        register(eager=True)
        assert all(tables()[op] != before[op] for op in CHANGED)
        unregister()
    assert tables() == before


def test_the_last_block_to_end_puts_it_back() -> None:
    before = tables()
    with registered():
        with registered(eager=True):
            assert tables() != before
        assert tables() == before
        assert is_registered()


def test_a_failure_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tables()

    def fail(*_: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(eager, "_backward", fail)
    with pytest.raises(RuntimeError, match="no kernel"):
        register(eager=True)
    assert not is_registered()
    assert tables() == before


def test_it_holds_in_threads() -> None:
    found: list[str] = []

    def work() -> None:
        with registered(eager=True):
            found.append(workers.third_order())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["right"] * 4
    assert not is_registered()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_it_holds_in_a_worker(start: str) -> None:
    """A forked worker has what its parent has; a spawned one registers for itself."""
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {start}")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    target = workers.forking if start == "fork" else workers.spawned
    worker = context.Process(target=target, args=(queue,))
    worker.start()
    assert queue.get(timeout=120) == (True, "right")
    worker.join()


@pytest.mark.usefixtures("rules")
def test_running_statistics_are_updated_once() -> None:
    """Under every level, and to what the operator makes of them."""
    x = orders.fixed(*orders.SHAPE) * 2

    def update(wrap: Any) -> tuple[Tensor, Tensor]:
        mean, var = orders.fixed(6), orders.fixed(6) ** 2 + 0.5
        wrap(lambda v: F.batch_norm(v, mean, var, orders.W6, orders.B6, True, 0.3, EPS))
        return mean, var

    want = update(lambda norm: norm(x))
    for mix in ("jvp", "grad", "grad_grad_grad", "jvp_grad"):
        found = update(lambda norm, mix=mix: orders.MIXES[mix](norm)(x))
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
