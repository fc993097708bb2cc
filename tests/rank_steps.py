"""Training steps over several ranks, each by one of torch's own engines, and the same step in one
process. What ranks run stands here, because a spawned process imports it by name.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch._dynamo.utils import counters
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization

import normpass
from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, BLOCKS, BATCH, LENGTH = 16, 3, 8, 4
STEPS = 2  # torch's engines do part of their work in the second step alone


class Block(nn.Module):
    """A pre-norm block with a norm of its result: b s c -> b s c."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm_after = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm_after(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def network(width: int = WIDTH, blocks: int = BLOCKS) -> Net:
    """The same weights in every process; in float64, where a difference is a mistake."""
    torch.manual_seed(0)
    net = Net(width, blocks).double()
    for parameter in net.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    return net


def batch(width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Input and target: b s c."""
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, BATCH, LENGTH, width, generator=generator, dtype=torch.float64)
    return x, target


def share(x: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return x.chunk(distributed.get_world_size())[distributed.get_rank()]


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def gradients(net: nn.Module) -> dict[str, Tensor]:
    """By name, whole."""

    def whole(gradient: Tensor | None) -> Tensor:
        assert gradient is not None
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

    # What wrappers put into names is not part of them.
    wrappers = "_checkpoint_wrapped_module.", "_orig_mod.", "parametrizations.", ".original"
    found = {}
    for name, parameter in net.named_parameters():
        for wrapper in wrappers:
            name = name.replace(wrapper, "")
        found[name] = whole(parameter.grad).detach()
    return found


def alone(width: int = WIDTH, blocks: int = BLOCKS) -> dict[str, Tensor]:
    """The gradients of one process that has the whole batch, in eager mode."""
    net = network(width, blocks)
    x, target = batch(width)
    loss(net(x), target).backward()
    return gradients(net)


def steps(
    net: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, target: Tensor, parts: int = 1
) -> None:
    for _ in range(STEPS):
        net.zero_grad()
        y = run(x)
        (loss(y.full_tensor() if isinstance(y, DTensor) else y, target) / parts).backward()


def data_parallel(compiled: Callable[[Any], Any], *, inside: bool) -> dict[str, Tensor]:
    net = network()
    ddp = DistributedDataParallel
    run = ddp(compiled(net)) if inside else compiled(ddp(net))
    steps(net, run, *map(share, batch()))
    return gradients(net)


LARGE = 128, 6  # of several buckets: the first is one of 1 MiB


def several_buckets(compiled: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Dynamo splits the graph where buckets end and compiles each part."""
    net = network(*LARGE)
    run = compiled(DistributedDataParallel(net, bucket_cap_mb=1.2))
    steps(net, run, *map(share, batch(LARGE[0])))
    return gradients(net)


def accumulated(compiled: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Gradients of half a share are added up before they are reduced with the other's."""
    net = network()
    ddp = DistributedDataParallel(net)
    run = compiled(ddp)
    halves = list(zip(*(share(x).chunk(2) for x in batch()), strict=True))
    for _ in range(STEPS):
        net.zero_grad()
        with ddp.no_sync():
            (loss(run(halves[0][0]), halves[0][1]) / 2).backward()
        (loss(run(halves[1][0]), halves[1][1]) / 2).backward()
    return gradients(net)


class Gathered(nn.Module):
    """A whole weight of the part that this rank has, as SimpleFSDP has it: the collectives stand in
    the compiled graph.
    """

    def forward(self, part: DTensor) -> Tensor:
        return part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def parametrized(compiled: Callable[[Any], Any]) -> dict[str, Tensor]:
    """SimpleFSDP: every parameter is a DTensor in parts, gathered where it is used."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    net = network()
    for module in list(net.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            setattr(module, name, part)
            register_parametrization(module, name, Gathered(), unsafe=True)
    x, target = map(share, batch())
    # Parts of a sum, where the other engines have a mean.
    steps(net, compiled(net), x, target, parts=distributed.get_world_size())
    return gradients(net)


def sharded(
    compiled: Callable[..., Any],
    *,
    whole: bool = False,
    in_place: bool = False,
    checkpoint: bool = False,
    policy: MixedPrecisionPolicy | None = None,
) -> dict[str, Tensor]:
    """FSDP2, compiled block by block as torchtitan does, or whole."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    net = network()
    rules = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    for k, block in enumerate(net.blocks):
        kept = checkpoint_wrapper(block) if checkpoint else block
        net.blocks[k] = kept if whole else compiled(kept, in_place=in_place)
    for block in net.blocks:
        fully_shard(block, **rules)
    fully_shard(net, **rules)
    steps(net, compiled(net) if whole else net, *map(share, batch()))
    return gradients(net)


def tensor_parallel(compiled: Callable[[Any], Any], *, sequence: bool) -> dict[str, Tensor]:
    """Linear layers divided among ranks. sequence: between them are parts of sequences, so that
    norms' weights get parts of their gradients' sums.
    """
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    net = network()
    norm = SequenceParallel()
    for block in net.blocks:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": norm,
                "norm_after": norm,
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }
        parallelize_module(block, mesh, plan)
    if sequence:
        parallelize_module(net, mesh, {"norm": norm})
        first = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1))
        parallelize_module(net, mesh, {"blocks.0": first})
    x, target = batch()
    shares = distributed.get_world_size() if sequence else 1
    mine = x.chunk(shares, 1)[distributed.get_rank()] if sequence else x
    steps(net, compiled(net), mine, target)
    return gradients(net)


