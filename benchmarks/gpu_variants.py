"""What is compared on a GPU: normpass, stock Inductor, eager mode and the peers.

A variant prepares a case once, where it compiles, and then binds each set of tensors to a step: a
function of nothing that runs the case's program on them and returns its outputs in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normpass.benchmarks.gpu_cases import FUNCTIONAL
from normpass.benchmarks.gpu_peers import PEERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from normpass.benchmarks.gpu_cases import GpuCase
    from normpass.benchmarks.gpu_peers import Peer

    Tensors = Mapping[str, Tensor]
    Step = Callable[[], tuple[Tensor, ...]]
    Bind = Callable[[Tensors], Step]

EAGER, STOCK, OURS = "eager", "inductor", "normpass"
# normpass's own variants, by their options of the backend.
NORMPASS: Mapping[str, Mapping[str, Any]] = {
    OURS: {},
    "normpass triton": {"gpu": "triton"},
    "normpass cuda": {"gpu": "cuda"},
    "normpass cuda bulk": {"gpu": "cuda_bulk"},
}
PARAMETERS = ("weight", "bias")


@dataclass(frozen=True)
class Variant:
    """One of those that are compared. takes: whether it is asked to do a case."""

    name: str
    prepare: Callable[[GpuCase], Bind]
    takes: Callable[[GpuCase], bool] = lambda case: True


def variants(*, fuse_all: bool = False, without: Sequence[str] = ()) -> list[Variant]:
    """All of them; eager comes first, by whose error the others are judged. Of peers those that
    can be imported. fuse_all: whether normpass is to fuse whatever the size. without: names of
    those that are left out.
    """
    forced = {"least_bytes": 0} if fuse_all else {}
    ours = [
        Variant(name, partial(compiled, backend="normpass", options={**options, **forced}))
        for name, options in NORMPASS.items()
    ]
    others = [Variant(EAGER, compiled), Variant(STOCK, partial(compiled, backend="inductor"))]
    peers = [peer for peer in PEERS if peer.name not in without]
    found = [*others, *ours, *map(of_peer, usable(peers))]
    return [each for each in found if each.name not in without]


def usable(peers: Sequence[Peer]) -> list[Peer]:
    """Those that can be imported."""
    return [peer for peer in peers if peer.status()["missing"] is None]


def of_peer(peer: Peer) -> Variant:
    """A variant of a library."""

    def prepare(case: GpuCase) -> Bind:
        module = peer.load()

        def bind(tensors: Tensors) -> Step:
            made = peer.norms[case.norm](module, tensors)
            return of_autograd(case.phase, made.forward, tensors, made.parameters)

        return bind

    return Variant(peer.name, prepare, peer.takes)


def compiled(
    case: GpuCase, backend: str | None = None, options: Mapping[str, Any] | None = None
) -> Bind:
    """A case's program compiled by a backend; None leaves it to eager mode."""

    def compile(function: Callable[..., Any]) -> Callable[..., Any]:
        if backend is None:
            return function
        made: Callable[..., Any] = torch.compile(
            function,
            backend=backend,
            fullgraph=True,
            dynamic=False,
            options=dict(options) if options else None,
        )
        return made

    if make := FUNCTIONAL.get(case.phase):
        program = compile(make(case.spec, tuple(case.tensors("meta"))))
        return lambda tensors: partial(program, *tensors.values())
    forward = compile(case.spec.function)

    def bind(tensors: Tensors) -> Step:
        given = (tensors[name] for name in PARAMETERS if name in tensors)
        parameters = tuple(value.detach().requires_grad_() for value in given)
        return of_autograd(case.phase, forward, tensors, parameters)

    return bind


def of_autograd(
    phase: str, forward: Callable[..., Tensor], tensors: Tensors, parameters: tuple[Tensor, ...]
) -> Step:
    """The step of a phase that is run by autograd: of `backward` the graph is kept, and run again.

    forward: y of x and the parameters.
    """
    x = tensors["x"].detach().requires_grad_()
    inputs = (x, *parameters)
    if phase == "forward":
        return lambda: (forward(*inputs),)
    dy = tensors["dy"]
    if phase == "both":

        def step() -> tuple[Tensor, ...]:
            y = forward(*inputs)
            return y, *torch.autograd.grad(y, inputs, dy)

        return step
    kept = forward(*inputs)
    return lambda: torch.autograd.grad(kept, inputs, dy, retain_graph=True)
