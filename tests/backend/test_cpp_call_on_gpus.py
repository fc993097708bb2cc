"""C++ that Inductor writes for a GPU calls regions. Without one the text is printed, for a GPU that
torch is only told of; with one, it runs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import gpu_absent
import pytest
import torch
from compiled import compile_fused, count_fused
from torch import nn
from torch._inductor import aoti_compile_and_package, aoti_load_package, config

from normpass.backend.entry import FusionPass
from normpass.backend.explain import record
from normpass.backend.options import Options
from normpass.passes.pipeline import Fused

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that runs C++")

PRINTING = """
import json, sys, warnings
warnings.simplefilter("ignore")
import gpu_absent, torch
from torch._inductor import config
from types import SimpleNamespace
from unittest import mock
import triton_regions as regions
from normpass.backend.inductor import inductor_call
from normpass.backend.run import cuda_launch, launch_triton
from normpass.backend.run.gpu_kernel import NotBuiltError
from normpass.backend.run.layouts import Layout
from normpass.backend.run.op import region_op
from normpass.passes import faults
from normpass.passes.region_text import parse

cuda_launch.library = lambda: SimpleNamespace(cuLaunchKernel=None)
text = regions.fill(regions.LAYER_NORM_BACKWARD, c="1024").strip()
region = parse(text)
how = sys.argv[1]

def refuse(recording):
    if how == "faulty":
        raise AttributeError("signature")
    return None

if how in ("refused", "faulty"):
    launch_triton.launches = refuse

def step(*tensors):
    return tuple(region_op(list(tensors), [8], text))

inductor_call.install()
shapes = [Layout.of(region, buffer, region.extents([8])).shape for buffer in region.inputs]
with config.patch({"cpp_wrapper": True, "triton.autotune_at_compile_time": False}):
    if how == "tuned first":  # Python runs before C++ is written
        codegen = torch._inductor.graph.GraphLowering.codegen
        def in_python(graph):
            graph.cpp_wrapper = False
            return codegen(graph)
        with mock.patch.object(torch._inductor.graph.GraphLowering, "codegen", in_python):
            code = gpu_absent.printed(step, *shapes)
    else:
        code = gpu_absent.printed(step, *shapes)
print(json.dumps([code, faults.reported()]))
"""


def printed(how: str) -> tuple[str, list[list[str]]]:
    """Inductor's code of a graph with a region, and our faults."""
    code, faults = gpu_absent.answer_of(PRINTING, how)
    return code, faults


@gpu_absent.needs_cpu_build
def test_cpp_calls_a_function_that_has_its_kernels_in_it() -> None:
    code, faults = printed("usual")
    defined, called = re.findall(
        r"^(?:extern \"C\" void| +) ?(normpass_layer_norm\w+)\(.*", code, re.MULTILINE
    )
    assert defined == called
    (call,) = re.findall(rf"^ +{called}\((.*)\);", code, re.MULTILINE)
    *tensors, rows, stream = call.split(", ")
    assert all(name.endswith(".data_ptr()") for name in tensors)
    assert len(tensors) == 8
    assert (rows, stream) == ("8L", "stream0")
    assert code.index("cudaStream_t stream0;") < code.index(call)
    assert code.count("static const char code_") == code.count("static Kernel ") > 1
    assert r"\177ELF" in code
    # The rows are known, and so is all that depends on them.
    assert not re.search(r"normpass::launch\(.*n_r", code)
    assert not faults


@pytest.mark.one_in(2)
@gpu_absent.needs_cpu_build
@pytest.mark.parametrize("how", ["refused", "faulty"])
def test_what_cannot_be_built_stays_with_inductor(how: str) -> None:
    code, faults = printed(how)
    assert "normpass" not in code
    assert re.search(r"triton_\w+_fused", code)
    assert [stage for stage, *_ in faults] == ["printing its function"] * (how == "faulty")


@gpu_absent.needs_cpu_build
def test_where_python_tunes_kernels_first_it_calls_the_operator() -> None:
    """What is freed there has to have a name."""
    code, _ = printed("tuned first")
    name, found = re.search(
        r"(\w+) = torch\.ops\.normpass\.region\(.*\n +for own, found in zip\(\[(.*)\], \1\):\n"
        r" +own\.copy_\(found\)",
        code,
    ).groups()
    assert len(found.split(", ")) == 3
    assert f"del {name}" in code


# ---- with a GPU


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(2048), nn.RMSNorm(2048)
        self.linear = nn.Linear(2048, 2048)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.linear(self.first(x))))


def gradients(function: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    y = function(x)
    return [y, *torch.autograd.grad(y.sin().sum(), [*module.parameters()])]


def check(found: list[Tensor], module: nn.Module, x: Tensor) -> None:
    double = Network().double().to(x.device)
    double.load_state_dict(module.state_dict())
    for one, other in zip(found, gradients(double, double, x.double()), strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4 * max(scale, 1))


@needs_gpu
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_step_in_cpp(dynamic: bool) -> None:
    module = Network().cuda()
    settings = {"fx_graph_cache": False, "cpp_wrapper": True}
    compiled = compile_fused(module, dynamic=dynamic, inductor=settings)
    for rows in (512, 300, 33) if dynamic else (512,):
        x = torch.randn(rows, 2048, device="cuda")
        check(gradients(compiled, module, x), module, x)
    assert count_fused() >= 2


@needs_gpu
def test_a_package(tmp_path: Path) -> None:
    module, x = Network().cuda().eval(), torch.randn(512, 2048, device="cuda")
    fusion = FusionPass(Options(least_bytes=0))
    with torch.no_grad(), config.patch(post_grad_custom_pre_pass=fusion), record.listen() as heard:
        exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
        path = aoti_compile_and_package(exported, package_path=str(tmp_path / "network.pt2"))
        loaded = aoti_load_package(path)
        for rows in (512, 77):
            x = torch.randn(rows, 2048, device="cuda")
            torch.testing.assert_close(loaded(x), module(x), rtol=1e-3, atol=1e-3)
    assert {type(decision) for decision in heard} == {Fused}
