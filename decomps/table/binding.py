"""An operator's vjp and jvp, from its row.

    vjp(op)(grads, args, results, needs) -> {argument: gradient}
    jvp(op)(tangents, args, results) -> tangents

None stands for a gradient or a tangent that is not there: it is zero, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps import registry
from normpass.decomps.table.formulas import EACH, Formula, NoFormula, compiled, is_number
from normpass.decomps.table.rows import (
    ELEMENTWISE,
    LINEAR,
    Arguments,
    Results,
    Row,
    row_of,
)
from normpass.decomps.table.transposes import transposed

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload, OpOverloadPacket


class Vjp:
    """The reverse derivative of an operator.

    vjp(grads, args, results, needs) -> {argument: gradient}

    grads    for each result its gradient or None: of the shape of the result
    args     the operator's arguments, by name or in the order of its schema
    results  what the operator has returned for them
    needs    the arguments whose gradient is asked for; all of a floating or complex dtype that have
             one, if it is not given. Nothing else is computed.

    Raises NotImplementedError where upstream says that there is no derivative, or where this table
    cannot evaluate upstream's; the message says which. TypeError for arguments that the operator
    does not take, ValueError for a need that has no gradient or as many gradients as results.
    """

    def __init__(self, row: Row) -> None:
        self.row: Row = row
        self.op: OpOverload = row.op
        self.formulas: dict[tuple[str, ...], Formula | NoFormula] = {}
        self.of_results: list[str] = [f"grad_{name}" for name in row.results]
        asked = (*self.of_results, "grad", "grads", "grad_input_mask", "needs", EACH)
        names = (*row.arguments, *row.results, *asked)
        for wrt, text in row.gradients.items():
            self.formulas[wrt] = _try(text, names, f"{row.op}: {', '.join(wrt)}")
        ours = not row.is_declared
        self.own: registry.Rule | None = registry.by_op("vjp").get(row.op) if ours else None
        # Of a norm's backward: in upstream's formula the saved statistics are constants.
        self.of_backward: registry.Rule | None = (
            registry.by_op("double_backward").get(row.op) if ours else None
        )
        self.tensor: str = next(iter(row.differentiable), "")

    def __repr__(self) -> str:
        return f"vjp({self.op})"

    def __call__(
        self,
        grads: Sequence[Tensor | None] | Tensor | None,
        args: Arguments,
        results: Results,
        needs: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        row = self.row
        if grads is None or isinstance(grads, torch.Tensor):
            grads = (grads,)
        if len(grads) != len(row.results):
            raise ValueError(f"{self.op} has {len(row.results)} results; found {len(grads)} grads")
        known = row.known(args, results)
        if needs is None:
            needs = [name for name in row.differentiable if is_number(known[name])]
        self._check(needs)
        if not any(map(_is_there, grads)):
            return dict.fromkeys(needs)
        constant = row.is_constant(known)
        differentiable = [g for g, none in zip(grads, constant, strict=True) if not none]
        if not differentiable:
            return dict.fromkeys(needs)
        first: Any = differentiable[0]
        if isinstance(first, list | tuple):  # of a list of results
            differentiable = list(first)
        known |= zip(self.of_results, grads, strict=True)
        known |= {"grad": differentiable[0], "grads": differentiable}
        found: dict[str, Any] = {}
        for wrt, formula in self.formulas.items():
            if any(name in needs for name in wrt):
                values = self._values(wrt, formula, known, needs)
                found |= {n: _fitted(v, known[n]) for n, v in values.items() if n in needs}
        return found

    def _values(
        self,
        wrt: tuple[str, ...],
        formula: Formula | NoFormula,
        known: dict[str, Any],
        needs: Sequence[str],
    ) -> dict[str, Any]:
        if self.own is not None and wrt == (self.tensor,):
            args = [known[name] for name in self.row.arguments]
            result = known[self.row.results[0]]
            return {self.tensor: self.own(known["grad"], *args, result=result)}
        if self.of_backward is not None and len(wrt) > 1:
            args = [known[name] for name in self.row.arguments]
            grads = [known[name] for name in self.of_results]
            return self.of_backward(grads, *args, needs=needs)
        if isinstance(formula, NoFormula):
            raise NotImplementedError(str(formula))
        mask = [name in needs for name in wrt]
        value = formula({**known, "grad_input_mask": mask, "needs": needs})
        return {wrt[0]: value} if len(wrt) == 1 else dict(zip(wrt, value, strict=True))

    def _check(self, needs: Sequence[str]) -> None:
        has = self.row.differentiable
        if unknown := [name for name in needs if name not in has]:
            raise ValueError(
                f"{self.op} has gradients of ({', '.join(has)}); found {', '.join(unknown)}"
            )


class Jvp:
    """The forward derivative of an operator.

    jvp(tangents, args, results) -> tangents

    tangents  by the names of arguments, or for each argument in the order of the schema: a tensor
              of its shape, or None
    args      the operator's arguments, by name or in the order of its schema
    results   what the operator has returned for them

    Returns for each result its tangent, None where it has none. Where upstream has no forward
    derivative it is the transpose of the vjp. Raises NotImplementedError where this table cannot
    evaluate it, TypeError for arguments that the operator does not take.
    """

    def __init__(self, row: Row) -> None:
        self.row: Row = row
        self.op: OpOverload = row.op
        self.formulas: dict[str, Formula | NoFormula] = {}
        names = [*row.arguments, *row.results]
        names += [f"{name}_{end}" for name in row.arguments for end in "pt"]
        # Of what an operator writes to, as it was before.
        names += ["original_self_p", "original_self_t", EACH]
        for result, text in row.tangents.items():
            if text not in (LINEAR, ELEMENTWISE):
                self.formulas[result] = _try(text, names, f"{row.op}: {result}")
        of_one = len(row.differentiable) == 1 and not row.is_declared
        self.own: registry.Rule | None = registry.by_op("jvp").get(row.op) if of_one else None
        by_vjp = not row.tangents or ELEMENTWISE in row.tangents.values()
        self.reverse: Vjp | None = Vjp(row) if by_vjp else None

    def __repr__(self) -> str:
        return f"jvp({self.op})"

    def __call__(
        self,
        tangents: Arguments,
        args: Arguments,
        results: Results,
    ) -> tuple[Any, ...]:
        row = self.row
        known = row.known(args, results)
        if not isinstance(tangents, Mapping):
            tangents = dict(zip(row.arguments, tangents, strict=False))
        if unknown := [name for name in tangents if name not in row.arguments]:
            raise TypeError(
                f"{self.op} takes ({', '.join(row.arguments)}); found tangents of "
                f"{', '.join(unknown)}"
            )
        tangents = {n: tangents[n] for n in row.differentiable if _is_there(tangents.get(n))}
        if not tangents:
            return (None,) * len(row.results)
        constant = row.is_constant(known)
        if not row.tangents and self.own is None:
            return self._transposed(known, tangents, constant)
        found: dict[str, Any] = {}
        return tuple(
            None if none else self._tangent(name, known, tangents, found)
            for name, none in zip(row.results, constant, strict=True)
        )

    def _tangent(
        self,
        result: str,
        known: dict[str, Any],
        tangents: Mapping[str, Any],
        found: dict[str, Any],
    ) -> Any:
        """found: what expressions that are of several results have come to so far."""
        if self.own is not None:
            name = self.row.differentiable[0]
            args = [known[argument] for argument in self.row.arguments]
            return self.own(tangents[name], *args, result=known[result])
        text = self.row.tangents.get(result)
        if text is None:
            return None  # as upstream has it, where it has one of another result
        if text == LINEAR:
            return self._linear(known, tangents)
        if text == ELEMENTWISE:
            return self._elementwise(known, tangents)
        formula = self.formulas[result]
        if isinstance(formula, NoFormula):
            raise NotImplementedError(str(formula))
        primals = {f"{name}_p": known[name] for name in self.row.arguments}
        fill = _as_it_is if self.row.is_declared else _filled
        each = {f"{name}_t": fill(tangents.get(name), known[name]) for name in self.row.arguments}
        before = {f"original_{n}": v for n, v in {**primals, **each}.items() if n[:5] == "self_"}
        given = {**known, **primals, **each, **before}
        if result not in self.row.numbers:
            return formula(given)
        if text not in found:
            found[text] = formula(given)
        return found[text][self.row.numbers[result]]

    def _linear(self, known: dict[str, Any], tangents: Mapping[str, Any]) -> Any:
        """The operator of the tangents: it is linear in all its tensors together."""
        row = self.row
        moved = {name: _filled(tangents.get(name), known[name]) for name in row.differentiable}
        given = {**known, **moved}
        positional = [given[name] for name in row.arguments if name not in row.keywords]
        return self.op(*positional, **{name: given[name] for name in row.keywords})

    def _elementwise(self, known: dict[str, Any], tangents: Mapping[str, Any]) -> Any:
        """conj(vjp(conj(tangent))): the Jacobian is diagonal."""
        assert self.reverse is not None
        name = self.row.differentiable[0]
        found = self.reverse((tangents[name].conj(),), *self._call(known), needs=(name,))[name]
        return None if found is None else found.conj()

    def _transposed(
        self, known: dict[str, Any], tangents: Mapping[str, Any], constant: Sequence[bool]
    ) -> tuple[Any, ...]:
        """What upstream has no formula for: the transpose of the vjp."""
        assert self.reverse is not None
        reverse, (args, results) = self.reverse, self._call(known)
        moved = list(tangents)
        pairs = [(known[n], tangents[n]) for n in moved]
        places = [k for k, none in enumerate(constant) if not none]
        if self.row.is_list:
            raise NotImplementedError(f"{self.op} has no forward derivative: it returns a list")

        def pulled(*grads: Any) -> list[Any]:
            each = dict(zip(places, grads, strict=True))
            found = reverse([each.get(k) for k in range(len(results))], args, results, moved)
            return [
                torch.zeros_like(x) if g is None else g
                for name, (value, tangent) in zip(moved, pairs, strict=True)
                for g, x, t in _each(found[name], value, tangent)
                if t is not None
            ]

        along = [t for pair in pairs for _, _, t in _each(None, *pair) if t is not None]
        try:
            found = transposed(pulled, [results[k] for k in places], along)
        except RuntimeError as error:  # a backward that is a kernel without a derivative
            if "not implemented" not in str(error):
                raise
            raise NotImplementedError(f"{self.op} has no forward derivative: {error}") from error
        numbers = dict(zip(places, found, strict=True))
        return tuple(numbers.get(k) for k in range(len(results)))

    def _call(self, known: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        args = {name: known[name] for name in self.row.arguments}
        return args, tuple(known[name] for name in self.row.results)


def _try(text: str | Formula, names: Sequence[str], what: str) -> Formula | NoFormula:
    try:
        return compiled(text, names, what)
    except NoFormula as missing:
        return missing


def _fitted(gradient: Any, value: Any) -> Any:
    """A gradient as autograd hands it on: of the shape and the dtype of what it is the gradient of.
    Formulas leave what broadcasting has repeated for here.
    """
    if isinstance(value, list | tuple):
        gradients = [None] * len(value) if gradient is None else gradient
        return [_fitted(g, v) for g, v in zip(gradients, value, strict=True)]
    if gradient is None or value is None:
        return None
    if value.is_nested:  # which has no shape to compare
        return gradient
    if gradient.is_complex() and not value.is_complex():
        gradient = gradient.real
    if gradient.shape != value.shape:
        gradient = gradient.sum_to_size(value.shape)
    return gradient.to(value.dtype)


def _is_there(tangent: Any) -> bool:
    if isinstance(tangent, list | tuple):
        return any(map(_is_there, tangent))
    return tangent is not None


def _each(gradient: Any, value: Any, tangent: Any) -> list[tuple[Any, Any, Any]]:
    """These three of an argument, or of each tensor of a list."""
    if not isinstance(value, list | tuple):
        return [(gradient, value, tangent)]
    gradients = [None] * len(value) if gradient is None else gradient
    return list(zip(gradients, value, tangent, strict=True))


def _as_it_is(tangent: Any, _: Any) -> Any:
    return tangent


def _filled(tangent: Any, primal: Any) -> Any:
    """A tangent, or zeros in its place where the tensor itself is there."""
    if isinstance(primal, list | tuple):
        each = tangent if isinstance(tangent, list | tuple) else [None] * len(primal)
        return [_filled(t, p) for t, p in zip(each, primal, strict=True)]
    if tangent is None and isinstance(primal, torch.Tensor):
        # As upstream has it: its product with an infinity is zero.
        return torch._efficientzerotensor(primal.shape, dtype=primal.dtype, device=primal.device)
    return tangent


_VJPS: dict[OpOverload, Vjp] = {}
_JVPS: dict[OpOverload, Jvp] = {}


def vjp(op: OpOverload | OpOverloadPacket) -> Vjp:
    """The reverse derivative of an operator of ATen, from derivatives.yaml; `Vjp` says how it is
    called. A packet stands for its default overload, or for the first that has a row where it has
    none. Raises UnknownRule (a KeyError), and TypeError for what is no operator.
    """
    row = row_of(op)
    return _VJPS.get(row.op) or _VJPS.setdefault(row.op, Vjp(row))


def jvp(op: OpOverload | OpOverloadPacket) -> Jvp:
    """The forward derivative of an operator of ATen, from derivatives.yaml; `Jvp` says how it is
    called. A packet stands for its default overload, or for the first that has a row where it has
    none. Raises UnknownRule (a KeyError), and TypeError for what is no operator.
    """
    row = row_of(op)
    return _JVPS.get(row.op) or _JVPS.setdefault(row.op, Jvp(row))


def forget(op: OpOverload) -> None:
    """What was read of an operator: its row is another now."""
    _VJPS.pop(op, None)
    _JVPS.pop(op, None)
