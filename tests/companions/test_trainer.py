"""The Trainer of transformers: models compiled in place, and its own switch with the rules
registered. The switch takes accelerate's names of backends, which ours is not among.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from companions.loops import (
    assert_fused,
    assert_same_training,
    loss_of,
    network,
    off,
    rows,
    weights,
)
from torch import nn

import normpass

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (the extra `companions`)"
)
pytest.importorskip("accelerate", reason="accelerate is not installed (the extra `companions`)")

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

# Of torch and of transformers, none of them about what is tested here.
pytestmark = pytest.mark.filterwarnings("default")

VOCABULARY = 61


class Texts(torch.utils.data.Dataset[Any]):
    """Random tokens, which stand for their own labels."""

    def __init__(self, count: int, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCABULARY, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[k], "labels": self.tokens[k]}


def llama() -> Any:
    """In float64, its norms in float32."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double()


def arguments(folder: Path, **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "optim": "sgd",
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(str(folder), **{**defaults, **settings})


def train(model: nn.Module, args: Any, examples: Any) -> Any:
    trainer = transformers.Trainer(model, args, train_dataset=examples)
    trainer.train()
    return trainer


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_a_model_compiled_in_place(recomputed: bool, tmp_path: Path) -> None:
    """And saved under its own names; with activations kept for the backward or recomputed."""
    args = arguments(tmp_path, gradient_checkpointing=recomputed)
    expected, model = llama(), llama()
    train(expected, args, Texts(12, 8))
    model.compile(backend="normpass")
    trainer = train(model, args, Texts(12, 8))
    assert_same_training(weights(model), weights(expected), weights(llama()), 1e-6)
    assert_fused()
    trainer.save_model()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert off(weights(loaded), weights(model)) == 0


class WithLoss(nn.Module):
    """What the Trainer takes besides models of transformers: a module that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(512, blocks=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net(x))}


def test_its_own_switch_with_the_rules_registered(tmp_path: Path) -> None:
    """Norms that are large enough to be fused without being told to."""
    settings = {"max_steps": 2, "per_device_train_batch_size": 1024}
    examples = [{"x": row} for row in rows(512, 2048)]
    expected, model = WithLoss(), WithLoss()
    train(expected, arguments(tmp_path, **settings), examples)
    with normpass.registered():
        train(model, arguments(tmp_path, torch_compile=True, **settings), examples)
    assert_same_training(weights(model), weights(expected), weights(WithLoss()))
    assert_fused()


def test_its_list_of_backends_is_closed(tmp_path: Path) -> None:
    """Once it takes any name, docs/companions.md has a shorter line to show."""
    args = arguments(tmp_path, torch_compile=True, torch_compile_backend="normpass")
    with pytest.raises(ValueError, match="'NORMPASS' is not a valid DynamoBackend"):
        transformers.Trainer(llama(), args, train_dataset=Texts(12, 8))


def test_what_torch_compile_returns_is_refused(tmp_path: Path) -> None:
    """It looks for the names of inputs at `forward`, under any backend. Should this fail, it looks
    elsewhere now, and docs/companions.md need not say so any more.
    """
    compiled = torch.compile(llama(), backend="normpass")
    with pytest.raises(ValueError, match="batch received was empty"):
        train(compiled, arguments(tmp_path), Texts(12, 8))
