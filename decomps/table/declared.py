"""Derivatives that users declare, as rows of the table.

A declared function asks for what it needs by the names of its parameters, as an expression of
derivatives.yaml does: arguments, results, gradients or tangents.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps.activation.torch_internals import DispatchKey
from normpass.decomps.operators import is_concrete
from normpass.decomps.table.derivatives_yaml import Entry
from normpass.decomps.table.formulas import Formula, is_number
from normpass.decomps.table.transposes import transposed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from normpass.decomps.activation.torch_internals import OpOverload

    Known = Mapping[str, Any]
    """What a row knows, by its names."""


def entry(op: OpOverload, functions: Mapping[str, Callable[..., Any]]) -> Entry:
    """The row that these functions make: of the kind "vjp" the gradients of all tensors, of the
    kind "jvp" the tangents of all results. The transpose of a "jvp" is the other kind; that of a
    "vjp" binding.Jvp takes, as of any row without tangents.
    """
    both = {kind: _Declared(op, kind, function) for kind, function in functions.items()}
    vjp, jvp = both.get("vjp"), both.get("jvp")
    fields = {tensors_of(op): vjp.formula() if vjp is not None else both["jvp"].transposed()}
    if jvp is not None:
        fields[_results(op)] = jvp.formula()
    asked = [vjp is None or vjp.asks_for(name) for name in _results(op)]
    return Entry(str(op._schema), fields, () if all(asked) else tuple(asked))


def check(op: OpOverload, kind: str, function: Callable[..., Any]) -> None:
    """Raises TypeError for a function that asks for what is not known, ValueError for an operator
    that writes to its arguments or is made of others.
    """
    if op._schema.is_mutable:
        raise ValueError(f"expected an operator that writes to none of its arguments; found {op}")
    if op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        raise ValueError(
            f"expected an operator with a kernel; found {op}, which autograd takes for the "
            "operators that it is made of (CompositeImplicitAutograd), and differentiates those"
        )
    declared = _Declared(op, kind, function)
    arguments = [a.name for a in op._schema.arguments]
    known = [*arguments, *declared.results, *declared.linear]
    if unknown := [name for name in declared.asks if name not in known]:
        raise TypeError(
            f"{getattr(function, '__qualname__', function)} asks for {', '.join(unknown)}; "
            f"the {declared.name} knows {', '.join(known)}"
        )


def tensors_of(op: OpOverload) -> tuple[str, ...]:
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
        self.tensors, self.results = tensors_of(op), _results(op)
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

    def transposed(self) -> Formula:
        """The gradients, of a function that gives tangents."""
        grads = [f"grad_{name}" for name in self.results]
        uses = {*self.asks, *self.tensors, *self.results, *grads} - {*self.linear}
        return Formula(
            f"transpose of the {self.name}", frozenset(uses), _by_position(uses, self._gradients)
        )

    def _gradients(self, known: Known) -> Any:
        numbers = [name for name in self.tensors if is_number(known[name])]
        there = [name for name in self.results if known[f"grad_{name}"] is not None]
        if any(isinstance(known[name], list | tuple) for name in (*numbers, *there)):
            raise NotImplementedError(
                f"{self.op} has lists of tensors, and a jvp without a vjp: declare its vjp too"
            )

        def pushed(*tangents: Any) -> list[Any]:
            given = {f"{name}_p": known[name] for name in self.tensors}
            given |= dict.fromkeys(f"{name}_t" for name in self.tensors)
            given |= {f"{name}_t": t for name, t in zip(numbers, tangents, strict=True)}
            values = self.values({**known, **given})
            each = dict(zip(self.results, _tuple(values, self.results), strict=True))
            return [_over(each[name], known[name]) for name in there]

        grads = [known[f"grad_{name}"] for name in there]
        found = dict(
            zip(
                numbers,
                transposed(pushed, [known[name] for name in numbers], grads),
                strict=True,
            )
        )
        each = tuple(found.get(name) for name in self.tensors)
        return each[0] if len(each) == 1 else each


def _by_position(names: Sequence[str] | set[str], function: Callable[[Known], Any]) -> Any:
    """A function of what a row knows as the table calls it: names in alphabetical order."""
    ordered = sorted(names)
    return lambda *values: function(dict(zip(ordered, values, strict=True)))


def _tuple(value: Any, names: Sequence[str]) -> Any:
    return value if len(names) > 1 else (value,)


def _over(tangent: Tensor | None, result: Tensor) -> Tensor:
    """A tangent over the shape of its result, which broadcasting may have left for here."""
    return torch.zeros_like(result) if tangent is None else tangent.expand_as(result)


def _zeros(like: Any) -> Any:
    if isinstance(like, list | tuple):
        return [_zeros(value) for value in like]
    if not isinstance(like, torch.Tensor):
        return None
    if is_concrete(like):
        return torch._efficientzerotensor(like.shape, dtype=like.dtype, device=like.device)
    return torch.zeros_like(like)
