"""accelerate: models that are compiled before `prepare`, and its own switch with the rules
registered. It takes names of backends from a list of its own, which ours is not in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from companions.loops import (
    Net,
    assert_fused,
    assert_same_training,
    loss_of,
    network,
    off,
    rows,
    weights,
)
from torch import Tensor, nn

import normpass

accelerate = pytest.importorskip(
    "accelerate", reason="accelerate is not installed (the extra `companions`)"
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Of torch and of accelerate, none of them about what is tested here.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _no_state() -> Iterator[None]:
    """accelerate keeps the first Accelerator's settings for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="normpass")


def in_place(model: nn.Module) -> Any:
    model.compile(backend="normpass")
    return model


def regions(model: nn.Module) -> Any:
    return accelerate.utils.compile_regions(model, backend="normpass")


def train(
    compile: Callable[[nn.Module], Any] | None, model: nn.Module, x: Tensor, **settings: Any
) -> dict[str, Tensor]:
    """Two steps of the optimizer, of two batches each."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    run = compile(model) if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(x, batch_size=len(x) // 4)
    run, optimizer, loader = accelerator.prepare(run, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(run):
            accelerator.backward(loss_of(run(batch)))
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("compile", [whole, in_place, regions])
def test_models_compiled_before_prepare(compile: Callable[[nn.Module], Any]) -> None:
    right = train(None, network(), rows(16))
    found = train(compile, network(), rows(16))
    assert_same_training(found, right, weights(network()))
    assert_fused()


def test_mixed_precision() -> None:
    """No further from float64 than eager mode's bfloat16, up to rounding that falls otherwise."""
    right = train(None, network(), rows(16))
    x = rows(16, dtype=torch.float32)
    eager = train(None, network().float(), x, mixed_precision="bf16")
    found = train(whole, network().float(), x, mixed_precision="bf16")
    assert off(eager, right) > 1e-5, "computed in float32"
    assert 0 < off(found, right) <= 2 * off(eager, right)
    assert_fused()


@pytest.mark.parametrize(("compile", "before"), [(in_place, ""), (whole, "_orig_mod.")])
def test_names_that_are_saved(
    compile: Callable[[nn.Module], Any], before: str, tmp_path: Path
) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = network()
    compiled = accelerator.prepare(compile(model))
    loss_of(compiled(rows(16, 8))).backward()
    accelerator.save_model(compiled, str(tmp_path))
    saved = accelerate.utils.load_state_dict(str(tmp_path / "model.safetensors"))
    assert off(saved, {before + name: value for name, value in weights(model).items()}) == 0
    assert_fused()


def test_its_own_switch_with_the_rules_registered() -> None:
    """Block by block; with norms that are large enough to be fused without being told to."""
    width, x = 512, rows(512, count=4 * 1024)
    right = train(None, network(width, blocks=1), x)
    plugin = accelerate.utils.TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    with normpass.registered():
        found = train(None, network(width, blocks=1), x, dynamo_plugin=plugin)
    assert_same_training(found, right, weights(network(width, blocks=1)))
    assert_fused()


def test_the_launcher_sets_the_same_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    parser = launch.launch_command_parser()
    line = "--cpu --num_machines 1 --num_processes 1 --mixed_precision no"
    line += " --dynamo_backend inductor train.py"
    options = parser.parse_args(line.split())
    _, environment = accelerate.utils.launch.prepare_simple_launcher_cmd_env(options)
    for name, value in environment.items():
        if name.startswith("ACCELERATE_"):
            monkeypatch.setenv(name, value)
    prepared = accelerate.Accelerator().prepare(Net(16, 1))
    assert isinstance(prepared, torch._dynamo.OptimizedModule)


def test_its_list_of_backends_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    """Once accelerate takes any name, docs/companions.md has a shorter line to show."""
    with pytest.raises(ValueError, match="'NORMPASS' is not a valid DynamoBackend"):
        accelerate.Accelerator(cpu=True, dynamo_backend="normpass")
    with pytest.raises(ValueError, match="'NORMPASS' is not a valid DynamoBackend"):
        accelerate.utils.TorchDynamoPlugin(backend="normpass")
    launch = pytest.importorskip("accelerate.commands.launch")
    with pytest.raises(SystemExit):
        launch.launch_command_parser().parse_args(["--dynamo_backend", "normpass", "train.py"])
    assert "invalid choice: 'normpass'" in capsys.readouterr().err
