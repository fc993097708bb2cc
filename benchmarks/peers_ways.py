"""The libraries that are compared, each in the modes that it has: eager mode and compiled."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

import normpass
from normpass.benchmarks.machine import installed

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from normpass.benchmarks.peers_norms import Function


@dataclass(frozen=True)
class Way:
    """A library in one of its modes.

    Attributes:
        module: what is imported, None for what is always there.
        package: whose version is told.
        compiled: a function as this way has it.
        around: what is in force meanwhile.
    """

    module: str | None
    package: str
    compiled: Callable[[Any], Any]
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def is_jax(self) -> bool:
        """Whether its arrays are JAX's."""
        return self.module == "jax"


def as_it_is(function: Function) -> Function:
    """A function, not compiled."""
    return function


def by_backend(backend: str) -> Callable[[Function], Function]:
    """What compiles a function whole by a backend of torch.compile."""
    return lambda function: torch.compile(function, backend=backend, fullgraph=True)


def _by_thunder(function: Function) -> Function:
    compiled: Function = import_module("thunder").jit(function)
    return compiled


def _by_jax(function: Function) -> Function:
    compiled: Function = import_module("jax").jit(function)
    return compiled


WAYS = {
    "eager": Way(None, "torch", as_it_is),
    "Inductor": Way(None, "torch", by_backend("inductor")),
    "normpass, eager": Way(None, "normpass", as_it_is, lambda: normpass.registered(eager=True)),
    "normpass": Way(None, "normpass", by_backend("normpass")),
    "normpass, registered": Way(None, "normpass", by_backend("normpass"), normpass.registered),
    "JAX": Way("jax", "jax", as_it_is),
    "JAX, jit": Way("jax", "jax", _by_jax),
    "thunder": Way("thunder", "lightning-thunder", _by_thunder),
}


def load_jax() -> Any:
    """JAX on the CPU, with float64 where that is asked for."""
    jax = import_module("jax")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    return jax


def missing(way: Way) -> str | None:
    """Why a way cannot be gone here, None if it can. Found out in another process: what a broken
    import leaves behind stays there.
    """
    if way.module is None:
        return None
    if installed(way.package) is None:
        return "not installed"
    command = [sys.executable, "-W", "ignore", "-c", f"import {way.module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    (*_, last) = done.stderr.strip().splitlines() or ["it ended without a word"]
    return f"{way.package} {installed(way.package)} cannot be imported: {last}"


def to_jax(x: Tensor) -> Any:
    """A tensor as an array of the same type."""
    jax = load_jax()
    if x.dtype == torch.bfloat16:
        return jax.numpy.asarray(x.detach().float().numpy()).astype(jax.numpy.bfloat16)
    return jax.numpy.asarray(x.detach().numpy())


def to_torch(x: Any) -> Tensor:
    """What a way has returned as a tensor: float64 where it is JAX's."""
    if isinstance(x, torch.Tensor):
        return x.detach()
    numpy = import_module("numpy")
    return torch.from_numpy(numpy.array(x, dtype="float64"))


def in_jax(name: str, formula: Function) -> Function:
    """A norm as JAX's users write it: half precision computes in float32."""
    jax = load_jax()
    if name == "softmax":
        softmax: Function = jax.nn.softmax
        return softmax

    def norm(x: Any, *parameters: Any) -> Any:
        wide = jax.numpy.promote_types(x.dtype, "float32")
        y = formula(x.astype(wide), *(each.astype(wide) for each in parameters))
        return y.astype(x.dtype)

    return norm
