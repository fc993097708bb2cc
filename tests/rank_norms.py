"""Batch norms over the images of several ranks, and what they are compared with. What ranks run
stands here, because a spawned process imports it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import oracles
import torch
from torch import Tensor, distributed, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import normpass

CHANNELS, STEPS = 6, 2
OPTIONS = {"least_bytes": 0, "inner": "eager"}


@dataclass(frozen=True)
class Case:
    """images: of each rank. shape: of one, after its channels. arguments: of the norm."""

    images: tuple[int, ...] = (3, 3)
    shape: tuple[int, ...] = (5, 4)
    dtype: torch.dtype = torch.float64
    channels_last: bool = False
    arguments: tuple[tuple[str, Any], ...] = ()

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The images of every rank in each step, and the gradients of what becomes of them."""
        generator = torch.Generator().manual_seed(2)
        shape = sum(self.images), CHANNELS, *self.shape
        made = []
        for _ in range(STEPS):
            x, g = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
            made.append(((3 * x + 20).to(self.dtype), g.to(self.dtype)))
        return made

    def share(self, x: Tensor, rank: int) -> Tensor:
        return x.split(self.images)[rank]

    def norm(self) -> nn.Module:
        torch.manual_seed(0)
        kinds: dict[int, Any] = {0: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
        norm: nn.Module = kinds[len(self.shape)](CHANNELS, **dict(self.arguments))
        for parameter in norm.parameters():
            nn.init.normal_(parameter, mean=1.0, std=0.3)
        return norm.to(torch.float64 if self.dtype == torch.float64 else torch.float32)


def results(case: Case, rank: int | None, run: Any, norm: nn.Module) -> dict[str, Tensor]:
    """Of every step, for one rank's images or all; then the norm's parameters' gradients and its
    state.
    """
    found = {}
    for step, (x, g) in enumerate(case.batches()):
        norm.zero_grad()
        mine = [x, g] if rank is None else [case.share(x, rank), case.share(g, rank)]
        if case.channels_last:
            mine = [t.to(memory_format=torch.channels_last) for t in mine]
        mine[0].requires_grad_()
        y = run(mine[0])
        y.backward(mine[1])
        found |= {f"y{step}": y.detach(), f"dx{step}": mine[0].grad}
    found |= {f"gradient of {name}": p.grad for name, p in norm.named_parameters()}
    return found | {name: b.detach() for name, b in norm.named_buffers()}


def synchronized(case: Case, backend: str | None) -> tuple[dict[str, Tensor], dict[str, int]]:
    """A rank's results, and what was fused."""
    counters.clear()
    norm = normpass.SyncBatchNorm.convert_sync_batchnorm(case.norm())
    options = OPTIONS if backend == "normpass" else None
    run = torch.compile(norm, backend=backend, options=options, fullgraph=True) if backend else norm
    found = results(case, distributed.get_rank(), run, norm)
    return found, dict(counters["normpass"])


def torchs_own(case: Case, backend: str | None) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The same of torch.nn.SyncBatchNorm with the rules registered. backend: None for eager mode
    with them.
    """
    counters.clear()
    norm = nn.SyncBatchNorm.convert_sync_batchnorm(case.norm())
    options = OPTIONS if backend == "normpass" else None
    with normpass.registered(eager=backend is None):
        run: Any = norm
        if backend is not None:
            run = torch.compile(norm, backend=backend, options=options, fullgraph=True)
        found = results(case, distributed.get_rank(), run, norm)
    return found, dict(counters["normpass"])


def torchs_own_alone() -> str:
    """What torch.nn.SyncBatchNorm says on CPUs, with the rules and after they were taken out."""
    norm: Any = nn.SyncBatchNorm.convert_sync_batchnorm(Case().norm())
    x = Case().batches()[0][0]
    with normpass.registered():
        compiled = torch.compile(norm, backend="eager")(x)
        assert compiled.shape == x.shape
    torch.compiler.reset()
    try:
        norm(x)
    except ValueError as error:
        return str(error)
    return ""


def in_groups(members: list[list[int]], *, whose: str) -> dict[str, Tensor]:
    """A rank's results where each group of processes has statistics of its own, compiled. whose:
    what says so, the conversion or the norm that is converted.
    """
    rank = distributed.get_rank()
    made = [distributed.new_group(ranks) for ranks in members]  # everybody has to call for each
    group = next(g for g, ranks in zip(made, members, strict=True) if rank in ranks)
    norm: nn.Module = Case().norm()
    if whose == "the norm's":
        stock = nn.SyncBatchNorm.convert_sync_batchnorm(norm, group)
        norm = normpass.SyncBatchNorm.convert_sync_batchnorm(stock)
    else:
        norm = normpass.SyncBatchNorm.convert_sync_batchnorm(norm, group)
    run = torch.compile(norm, backend="normpass", options=OPTIONS, fullgraph=True)
    images = Case((3,) * sum(map(len, members)))
    return results(images, rank, run, norm)


def together(case: Case) -> dict[str, Tensor]:
    """The results of one process that has all images, in eager mode."""
    norm = case.norm()
    return results(case, None, norm, norm)


def exact(case: Case) -> dict[str, Tensor]:
    """The same in float64, from primitives."""
    norm: Any = case.norm().double()
    parameters = [p.detach().clone().requires_grad_() for p in norm.parameters()]
    state = {name: b.clone().double() for name, b in norm.named_buffers()}
    found = {}
    for step, (x, g) in enumerate(case.batches()):
        x = x.double().requires_grad_()
        y = oracles.batch_norm(x, *parameters, eps=norm.eps)
        dx, *gradients = torch.autograd.grad(y, [x, *parameters], g.double())
        found |= {f"y{step}": y.detach(), f"dx{step}": dx}
        of_channels = x.detach().transpose(0, 1).flatten(1)
        mean = of_channels.mean(1)
        var = (of_channels - mean[:, None]).square().sum(1) / (of_channels.size(1) - 1)
        if state:
            state["num_batches_tracked"] += 1
            m = norm.momentum or 1 / state["num_batches_tracked"]
            state["running_mean"] += m * (mean - state["running_mean"])
            state["running_var"] += m * (var - state["running_var"])
    names = [name for name, _ in norm.named_parameters()]
    found |= {f"gradient of {n}": g for n, g in zip(names, gradients, strict=True)}
    return found | state


def in_a_network(backend: str | None) -> list[Tensor]:
    """The gradients of a small network under DistributedDataParallel, compiled whole."""
    net = network()
    net = normpass.SyncBatchNorm.convert_sync_batchnorm(net)
    parallel = DistributedDataParallel(net)
    run = torch.compile(parallel, backend=backend) if backend else parallel
    x = pixels().chunk(distributed.get_world_size())[distributed.get_rank()]
    for _ in range(STEPS):
        net.zero_grad()
        run(x).square().mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def second_order(backend: str | None) -> list[Tensor]:
    """The parameters' gradients of a penalty on the gradient of a rank's images."""
    net: Any = normpass.SyncBatchNorm.convert_sync_batchnorm(network())
    run = torch.compile(net, backend=backend) if backend else net
    x = pixels().chunk(distributed.get_world_size())[distributed.get_rank()].requires_grad_()
    return penalty_gradients(net, run, x)


def penalty_gradients(net: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    (slope,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)]
    return nn.Sequential(*layers, nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 3)).double()


def pixels() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 3, 10, 10, generator=generator, dtype=torch.float64)
