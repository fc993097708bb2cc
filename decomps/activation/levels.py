"""The levels of torch.func's transforms, and of forward mode: what rules have to know of them."""

from __future__ import annotations

import contextlib
import functools
import threading
from operator import or_
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.activation.torch_internals import (
    GRAD,
    JVP,
    PYTHON_TLS_SNAPSHOT,
    VMAP,
    AutoDispatchBelowAutograd,
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    ForceDispatchKeyGuard,
    Missing,
    SetExcludeDispatchKeyGuard,
    VmapInfo,
    VmapInterpreter,
    add_batch_dim,
    excluded_keys,
    forward_level,
    get_interpreter_stack,
    get_unwrapped,
    included_keys,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_bdim,
    maybe_get_level,
    peek_interpreter_stack,
    retrieve_current_functorch_interpreter,
    set_fwd_grad_enabled,
    unwrap_for_grad,
    unwrap_if_dead,
    wrap_for_grad,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor


def in_forward_mode() -> bool:
    """Whether torch.autograd.forward_ad or torch.func.jvp is active."""
    return forward_level() >= 0


def at_jvp() -> bool:
    """Whether the innermost level is one of torch.func.jvp: of a graph's own calls, which enter
    forward mode without Python, nothing else tells.
    """
    top = peek_interpreter_stack()
    return top is not None and top.key() == JVP


# A level's kind as a number: to compare two kinds as they are takes microseconds.
_GRAD, _JVP, _VMAP = (-1 if isinstance(k, Missing) else int(k) for k in (GRAD, JVP, VMAP))


def _kinds() -> list[int]:
    """The kinds of all levels, from the outermost on."""
    if not in_transform():
        return []
    return [int(interpreter.key()) for interpreter in get_interpreter_stack() or ()]


def needs_composition() -> bool:
    """Whether derivatives are asked for that an operator's own formulas need not give: any in
    forward mode, and those of more than one level.
    """
    if in_forward_mode():
        return True
    kinds = _kinds()
    return _JVP in kinds or kinds.count(_GRAD) > 1


def needs_composition_of(values: Iterable[Any]) -> bool:
    """The same in eager mode, of a call with these arguments: an operator's own formulas are right
    there for one level of forward mode over one of reverse mode at the most, if nothing outside of
    them asks for a derivative too.
    """
    forward, kinds = in_forward_mode(), _kinds()
    if not kinds:
        return forward and _are_recorded(values)
    if kinds != [_JVP, _GRAD]:  # with vmap in it, the backward's batching rule would be derived
        kinds = [kind for kind in kinds if kind != _VMAP]
        if kinds == [_GRAD] and not forward:
            return False
        if kinds not in ([], [_JVP]):
            return True
    return _are_recorded(values)


def _are_recorded(values: Iterable[Any]) -> bool:
    """Whether the tape below all levels records what is done with these."""
    return torch.is_grad_enabled() and any(map(_is_recorded, values))


def _is_recorded(value: Any) -> bool:
    """Whether autograd's tape below all levels has this tensor."""
    if not isinstance(value, torch.Tensor):
        return False
    while is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value.requires_grad


def in_transform() -> bool:
    """Whether a transform of torch.func is active."""
    return peek_interpreter_stack() is not None


def is_wrapped(value: Tensor) -> bool:
    """Whether a level of grad, jvp or vmap wraps this tensor."""
    return is_functorch_wrapped_tensor(value)


class BatchLevel:
    """The innermost level, which is one of vmap."""

    def __init__(self) -> None:
        interpreter = VmapInterpreter(peek_interpreter_stack())
        self.number: int = interpreter.level()
        self.info = VmapInfo(
            batch_size=interpreter.batch_size(), randomness=interpreter.randomness()
        )

    def unwrap(self, value: Any) -> tuple[Any, int | None]:
        """A value below this level, and its batch dimension there."""
        if isinstance(value, torch.Tensor) and is_batchedtensor(value):
            return _unwrapped(value, self.number)
        return value, None

    def unwrapped(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The same of each value, and of those in lists."""
        pairs = [
            self.unwrapped(value) if isinstance(value, list | tuple) else self.unwrap(value)
            for value in values
        ]
        return [value for value, _ in pairs], [dim for _, dim in pairs]

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """A block below this level."""
        with retrieve_current_functorch_interpreter().lower():
            yield

    def wrap(self, value: Any, dim: int | None) -> Any:
        return value if dim is None else add_batch_dim(value, dim, self.number)


class DerivativeLevel:
    """The innermost level, which is one of grad or jvp."""

    def __init__(self) -> None:
        self.interpreter = retrieve_current_functorch_interpreter()
        self.number: int = self.interpreter.level()

    def lifted(self, values: Sequence[Any]) -> list[Any]:
        """Values at this level: what is no variable of it is a constant, and not one of an outer
        level.
        """
        values, _ = self.interpreter.lift(values, {})
        return list(values)

    def unwrap(self, value: Any) -> Any:
        return unwrap_for_grad(value, self.number) if isinstance(value, torch.Tensor) else value

    def wrap(self, value: Any) -> Any:
        return wrap_for_grad(value, self.number) if isinstance(value, torch.Tensor) else value

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """A block below this level, with reverse and forward mode as they are there: a Function's
        apply() turns them off.
        """
        with torch.enable_grad(), set_fwd_grad_enabled(True), self.interpreter.lower():
            yield


AUTOCAST = [name for name in dir(DispatchKey) if name.startswith("Autocast")]


def _keys(names: Iterable[str]) -> Any:
    return functools.reduce(or_, (DispatchKeySet(getattr(DispatchKey, name)) for name in names))


@functools.cache
def _kept() -> Any:
    """The keys of which it does not depend on a kernel whether they are off."""
    return _keys([*AUTOCAST, "PreDispatch", "PythonDispatcher"])


class _Casting(threading.local):
    """The key of autocast that was on where a kernel was called."""

    key: str | None = None


_CASTING = _Casting()


@contextlib.contextmanager
def casting(key: str) -> Iterator[None]:
    """A block without a key of autocast, which `as_called_by_user` has on again: fake tensors and
    AOTAutograd call a kernel with all of them off.
    """
    before, _CASTING.key = _CASTING.key, key
    try:
        with ExcludeDispatchKeyGuard(_keys([key])):
            yield
    finally:
        _CASTING.key = before


@contextlib.contextmanager
def as_called_by_user() -> Iterator[None]:
    """A block of a kernel in which torch can be used as outside of one: transforms of torch.func,
    autograd, autocast. Neither tape nor forward mode sees it.

    A kernel runs without the keys that have been processed before it, one for fake tensors without
    all that come before Python. What vmap wraps there would reach kernels that cannot read it.
    """
    key, _CASTING.key = _CASTING.key, None
    excluded = excluded_keys() & _kept()
    if key is not None:
        excluded = excluded - _keys([key])
    keys = ForceDispatchKeyGuard(included_keys(), excluded)
    try:
        with torch.no_grad(), set_fwd_grad_enabled(False), keys:
            yield
    finally:
        _CASTING.key = key


def alive(value: Any) -> Any:
    """A value, of a tensor whose level has ended the tensor."""
    return unwrap_if_dead(value) if isinstance(value, torch.Tensor) else value


def innermost() -> Any:
    """The kind of the innermost level: GRAD, JVP, VMAP or another."""
    return retrieve_current_functorch_interpreter().key()


def _unwrapped(value: Tensor, level: int) -> tuple[Tensor, int | None]:
    """A tensor below a level, and its batch dimension there if the level is one of vmap."""
    if maybe_get_level(value) != level:
        return value, None
    dim = maybe_get_bdim(value) if is_batchedtensor(value) else None
    return get_unwrapped(value), dim


@contextlib.contextmanager
def below(target: Tensor, value: Tensor, refusal: str | None) -> Iterator[tuple[Tensor, Tensor]]:
    """A block below all levels, with the two tensors as they are there: batch axes first, in the
    same order in both, of size one where the value has none.

    Where a level of vmap has batched the value and not the target, the value is the mean of the
    examples'; or, with a refusal, that raises RuntimeError(refusal).
    """
    with contextlib.ExitStack() as lowered:
        for level in _each(lowered):
            (target, front), (value, dim) = _unwrapped(target, level), _unwrapped(value, level)
            if front is None and dim is not None:
                if refusal is not None:
                    raise RuntimeError(refusal)
                value = value.mean(dim)
            if front is not None:
                target = target.movedim(front, 0)
                value = value.unsqueeze(0) if dim is None else value.movedim(dim, 0)
        yield target, value


class OneAxis:
    """Tensors as they are below all levels, which are those of vmap: their batch axes as one axis
    in front, which all of them have.
    """

    def __init__(self, values: Sequence[Tensor], lowered: contextlib.ExitStack) -> None:
        self.levels: list[tuple[int, int]] = []  # number and size, from the innermost on
        for level in _each(lowered):
            pairs = [_unwrapped(value, level) for value in values]
            sizes = [value.shape[dim] for value, dim in pairs if dim is not None]
            if sizes:
                self.levels.append((level, sizes[0]))
                values = [
                    value.expand(sizes[0], *value.shape) if dim is None else value.movedim(dim, 0)
                    for value, dim in pairs
                ]
        depth = len(self.levels)
        self.values = [v.flatten(0, depth - 1) if depth else v.unsqueeze(0) for v in values]

    def wrap(self, value: Tensor) -> Tensor:
        """A result with that axis in front, as the levels see it."""
        value = value.unflatten(0, [size for _, size in reversed(self.levels)] or [1])
        for level, _ in reversed(self.levels):
            value = add_batch_dim(value, 0, level)
        return value if self.levels else value.squeeze(0)


def in_vmap() -> bool:
    """Whether one of the levels is of vmap."""
    return _VMAP in _kinds()


def only_vmap() -> bool:
    """Whether all levels are those of vmap."""
    return set(_kinds()) <= {_VMAP}


def may_be_differentiated(values: Iterable[Any]) -> bool:
    """Whether somebody may ask for a derivative of these: a level, or the tape."""
    if in_forward_mode() or any(kind != _VMAP for kind in _kinds()):
        return True
    return _are_recorded(values)


def constant(value: Tensor) -> Tensor:
    """The value without derivatives at any level or on the tape; batched as it is.

    detach does less: it leaves tangents, and what outer levels know.
    """
    batched = []
    with contextlib.ExitStack() as lowered:
        for level in _each(lowered):
            value, dim = _unwrapped(value, level)
            if dim is not None:
                batched.append((dim, level))
        with AutoDispatchBelowAutograd():
            value = torch.ops.aten.detach.default(value)
    for dim, level in reversed(batched):
        value = add_batch_dim(value, dim, level)
    return value


def _each(lowered: contextlib.ExitStack) -> Iterator[int]:
    """The levels of grad, jvp and vmap from the innermost on, each when it is left for `lowered`
    to come back to.
    """
    # functorch excludes the key while it runs a rule of the innermost level. What a rule then
    # calls with fake tensors below all levels needs it on torch 2.11, whose fallback to Python
    # asserts that it was there.
    lowered.enter_context(SetExcludeDispatchKeyGuard(PYTHON_TLS_SNAPSHOT, False))
    while in_transform():
        interpreter = retrieve_current_functorch_interpreter()
        if interpreter.key() not in (GRAD, JVP, VMAP):
            return
        lowered.enter_context(interpreter.lower())
        yield interpreter.level()
