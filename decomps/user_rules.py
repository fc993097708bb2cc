"""Rules that users declare for operators of theirs, or for torch's own: `normpass.rule`.

For an operator of theirs a derivative and a batching rule hold from the declaration on, in eager
mode and under every backend: without them it would have none. For one of torch's own, and
decompositions, they hold where rules are registered, as ours do, and stand before ours.

Code that was compiled before stays as it is.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from normpass.decomps import activation, registry
from normpass.decomps.activation.dispatch import look_up_again
from normpass.decomps.activation.kernels import batched
from normpass.decomps.activation.torch_internals import (
    OpOverload,
    OpOverloadPacket,
    destroy,
)
from normpass.decomps.registry import Rule
from normpass.decomps.table import declared
from normpass.decomps.table.binding import forget
from normpass.decomps.table.nodes import differentiated

if TYPE_CHECKING:
    from collections.abc import Callable

    from normpass.decomps.registry import Kind

    # An overload, a packet, "library::name", or what torch.library.custom_op returns.
    Operator = OpOverload | OpOverloadPacket | str | Any

F = TypeVar("F", bound="Callable[..., Any]")

_LOCK = threading.RLock()
_LIBRARIES: dict[tuple[OpOverload, str], torch.library.Library] = {}


def derivative(
    op: Operator,
    *,
    kind: Literal["vjp", "jvp"] = "vjp",
    source: str = "",
    shapes: str = "",
    why: str = "",
) -> Callable[[F], Rule]:
    """Decorator: declares the derivative of an operator that writes to none of its arguments.

        @normpass.rule.derivative("mylib::swish")
        def swish_backward(grad, x):
            s = x.sigmoid()
            return grad * (s + x * s * (1 - s))

    The function asks for what it needs by the names of its parameters, and is differentiated for
    the next derivative:

    - any argument of the operator, and `result` (several: result0, result1, ..., or as the schema
      names them)
    - of the kind "vjp" `grad`, the gradient of the one result; of several `grad_result0` and so on,
      or `grads`, all in a list; a result whose gradient is not asked for is a constant. `needs`:
      the names of the arguments whose gradients are wanted
    - of the kind "jvp" `x_t`, the tangent of the argument x, zeros where it has none

    A "vjp" returns the gradient of the one tensor argument; of several a tuple in the order of the
    schema or a dict by name, None for what has none. A "jvp" returns the tangent of the result, or
    a tuple. One kind is enough: the other is its transpose (of a "jvp" alone only without lists of
    tensors).

    Args:
        op: an operator ("library::name", "library::name.overload", torch.ops.library.name, or what
            torch.library.custom_op returned).
        kind: which derivative this is.
        source, shapes, why: for the record; see `normpass.rules()`.

    Returns:
        The rule: called it calls the function, and `remove()` takes it out again.

    Raises:
        ValueError: for an operator that does not exist, writes to an argument or is made of others
            (CompositeImplicitAutograd), or another kind.
        TypeError: for a parameter that is no such name; the message lists them.
    """
    if kind not in ("vjp", "jvp"):
        raise ValueError(f"kind: expected 'vjp' or 'jvp'; found {kind!r}")
    found = operator(op)

    def decorate(function: F) -> Rule:
        declared.check(found, kind, function)
        return _declare(kind, found, function, source, shapes, why)

    return decorate


def batching(
    op: Operator, *, source: str = "", shapes: str = "", why: str = ""
) -> Callable[[F], Rule]:
    """Decorator: declares what an operator is under torch.vmap.

        @normpass.rule.batching("mylib::swish")
        def swish(info, in_dims, x):
            return torch.ops.mylib.swish(x), in_dims[0]

    The function is f(info, in_dims, *args) -> (outs, out_dims), as torch.library.register_vmap has
    it: args are all arguments in the schema's order, in_dims the batch dimension of each tensor or
    None. Several results are two tuples.

    Args, returns, raises: as `derivative`.
    """
    found = operator(op)
    return lambda function: _declare("batching", found, function, source, shapes, why)


def decomposition(
    op: Operator, *, source: str = "", shapes: str = "", why: str = ""
) -> Callable[[F], Rule]:
    """Decorator: declares what a compiler has in place of an operator.

        @normpass.rule.decomposition("mylib::swish")
        def swish(x):
            return x * x.sigmoid()

    The function takes the operator's arguments and returns what it returns, of the same shapes,
    dtypes and layouts. It holds in `normpass.decompositions()`, under backend="normpass", and in
    stock Inductor while rules are registered.

    Args, returns, raises: as `derivative`.
    """
    found = operator(op)
    return lambda function: _declare("decomposition", found, function, source, shapes, why)


def remove(rule: Rule) -> None:
    """See `Rule.remove`."""
    with _LOCK:
        if registry.DECLARED.get(rule.key) is rule:
            del registry.DECLARED[rule.key]
            _changed(rule)
        elif any(other is rule for other in registry.rules()):
            raise ValueError(f"the {rule.kind} rule for {rule.name} is one of normpass's own")


def operator(op: Operator) -> OpOverload:
    """The overload that is meant; a packet stands for its default, or for the only one it has.

    Raises ValueError where there is none.
    """
    given = op
    op = getattr(op, "_opoverload", op)  # of torch.library.custom_op: it has no public name
    if isinstance(op, str):
        op = _named(op)
    if isinstance(op, OpOverloadPacket):
        names = op.overloads()
        name = "default" if "default" in names else names[0] if len(names) == 1 else None
        if name is None:
            raise ValueError(f"{op} has the overloads {', '.join(names)}: say which")
        op = getattr(op, name)
    if not isinstance(op, OpOverload):
        raise ValueError(f"expected an operator, as 'library::name'; found {given!r}")
    return op


def _named(name: str) -> Any:
    """torch.ops.<name>, of "library::name" or "library::name.overload"; the text if it is none."""
    found: Any = torch.ops
    for part in name.replace("::", ".").split("."):
        found = getattr(found, part, None)
        if found is None:
            return name
    return found


def _declare(
    kind: Kind, op: OpOverload, function: Callable[..., Any], source: str, shapes: str, why: str
) -> Rule:
    where = f"{getattr(function, '__module__', '?')}: {getattr(function, '__qualname__', '?')}"
    tensors = ", ".join(f"{name}: *{name}" for name in declared.tensors_of(op))
    rule = Rule(kind, op, str(op), source or where, shapes or f"{tensors} -> ...", why, function)
    with _LOCK:
        other = registry.DECLARED.get(rule.key)
        # Where a cell of a notebook runs again, its rule takes the place of the one before.
        if other is not None and (other.source, other.__name__) != (rule.source, rule.__name__):
            raise ValueError(
                f"two {kind} rules for {op}: one at {other.place}, another at {rule.place}; "
                "remove() takes one out"
            )
        registry.DECLARED[rule.key] = rule
        _changed(rule)
    return rule


def _changed(rule: Rule) -> None:
    """Makes true what is declared now of a rule's operator."""
    op = rule.op
    assert op is not None
    forget(op)
    if op.namespace != "aten":
        has = {kind for kind, declared_op in registry.DECLARED if declared_op == op}
        _put(op, "Autograd", differentiated(op) if has & {"vjp", "jvp"} else None)
        batch = registry.DECLARED.get(("batching", op))
        _put(op, "FuncTorchBatched", batched(op, batch) if batch is not None else None)
    activation.refresh()


def _put(op: OpOverload, key: str, kernel: Callable[..., Any] | None) -> None:
    """An operator's kernel at a dispatch key, in place of the one that we put there before."""
    before = _LIBRARIES.pop((op, key), None)
    if before is not None:
        destroy(before)
    if kernel is not None:
        library = torch.library.Library(op.namespace, "IMPL")
        with warnings.catch_warnings():  # that is the purpose
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            library.impl(op, kernel, key, allow_override=True)  # the default from 2.13 on
        _LIBRARIES[op, key] = library
    look_up_again(op)
