"""normpass.as_op: an autograd.Function as an operator, for every transform and every compiler.

signature.py   which operator a call is one of: what schemas say of arguments and results
operator.py    an operator and its kernels
node.py        its derivatives: the Function's own, at each level
batched.py     the Function under vmap, as another Function
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normpass.decomps.activation.torch_internals import tree_flatten, tree_map, tree_unflatten
from normpass.decomps.function_ops import in_dynamo
from normpass.decomps.function_ops.batched import batched
from normpass.decomps.function_ops.operator import (
    NotOnFakeTensorsError,
    Operator,
    as_tuple,
    returned,
)
from normpass.decomps.function_ops.signature import Signature
from normpass.decomps.operators import is_concrete

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from normpass.decomps.activation.levels import BatchLevel
    from normpass.decomps.activation.torch_internals import OpOverload

    FunctionClass = type[torch.autograd.Function]

_BASE = torch.autograd.Function
_LOCK = threading.RLock()


def as_op(function: FunctionClass | None = None, *, fake: Callable[..., Any] | None = None) -> Any:
    """An autograd.Function as an operator: right under every transform, and compiled.

        @normpass.as_op
        class Swish(torch.autograd.Function):
            @staticmethod
            def forward(x, scale): ...
            @staticmethod
            def setup_context(ctx, inputs, output): ...
            @staticmethod
            def backward(ctx, grad): ...

        y = Swish(x, 2.0)  # or swish = normpass.as_op(Swish)

    A call is one of an operator of torch.ops.normpass_functions, with a kernel for fake tensors and
    derivatives in both modes: in eager mode, under torch.func in any nesting, under torch.compile
    (fullgraph, any backend) and torch.export. The derivative is the Function's own backward, whose
    operations are differentiated for the next one. What may be left out is derived:

    - jvp: the transpose of backward, which then is to be made of differentiable operations
    - vmap: all four functions for one example each; of a forward that is no torch code, or that
      vmap cannot run, a call for each example

    A compiler sees the operations of forward; with `fake` the call stays one operator. torch.export
    keeps it one until run_decompositions().

    Arguments: tensors of any shape, None, numbers, bools, strings, dtypes, devices, and structures
    of these. Values of other types are constants, for each of which there is another operator.
    Results: a tensor, or a structure with some; other values in it are the same in each call of a
    kind, or numbers. As in an autograd.Function, a tensor within a structure has no derivative. An
    argument under ctx.mark_dirty is written to (no vmap); any other result is memory of its own,
    where the Function might return a view.

    Args:
        function: a subclass of torch.autograd.Function with a setup_context. Left out, this is a
            decorator.
        fake: for a forward that fake tensors cannot go through, because it asks for numbers (NumPy,
            item(), an extension in C++): a function of forward's parameters which returns empty
            tensors of the shapes, dtypes and devices that forward would.

    Returns:
        A callable of forward's arguments, the same for the same class. Its `operator(*args)` are
        the operator of a call and that one's arguments, as torch.library.opcheck takes them;
        `apply` is the call itself.

    Raises:
        TypeError: for what is no such Function, and at a call for a value that cannot be hashed.
        RuntimeError: at the first call if forward does not run on fake tensors and `fake` was not
            given; if a call returns another structure than the first did.
    """
    if function is None:
        return functools.partial(as_op, fake=fake)
    _check(function)
    with _LOCK:
        found: FunctionOp | None = function.__dict__.get("normpass_op")
        if found is None or fake not in (None, found.fake):
            found = FunctionOp(function, fake)
            function.normpass_op = found  # type: ignore[attr-defined]
    return found


def _check(function: Any) -> None:
    """Raises TypeError for what is no autograd.Function with a forward and a setup_context."""
    if not (inspect.isclass(function) and issubclass(function, _BASE)):
        raise TypeError(f"as_op takes a subclass of torch.autograd.Function; found {function!r}")
    if function.forward is _BASE.forward:
        raise TypeError(f"as_op takes a Function with a forward; found {function.__name__}")
    if function.setup_context is _BASE.setup_context:
        parameters = ", ".join(inspect.signature(function.forward).parameters)
        raise TypeError(
            f"as_op takes a Function whose forward has no ctx, with a setup_context(ctx, inputs, "
            f"output) beside it; found {function.__name__}.forward({parameters}) and no "
            "setup_context"
        )


class FunctionOp:
    """An autograd.Function whose calls are calls of operators; see `as_op`."""

    def __init__(
        self, function: FunctionClass, fake: Callable[..., Any] | None = None, tried: bool = True
    ) -> None:
        """tried: whether a forward that fake tensors cannot go through is run to see its error."""
        self.function: FunctionClass = function
        self.fake: Callable[..., Any] | None = fake
        self.tried: bool = tried
        self.__module__ = function.__module__
        self.__name__: str = function.__name__
        self.__doc__ = function.__doc__
        self.__wrapped__: Callable[..., Any] = function.forward
        self._parameters = inspect.signature(function.forward)
        self._operators: dict[Signature, Operator] = {}
        # Of calls without structures and constants, which their types tell apart.
        self._by_types: dict[tuple[type, ...], Operator] = {}
        self._batched: dict[Any, FunctionOp | None] = {}

        def call(*args: Any, **kwargs: Any) -> Any:
            if in_dynamo.constants:
                args, kwargs = tree_map(in_dynamo.value, (args, kwargs))
            operator, given = self._find(args, kwargs)
            return in_dynamo.kept(operator.results, as_tuple(operator.op(*given)), given)

        # Dynamo has the call in its graph as it stands.
        call.__name__ = call.__qualname__ = function.__name__
        self._in_graph = torch.compiler.allow_in_graph(call)

    def __reduce__(self) -> Any:
        """By name: of the class, or where that is a decorated one, of this."""
        name = self.function.__qualname__
        if getattr(sys.modules.get(self.__module__), name, None) is self:
            return name
        return as_op, (self.function,)

    def __repr__(self) -> str:
        return f"as_op({self.function.__qualname__})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            args, kwargs = tree_map(in_dynamo.named, (args, kwargs))
            return in_dynamo.structured(self._in_graph(*args, **kwargs))
        operator, given = self._find(args, kwargs)
        return operator(given)

    apply = __call__

    def operator(self, *args: Any, **kwargs: Any) -> tuple[OpOverload, tuple[Any, ...]]:
        """The operator of a call like this one, and its arguments: what torch.library.opcheck asks
        for.
        """
        operator, given = self._find(args, kwargs)
        return operator.op, tuple(given)

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Operator, Sequence[Any]]:
        """The operator of a call, and its arguments."""
        if kwargs:
            args = self._positional(args, kwargs)
        types = tuple(map(type, args))
        operator = self._by_types.get(types)
        if operator is not None:
            return operator, args
        signature, given = Signature.of(repr(self), args)
        operator = self._operators.get(signature)
        if operator is None:
            operator = self._made(signature, given)
        if signature.is_flat:
            self._by_types[types] = operator
        return operator, given

    def _made(self, signature: Signature, given: list[Any]) -> Operator:
        # Not locked: forward may call another of these, in the thread of the fake tensors.
        try:
            found = returned(self.function, self.fake, signature, given)
        except NotOnFakeTensorsError:
            if self.tried and all(is_concrete(x) for x in given if isinstance(x, Tensor)):
                # Where the arguments are wrong, the error to be seen is forward's own.
                with torch.no_grad():
                    self.function.forward(*signature.arguments(given))
            raise
        with _LOCK:
            if signature not in self._operators:
                self._operators[signature] = Operator(
                    self.function, self.fake, signature, *found, self._under_vmap
                )
            return self._operators[signature]

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments by position, as apply() takes them, up to the last that is given."""
        bound = self._parameters.bind(*args, **kwargs)
        last = max(list(self._parameters.parameters).index(name) for name in bound.arguments)
        bound.apply_defaults()
        if bound.kwargs:
            raise TypeError(
                f"{self} takes no keyword-only arguments; found {', '.join(bound.kwargs)}"
            )
        return bound.args[: last + 1]

    # --- vmap -------------------------------------------------------------------------------------

    def _under_vmap(
        self, level: BatchLevel, args: tuple[Any, ...], in_dims: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        function = self.function
        if function.vmap is _BASE.vmap:
            return self._derived(level, args, in_dims)
        if function.generate_vmap_rule:
            raise RuntimeError(
                f"You tried to vmap over {function.__name__}, but it has both "
                "generate_vmap_rule=True and an overridden vmap staticmethod. Please set "
                "generate_vmap_rule=False or delete the overridden vmap staticmethod to avoid "
                "ambiguity."
            )
        found = function.vmap(level.info, in_dims, *args)
        if not isinstance(found, tuple) or len(found) != 2:
            raise RuntimeError(
                "Expected the vmap staticmethod to have two returns, an output and out_dims with "
                f"pytree structure compatible with the output. Got {found!r} instead"
            )
        return found

    def _derived(
        self, level: BatchLevel, args: tuple[Any, ...], in_dims: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        dims = tuple(tree_flatten(in_dims)[0])
        key = dims, level.info.randomness
        with _LOCK:
            if key not in self._batched:
                other = None
                if self.fake is None:
                    other = FunctionOp(batched(self.function, *key), tried=False)
                self._batched[key] = other
            other = self._batched[key]
        if other is not None:
            try:
                return other(*args), 0
            except NotOnFakeTensorsError as error:
                if level.info.randomness == "error" and "randomness" in str(error):
                    raise (error.__cause__ or error) from None
        # What does not run under vmap: numbers in NumPy, requires_grad_().
        found = self._one_by_one(level.info.batch_size, args, dims)
        self._batched[key] = None
        return found, 0

    def _one_by_one(self, size: int, args: tuple[Any, ...], dims: tuple[int | None, ...]) -> Any:
        """A forward that is no torch code knows nothing of a batch: a call for each example."""
        leaves, spec = tree_flatten(args)
        columns = [
            [x] * size if dim is None else x.unbind(dim)
            for x, dim in zip(leaves, dims, strict=True)
        ]
        if not size:
            raise NotImplementedError(f"{self} has no vmap of its own, for a batch of no examples")
        rows = [
            tree_flatten(self(*tree_unflatten(list(row), spec)))
            for row in zip(*columns, strict=True)
        ]
        each = zip(*(row for row, _ in rows), strict=True)
        stacked = [torch.stack(ys) if isinstance(ys[0], Tensor) else ys[0] for ys in each]
        return tree_unflatten(stacked, rows[0][1])
