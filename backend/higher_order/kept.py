"""What a call of compiled code keeps for further derivatives: its inputs, and how it drew random
numbers.

Private, checked on torch 2.11, 2.13 and 2.15: _top_saved_tensors_default_hooks, SavedTensor and
(since 2.12) _make_saved_tensor of torch._C._autograd.
"""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from normpass.backend.higher_order.program import Layout

    State = tuple[torch.device | None, Tensor]  # of a generator; the CPU's has no device

_HOOKS = torch._C._autograd._top_saved_tensors_default_hooks
_SAVED = torch._C._autograd.SavedTensor
_MAKE_SAVED = getattr(torch._C._autograd, "_make_saved_tensor", None)  # since torch 2.12
_VERSION: Any = operator.attrgetter("_version")


class Kept:
    """What a call keeps for further derivatives.

    inputs: as they were, without a copy unless the graph writes to them. versions: of the tensors
    among them, 0 for others. random: the state of the generators before the graph ran, if it draws.
    refusal: why there are no further derivatives, if so.
    """

    __slots__ = ("inputs", "random", "refusal", "versions")

    def __init__(self, inputs: Sequence[Any], versions: list[int]) -> None:
        self.inputs, self.versions = inputs, versions
        self.random: list[State] | None = None
        self.refusal: str | None = None

    def remember_generators(self, inputs: Sequence[Any]) -> None:
        try:
            self.random = random_state(inputs)
        except RuntimeError as error:
            self.refusal = (
                "a further derivative of compiled code: expected the states of the random number "
                f"generators before it ran, found {error}"
            )

    def unpacked(self, layout: Layout) -> list[Any]:
        """Raises RuntimeError if one of them was written to since, or if they do not suffice."""
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        for i, (x, version) in enumerate(zip(self.inputs, self.versions, strict=True)):
            if (now := _version(x)) != version and i not in layout.unread:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: an input of compiled code of shape {tuple(x.shape)} is at "
                    f"version {now}; expected version {version} instead"
                )
        return [x.unpack() if isinstance(x, _SAVED | _Dropped) else x for x in self.inputs]


def keeper(layout: Layout) -> Callable[[Sequence[Any]], Kept]:
    """What makes of a graph's inputs what a call keeps. It runs in each forward, so that what takes
    time there is left to the calls that need it.
    """
    copied = layout.written - layout.unread

    def keep(inputs: Sequence[Any]) -> Kept:
        if copied:
            inputs = [_before_it_is_written(x) if i in copied else x for i, x in enumerate(inputs)]
        if has_hooks():
            inputs = [_through_hooks(x) for x in inputs]
        try:
            return Kept(inputs, list(map(_VERSION, inputs)))
        except (AttributeError, RuntimeError):  # a number among them, or a tensor of inference mode
            return Kept(inputs, list(map(_version, inputs)))

    return keep


def keeping(forward: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """A compiled function's forward, which keeps what further derivatives need in its context."""
    keep = keeper(layout)
    draws: list[bool] = []  # whether the graph draws random numbers, once it has run

    def forward_and_keep(ctx: Any, *inputs: Any) -> Any:
        ctx.normpass_kept = kept = keep(inputs)
        if draws and not draws[0]:
            return forward(ctx, *inputs)
        # DistributedDataParallel's optimizer runs each part of a graph so, to know what comes out.
        if any(isinstance(x, FakeTensor) for x in inputs):
            return forward(ctx, *inputs)
        kept.remember_generators(inputs)
        result = forward(ctx, *inputs)
        if not draws and kept.random is not None:
            draws.append(differ(kept.random, random_state(inputs)))
            if not draws[0]:
                kept.random = None
        return result

    return forward_and_keep


def has_hooks() -> bool:
    """Whether saved tensors go through hooks: in a checkpoint, in save_on_cpu."""
    return _HOOKS(True) is not None


def _version(x: Any) -> int:
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def _through_hooks(x: Any) -> Any:
    """An activation as the hooks for saved tensors keep it: checkpointing would be for nothing if
    it were kept as it is.
    """
    if not isinstance(x, Tensor) or (x.is_leaf and x.requires_grad):
        return x
    return _MAKE_SAVED(x, False) if _MAKE_SAVED else _Dropped()


class _Dropped:
    def unpack(self) -> Tensor:
        raise RuntimeError(
            "a second derivative of compiled code under hooks for saved tensors (checkpointing, "
            f"save_on_cpu): expected torch 2.12 or newer, found {torch.__version__}; compile what "
            "is checkpointed together with the checkpoint"
        )


def _before_it_is_written(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    with torch.enable_grad():
        return x.clone()


def random_state(inputs: Sequence[Any]) -> list[State]:
    """The states of the generators of a graph's devices.

    Raises:
        RuntimeError: where a device does not tell: while a CUDA graph is captured.
    """
    devices = {x.device for x in inputs if isinstance(x, Tensor)}
    devices = {device for device in devices if device.type not in ("cpu", "meta")}
    states: list[State] = [(None, torch.get_rng_state())]
    return states + [(device, _generators(device).get_rng_state(device)) for device in devices]


def _generators(device: torch.device) -> Any:
    return torch.get_device_module(device.type)


def differ(before: Sequence[State], after: Sequence[State]) -> bool:
    return any(not torch.equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True))


@contextlib.contextmanager
def random_again(states: Sequence[State] | None, inputs: Sequence[Any]) -> Iterator[None]:
    """A block that draws the random numbers that were drawn from these states on."""
    if states is None:
        yield
        return
    before = random_state(inputs)
    _set(states)
    try:
        yield
    finally:
        _set(before)


def _set(states: Sequence[State]) -> None:
    for device, state in states:
        if device is None:
            torch.set_rng_state(state)
        else:
            _generators(device).set_rng_state(state, device)