def sharded_along_rows(compiled: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Norms over a dimension that is divided among ranks: DTensor gathers it, or sums parts."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    net = distribute_module(network(), mesh)
    x, target = batch()
    steps(net, compiled(net), distribute_tensor(x, mesh, [Shard(2)]), target)
    return gradients(net)


class Half(nn.Module):
    """Consecutive blocks of a network, and its last norm."""

    def __init__(self, net: Net, blocks: range, *, last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(k): net.blocks[k] for k in blocks})
        self.norm = net.norm if last else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None else self.norm(x)


def pipelined(compiled: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Each rank has some of the blocks, and four parts of the batch go through them."""
    rank, count = distributed.get_rank(), distributed.get_world_size()
    bounds = [BLOCKS * k // count for k in range(count + 1)]
    last = rank == count - 1
    half = Half(network(), range(bounds[rank], bounds[rank + 1]), last=last)
    stage = PipelineStage(compiled(half), rank, count, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss)
    x, target = batch()
    for _ in range(STEPS):
        half.zero_grad()
        schedule.step(*([x] if rank == 0 else []), **({"target": target} if last else {}))
    return gradients(half)


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, Callable[[Callable[[Any], Any]], dict[str, Tensor]]] = {
    "DDP of compiled": partial(data_parallel, inside=True),
    "compiled DDP": partial(data_parallel, inside=False),
    "compiled DDP, several buckets": several_buckets,
    "compiled DDP, accumulated": accumulated,
    "FSDP2 by block": sharded,
    "FSDP2 by block, in place": partial(sharded, in_place=True),
    "FSDP2 whole": partial(sharded, whole=True),
    "FSDP2 by block, checkpointed": partial(sharded, checkpoint=True),
    "FSDP2 whole, checkpointed": partial(sharded, whole=True, checkpoint=True),
    "FSDP2 by block, bfloat16": partial(sharded, policy=BFLOAT16),
    "SimpleFSDP": parametrized,
    "tensor parallel": partial(tensor_parallel, sequence=False),
    "sequence parallel": partial(tensor_parallel, sequence=True),
    "rows sharded": sharded_along_rows,
    "pipeline": pipelined,
}


def run(way: str, backend: str | None, inner: str) -> tuple[dict[str, Tensor], dict[str, int]]:
    """A way's gradients, and how many regions were fused and refused. backend: None for eager mode.
    inner: what compiles the rest.
    """
    counters.clear()
    options = {"least_bytes": 0, "inner": inner} if backend == "normpass" else None

    def compiled(function: Any, *, in_place: bool = False) -> Any:
        if in_place and backend:
            function.compile(backend=backend, options=options)
        elif backend:
            return torch.compile(function, backend=backend, options=options)
        return function

    found = WAYS[way](compiled)
    seen = faults.reported()
    assert not seen, f"faults of ours, survived: {seen}"
    return found, dict(counters["normpass"])


def traced_step(fused: bool) -> tuple[dict[str, Tensor], dict[str, int]]:
    """A training step as a graph trainer has it: make_fx of forward, loss and backward with the
    collectives that gather weights and scatter gradients, then normpass.fuse among its passes.
    """
    counters.clear()
    net = network()
    group = distributed.group.WORLD
    names, weights = zip(*net.named_parameters(), strict=True)
    parts = [share(weight.detach()).clone().requires_grad_() for weight in weights]

    def step(x: Tensor, target: Tensor, *parts: Tensor) -> list[Tensor]:
        whole = [all_gather_tensor_autograd(part, 0, group) for part in parts]
        y = torch.func.functional_call(net, dict(zip(names, whole, strict=True)), (x,))
        part_of_sum = loss(y, target) / distributed.get_world_size()
        return list(torch.autograd.grad(part_of_sum, parts))

    x, target = map(share, batch())
    traced = make_fx(step, tracing_mode="fake")(x, target, *parts)
    run = normpass.fuse(traced, (x, target, *parts), least_bytes=0) if fused else traced
    with torch.no_grad():
        found = [all_gather_tensor(g, 0, group).clone() for g in run(x, target, *parts)]
    return dict(zip(names, found, strict=True)), dict(counters["normpass"])


def dies(who: int) -> None:
    """A step in which a rank dies between its forward and its backward."""
    net = network()
    run = torch.compile(
        DistributedDataParallel(net), backend="normpass", options={"inner": "eager"}
    )
    x, target = map(share, batch())
    value = loss(run(x), target)
    if distributed.get_rank() == who:
        os._exit(1)
    value.backward()
