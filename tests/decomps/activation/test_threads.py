"""Rules that come and go while another thread traces or compiles."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._inductor.decomposition  # enters rules that `state` has to hold
import torch.nn.functional as F
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx

from normpass.decomps.activation import is_registered, register, unregister
from normpass.decomps.registry import by_op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

aten = torch.ops.aten
CHANGED = {
    op
    for kind in ("autograd", "double_backward", "batching", "zero_tensor")
    for op in by_op(kind)  # type: ignore[arg-type]
    if op.namespace == "aten"
} | {aten._efficientzerotensor.default}
X = torch.sin(torch.arange(60.0).double() ** 2).reshape(3, 4, 5)
ARGS = X, torch.arange(5.0).double() + 1, X.flip(0)
# What stock torch traces too: some traces see half of the rules.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "vmap_grad": lambda x, w, v: vmap(grad(lambda u: F.layer_norm(u, (5,), w).sin().sum()))(x),
    "vmap": lambda x, w, v: vmap(lambda u: F.batch_norm(u, None, None, training=True))(x),
    "grad": lambda x, w, v: grad(lambda u: F.layer_norm(u, (5,), w).sin().sum())(x),
    "jvp": lambda x, w, v: jvp(lambda u: (u * v + u.reshape(-1).sum()).sin(), (x,), (v,))[1],
    "zeros": lambda x, w, v: jvp(lambda u: u * v + v / (u * u + 1) - v, (x,), (v,))[1],
}


def state() -> list[Any]:
    return [(op, {**op.py_kernels}, {**op.python_key_table}) for op in CHANGED]


def unchanged(before: list[Any]) -> bool:
    """Also what is called: nothing in a cache of the dispatcher is ours any more."""
    ours = [
        (op, key, kernel)
        for op in CHANGED
        for key, kernel in op._dispatch_cache.items()
        if "normpass" in str(getattr(kernel, "__module__", "")) or type(kernel).__name__ == "Rule"
    ]
    return state() == before and not ours and not is_registered()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    register()
    unregister()
    before, interval = state(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
    assert unchanged(before)


def traced(function: Callable[..., Any]) -> Tensor:
    with enable_python_dispatcher():
        graph = make_fx(function, tracing_mode="symbolic")(*ARGS)
    found: Tensor = graph(*ARGS)
    return found


def compiled(function: Callable[..., Any]) -> Tensor:
    torch._dynamo.reset()
    found: Tensor = torch.compile(function, backend="aot_eager", fullgraph=True)(*ARGS)
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("run", [traced, compiled])
def test_rules_change_while_another_thread_works(run: Callable[..., Tensor]) -> None:
    want = {name: function(*ARGS) for name, function in FUNCTIONS.items()}
    errors: list[Any] = []
    done = threading.Event()

    def work() -> None:
        try:
            # Twice at least: once with what the first round has cached.
            end = time.monotonic() + 5
            rounds = 0
            while rounds < 2 or time.monotonic() < end:
                rounds += 1
                for name, function in FUNCTIONS.items():
                    torch.testing.assert_close(run(function), want[name], rtol=1e-9, atol=1e-9)
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    worker = threading.Thread(target=work)
    worker.start()
    changes = 0
    while not done.is_set():
        register()
        unregister()
        changes += 1
    worker.join()
    if errors:
        raise errors[0]
    assert changes > 10


class Waiting(dict[Any, Any]):
    """A table of kernels in which one thread, having looked something up, is held."""

    thread: threading.Thread | None = None

    def __init__(self, table: Any) -> None:
        super().__init__(table)
        self.found, self.go = threading.Event(), threading.Event()

    def get(self, key: Any, default: Any = None) -> Any:
        kernel = super().get(key, default)
        if threading.current_thread() is self.thread:
            self.found.set()
            self.go.wait()
        return kernel


@contextlib.contextmanager
def late(op: Any, key: DispatchKey) -> Iterator[None]:
    """A thread that asks which kernel to call before the block, and enters the answer after it."""
    table = op.py_kernels = Waiting(op.py_kernels)
    op._dispatch_cache.pop(key, None)
    table.thread = threading.Thread(target=lambda: op._get_dispatch(key))
    table.thread.start()
    table.found.wait()
    yield
    table.go.set()
    table.thread.join()


@pytest.mark.parametrize("change", [register, unregister])
@pytest.mark.parametrize(
    ("op", "key"),
    [
        (aten.native_layer_norm.default, DispatchKey.AutogradCPU),
        (aten.native_batch_norm.default, DispatchKey.FuncTorchBatched),
        (aten.mul.Tensor, DispatchKey.ZeroTensor),
    ],
    ids=["autograd", "vmap", "zeros"],
)
def test_a_thread_that_is_late_enters_nothing_old(op: Any, key: DispatchKey, change: Any) -> None:
    if change is unregister:
        register()
    with late(op, key):
        change()
    called = op._dispatch_cache[key]
    if change is register:
        assert called is op.py_kernels[key]
        unregister()
        assert op._dispatch_cache[key] is not called
    op.py_kernels = dict(op.py_kernels)


def test_a_zero_is_recorded_while_the_rule_for_it_goes() -> None:
    """torch's own function fails if the table of an operator changes while it is in it."""
    op = aten._efficientzerotensor.default
    register()
    called = op._dispatch_cache[DispatchKey.Python]
    assert ProxyTorchDispatchMode in op.python_key_table
    unregister()

    def zero(x: Tensor) -> Tensor:
        return called([3], dtype=x.dtype, device=x.device) + x

    graph = make_fx(zero)(torch.ones(3))
    assert graph(torch.ones(3)).equal(torch.ones(3))
