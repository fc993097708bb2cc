"""The records and the decorators: the only way in which a rule comes into being.

Everything else (the decomposition table, the activation, the tests, the documentation) is derived
from what is registered here. Importing this module registers nothing; the rules are loaded by the
first question asked.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch

from normpass.decomps.activation.torch_internals import (
    OpOverload,
    OpOverloadPacket,
    parse_schema,
)
from normpass.decomps.conventions import linear, with_conventions
from normpass.decomps.operators import define
from normpass.decomps.slopes import Elementwise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import CodeType

    from normpass.decomps.conventions import Result

Kind = Literal[
    "decomposition",
    "autograd",
    "batching",
    "autograd_function",
    "zero_tensor",
    "vjp",
    "double_backward",
    "jvp",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
DERIVATIVES: tuple[Kind, ...] = ("vjp", "double_backward", "jvp")

F = TypeVar("F", bound="Callable[..., Any]")


@dataclass(frozen=True)
class Rule:
    """One rule, callable like its function.

    kind      one of KINDS
    op        the operator the rule is for; None for a formula that only has a name
    name      the operator's name, or the name of the formula in FunctionsManual.cpp
    source    file and function of PyTorch whose meaning the rule reproduces
    shapes    "x: *n d, weight: d -> y: *n d": names of the parameters, axes, results
    why       what the code alone does not say; may be empty
    function  the rule itself
    constants numbers of the results that have no derivative for autograd, such as a saved mean:
              those of the operator in derivatives.yaml
    eager     whether it holds in eager mode too where it is asked for; else torch's own rule does,
              which is in C++ and as right

    and, for the tests that are made from the record:

    linear    the parameters that are gradients or tangents: None stands for zero
    sample    the arguments that cannot be any numbers, from the others, which it names: saved
              results, factors; lambda input: {"result": input.prod()}
    of        what a formula is the derivative of. The name of an operator in derivatives.yaml,
              "linalg_qr": the formula's arguments are then those that this operator's row gives
              it, and `sample` is of the operator's. Or a function or an operator of the formula's
              arguments and of those whose gradients `shapes` calls dx or gx:
              lambda self: self.logsumexp(0)
    compared  the tensors of which a formula asks no more than where they are equal or greater
    """

    kind: Kind
    op: OpOverload | None
    name: str
    source: str
    shapes: str
    why: str
    function: Callable[..., Any]
    linear: tuple[str, ...] = ()
    sample: Callable[..., Mapping[str, Any]] | None = None
    of: Callable[..., Any] | str | None = None
    constants: tuple[int, ...] = ()
    compared: tuple[str, ...] = ()
    eager: bool = True

    # What tools read of a function: inspect.signature, help, documentation generators.
    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", self.name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.function.__doc__)
        if self.kind not in KINDS:
            raise ValueError(f"a rule's kind is one of {', '.join(KINDS)}; found {self.kind!r}")
        if not self.name:
            raise ValueError(f"a rule ({self.kind}, {self.place}) needs an op or a name")
        if not self.source.strip():
            raise ValueError(f"the {self.kind} rule for {self.name} names no source")
        if "->" not in self.shapes:
            raise ValueError(
                f"the {self.kind} rule for {self.name} needs shapes such as "
                f"'x: *n d, weight: d -> y: *n d'; found {self.shapes!r}"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def key(self) -> tuple[Kind, OpOverload | str]:
        return self.kind, self.op if self.op is not None else self.name

    @property
    def code(self) -> CodeType | None:
        """The code that somebody wrote for this rule: of an elementwise operator's its slope. None
        for what is not written in Python.
        """
        written = getattr(self.function, "slope", self.function)
        return getattr(inspect.unwrap(written), "__code__", None)

    @property
    def place(self) -> str:
        """file:line of the function, for messages."""
        code = self.code
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.function)

    def remove(self) -> None:
        """Takes a rule out again that was declared with normpass.rule; harmless if it is gone.
        Raises ValueError for a rule of normpass's own.
        """
        from normpass.decomps.user_rules import remove

        remove(self)


class UnknownRule(KeyError):
    """Asked for a rule that does not exist; the message says what is near."""

    def __str__(self) -> str:
        # KeyError would print the repr of its argument.
        return str(self.args[0])


_RULES: dict[tuple[Kind, OpOverload | str], Rule] = {}
# Those of users, which stand before ours (decomps/user_rules.py).
DECLARED: dict[tuple[Kind, OpOverload | str], Rule] = {}

# The packages whose import registers rules; the first has all decompositions of ATen's operators.
_NORMS = "normpass.decomps.norms"
_ROOMS = (
    _NORMS,
    "normpass.decomps.derivatives",
    "normpass.decomps.zero_tensors",
    "normpass.decomps.batching.attention",
    "normpass.decomps.batching.convolution_spellings",
    "normpass.decomps.autograd_function",
)


def _add(rule: Rule) -> None:
    other = _RULES.get(rule.key)
    if other is not None:
        raise ValueError(
            f"two {rule.kind} rules for {rule.name}: one at {other.place}, another at {rule.place}"
        )
    _RULES[rule.key] = rule


def register_rule(
    kind: Kind,
    op: OpOverload | None = None,
    name: str = "",
    *,
    source: str,
    shapes: str,
    why: str = "",
    sample: Callable[..., Mapping[str, Any]] | None = None,
    constants: Sequence[int] = (),
    eager: bool = True,
) -> Callable[[F], F]:
    """Decorator: enters a function as a rule, as it is.

    Raises ValueError if the rule has no source, no shapes, neither op nor name, or if a rule of
    this kind exists already.
    """

    def decorate(function: F) -> F:
        called, fixed = name or str(op or ""), tuple(constants)
        rule = Rule(kind, op, called, source, shapes, why, function, sample=sample)
        _add(replace(rule, constants=fixed, eager=eager))
        return function

    return decorate


def decomposition(
    op: OpOverload | str,
    *,
    source: str,
    shapes: str,
    results: Sequence[Result],
    why: str = "",
    autograd: bool = False,
    constants: Sequence[int] = (),
    sample: Callable[..., Mapping[str, Any]] | None = None,
    check: Callable[..., None] | None = None,
) -> Callable[[F], F]:
    """Decorator: enters a formula as the decomposition of an operator.

    The formula takes the operator's arguments in order and computes in working precision; what is
    registered is the formula under the conventions of `conventions.with_conventions` (precision,
    masks, dtypes and layouts of the results). The decorated name stays the bare formula.

    `op` may be a string such as "aten.batch_norm_backward.default" where some supported version of
    torch lacks the operator: there the rule does not exist. autograd: the formula is what the
    operator is for autograd too, at higher orders (decomps/activation/kernels.py), with these
    constants among its results. check: raises what is wrong with the operator's arguments.
    """

    def decorate(formula: F) -> F:
        found = find_op(op) if isinstance(op, str) else op
        if found is not None:
            function = with_conventions(formula, found._schema, results, check=check)
            rule = Rule("decomposition", found, str(found), source, shapes, why, function)
            rule = replace(rule, sample=sample, constants=tuple(constants))
            _add(rule)
            if autograd:
                _add(replace(rule, kind="autograd"))
        return formula

    return decorate


def formula(
    kind: Kind,
    schema: str,
    *,
    source: str,
    shapes: str,
    results: Sequence[Result],
    zeros: Sequence[str] = (),
    ones: Sequence[str] = (),
    as_given: bool = False,
    why: str = "",
    sample: Callable[..., Mapping[str, Any]] | None = None,
    of: Callable[..., Any] | str | None = None,
    compared: Sequence[str] = (),
) -> Callable[[F], F]:
    """Decorator: enters a derivative formula under its FunctionsManual name.

    schema: "softmax_double_backward(Tensor? grad, Tensor grad_output, int dim, Tensor output) ->
    Tensor", with upstream's names in upstream's order; where upstream has several functions of a
    name, all but the first name themselves as overloads do: "norm_backward.dim(...)". zeros, ones:
    the parameters for which None means an undefined gradient and a weight of ones; as_given: they
    are not raised to working precision (conventions.with_conventions). sample, of, compared: what
    the tests need to know (`Rule`). The formula is torch.ops.normpass.<name> too, and that
    operator's decomposition. The decorated name stays the bare formula, but for its call where all
    of `zeros` are: ZERO (conventions.linear).
    """
    parsed = parse_schema(f"normpass::{schema}")
    name = schema.partition("(")[0]

    def decorate(function: F) -> F:
        bare = linear(function, parsed, zeros)
        rule = with_conventions(bare, parsed, results, zeros=zeros, ones=ones, as_given=as_given)
        op, given = define(schema, rule), tuple(zeros)
        entry = Rule(kind, op, name, source, shapes, why, rule, given, sample, of)
        _add(replace(entry, compared=tuple(compared)))
        return bare

    return decorate


def slopes(table: Mapping[str, Callable[..., Any]], *, source: str) -> None:
    """Enters the vjp and the jvp of elementwise operators, from a table of their slopes.

    table: "aten.tanh.default" -> lambda y: 1 - y * y (decomps/slopes.py says what a slope may ask
    for); an operator that this torch lacks is skipped. source: the file of the formulas.
    """
    for name, slope in table.items():
        op = find_op(name)
        if op is None:
            continue
        row = Elementwise(op, slope)
        of = f"{source}: {op._schema.name.removeprefix('aten::')}"
        given = ", ".join(f"{name}: *s" for name in row.tensors)
        vjp, jvp = (f"{name}: *s, {given} -> d{row.tensors[0]}: *s" for name in ("grad", "tangent"))
        _add(Rule("vjp", op, str(op), of, vjp, "", row.vjp(), ("grad",)))
        _add(Rule("jvp", op, str(op), of, jvp, "", row.jvp(), ("tangent",)))


def find_op(name: str) -> OpOverload | None:
    """torch.ops.<name>, as "aten.native_layer_norm.default"; None if this torch lacks it."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    if not isinstance(found, OpOverload):
        raise ValueError(f"expected the name of an overload (namespace.op.overload), found {name}")
    return found


