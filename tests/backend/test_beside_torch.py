"""What stands beside torch.compile in torch, with this backend: regional compilation, modes,
stances, compiled optimizers and autograd, marks on functions, and checkpoints.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compiled import count_fused
from higher_order_cases import IGNORED
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.fx.traceback import annotate
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import normpass
from normpass.backend.entry import normpass as backend

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., Any]

pytestmark = IGNORED
WIDTH = 8
UNCOMPILED = {"least_bytes": 0, "inner": "eager"}
BY_INDUCTOR = {"least_bytes": 0, "inductor": {"fx_graph_cache": False}}


def model(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width)
    ).double()


def rows(count: int = 16, width: int = WIDTH) -> Tensor:
    return torch.randn(
        count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(count)
    )


def gradients(net: nn.Module, function: Function, *args: Any) -> list[Tensor]:
    net.zero_grad()
    function(*args).sin().sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def assert_right(
    net: nn.Module, function: Function, eager: Function, *args: Any, norms: int = 1
) -> None:
    """The gradients of eager mode, and so many norms fused in forward and backward."""
    right = gradients(net, eager, *args)
    counters.clear()
    torch.testing.assert_close(gradients(net, function, *args), right)
    assert (count_fused("forward"), count_fused("backward")) == (norms, norms)


# ---- compilers beside the backend


class Marked(nn.Module):
    """One norm in a region that is marked for Inductor, and one outside of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.last = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        with annotate({"compile_with_inductor": "norm"}):
            x = self.norm(x)
        return self.last(x)


def test_regions_for_inductor() -> None:
    """torch.fx.passes.regional_inductor calls stock Inductor, which `registered` gives the pass."""
    from torch.fx.passes.regional_inductor import regional_inductor

    net, x = Marked(128).double(), rows(4096, 128)
    regional = aot_autograd(fw_compiler=regional_inductor, bw_compiler=regional_inductor)
    right = gradients(net, net, x)
    with normpass.registered():
        compiled: Any = torch.compile(net, backend=regional, fullgraph=True)
        torch.testing.assert_close(gradients(net, compiled, x), right)
    seen = [key.partition(":")[0] for key in counters["normpass"]]
    assert "fused layer_norm_backward" in seen
    assert not any("rms_norm" in key for key in seen)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # autotuning, torch 2.11
@pytest.mark.parametrize(
    ("mode", "dynamic"),
    [("reduce-overhead", None), ("max-autotune", None), ("max-autotune-no-cudagraphs", True)],
)
def test_modes(mode: str, dynamic: bool | None) -> None:
    """Inductor's settings of the mode are in force, and options too where they are the backend's
    own.
    """
    seen = set()

    def look(_: object) -> None:
        seen.add((inductor_config.max_autotune, inductor_config.triton.cudagraphs))

    options = {"least_bytes": 0, "inductor": {"post_grad_custom_post_pass": look}}
    net = model()
    compiled: Any = torch.compile(
        net, backend=partial(backend, options=options), mode=mode, dynamic=dynamic, fullgraph=True
    )
    assert_right(net, compiled, net, rows())
    assert seen == {("autotune" in mode, not mode.endswith("no-cudagraphs"))}


def test_a_mode_alone_and_with_options() -> None:
    net, x = model(), rows()
    compiled: Any = torch.compile(net, backend="normpass", mode="default")
    torch.testing.assert_close(compiled(x), net(x))
    with pytest.raises(RuntimeError, match="Either mode or options can be specified, but both"):
        torch.compile(net, backend="normpass", mode="max-autotune", options={"fuse": True})
    compiled = torch.compile(net, backend="normpass", mode="fastest")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="Unrecognized mode=fastest, should be one of: default"):
        compiled(x)


