"""C++ that Inductor writes calls regions: `cpp_wrapper`, and AOTInductor's packages, loaded from
Python and from a program without it. The reference is eager mode in float64.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
import subprocess
import zipfile
from typing import TYPE_CHECKING, Any

import piecewise
import pytest
import torch
from compiled import compile_fused, count_fused
from torch import nn
from torch._inductor import aoti_compile_and_package, aoti_load_package, config
from torch._inductor.utils import run_and_get_code

import normpass
from normpass.backend.explain import record
from normpass.backend.inductor import cpp_call, inductor_call
from normpass.backend.run.gpu_kernel import NotBuiltError
from normpass.backend.run.op import region_op
from normpass.passes import faults
from normpass.passes.pipeline import Fused, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from normpass.passes.pipeline import Decision

# torch's own, in torch.export
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")


class Network(nn.Module):
    """Norms of rows, and of images whose channels Inductor puts together; one whose input is made
    inside of the graph and not contiguous.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.group = nn.Conv2d(8, 32, 3, padding=1), nn.GroupNorm(4, 32)
        self.batch = nn.BatchNorm2d(32)
        self.linear, self.layer = nn.Linear(64, 24), nn.LayerNorm(24)
        self.turned = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.batch(self.conv(x)))
        y = torch.nn.functional.silu(self.group(self.conv(x)) + y).flatten(2)
        y = self.layer(self.linear(y))
        return self.turned(y.transpose(1, 2)).softmax(-1)


def images(count: int) -> Tensor:
    return torch.randn(count, 8, 8, 8, generator=torch.Generator().manual_seed(count))


def gradients(function: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    y = function(x)
    cotangent = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y).sin()
    return [y, *torch.autograd.grad(y, list(module.parameters()), cotangent)]


