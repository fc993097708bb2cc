"""Derivatives that users declare, as rows of the table.

A declared function asks for what it needs by the names of its parameters, as an expression of
derivatives.yaml does: arguments, results, gradients or tangents.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.activation.torch_internals import enable_inplace_requires_grad
from normpass.decomps.operators import is_concrete
from normpass.decomps.table.derivatives_yaml import Entry
from normpass.decomps.table.formulas import Formula, is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from normpass.decomps.activation.torch_internals import OpOverload

    Known = Mapping[str, Any]
    """What a row knows, by its names."""


def entry(op: OpOverload, functions: Mapping[str, Callable[..., Any]]) -> Entry:
    """The row that these functions make: of the kind "vjp" the gradients of all tensors, of the
    kind "jvp" the tangents of all results. One that is missing is the transpose of the other.
    """
    both = {kind: _Declared(op, kind, function) for kind, function in functions.items()}
    vjp, jvp = both.get("vjp"), both.get("jvp")
    gradients = vjp.formula() if vjp is not None else both["jvp"].transposed()
    tangents = jvp.formula() if jvp is not None else both["vjp"].transposed()
    tensors, results = _tensors(op), _results(op)
    asked = [vjp is None or vjp.asks_for(name) for name in results]
    flags = () if all(asked) else tuple(asked)
    return Entry(str(op._schema), {tensors: gradients, results: tangents}, flags)


def check(op: OpOverload, kind: str, function: Callable[..., Any]) -> None:
    """Raises TypeError for a function that asks for what is not known, ValueError for an operator
    that writes to its arguments.
    """
    if op._schema.is_mutable:
        raise ValueError(f"expected an operator that writes to none of its arguments; found {op}")
    declared = _Declared(op, kind, function)
    arguments = [a.name for a in op._schema.arguments]
    known = [*arguments, *declared.results, *declared.linear]
    if unknown := [name for name in declared.asks if name not in known]:
        raise TypeError(
            f"{getattr(function, '__qualname__', function)} asks for {', '.join(unknown)}; "
            f"the {declared.name} knows {', '.join(known)}"
        )


def _tensors(op: OpOverload) -> tuple[str, ...]:
    """The arguments that are tensors or lists of them."""
    return tuple(a.name for a in op._schema.arguments if "Tensor" in str(a.type))


def _results(op: OpOverload) -> tuple[str, ...]:
    """What the results are called: as the schema says, else result, or result0 and so on."""
    returns = op._schema.returns
    numbered = ["result"] if len(returns) == 1 else [f"result{k}" for k in range(len(returns))]
    return tuple(r.name or name for r, name in zip(returns, numbered, strict=True))


class _Declared:
    """A function that somebody has declared as an operator's vjp or jvp.

    asks    the names of its parameters
    linear  the names of gradients and what belongs to them, or of tangents and their primals
    """

    def __init__(self, op: OpOverload, kind: str, function: Callable[..., Any]) -> None:
        self.op, self.kind, self.function = op, kind, function
        self.name = f"{kind} of {op}"
        self.asks = tuple(inspect.signature(function).parameters)
        self.tensors, self.results = _tensors(op), _results(op)
        if kind == "vjp":
            first = ("grad",) if len(self.results) == 1 else ()
            self.linear = (*first, "grads", *(f"grad_{name}" for name in self.results), "needs")
        else:
            self.linear = tuple(f"{name}_{end}" for name in self.tensors for end in "tp")

    def asks_for(self, result: str) -> bool:
        """Whether the gradient of this result is used: else the result is a constant."""
        return not {"grad", "grads", f"grad_{result}"}.isdisjoint(self.asks)

    def formula(self) -> Formula:
        return Formula(self.name, frozenset(self.asks), _by_position(self.asks, self.values))

    def values(self, known: Known) -> Any:
        """What the function returns: a value for each argument or result that it is of."""
        value = self.function(**{name: self._given(known, name) for name in self.asks})
        names = self.tensors if self.kind == "vjp" else self.results
        wrong = [name for name in value if name not in names] if isinstance(value, dict) else []
        if isinstance(value, dict):
            value = tuple(value.get(name) for name in names)
        each = value if isinstance(value, tuple) else (value,)
        if wrong or len(each) != len(names):
            found = ", ".join(map(str, wrong)) or f"{len(each)} values"
            raise TypeError(f"the {self.name} returns values of {', '.join(names)}; found {found}")
        return each[0] if len(names) == 1 else each

    def _given(self, known: Known, name: str) -> Any:
        """What the function is given of a name: of a tangent that is not there zeros. They have
        memory in a trace, since a compiled graph would be handed a null pointer (zero_tensors.py).
        """
        value = known[name]
        if value is not None or self.kind == "vjp" or name not in self.linear:
            return value
        return _zeros(known[name[:-2]])

    # --- the other kind -------------------------------------------------------------------------

    def transposed(self) -> Formula:
        """The derivative of the function in what it is linear in: J t is that of g -> J^H g along
        t, and J^H g that of t -> J t.
        """
        fixed = {*self.asks, *self.tensors, *self.results} - {*self.linear}
        tangents = {f"{name}_t" for name in self.tensors}
        if self.kind == "vjp":
            uses, function = fixed | tangents, self._tangents
        else:
            grads = {f"grad_{name}" for name in self.results}
            uses, function = fixed | grads, self._gradients
        return Formula(
            f"transpose of the {self.name}", frozenset(uses), _by_position(uses, function)
        )

    def _tangents(self, known: Known) -> Any:
        moved = [name for name in self.tensors if known[f"{name}_t"] is not None]
        numbers = [n for n in self.results if is_number(known[n]) and self.asks_for(n)]

        def pulled(*grads: Any) -> list[Any]:
            given = dict(zip(numbers, grads, strict=True))
            each = [given.get(name) for name in self.results]
            named = {f"grad_{name}": grad for name, grad in zip(self.results, each, strict=True)}
            whole = {"grad": each[0], "grads": list(grads), "needs": moved}
            return _of(self.values({**known, **named, **whole}), self.tensors, moved, known)

        tangents = [known[f"{name}_t"] for name in moved]
        found = _transposed(self.op, pulled, [known[name] for name in numbers], tangents)
        return _spread(dict(zip(numbers, found, strict=True)), self.results)

    def _gradients(self, known: Known) -> Any:
        numbers = [name for name in self.tensors if is_number(known[name])]
        there = [name for name in self.results if known[f"grad_{name}"] is not None]

        def pushed(*tangents: Any) -> list[Any]:
            given = {f"{name}_p": known[name] for name in self.tensors}
            given |= dict.fromkeys(f"{name}_t" for name in self.tensors)
            given |= {f"{name}_t": t for name, t in zip(numbers, tangents, strict=True)}
            return _of(self.values({**known, **given}), self.results, there, known)

        grads = [known[f"grad_{name}"] for name in there]
        found = _transposed(self.op, pushed, [known[name] for name in numbers], grads)
        return _spread(dict(zip(numbers, found, strict=True)), self.tensors)


def _by_position(names: Sequence[str] | set[str], function: Callable[[Known], Any]) -> Any:
    """A function of what a row knows as the table calls it: names in alphabetical order."""
    ordered = sorted(names)
    return lambda *values: function(dict(zip(ordered, values, strict=True)))


def _transposed(
    op: OpOverload, linear: Callable[..., list[Any]], like: list[Any], along: list[Any]
) -> Sequence[Tensor]:
    """The transpose of a linear function of tensors like these, applied to tensors."""
    if not all(isinstance(value, torch.Tensor) for value in (*like, *along)):
        raise NotImplementedError(
            f"{op} has lists of tensors and a derivative of one kind: declare its other kind too"
        )
    # By the tape, and not by a transform: this may run within a level of torch.func's.
    create = torch.is_grad_enabled()
    with torch.enable_grad(), enable_inplace_requires_grad(True):
        at = [torch.zeros_like(value).requires_grad_() for value in like]
        values = linear(*at)
    return torch.autograd.grad(values, at, along, create_graph=create, materialize_grads=True)


def _of(value: Any, names: Sequence[str], wanted: Sequence[str], known: Known) -> list[Any]:
    """Those that are wanted, of the shapes of what they belong to, zeros where there is None."""
    each = dict(zip(names, value if len(names) > 1 else (value,), strict=True))
    return [_shaped(each[name], known[name]) for name in wanted]


def _shaped(value: Tensor | None, like: Tensor) -> Tensor:
    """What broadcasting has repeated is summed, and what it would repeat is repeated."""
    if value is None:
        return torch.zeros_like(like)
    value = value if value.dim() >= like.dim() else value.expand_as(like)
    return value if value.shape == like.shape else value.sum_to_size(like.shape)


def _spread(found: Mapping[str, Any], names: Sequence[str]) -> Any:
    each = tuple(found.get(name) for name in names)
    return each[0] if len(names) == 1 else each


def _zeros(like: Any) -> Any:
    if isinstance(like, list | tuple):
        return [_zeros(value) for value in like]
    if not isinstance(like, torch.Tensor):
        return None
    if is_concrete(like):
        return torch._efficientzerotensor(like.shape, dtype=like.dtype, device=like.device)
    return torch.zeros_like(like)