def rules() -> tuple[Rule, ...]:
    """Every rule, in the order of registration."""
    _load()
    return loaded()


def loaded() -> tuple[Rule, ...]:
    """The rules whose modules are imported, in the order of registration."""
    return tuple({**_RULES, **DECLARED}.values())


def declared_derivatives(op: OpOverload) -> dict[str, Callable[..., Any]]:
    """What users say that an operator's vjp and jvp are."""
    keys: tuple[Kind, ...] = ("vjp", "jvp")
    return {kind: DECLARED[kind, op].function for kind in keys if (kind, op) in DECLARED}


def _load() -> None:
    for room in _ROOMS:
        importlib.import_module(room)


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """A fresh table, op to function, for aot_autograd(decompositions=...)."""
    _load()
    return decompositions_in_use()


def decompositions_in_use() -> dict[OpOverload, Callable[..., Any]]:
    """Those of ATen's operators, and of our own as far as their modules are imported: the others
    are not there to be called. To import them all takes a tenth of a second.
    """
    importlib.import_module(_NORMS)
    return {
        rule.op: rule.function
        for rule in loaded()
        if rule.op is not None and (rule.kind == "decomposition" or rule.op.namespace == "normpass")
    }


def by_op(kind: Kind) -> dict[OpOverload, Rule]:
    """Operators and their rules of one kind."""
    return {rule.op: rule for rule in rules() if rule.kind == kind and rule.op is not None}


