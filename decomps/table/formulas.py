"""One field of a row as a function: its expression translated, and its names found."""

from __future__ import annotations

import ast
import linecache
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from normpass.decomps import registry
from normpass.decomps.table.expressions import NotUnderstood, identifier, translate
from normpass.decomps.table.vocabulary import CONSTANTS, HELPERS, METHODS, Options

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch._ops import OpOverload


EACH = "i"


class NoFormula(LookupError):
    """An expression that cannot be evaluated here; the message says what is missing."""


@dataclass(frozen=True)
class Formula:
    """text: the expression, in Python. uses: those of the row's names that it asks for; one that
    asks for EACH is of the elements of lists, and gives a list.
    """

    text: str
    uses: frozenset[str]
    function: Callable[..., Any]

    def __call__(self, known: Mapping[str, Any]) -> Any:
        names = sorted(self.uses)
        if EACH not in self.uses:
            return self.function(*[known[name] for name in names])
        lists = [known[name] for name in names if isinstance(known.get(name), list | tuple)]
        return [
            None
            if "grads" in self.uses and known["grads"][i] is None
            else self.function(*[i if name == EACH else _one(known, name, i) for name in names])
            for i in range(len(lists[0]))
        ]


def _one(known: Mapping[str, Any], name: str, i: int) -> Any:
    """What a formula of elements asks for: of tangents and their primals the element itself."""
    value = known[name]
    return value[i] if name[-2:] in ("_p", "_t") and isinstance(value, list | tuple) else value


def compiled(expression: str | Formula, names: Collection[str], what: str) -> Formula:
    """The function of an expression of derivatives.yaml.

    names: what the row knows: arguments, results, gradients or tangents. what: the operator and the
    field, for messages. Raises NoFormula where a function that it calls does not exist here.
    """
    if isinstance(expression, Formula):
        return expression
    try:
        tree = translate(expression, METHODS.__contains__)
    except NotUnderstood as error:
        raise NoFormula(f"{what}: {error}") from error
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    read = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in called
    }
    known = {identifier(name): name for name in names}
    functions = {name: _function(name, what) for name in sorted(called)}
    constants = {name: CONSTANTS[name] for name in read - known.keys() if name in CONSTANTS}
    if unknown := read - known.keys() - constants.keys():
        raise NoFormula(
            f"{what} asks for {', '.join(sorted(unknown))}, which the row does not know"
        )
    uses = frozenset(known[name] for name in read & known.keys())
    text = ast.unparse(ast.fix_missing_locations(ast.Expression(tree)))
    parameters = ", ".join(identifier(name) for name in sorted(uses))
    # The text can be read where Python shows its lines: in tracebacks, and by Dynamo.
    place, source = f"<{what}>", f"def formula({parameters}):\n    return {text}\n"
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    scope: dict[str, Any] = {**functions, **constants}
    exec(compile(source, place, "exec"), scope)  # torch's own table, translated
    return Formula(text, uses, scope["formula"])


def _function(name: str, what: str) -> Any:
    """A helper, a method that is a function here, a derivative formula, or an operator of ATen."""
    for known in (HELPERS, METHODS):
        if name in known:
            return known[name]
    packet = registry.formula_packets().get(name) or getattr(torch.ops.aten, name, None)
    if packet is None:
        raise NoFormula(f"{what} calls {name}, for which there is no rule")
    return _by_position(packet)


@dataclass(frozen=True)
class _Overload:
    """What a schema says, in terms that Dynamo can trace.

    kinds: of each argument: its type without "Optional". optional: whether None is one. keywords:
    the names of those that are given by name alone, "" for others. required: how many have no
    default.
    """

    function: Any
    kinds: tuple[str, ...]
    optional: tuple[bool, ...]
    keywords: tuple[str, ...]
    required: int

    @classmethod
    def of(cls, op: OpOverload) -> _Overload:
        arguments = op._schema.arguments
        types = [a.type for a in arguments]
        optional = tuple(isinstance(t, torch.OptionalType) for t in types)
        inner = [t.getElementType() if isinstance(t, torch.OptionalType) else t for t in types]
        keywords = tuple(a.name if a.kwarg_only else "" for a in arguments)
        required = sum(not a.has_default_value() for a in arguments)
        # A rule that is the operator for autograd too takes its place: exact to any order.
        function = registry.by_op("autograd").get(op, op)
        return cls(function, tuple(map(str, inner)), optional, keywords, required)

    def takes(self, args: list[Any], numbers_are_tensors: bool) -> bool:
        if not self.required <= len(args) <= len(self.kinds):
            return False
        return all(
            self.optional[k] if value is None else _is_of(value, self.kinds[k], numbers_are_tensors)
            for k, value in enumerate(args)
        )

    def call(self, args: list[Any]) -> Any:
        args = [as_tensor(v) if self.kinds[k] == "Tensor" else v for k, v in enumerate(args)]
        named = {self.keywords[k]: v for k, v in enumerate(args) if self.keywords[k]}
        return self.function(*args[: len(args) - len(named)], **named)


def _by_position(packet: Any) -> Callable[..., Any]:
    """An operator as C++ calls it: every argument by its position, TensorOptions in one."""
    ops = [getattr(packet, name) for name in packet.overloads() if "out" not in name]
    overloads = [_Overload.of(op) for op in ops]

    def call(*args: Any) -> Any:
        flat: list[Any] = []
        for value in args:
            if isinstance(value, Options):
                flat += [value.dtype, value.layout, value.device, None]
            else:
                flat.append(value)
        for numbers_are_tensors in (False, True):
            for overload in overloads:
                if overload.takes(flat, numbers_are_tensors):
                    return overload.call(flat)
        kinds = ", ".join(type(value).__name__ for value in args)
        raise TypeError(f"no overload of {packet} takes ({kinds})")

    return call


def _is_of(value: Any, kind: str, numbers_are_tensors: bool) -> bool:
    """Whether a value can be an argument of this type of schemas."""
    if kind == "Tensor":
        return isinstance(value, torch.Tensor) or (
            numbers_are_tensors and isinstance(value, int | float | complex)
        )
    if kind.startswith("List["):
        return isinstance(value, list | tuple)
    return not isinstance(value, torch.Tensor | list | tuple)


def is_number(value: Any) -> bool:
    """A tensor of a dtype that has derivatives, or a list of such."""
    if isinstance(value, list | tuple):
        return any(map(is_number, value))
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def as_tensor(value: Any) -> Any:
    """A number in a tensor's place, as a tensor without axes: no dtype follows from it."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, complex):
        return torch.scalar_tensor(value, dtype=torch.complex128)
    if isinstance(value, bool):
        return torch.scalar_tensor(value, dtype=torch.bool)
    dtype = torch.float64 if isinstance(value, float | torch.SymFloat) else torch.int64
    return torch.scalar_tensor(value, dtype=dtype)