def assert_near(found: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    for one, other in zip(found, right, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-5 * max(scale, 1))


def in_double(module: nn.Module, x: Tensor) -> list[Tensor]:
    double = Network().double()
    double.load_state_dict(module.state_dict())
    return gradients(double.train(module.training), double, x.double())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("separate", [False, True], ids=["one file", "files of their own"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_step_in_cpp(dynamic: bool, separate: bool) -> None:
    module = Network()
    settings = {
        "fx_graph_cache": False,
        "cpp_wrapper": True,
        "cpp_wrapper_build_separate": separate,
    }
    compiled = compile_fused(module, dynamic=dynamic, inductor=settings)
    right = in_double(module, images(4))
    found, code = run_and_get_code(gradients, compiled, module, images(4))
    assert_near(found, right)
    assert len(code) == 2
    assert not any(str(region_op) in text for text in code)
    fused = count_fused()
    assert count_fused("group_norm_backward") >= 1
    for rows in (3, 7) if dynamic else ():
        right = in_double(module, images(rows))
        assert_near(gradients(compiled, module, images(rows)), right)
    assert count_fused() == fused  # nothing was compiled again


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise NotBuiltError("no compiler")

    monkeypatch.setattr(cpp_call, "results", refuse)


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", [piecewise.rms_rope, piecewise.gated])
def test_pieces_of_tensors_whose_regions_turn_out_not_to_be_built(f: Any, dynamic: bool) -> None:
    """What is read are views, and what is left is one tensor of two outputs."""
    given = piecewise.inputs(torch.float32)
    settings = {"fx_graph_cache": False, "cpp_wrapper": True}
    found = piecewise.both(compile_fused(f, dynamic=dynamic, inductor=settings), given)
    right = piecewise.both(f, [x.detach().double().requires_grad_(x.requires_grad) for x in given])
    assert_near(found, right)
    assert count_fused() >= 1
    assert not faults.reported()


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_step_whose_regions_turn_out_not_to_be_built(
    dynamic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Inductor computes what they mean; on a GPU that is known only when it lowers the graph."""
    module = Network()
    settings = {"fx_graph_cache": False, "cpp_wrapper": True}
    compiled = compile_fused(module, dynamic=dynamic, inductor=settings)
    for rows in (4, 3, 7) if dynamic else (4,):
        right = in_double(module, images(rows))
        found, code = run_and_get_code(gradients, compiled, module, images(rows))
        assert_near(found, right)
        assert not any("normpass" in text for text in code)
    assert count_fused("group_norm_backward") >= 1
    assert "a region stays with Inductor: no compiler" in caplog.text
    assert not faults.reported()


def test_code_from_the_cache_calls_the_same(fresh_cache: Path) -> None:
    """Inductor's cache keeps the C++ whole, so that nobody has to print it again."""
    module, x = nn.LayerNorm(48), torch.randn(6, 48)
    for hits in (0, 1):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found = compile_fused(module, inductor={"cpp_wrapper": True})(x)
        assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == hits
        torch.testing.assert_close(found, module(x))


def test_where_tensors_do_not_lie_as_planned_they_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any) -> Any:
        raise NotImplementedError("for the test")

    monkeypatch.setattr(inductor_call, "_settled", fail)
    module = Network().eval()
    compiled = compile_fused(module, inductor={"fx_graph_cache": False, "cpp_wrapper": True})
    assert_near(gradients(compiled, module, images(4)), in_double(module, images(4)))


REGION = """\
region halves
axes    r=6 c=16
input   x: f32[r c]
mul     = mul(x, 2.0)
sum     = sum[c](mul)
output  y: f32[r c] = mul
output  s: f32[r] = sum"""


@pytest.mark.parametrize("read", [0, 1])
def test_a_result_that_nobody_reads(read: int) -> None:
    """It is written all the same."""
    assert inductor_call.install()

    def function(x: Tensor) -> Tensor:
        return torch.ops.normpass.region([x.sin()], [], REGION)[read] + 1

    x = torch.randn(6, 16)
    with config.patch(fx_graph_cache=False, cpp_wrapper=True):
        found = torch.compile(function, backend="inductor")(x)
    torch.testing.assert_close(found, (2 * x.sin(), 2 * x.sin().sum(-1))[read] + 1)


# ---- packages


@contextlib.contextmanager
def every_norm() -> Iterator[list[Decision]]:
    """A block in which stock Inductor fuses them, however small they are, as it decomposes them."""
    from normpass.backend import entry
    from normpass.backend.options import Options

    fusion = entry.FusionPass(Options(least_bytes=0))
    with record.listen() as heard, config.patch(post_grad_custom_pre_pass=fusion):
        yield heard


def package(module: nn.Module, x: Tensor, path: Path, *, dynamic: bool) -> str:
    batch = ({0: torch.export.Dim("batch", min=2, max=64)},) if dynamic else None
    with torch.no_grad(), every_norm() as heard:
        exported = torch.export.export(module, (x,), dynamic_shapes=batch)
        built = aoti_compile_and_package(exported, package_path=str(path))
    assert {type(decision) for decision in heard} == {Fused}
    assert {"group_norm", "layer_norm"} <= {decision.name for decision in heard}
    return str(built)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """One whose running statistics are those of some images."""
    module = Network()
    for count in (3, 5):
        module(images(count))
    return module.eval()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_package(dynamic: bool, network: nn.Module, tmp_path: Path) -> None:
    path = package(network, images(4), tmp_path / "network.pt2", dynamic=dynamic)
    loaded = aoti_load_package(path)
    for count in (4, 2, 9) if dynamic else (4,):
        right = in_double(network, images(count))[:1]
        assert_near([loaded(images(count))], right)


def test_registered_rules_are_enough(tmp_path: Path) -> None:
    """Norms that are large enough to be fused without being told to."""
    norm = nn.Sequential(nn.LayerNorm(1024), nn.RMSNorm(1024)).eval()
    x = torch.randn(2048, 1024)
    with normpass.registered(), torch.no_grad(), record.listen() as heard:
        exported = torch.export.export(norm, (x,))
        path = aoti_compile_and_package(exported, package_path=str(tmp_path / "norm.pt2"))
    assert [type(decision) for decision in heard] == [Fused]
    torch.testing.assert_close(aoti_load_package(path)(x), norm(x), rtol=1e-5, atol=1e-5)


class WithStandardisedWeight(Network):
    """A norm of a weight is a constant of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 32 * 24).sin().view(32, 24))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ nn.functional.layer_norm(self.weight, (24,))


def packed(module: nn.Module, x: Tensor, path: Path, settings: dict[str, Any]) -> str:
    with torch.no_grad(), every_norm() as heard:
        exported = torch.export.export(module, (x,))
        found = aoti_compile_and_package(
            exported, package_path=str(path), inductor_configs=settings
        )
    assert [decision.name for decision in heard].count("layer_norm") >= 2
    assert {type(decision) for decision in heard} == {Fused}
    return str(found)


def test_constants_computed_where_it_is_loaded_from_weights_that_come_later(tmp_path: Path) -> None:
    """The kernel of the weight's norm is in the graph of constants, which runs when there are
    new ones.
    """
    module = WithStandardisedWeight().eval()
    settings = {
        "aot_inductor.use_runtime_constant_folding": True,
        "aot_inductor.package_constants_in_so": False,
    }
    path = packed(module, images(4), tmp_path / "network.pt2", settings)
    loaded: Any = aoti_load_package(path)
    names = set(loaded.get_constant_fqns())
    for factor in (1, 3):
        with torch.no_grad():
            module.weight.mul_(torch.linspace(1, factor, 24))
        weights = {name: w for name, w in module.state_dict().items() if name in names}
        loaded.load_constants(weights, check_full_update=True)
        right = copy.deepcopy(module).double()(images(4).double())
        assert_near([loaded(images(4))], [right])


@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake here")
@pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch's CMake files of this build ask for CUDA's"
)
def test_a_package_of_sources(tmp_path: Path) -> None:
    """`package_cpp_only`: built by CMake where it is used."""
    module = WithStandardisedWeight().eval()
    settings = {"aot_inductor.package_cpp_only": True}
    path = packed(module, images(4), tmp_path / "network.pt2", settings)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    (lists,) = tmp_path.rglob("CMakeLists.txt")
    # A newer CMake is asked for than distributions have, of which nothing is used.
    lists.write_text(re.sub(r"(?<=VERSION )3\.\d+", "3.18", lists.read_text()))
    built = tmp_path / "built"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (
        ["cmake", prefix, "-S", lists.parent, "-B", built],
        ["cmake", "--build", built],
    ):
        subprocess.run(command, check=True, capture_output=True)
    (library,) = built.glob("*.so")
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    right = copy.deepcopy(module).double()(images(4).double())
    assert_near(runner.run([images(4)]), [right])


# Prints whether there is Python in the process; writes what the package makes of some numbers.
PROGRAM = """
#include <dlfcn.h>
#include <cstdio>
#include <fstream>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

int main(int count, char** arguments) {
  c10::InferenceMode without_gradients;
  torch::inductor::AOTIModelPackageLoader loader(arguments[1]);
  for (int k = 2; k < count; ++k) {
    const int64_t images = std::stoll(arguments[k]);
    auto x = torch::linspace(-3, 3, images * 512).sin().view({images, 8, 8, 8});
    const auto y = loader.run({x})[0].contiguous();
    std::ofstream file(std::string(arguments[k]) + ".numbers", std::ios::binary);
    file.write(static_cast<const char*>(y.data_ptr()), y.nbytes());
  }
  std::puts(dlsym(RTLD_DEFAULT, "Py_IsInitialized") ? "Python" : "no Python");
}
"""


def build_program(folder: Path) -> Path:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils.cpp_extension import include_paths, library_paths

    source, program = folder / "program.cpp", folder / "program"
    source.write_text(PROGRAM)
    includes = [f"-I{path}" for path in include_paths()]
    libraries = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    command = [get_cpp_compiler(), "-O0", "-std=c++20", "-w", *includes, str(source), *libraries]
    linked = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl", "-o", str(program)]
    subprocess.run([*command, *linked], check=True)
    return program


def test_a_program_without_python(network: nn.Module, tmp_path: Path) -> None:
    path = package(network, images(4), tmp_path / "network.pt2", dynamic=True)
    program = build_program(tmp_path)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [str(program), path, "4", "11"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "no Python"
    for count in (4, 11):
        x = torch.linspace(-3, 3, count * 512).sin().view(count, 8, 8, 8)
        (right,) = in_double(network, x)[:1]
        numbers = bytearray((tmp_path / f"{count}.numbers").read_bytes())
        found = torch.frombuffer(numbers, dtype=torch.float32)
        assert_near([found.view(right.shape)], [right])


# ---- what stays with Inductor


def test_why_kernels_of_gpus_stay_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with config.patch(cpp_wrapper=True):
        assert inductor_call.no_call("cpu") is None
        assert "expected a GPU to compile for, found none" in str(inductor_call.no_call("cuda"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert inductor_call.no_call("cuda") is None
        monkeypatch.setattr(torch.version, "hip", "7.1")
        assert "found AMD's" in str(inductor_call.no_call("cuda"))
    assert inductor_call.no_call("cuda") is None


def test_what_lies_on_the_stack(tmp_path: Path) -> None:
    norm, x = nn.LayerNorm(64).eval(), torch.randn(8, 64)
    with torch.no_grad(), every_norm() as heard:
        exported = torch.export.export(norm, (x,))
        settings = {"aot_inductor.allow_stack_allocation": True}
        path = aoti_compile_and_package(
            exported, package_path=str(tmp_path / "norm.pt2"), inductor_configs=settings
        )
    (decision,) = heard
    assert isinstance(decision, Refused)
    assert decision.reason.startswith("allow_stack_allocation: ")
    torch.testing.assert_close(aoti_load_package(path)(x), norm(x), rtol=1e-5, atol=1e-5)


def test_an_inductor_that_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package would call an operator that nobody has, where it is loaded."""
    monkeypatch.setattr(inductor_call, "install", lambda: False)
    with config.patch(cpp_wrapper=True):
        assert "could not be told" in str(inductor_call.no_call("cpu"))