@pytest.mark.parametrize(
    "stance",
    [
        {"stance": "force_eager"},
        {"stance": "eager_on_recompile"},
        {"stance": "fail_on_recompile"},
        {"skip_guard_eval_unsafe": True},
    ],
    ids=lambda stance: next(iter(stance.values())),
)
def test_stances(stance: dict[str, Any]) -> None:
    """The same calls run compiled, run uncompiled, are compiled and fail as with stock."""

    def calls(how: dict[str, Any]) -> list[Any]:
        net, found = model(), []
        compiled: Any = torch.compile(net, dynamic=False, **how)

        def call(x: Tensor) -> None:
            try:
                torch.testing.assert_close(gradients(net, compiled, x), gradients(net, net, x))
                found.append(counters["stats"]["unique_graphs"])
            except RuntimeError as error:
                found.append(str(error)[:40])

        call(rows())
        with torch.compiler.set_stance(**stance):
            for count in (16, 5, 5, 16):
                call(rows(count))
        torch._dynamo.reset()
        counters["stats"].clear()
        return found

    stock = calls({"backend": "aot_eager"})
    assert calls({"backend": "normpass", "options": UNCOMPILED}) == stock
    assert count_fused("backward") == stock[-1] if isinstance(stock[-1], int) else 1


OPTIMIZERS: dict[str, Function] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_optimizers(name: str) -> None:
    def trained(how: dict[str, Any] | None, step: dict[str, Any] | None) -> list[Tensor]:
        net = model()
        optimizer = OPTIMIZERS[name](net.parameters())
        forward: Any = torch.compile(net, **how) if how else net
        update: Any = torch.compile(optimizer.step, **step) if step else optimizer.step
        for _ in range(3):
            gradients(net, forward, rows())
            update()
        torch._dynamo.reset()
        return [p.detach() for p in net.parameters()]

    ours = {"backend": "normpass", "options": UNCOMPILED}
    found = trained(ours, {"backend": "normpass", "options": BY_INDUCTOR})
    assert (count_fused("forward"), count_fused("backward")) == (1, 1)
    torch.testing.assert_close(found, trained(None, {"backend": "aot_eager"}))
    # AdamW's 1 - beta^step is of float32 where it is compiled, and of float64 where it is not.
    near = {"rtol": 0, "atol": 1e-6} if name == "AdamW" else {}
    torch.testing.assert_close(found, trained(None, None), **near)


# ---- compiled autograd


@pytest.mark.one_in(2)
@pytest.mark.parametrize("double_backward", [True, False])
@pytest.mark.parametrize("options", [UNCOMPILED, BY_INDUCTOR], ids=["eager", "inductor"])
def test_compiled_autograd(options: dict[str, Any], double_backward: bool) -> None:
    """Of a compiled model: its backward is one graph of the norm's and autograd's."""
    net, x = model(), rows()
    how: Any = {"backend": "normpass", "options": {**options, "double_backward": double_backward}}
    right = gradients(net, net, x)
    compiled = torch.compile(net, **how)
    compile_backward = partial(torch.compile, fullgraph=True, dynamic=True, **how)
    with compiled_autograd._enable(compile_backward):
        for _ in range(2):
            torch.testing.assert_close(gradients(net, compiled, x), right)
    assert counters["compiled_autograd"]["captures"] == 1
    assert count_fused() == 2


@pytest.mark.parametrize("double_backward", [True, False])
def test_compiled_autograd_of_backward_inside(double_backward: bool) -> None:
    net, x = model(), rows()

    def step(x: Tensor) -> Tensor:
        loss: Tensor = net(x).sin().sum()
        loss.backward()
        return loss.detach()

    right = gradients(net, net, x)
    options = {**UNCOMPILED, "double_backward": double_backward}
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled: Any = torch.compile(step, backend="normpass", options=options)
        for _ in range(2):
            net.zero_grad()
            compiled(x)
            torch.testing.assert_close([p.grad for p in net.parameters()], right)
    assert counters["compiled_autograd"]["captures"] == 1
    assert count_fused() == 2


@pytest.mark.parametrize("how", ["aot_eager", "normpass"])
def test_compiled_autograd_takes_no_second_derivatives(how: str) -> None:
    """A limit of torch's, which says so under any backend."""
    compiled: Any = torch.compile(model(), backend=how)
    x = rows().requires_grad_()
    compile_backward = partial(torch.compile, backend=how)
    with (
        compiled_autograd._enable(compile_backward),
        pytest.raises(RuntimeError, match=r"create_graph|higher order gradients"),
    ):
        torch.autograd.grad(compiled(x).sum(), x, create_graph=True)


# ---- marks on functions, and what is traced by request


