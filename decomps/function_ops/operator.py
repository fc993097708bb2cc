"""The operator of one kind of calls of an autograd.Function.

CompositeExplicitAutograd   its forward
Autograd                    a node with its backward and its jvp (node.py), at each level
FuncTorchDynamicLayerFrontMode
                            the innermost level of torch.func: that node, or under vmap its own
                            vmap or one that is derived (batched.py); and so on at the next
fake tensors                its forward, or the function that as_op was given for them
AOTAutograd                 its forward, whose operations a compiler then sees; with a function
                            for fake tensors it stays one operator
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import threading
import uuid
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from normpass.decomps.activation.levels import (
    AUTOCAST,
    BatchLevel,
    DerivativeLevel,
    alive,
    as_called_by_user,
    casting,
    in_transform,
    innermost,
)
from normpass.decomps.activation.torch_internals import (
    FUNCTORCH_FRONT,
    GRAD,
    JVP,
    VMAP,
    AutoDispatchBelowAutograd,
    FakeTensorMode,
    FunctionalTensorMode,
    FunctorchFunctionalizeAPI,
    is_excluded,
    memory_of,
    retrieve_current_functorch_interpreter,
    tree_map,
)
from normpass.decomps.function_ops.node import applied, node_of
from normpass.decomps.function_ops.signature import Results
from normpass.decomps.table.nodes import is_differentiated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from normpass.decomps.activation.torch_internals import OpOverload
    from normpass.decomps.function_ops.signature import Signature

    FunctionClass = type[torch.autograd.Function]
    # (level, arguments, their batch dimensions) -> (results, their batch dimensions)
    BatchingRule = Callable[[BatchLevel, tuple[Any, ...], tuple[Any, ...]], tuple[Any, Any]]

NAMESPACE = "normpass_functions"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_names: set[str] = set()


class NotOnFakeTensorsError(RuntimeError):
    """A forward that fake tensors cannot go through."""


def returned(
    function: FunctionClass,
    fake: Callable[..., Any] | None,
    signature: Signature,
    example: Sequence[Any],
) -> tuple[Results, tuple[int, ...]]:
    """What a call returns, and the numbers of the arguments that it writes to. example: of such a
    call the arguments that are in the schema.
    """
    forward, name = fake or function.forward, function.__name__

    def run(fakes: list[Any]) -> tuple[Results, tuple[int, ...]]:
        args = signature.arguments(fakes)
        value = forward(*args)
        dirty = _marked_dirty(function, args, value)
        written = {id(x): k for k, x in enumerate(fakes) if id(x) in dirty}
        return Results.of(value, written)[0], tuple(written.values())

    try:
        results, written = _on_fake_tensors(run, example)
    except Exception as error:
        what = "the function given as fake=" if fake else f"{name}.forward"
        raise NotOnFakeTensorsError(
            f"{what} cannot be run on fake tensors ({type(error).__name__}: {error}). If that "
            f"is because of what {name}.forward does with numbers, say with fake=f what it "
            "returns: f has the parameters of forward, and returns empty tensors of the right "
            "shapes, dtypes and devices"
        ) from error
    if "Tensor" not in results.kinds and not results.arguments:
        raise TypeError(f"{name}.forward is to return a tensor, or several; found {results.text()}")
    return results, written


class Operator:
    """An operator, for calls with one signature.

    results, written    what `returned` finds of such a call
    """

    def __init__(
        self,
        function: FunctionClass,
        fake: Callable[..., Any] | None,
        signature: Signature,
        results: Results,
        written: Sequence[int],
        batching: BatchingRule,
    ) -> None:
        self.function, self.fake, self.signature = function, fake, signature
        self.results, self.written, self.batching = results, written, batching
        self.op = self._defined()
        self.node = node_of(function, self._node_forward)

    def __call__(self, given: Sequence[Any]) -> Any:
        """given: of a call the arguments that are in the schema."""
        return self._structured(self.op(*given), given)

    def _structured(self, found: Any, given: Sequence[Any]) -> Any:
        """What the Function returns, of what the operator does."""
        return self.results.value(as_tuple(found), given)

    def _flat(self, value: Any, given: Sequence[Any]) -> Any:
        """What the operator returns, of what the Function does."""
        if self.results.is_tensor and isinstance(value, torch.Tensor):
            return value
        results, found = Results.of(value, {id(given[k]): k for k in self.written})
        if results != self.results:
            raise RuntimeError(
                f"{self.op} returns {self.results.text()}, as its first call did; found "
                f"{results.text()}"
            )
        return (tuple(found) if len(found) > 1 else found[0]) if found else None

    # --- what it is -------------------------------------------------------------------------------

    def _defined(self) -> OpOverload:
        text = self.signature.schema(self.function.forward, self.written)
        text = f"({text}) -> {self.results.schema()}"
        name = self._name(text)
        _library.define(name + text, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, self._forward, "CompositeExplicitAutograd")
        _library.impl(name, self._differentiated, "Autograd")
        _library.impl(name, self._at_level, "FuncTorchDynamicLayerFrontMode")
        for key in AUTOCAST:
            _library.impl(name, functools.partial(self._under_autocast, key), key)
        qualified = f"{NAMESPACE}::{name}"
        torch.library.register_fake(qualified, self._on_fakes, lib=_library)
        if self.fake is None:
            torch.library.register_torch_dispatch(
                qualified, FunctionalTensorMode, self._traced, lib=_library
            )
        op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
        return op

    def _name(self, schema: str) -> str:
        """The Function's name, and what no other operator has. Compiled code in caches calls an
        operator by it: it is the same in another process if the operator is.
        """
        cls = self.function
        code = _code(self.fake or cls.forward)
        about = f"{cls.__module__}.{cls.__qualname__}{schema}{self.signature}{self.results}{code}"
        known = self.signature.is_known_elsewhere() and "<locals>" not in about
        while True:
            digest = hashlib.sha256(about.encode()).hexdigest()[:8]
            name = f"{''.join(c for c in cls.__name__ if c.isalnum() or c == '_')}_{digest}"
            if known and name not in _names:
                _names.add(name)
                return name
            about, known = about + uuid.uuid4().hex, True

    # --- kernels ----------------------------------------------------------------------------------

    def _forward(self, *given: Any) -> Any:
        return self._run(self.function.forward, given)

    def _on_fakes(self, *given: Any) -> Any:
        return self._run(self.fake or self.function.forward, given)

    def _run(self, forward: Callable[..., Any], given: Sequence[Any]) -> Any:
        with as_called_by_user():
            value = forward(*self.signature.arguments(given))
            return self._flat(_apart(value, given, self.written), given)

    def _traced(self, mode: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        del func, types, kwargs
        with mode:
            return self._forward(*args)

    def _under_autocast(self, key: str, *given: Any) -> Any:
        with casting(key):
            return self.op(*given)

    def _differentiated(self, *given: Any) -> Any:
        if not is_differentiated(given):
            return self._below(given)
        return self._applied(given)

    def _applied(self, given: Sequence[Any]) -> Any:
        return self._flat(applied(self.node, self.signature.arguments(given)), given)

    def _node_forward(self, args: tuple[Any, ...]) -> Any:
        given = self.signature.given(args)
        # A level that is being processed in C++ is left in C++.
        if in_transform() and not is_excluded(FUNCTORCH_FRONT):
            return self._structured(self._below_level(DerivativeLevel(), given), given)
        return self._structured(self._below(given), given)

    def _below(self, given: Sequence[Any]) -> Any:
        with AutoDispatchBelowAutograd():
            return self.op(*given)

    def _below_level(self, level: DerivativeLevel, given: Sequence[Any]) -> Any:
        plain = [level.unwrap(x) for x in given]
        with level.left():
            found = self.op(*plain)
        return tree_map(level.wrap, found)

    def _at_level(self, *given: Any) -> Any:
        """The call at the innermost level of torch.func, before torch has begun to process it."""
        given, kind = tuple(map(alive, given)), innermost()
        if kind == VMAP:
            return self._batched(given)
        if kind not in (GRAD, JVP):
            return self._functionalized(given)
        level = DerivativeLevel()
        lifted = level.lifted(given)
        if any(lifted[k] is not given[k] for k in self.written):
            raise RuntimeError(
                f"{self.op} writes to a tensor that is no variable of the function which "
                "torch.func differentiates: pass it in as an argument, or write to a copy"
            )
        if is_differentiated(lifted):
            return self._applied(lifted)
        return self._below_level(level, lifted)

    def _batched(self, given: Sequence[Any]) -> Any:
        level = BatchLevel()
        plain, dims = level.unwrapped(given)
        with level.left():
            if all(dim is None for dim in dims):
                return self.op(*plain)
            if self.written:
                raise NotImplementedError(f"{self.op} writes to an argument: it has no vmap")
            args, in_dims = self.signature.arguments(plain), self.signature.structured(dims)
            out, out_dims = self.batching(level, args, in_dims)
        return self._flat(_wrapped(level, out, out_dims), given)

    def _functionalized(self, given: Sequence[Any]) -> Any:
        level = FunctorchFunctionalizeAPI(retrieve_current_functorch_interpreter())
        plain = level.unwrap_tensors(tuple(given))
        with level.redispatch_to_next():
            found = self.op(*plain)
        return level.wrap_tensors(found)


def _wrapped(level: BatchLevel, out: Any, dims: Any) -> Any:
    """Results as a level of vmap has them. dims: in their structure, or one for all of a part."""
    if isinstance(dims, list | tuple):
        if not isinstance(out, list | tuple) or len(out) != len(dims):
            raise RuntimeError(
                "vmap is to return results and batch dimensions of one structure; found the "
                f"dimensions {dims} of {Results.of(out, {})[0].text()}"
            )
        return type(out)(_wrapped(level, y, dim) for y, dim in zip(out, dims, strict=True))
    return tree_map(lambda y: level.wrap(y, dims) if isinstance(y, torch.Tensor) else y, out)


def _code(function: Callable[..., Any]) -> str:
    """What tells a function from another that has its place."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else _text(code)


