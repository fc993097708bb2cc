"""What derivatives.yaml says of an operator, rows of our own, and of users': as one record."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from normpass.decomps import registry
from normpass.decomps.activation.torch_internals import (
    DispatchKey,
    OpOverload,
    OpOverloadPacket,
)
from normpass.decomps.table import declared
from normpass.decomps.table.derivatives_yaml import DEFAULT, Entry, entries
from normpass.decomps.table.formulas import Formula, as_tensor, compiled, is_number
from normpass.decomps.table.own_rows import of_functional, with_own

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
    is_declared     whether somebody has declared it (decomps/user_rules.py)

    All of it is read at once: what is called later has to be traced by Dynamo.
    """

    def __init__(self, op: OpOverload, entry: Entry, is_declared: bool = False) -> None:
        self.op: OpOverload = op
        self.entry: Entry = entry
        self.is_declared: bool = is_declared
        schema, returns = op._schema.arguments, op._schema.returns
        self.arguments: tuple[str, ...] = tuple(a.name for a in schema)
        self.defaults: dict[str, Any] = {
            a.name: a.default_value for a in schema if a.has_default_value()
        }
        self.keywords: tuple[str, ...] = tuple(a.name for a in schema if a.kwarg_only)
        self.tensors: tuple[str, ...] = tuple(a.name for a in schema if str(a.type) == "Tensor")
        numbered = ("result",) if len(returns) == 1 else [f"result{k}" for k in range(len(returns))]
        self.results: tuple[str, ...] = tuple(
            r.name or name for r, name in zip(returns, numbered, strict=True)
        )
        self.is_list: bool = len(returns) == 1 and str(returns[0].type) == "List[Tensor]"
        fields = {names: text for names, text in entry.fields.items() if text != CONSTANT}
        self.gradients: dict[tuple[str, ...], Any] = {
            n: text for n, text in fields.items() if set(n) <= {*self.arguments}
        }
        self.differentiable: tuple[str, ...] = tuple(
            name for names in self.gradients for name in names
        )
        self.tangents: dict[str, Any] = {
            name: text for names, text in fields.items() for name in names if name in self.results
        }
        self.numbers: dict[str, int] = {
            n: k for ns in fields if len(ns) > 1 for k, n in enumerate(ns)
        }

        # As upstream has it: formulas that say "grad" are of the first result alone.
        of_first = any(map(_says_grad, self.gradients.values()))
        rest = self.results[1:] if of_first else ()
        self.others: tuple[str, ...] = tuple(name for name in rest if name not in self.tangents)

        names = (*self.arguments, *self.results)
        self.flags: tuple[bool | Formula, ...] = tuple(
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


def _says_grad(text: str | Formula) -> bool:
    return "grad" in text.uses if isinstance(text, Formula) else bool(re.search(r"\bgrad\b", text))


Arguments = Mapping[str, Any] | Sequence[Any]
"""An operator's arguments by name, or in the order of its schema."""
Results = Any
"""What the operator returned: a tensor, or a tuple or a list of them."""


def row_of(op: OpOverload | OpOverloadPacket, dispatch_key: str = DEFAULT) -> Row:
    """The row of an operator. Raises UnknownRule (a KeyError) where it has none."""
    if isinstance(op, OpOverloadPacket):
        overloads = [getattr(op, name) for name in op.overloads()]
        overloads.sort(key=lambda overload: overload._overloadname != "default")
        rows = (o for o in overloads if dispatch_key in entries().get(_name(o), {}))
        op = next(rows, overloads[0])
    if not isinstance(op, OpOverload):
        raise TypeError(f"expected an operator, such as torch.ops.aten.mul.Tensor; found {op!r}")
    if functions := registry.declared_derivatives(op):
        return Row(op, declared.entry(op, functions), is_declared=True)
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
    if op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        hint = "it is put together from others: differentiate what it decomposes into"
    else:
        name = _name(op)
        same = [other for other in entries() if other.split(".")[0] == name.split(".")[0]]
        near = same or difflib.get_close_matches(name, entries(), n=5, cutoff=0.6)
        hint = f"near matches: {', '.join(near)}" if near else "nothing has a similar name"
    return registry.UnknownRule(f"derivatives.yaml has no row for {op}; {hint}")
