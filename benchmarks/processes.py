"""`normpass bench --processes`: training steps of a small GPT over two processes, with normpass
against the same with Inductor, by DistributedDataParallel and FSDP2.

Both are compiled in the same processes, each of one thread, and take steps in alternation; before
and after each step the processes meet, and what is timed is between. Gradients of both are compared
with each other first.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn

from normpass.benchmarks.machine import machine
from normpass.benchmarks.measure import Timing, spread
from normpass.benchmarks.zoo_own import gpt, predict_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console

    Step = Callable[[], None]

REPEATS = 25
COUNT = 2
BACKENDS = ("inductor", "normpass")
SIZES = {"batch": 8, "tokens": 256, "vocabulary": 1000, "width": 256, "depth": 4}
# Of the largest gradient of a parameter: bfloat16 has 8 bits, and sums are taken in other orders.
NEAR = {"bfloat16": 5e-2}


def data_parallel(net: Any, backend: str) -> nn.Module:
    """Split by Dynamo at buckets."""
    wrapped: Any = nn.parallel.DistributedDataParallel(net)
    compiled: Any = torch.compile(wrapped, backend=backend)
    return compiled


def sharded(net: Any, backend: str, *, half: bool = False) -> nn.Module:
    """Block by block, as torchtitan does."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = torch.bfloat16 if half else None
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for block in net.blocks:
        block.compile(backend=backend)
        fully_shard(block, mp_policy=policy)
    return fully_shard(net, mp_policy=policy)


ENGINES: dict[str, Callable[[Any, str], nn.Module]] = {
    "DistributedDataParallel": data_parallel,
    "FSDP2": sharded,
    "FSDP2, bfloat16": partial(sharded, half=True),
}


def training(
    engine: str, backend: str, rank: int, sizes: Mapping[str, int]
) -> tuple[nn.Module, Step]:
    """A model of this process, and a step of it that leaves gradients behind."""
    torch.manual_seed(0)
    made = gpt(**sizes)
    net = ENGINES[engine](made.module, backend)
    generator = torch.Generator().manual_seed(rank)
    words = made.inputs["words"].random_(sizes["vocabulary"], generator=generator)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        predict_words(net, words).backward()
        optimizer.step()

    return net, step


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """This process's parts."""
    parts = []
    for parameter in module.parameters():
        if parameter.grad is not None:
            local = getattr(parameter.grad, "to_local", lambda grad=parameter.grad: grad)
            parts.append(local().detach().float().clone())
    return parts


def in_process(
    rank: int, engine: str, store: str, sizes: Mapping[str, int], repeats: int, out: str
) -> None:
    """One of the processes: the first writes the seconds of each step."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=COUNT,
        timeout=timedelta(minutes=10),
    )
    steps, found = {}, {}
    for backend in BACKENDS:
        net, steps[backend] = training(engine, backend, rank, sizes)
        steps[backend]()
        found[backend] = gradients(net)
        for _ in range(2):
            steps[backend]()
    stock, ours = (found[backend] for backend in BACKENDS)
    largest = max(float(one.abs().max()) for one in stock if one.numel())
    off = max(
        float((one - other).abs().max()) / largest
        for one, other in zip(stock, ours, strict=True)
        if one.numel()
    )
    seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for round_ in range(repeats):
        for backend in BACKENDS if round_ % 2 == 0 else reversed(BACKENDS):
            distributed.barrier()
            start = time.perf_counter()
            steps[backend]()
            distributed.barrier()
            seconds[backend].append(time.perf_counter() - start)
    if rank == 0:
        Path(out).write_text(json.dumps({"seconds": seconds, "off": off}))
    distributed.destroy_process_group()


def measured(engine: str, sizes: Mapping[str, int], repeats: int) -> dict[str, Any]:
    """Both backends' times, and how many times faster the second is: the median of the ratios of
    steps that followed each other.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        store = str(Path(folder) / "store")
        arguments = engine, store, dict(sizes), repeats, str(out)
        spawn(in_process, arguments, nprocs=COUNT)
        document = json.loads(out.read_text())
    stock, ours = (document["seconds"][backend] for backend in BACKENDS)
    ratio = statistics.median(one / other for one, other in zip(stock, ours, strict=True))
    near = max((allowed for name, allowed in NEAR.items() if name in engine), default=1e-4)
    return {
        "timings": {backend: Timing.of(document["seconds"][backend]) for backend in BACKENDS},
        "speedup": ratio,
        "off": document["off"],
        "wrong": document["off"] > near,
    }


def run(
    console: Console, repeats: int, folder: Path, sizes: Mapping[str, int] | None = None
) -> int:
    """Measure every engine, print and save; 1 if gradients of one differ."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        console.print("--processes needs torch.distributed with gloo, and this torch has none")
        return 1
    sizes = sizes or SIZES
    table = Table(title=f"milliseconds of a step, {COUNT} processes of one thread, gloo")
    for heading in ("engine", *BACKENDS, "speedup", "gradients differ by"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    found = {engine: measured(engine, sizes, repeats) for engine in ENGINES}
    for engine, one in found.items():
        times = [spread(one["timings"][backend]) for backend in BACKENDS]
        table.add_row(engine, *times, f"{one['speedup']:.2f}x", f"{one['off']:.1e}")
    console.print(table)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cpu-processes.json"
    for one in found.values():
        one["timings"] = {name: asdict(timing) for name, timing in one["timings"].items()}
    document = {
        "machine": machine("cpu") | {"threads": 1},
        "processes": COUNT,
        "sizes": dict(sizes),
        "repeats": repeats,
        "engines": found,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"saved {path}")
    return int(any(one["wrong"] for one in found.values()))