def _text(code: CodeType) -> str:
    """Of code what it does, and not where it stands."""
    constants = (_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return f"{code.co_code.hex()}{code.co_names}{', '.join(constants)}"


def as_tuple(found: Any) -> tuple[Any, ...]:
    """What an operator has returned."""
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def _marked_dirty(function: FunctionClass, args: tuple[Any, ...], value: Any) -> set[int]:
    """The ids of the arguments that a Function says it has written to."""
    ctx: Any = torch.autograd.function.FunctionCtx()
    ctx.needs_input_grad = (False,) * len(args)
    # What it does with numbers fails on fake tensors, and need not be known.
    with contextlib.suppress(Exception):
        function.setup_context(ctx, args, value)
    return {id(x) for x in getattr(ctx, "dirty_tensors", None) or ()}


def _apart(value: Any, given: Sequence[Any], written: Sequence[int]) -> Any:
    """Results that have no memory in common with an argument or with each other: what is a view in
    an autograd.Function is a copy in an operator. An argument that was written to is itself.
    """
    seen = {_memory(x) for x in given if isinstance(x, torch.Tensor)}
    same = {id(given[k]) for k in written}

    def own(y: Any) -> Any:
        if not isinstance(y, torch.Tensor) or id(y) in same:
            return y
        if _memory(y) in seen:
            y = y.clone()
        seen.add(_memory(y))
        return y

    return own(value) if isinstance(value, torch.Tensor) else tree_map(own, value)


def _memory(x: torch.Tensor) -> Any:
    try:
        return memory_of(x)
    except (NotImplementedError, RuntimeError):  # a layout without storage, such as sparse
        return id(x)


def _on_fake_tensors(function: Callable[[list[Any]], Any], example: Sequence[Any]) -> Any:
    """A function of arguments like these. In a thread of its own, where no transform, no mode and
    no tape is active: the first call may be anywhere.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            with torch.no_grad(), FakeTensorMode():
                found.append((function([_like(x) for x in given]), None))
        except BaseException as error:
            found.append((None, error))

    given = [_described(x) for x in example]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = found[0]
    if error is not None:
        raise error
    return value


def _described(x: Any) -> Any:
    """What `_like` makes something from, without the numbers of a tensor."""
    if isinstance(x, torch.Tensor):
        strided = x.layout == torch.strided
        stride = tuple(map(_hint, x.stride())) if strided else None
        return _Tensor(tuple(map(_hint, x.shape)), stride, x.dtype, x.device)
    return _hint(x)


def _hint(x: Any) -> Any:
    """A number; of a symbolic one the example that it was made from, or two."""
    if not isinstance(x, torch.SymInt | torch.SymFloat):
        return x
    hint = getattr(x.node, "hint", None)
    return 2 if hint is None else hint


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device


def _like(x: Any) -> Any:
    if not isinstance(x, _Tensor):
        return x
    if x.stride is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=x.device)
