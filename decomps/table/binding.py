"""An operator's vjp and jvp, from its row.

    vjp(op)(grads, args, results, needs) -> {argument: gradient}
    jvp(op)(tangents, args, results) -> tangents

None stands for a gradient or a tangent that is not there: it is zero, and costs nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from normpass.decomps import registry
from normpass.decomps.table.derivatives_yaml import DEFAULT, Entry, entries
from normpass.decomps.table.formulas import EACH, Formula, NoFormula, as_tensor, compiled
from normpass.decomps.table.own_rows import of_functional, with_own

if TYPE_CHECKING:
    from torch import Tensor

LINEAR = "auto_linear"
ELEMENTWISE = "auto_element_wise"
CONSTANT = "non_differentiable"


class Row:
    """An operator and what derivatives.yaml says of it.

    arguments       the operator's, in the order of its schema
    defaults        those that have one, and what it is
    keywords        those that are given by name alone
    tensors         those that are one tensor, which may be given as a number
    results         what the row calls them: result, or result0 and so on, where they have no name
    is_list         whether the one result is a list of tensors
    gradients       one argument or several -> the expression of their gradients
    differentiable  the arguments that have one
    tangents        result -> the expression of its tangent
    numbers         result -> its place among those that one expression is of
    flags           for each result whether it has a derivative, or what says so of the arguments;
                    empty where every result of a floating or complex dtype has, but for
    others          results that have none, since the formulas are of the first alone

    All of it is read at once: what is called later has to be traced by Dynamo.
    """

    def __init__(self, op: OpOverload, entry: Entry) -> None:
        self.op, self.entry = op, entry
        schema, returns = op._schema.arguments, op._schema.returns
        self.arguments = tuple(a.name for a in schema)
        self.defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
        self.keywords = tuple(a.name for a in schema if a.kwarg_only)
        self.tensors = tuple(a.name for a in schema if str(a.type) == "Tensor")
        numbered = ("result",) if len(returns) == 1 else [f"result{k}" for k in range(len(returns))]
        self.results = tuple(r.name or name for r, name in zip(returns, numbered, strict=True))
        self.is_list = len(returns) == 1 and str(returns[0].type) == "List[Tensor]"
        fields = {names: text for names, text in entry.fields.items() if text != CONSTANT}
        self.gradients = {n: text for n, text in fields.items() if set(n) <= {*self.arguments}}
        self.differentiable = tuple(name for names in self.gradients for name in names)
        self.tangents = {
            name: text for names, text in fields.items() for name in names if name in self.results
        }
        self.numbers = {n: k for ns in fields if len(ns) > 1 for k, n in enumerate(ns)}

        # As upstream has it: formulas that say "grad" are of the first result alone.
        of_first = any(re.search(r"\bgrad\b", text) for text in self.gradients.values())
        rest = self.results[1:] if of_first else ()
        self.others = tuple(name for name in rest if name not in self.tangents)

        names = (*self.arguments, *self.results)
        self.flags = tuple(
            flag if isinstance(flag, bool) else compiled(flag, names, f"{op}: differentiability")
            for flag in entry.differentiable
        )

    def is_constant(self, known: Mapping[str, Any]) -> tuple[bool, ...]:
        """For each result whether it has no derivative, for arguments of these values."""
        if not self.flags:
            return tuple(
                (known[name] is not None and not is_number(known[name])) or name in self.others
                for name in self.results
            )
        return tuple(not (f if isinstance(f, bool) else f(known)) for f in self.flags)

    def given(self, args: Arguments) -> dict[str, Any]:
        """The operator's arguments by name, its defaults among them."""
        if not isinstance(args, Mapping):
            args = dict(zip(self.arguments, args, strict=False))
        given = {**self.defaults, **args}
        missing = [name for name in self.arguments if name not in given]
        unknown = [name for name in args if name not in self.arguments]
        if missing or unknown:
            raise TypeError(
                f"{self.op} takes ({', '.join(self.arguments)}); missing: "
                f"{', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
            )
        return {n: as_tensor(v) if n in self.tensors else v for n, v in given.items()}

    def known(self, args: Arguments, results: Results) -> dict[str, Any]:
        """Arguments and results by name."""
        if isinstance(results, torch.Tensor) or (
            self.is_list and all(isinstance(y, torch.Tensor) for y in results)
        ):
            results = (results,)
        return {**self.given(args), **dict(zip(self.results, results, strict=True))}