def batch_rule(op: OpOverload | OpOverloadPacket) -> Rule:
    """The batching rule of an operator, callable as f(info, in_dims, *args) -> (outs, out_dims).

    A packet stands for its default overload. Raises UnknownRule (a KeyError).
    """
    return rule_of("batching", op)


def derivative(name: str) -> Rule:
    """The derivative formula of this FunctionsManual name. Raises UnknownRule (a KeyError)."""
    _load()
    op = find_op(f"normpass.{name}" if "." in name else f"normpass.{name}.default")
    for kind in DERIVATIVES:
        found = _RULES.get((kind, name)) or (_RULES.get((kind, op)) if op is not None else None)
        if found is not None:
            return found
    known = {rule.name: rule for rule in rules() if rule.kind in DERIVATIVES}
    if name in known:
        return known[name]
    raise _unknown("derivative formula", name, known)


def rule_of(kind: Kind, op: OpOverload | OpOverloadPacket) -> Rule:
    """The rule of this kind that an operator has. A packet stands for its default overload. Raises
    UnknownRule (a KeyError).
    """
    if isinstance(op, OpOverloadPacket):
        op = op.default
    _load()
    if (found := DECLARED.get((kind, op)) or _RULES.get((kind, op))) is not None:
        return found
    known = {str(rule.op): rule for rule in rules() if rule.kind == kind and rule.op is not None}
    raise _unknown(f"{kind} rule", str(op), known)


def formula_packets() -> dict[str, Callable[..., Any]]:
    """FunctionsManual's names -> the operators of our formulas, with all their overloads."""
    return {
        base: getattr(torch.ops.normpass, base)
        for rule in rules()
        if rule.kind in DERIVATIVES and rule.op is not None and rule.op.namespace == "normpass"
        for base in (rule.name.partition(".")[0],)
    }


def _unknown(what: str, name: str, known: dict[str, Rule]) -> UnknownRule:
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
    if near:
        hint = f"near matches: {', '.join(near)}"
    else:
        hint = f"none of the {len(known)} registered has a similar name"
    return UnknownRule(f"no {what} named {name!r}; {hint}")