def test_uncompiled_and_opaque_functions() -> None:
    """torch.compiler.disable breaks the graph, torch.compiler.allow_in_graph keeps it whole; norms
    before, in (where it is traced) and behind are fused.
    """
    net, x = model(), rows()

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,)).sin()

    disabled = torch.compiler.disable(norm)
    opaque = torch.compiler.allow_in_graph(norm)
    for between, whole, norms in ((disabled, False, 2), (opaque, True, 3)):
        torch._dynamo.reset()

        def function(x: Tensor, between: Function = between) -> Tensor:
            return net(between(net(x)))

        compiled: Any = torch.compile(
            function, backend="normpass", fullgraph=whole, options=UNCOMPILED
        )
        assert_right(net, compiled, function, x, norms=norms)


def scaled(net: nn.Module, x: Tensor) -> Tensor:
    return net(x / x.abs().max().item())


def cut(net: nn.Module, x: Tensor) -> Tensor:
    count = (x[:, 0] > 0).sum().item()
    torch._check(count <= x.shape[0])
    return net(x[:count])


def selected(net: nn.Module, x: Tensor) -> Tensor:
    return net(x[x[:, 0] > 0])


@pytest.mark.parametrize("options", [UNCOMPILED, BY_INDUCTOR], ids=["eager", "inductor"])
@pytest.mark.parametrize("program", [scaled, cut, selected])
def test_numbers_and_sizes_from_data(program: Function, options: dict[str, Any]) -> None:
    """In one graph, whose kernels take the sizes that come out."""
    net = model()
    flags = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(flags):
        eager = partial(program, net)
        compiled: Any = torch.compile(eager, backend="normpass", fullgraph=True, options=options)
        assert_right(net, compiled, eager, rows())
        for x in (-rows(), -rows().abs()):  # other numbers of rows, and none
            torch.testing.assert_close(gradients(net, compiled, x), gradients(net, eager, x))
    assert counters["stats"]["unique_graphs"] == 1


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    @torch.compile(backend="normpass", options=UNCOMPILED)
    def decorated(self, x: Tensor) -> Tensor:
        return self.net(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_methods_decorators_and_modules_in_place() -> None:
    eager, x = model(), rows()
    right = gradients(eager, eager, x)
    how: Any = {"backend": "normpass", "options": UNCOMPILED}
    ways: list[tuple[nn.Module, Function]] = [(net := WithMethod(), net.decorated)]
    ways.append((net := WithMethod(), torch.compile(net.forward, **how)))
    # Of a class of one's own: Dynamo skips those of torch.nn where they are compiled in place.
    (net := WithMethod()).compile(**how)
    ways.append((net, net))
    for net, function in ways:
        counters.clear()
        torch._dynamo.reset()
        torch.testing.assert_close(gradients(net, function, x), right)
        assert (count_fused("forward"), count_fused("backward")) == (1, 1)
        assert net.state_dict().keys() == WithMethod().state_dict().keys()


def test_autocast_around_compiled_code() -> None:
    """Entered after compilation it compiles again; gradients are off by no more than eager's."""
    net, x = model(), rows()
    exact = gradients(net, net, x)
    net, x = net.float(), x.float()
    compiled: Any = torch.compile(net, backend="normpass", options=UNCOMPILED)

    def off(function: Function) -> float:
        found = gradients(net, function, x)
        return max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))

    plain = off(compiled)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(x).dtype is torch.bfloat16
        assert plain < 1e-5 < off(compiled) <= 2 * off(net)
    assert off(compiled) == plain
    assert count_fused("backward") == 2


# ---- checkpoints


def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    products = torch.ops.aten.addmm.default, torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, Any] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, policy),
    },
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("place", ["inside", "around"])
def test_checkpoints(name: str, place: str) -> None:
    net, x = model(), rows().requires_grad_()
    how = CHECKPOINTS[name]
    right = gradients(net, net, x)
    if place == "around" and name == "selective":
        # Its policy is asked for operators, of which compiled code shows none.
        pytest.skip("selective checkpoints are of what is inside the graph")
    if place == "inside":
        function: Function = torch.compile(
            lambda x: checkpoint(net, x, **how),
            backend="normpass",
            fullgraph=True,
            options=UNCOMPILED,
        )
    else:
        compiled = torch.compile(net, backend="normpass", fullgraph=True, options=UNCOMPILED)
        function = partial(checkpoint, compiled, **how)
    for _ in range(2):
        torch.testing.assert_close(gradients(net, function, x), right)
    assert count_fused("backward") == 1
    assert count_fused("forward") >= 1