def is_number(value: Any) -> bool:
    """A tensor of a dtype that has derivatives, or a list of such."""
    if isinstance(value, list | tuple):
        return any(map(is_number, value))
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


Arguments = Mapping[str, Any] | Sequence[Any]
"""An operator's arguments by name, or in the order of its schema."""
Results = Any
"""What the operator returned: a tensor, or a tuple or a list of them."""


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
        self.row, self.op = row, row.op
        self.formulas: dict[tuple[str, ...], Formula | NoFormula] = {}
        self.of_results = [f"grad_{name}" for name in row.results]
        asked = (*self.of_results, "grad", "grads", "grad_input_mask", EACH)
        names = (*row.arguments, *row.results, *asked)
        for wrt, text in row.gradients.items():
            self.formulas[wrt] = _try(text, names, f"{row.op}: {', '.join(wrt)}")
        self.own = registry.by_op("vjp").get(row.op)
        # Of a norm's backward: in upstream's formula the saved statistics are constants.
        self.of_backward = registry.by_op("double_backward").get(row.op)
        self.tensor = next(iter(row.differentiable), "")

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
        value = formula({**known, "grad_input_mask": [name in needs for name in wrt]})
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

    Returns for each result its tangent, None where it has none. Raises NotImplementedError where
    upstream has no forward derivative or this table cannot evaluate it, TypeError for arguments
    that the operator does not take.
    """

    def __init__(self, row: Row) -> None:
        self.row, self.op = row, row.op
        self.formulas: dict[str, Formula | NoFormula] = {}
        names = [*row.arguments, *row.results]
        names += [f"{name}_{end}" for name in row.arguments for end in "pt"]
        # Of what an operator writes to, as it was before.
        names += ["original_self_p", "original_self_t", EACH]
        for result, text in row.tangents.items():
            if text not in (LINEAR, ELEMENTWISE):
                self.formulas[result] = _try(text, names, f"{row.op}: {result}")
        self.own = registry.by_op("jvp").get(row.op) if len(row.differentiable) == 1 else None
        self.reverse = Vjp(row) if ELEMENTWISE in row.tangents.values() else None

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
        if not row.tangents and self.own is None:
            raise NotImplementedError(f"{self.op} has no forward derivative in derivatives.yaml")
        constant = row.is_constant(known)
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
        each = {
            f"{name}_t": _filled(tangents.get(name), known[name]) for name in self.row.arguments
        }
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

    def _call(self, known: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        args = {name: known[name] for name in self.row.arguments}
        return args, tuple(known[name] for name in self.row.results)


def _try(text: str, names: Sequence[str], what: str) -> Formula | NoFormula:
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


def row_of(op: OpOverload | OpOverloadPacket, dispatch_key: str = DEFAULT) -> Row:
    """The row of an operator. Raises UnknownRule (a KeyError) where it has none."""
    if isinstance(op, OpOverloadPacket):
        overloads = [getattr(op, name) for name in op.overloads()]
        overloads.sort(key=lambda overload: overload._overloadname != "default")
        rows = (o for o in overloads if dispatch_key in entries().get(_name(o), {}))
        op = next(rows, overloads[0])
    if not isinstance(op, OpOverload):
        raise TypeError(f"expected an operator, such as torch.ops.aten.mul.Tensor; found {op!r}")
    by_key = entries().get(_name(op)) or of_functional(
        _name(op), [r.name for r in op._schema.returns]
    )
    if not by_key or dispatch_key not in by_key:
        raise _no_row(op)
    return Row(op, with_own(by_key[dispatch_key]))


def _name(op: OpOverload) -> str:
    """What derivatives.yaml calls an operator; nothing for one that is not of ATen."""
    overload = op._schema.overload_name
    name = op._schema.name.removeprefix("aten::") if op.namespace == "aten" else ""
    return f"{name}.{overload}" if overload else name


def _no_row(op: OpOverload) -> registry.UnknownRule:
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        hint = "it is put together from others: differentiate what it decomposes into"
    else:
        name = _name(op)
        same = [other for other in entries() if other.split(".")[0] == name.split(".")[0]]
        near = same or difflib.get_close_matches(name, entries(), n=5, cutoff=0.6)
        hint = f"near matches: {', '.join(near)}" if near else "nothing has a similar name"
    return registry.UnknownRule(f"derivatives.yaml has no row for {op}; {hint}")
