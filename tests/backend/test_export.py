"""What torch.export makes of trained models and of functions with rules: ATen's operators alone,
loaded by a process that has no normpass.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import normpass

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

# torch's own
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning"),
]
LOAD = """
import sys
sys.modules["normpass"] = None  # to import it is an error
import torch
program = torch.export.load(sys.argv[1])
x, right = torch.load(sys.argv[2])
torch.testing.assert_close(program.module()(x), right, rtol=1e-4, atol=1e-5)
print("right")
"""


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


class Model(nn.Module):
    """Every norm there is, and an autograd.Function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rms = nn.LayerNorm(32), nn.RMSNorm(32)
        self.batch, self.group = nn.BatchNorm1d(32), nn.GroupNorm(4, 32)
        self.instance, self.swish = nn.InstanceNorm1d(4, affine=True), normpass.as_op(Swish)

    def forward(self, x: Tensor) -> Tensor:
        y = self.swish(self.batch(self.rms(self.layer(x))))
        return self.instance(self.group(y).view(-1, 4, 8)).softmax(-1)


def operators(program: torch.export.ExportedProgram) -> set[str]:
    nodes = program.graph.find_nodes
    called = {n.target for n in program.graph.nodes if n.op == "call_function"}
    assert not nodes(op="call_module")
    return {target.namespace for target in called if isinstance(target, torch._ops.OpOverload)}


def check(program: torch.export.ExportedProgram, x: Tensor, right: Tensor, folder: Path) -> None:
    """Loads and runs it where normpass cannot be imported."""
    assert operators(program) <= {"aten", "prims"}  # the latter are torch's as well
    torch.export.save(program, str(folder / "program.pt2"))
    torch.save((x, right.detach()), folder / "right.pt")
    command = [sys.executable, "-W", "ignore", "-c", LOAD]
    paths = [str(folder / name) for name in ("program.pt2", "right.pt")]
    done = subprocess.run([*command, *paths], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.one_in(4)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_trained_model(compiled: bool, strict: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(6, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = torch.compile(model, backend="normpass", options={"inner": "eager"})
    for _ in range(2):
        step(x).square().sum().backward()
        optimizer.step()
    exported = step if compiled and not strict else model
    with normpass.registered():
        program = torch.export.export(exported.eval(), (x,), strict=strict).run_decompositions()
    check(program, x, model(x), tmp_path)


def gradient_of_examples(x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda x: F.layer_norm(x, (8,)).sin().sum()))(x)


def tangent(x: Tensor) -> Tensor:
    return torch.func.jvp(lambda x: F.group_norm(x, 2).sin(), (x,), (x.cos(),))[1]


def curvature(x: Tensor) -> Tensor:
    def norm(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True).sin().sum()

    return torch.func.jvp(torch.func.grad(norm), (x,), (x.cos(),))[1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("function", [gradient_of_examples, tangent, curvature])
def test_a_function_with_rules(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """torch.export takes no transforms itself: what they make is traced first. (torch 2.13 refuses
    a transposed input of such a graph, "sources must not be empty", without our rules as well.)
    """
    x = torch.randn(6, 4, 8)
    with normpass.registered():
        traced = make_fx(function, tracing_mode="fake")(x)
    program = torch.export.export(traced, (x,), strict=False)
    check(program, x, function(x), tmp_path)
