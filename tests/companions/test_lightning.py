"""lightning: modules compiled whole, in place and with what they log; Fabric."""

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
    rows,
    weights,
)
from torch import Tensor, nn

lightning = pytest.importorskip(
    "lightning", reason="lightning is not installed (the extra `companions`)"
)

if TYPE_CHECKING:
    from collections.abc import Callable

# Of torch and of lightning, none of them about what is tested here.
pytestmark = pytest.mark.filterwarnings("default")


class Training(lightning.LightningModule):
    """logs: whether steps log their loss, as most do."""

    def __init__(self, net: Net, logs: bool) -> None:
        super().__init__()
        self.net, self.logs = net, logs

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = loss_of(self(batch[0]))
        if self.logs:
            self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("error", loss_of(self(batch[0])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unlogged(Training):
    """Logging stays out of compiled steps."""

    log = torch.compiler.disable(lightning.LightningModule.log)


def whole(module: nn.Module) -> Any:
    return torch.compile(module, backend="normpass")


def in_place(module: nn.Module) -> Any:
    module.compile(backend="normpass")
    return module


def net_in_place(module: Any) -> Any:
    module.net.compile(backend="normpass")
    return module


def fit(
    compile: Callable[[Any], Any] | None,
    net: Net,
    kind: type[Training] = Training,
    *,
    logs: bool = False,
    **settings: Any,
) -> dict[str, Tensor]:
    """Four batches, with a look at the validation set where steps log."""
    module = kind(net, logs)
    x = torch.utils.data.TensorDataset(rows(16, dtype=next(net.parameters()).dtype))
    loader = torch.utils.data.DataLoader(x, batch_size=8)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(compile(module) if compile else module, loader, loader if logs else None)
    assert logs == ("loss" in trainer.logged_metrics)
    return weights(net)


@pytest.mark.parametrize("compile", [whole, in_place, net_in_place])
def test_fit(compile: Callable[[Any], Any]) -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    right = fit(None, network(), **settings)
    found = fit(compile, network(), **settings)
    assert_same_training(found, right, weights(network()))
    assert_fused()


@pytest.mark.parametrize(
    ("compile", "kind"), [(in_place, Training), (net_in_place, Training), (whole, Unlogged)]
)
def test_fit_that_logs(compile: Callable[[Any], Any], kind: type[Training]) -> None:
    """torch 2.12 and 2.13 fail on `log` in a step that is compiled whole, under every backend:
    pytorch issue 190171.
    """
    right = fit(None, network(), kind, logs=True)
    found = fit(compile, network(), kind, logs=True)
    assert_same_training(found, right, weights(network()))
    assert_fused()


def with_fabric(compile: Callable[[Any], Any] | None) -> dict[str, Tensor]:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run, optimizer = fabric.setup(compile(net) if compile else net, optimizer)
    for x in rows(16).split(8):
        optimizer.zero_grad()
        fabric.backward(loss_of(run(x)))
        optimizer.step()
    return weights(net)


@pytest.mark.parametrize("compile", [whole, in_place])
def test_fabric(compile: Callable[[Any], Any]) -> None:
    right = with_fabric(None)
    assert_same_training(with_fabric(compile), right, weights(network()))
    assert_fused()
