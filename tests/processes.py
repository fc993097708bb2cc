"""What the tests of many processes and threads at once run, and how they run it: in a spawned
process it is imported by the name of this module.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normpass.backend.run import toolchain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from normpass.backend.run.runtime import Kernel

# Seconds until a process is taken to hang: compiling a small model takes 5 to 20 on a busy core.
PATIENCE = 240


def model(width: int) -> nn.Module:
    """Two norms, with the same weights wherever it is made."""
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh(), nn.RMSNorm(width))


def compiled(net: nn.Module, inner: str = "eager") -> Callable[..., Any]:
    """With all of its norms fused."""
    return torch.compile(net, backend="normpass", options={"least_bytes": 0, "inner": inner})


def step(function: Callable[..., Any], net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, and all gradients."""
    y = function(x)
    grads = torch.autograd.grad(y.sin().sum(), [x, *net.parameters()])
    return [y.detach(), *grads]


def example(width: int, rows: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, width, generator=generator, requires_grad=True)


def differences(function: Callable[..., Any], net: nn.Module, x: torch.Tensor) -> list[str]:
    """What is not as in eager mode; empty if all is right."""
    wrong = []
    for k, (ours, theirs) in enumerate(zip(step(function, net, x), step(net, net, x), strict=True)):
        try:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        except AssertionError as error:
            wrong.append(f"{k}: {error}")
    return wrong


@contextmanager
def forked(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """A forked process that calls function(*args). It is over at the end of the block, one way or
    another.
    """
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
        process.start()
    try:
        yield process
    finally:
        process.join(10)
        process.kill()
        process.join()


def answer_of_fork(function: Callable[..., Any], *args: Any, patience: float = PATIENCE) -> Any:
    """What function(*args) returns in a forked process, or how that ended instead."""
    ours, theirs = multiprocessing.Pipe()
    with forked(_answer, theirs, function, args) as process:
        theirs.close()
        try:
            return ours.recv() if ours.poll(patience) else f"no answer within {patience} s"
        except EOFError:
            process.join(10)
            return f"it died: {process.exitcode}"


def _answer(end: Any, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)  # as in a worker of a DataLoader: GCC's OpenMP does not outlive a fork
    try:
        end.send(function(*args))
    except BaseException as error:
        end.send(repr(error))


@contextmanager
def spawned(function: Callable[..., Any], *args: Any) -> Iterator[Callable[[], Any]]:
    """A fresh process that calls function(queue, *args), which makes it the leader of a group. All
    of the group is ended with the block. Yields what waits for the queue's next item.
    """
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=function, args=(queue, *args))
    process.start()
    try:
        yield lambda: queue.get(timeout=PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


SMALL = """\
region small
axes    r=? c={width}
input   x: f32[r c]
sum     = sum[c](x)
sub     = sub(x, sum)
output  y: f32[r c] = sub"""


def small(width: int) -> str:
    """A kernel that no other test has, if the width is one's own."""
    return SMALL.format(width=width)


def is_right(kernel: Kernel) -> bool:
    """Whether the kernel of a small region computes what that says, built or not."""
    width = int(kernel.text.split("c=")[1].split()[0])
    x = torch.randn(5, width)
    (y,) = kernel([x], [5])
    return torch.allclose(y, x - x.sum(1, keepdim=True), atol=1e-4)


def has_whole_libraries_only(cache: Path) -> bool:
    """Whether each can be loaded and has its checksum, and nothing else lies about."""
    folder = cache / "normpass"
    for library in folder.glob("*.so"):
        total = hashlib.sha256(library.read_bytes()).hexdigest()
        if library.with_suffix(".sum").read_text() != total:
            return False
        ctypes.CDLL(str(library))
    return {file.suffix for file in folder.iterdir()} <= {".so", ".sum", ".cpp", ".json"}


def program(text: str, cache: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A Python program, which Ctrl-C can be sent to with all that it has started. Inductor does not
    try the compiler with each kind of vectors first.
    """
    environment = {
        "PYTHONPATH": os.pathsep.join(
            (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
        ),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# ---- what they run


def train_at_once(queue: Any, count: int, width: int, cache: str) -> None:
    """A process that becomes `count` processes, which compile and train the same model at the same
    time. It has compiled another one, elsewhere: what that imports is imported once. It has no
    gradients taken, which torch may refuse to a fork afterwards.
    """
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    with torch.no_grad():
        compiled(model(24), "inductor")(example(24))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    fork = multiprocessing.get_context("fork")
    barrier, ends = fork.Barrier(count), []
    for k in range(count):
        ours, theirs = multiprocessing.Pipe()
        task = _train_when_all_are_there, (barrier, width, ("eager", "inductor")[k % 2])
        fork.Process(target=_answer, args=(theirs, *task), daemon=True).start()
        ends.append(ours)
    queue.put([end.recv() if end.poll(PATIENCE) else "no answer" for end in ends])


def _train_when_all_are_there(barrier: Any, width: int, inner: str) -> list[str]:
    net = model(width)
    function = compiled(net, inner)
    barrier.wait(PATIENCE)
    return [wrong for _ in range(2) for wrong in differences(function, net, example(width))]


def fork_after_training(queue: Any, inner: str) -> None:
    """A process that has compiled and trained a model, with several threads, and forks a child that
    goes on with it, and compiles another one.
    """
    os.setpgid(0, 0)
    torch.set_num_threads(2)
    net = model(64)
    function = compiled(net, inner)
    x = example(64, 4096)  # enough for two threads
    queue.put(differences(function, net, x))
    queue.put(answer_of_fork(_go_on, function, net, x, inner))


def _go_on(
    function: Callable[..., Any], net: nn.Module, x: torch.Tensor, inner: str
) -> dict[str, Any]:
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError as error:
        return {"refused": str(error)}
    other, before = model(56), toolchain.compiled
    return {
        "wrong": differences(function, net, x),
        "wrong in another": differences(compiled(other, inner), other, example(56)),
        "compiled": toolchain.compiled > before,
    }
