"""What a schema says of a call's arguments and results, and what it cannot say.

A schema holds tensors, numbers, text, dtypes and devices, in a row. The structure in which they
stand and values of any other type belong to the operator: another structure or another value is an
operator of its own.
"""

from __future__ import annotations

import functools
import inspect
import keyword
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from normpass.decomps.activation.torch_internals import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from normpass.decomps.activation.torch_internals import TreeSpec

    Kinds = tuple[str | None, ...]
    """Of each leaf its type as schemas call it; None for a constant."""

# Of these types exactly: what inherits one may be more than its number, such as a member of an
# enum, and is a constant.
_NUMBERS: dict[type, str] = {
    int: "SymInt",
    torch.SymInt: "SymInt",
    float: "float",
    torch.SymFloat: "float",
    bool: "bool",
}
_VALUES: dict[type, str] = _NUMBERS | {
    # A schema's float would make a constant of a symbolic one.
    float: "Scalar",
    torch.SymFloat: "Scalar",
    complex: "Scalar",
    str: "str",
    torch.dtype: "ScalarType",
    torch.device: "Device",
    torch.layout: "Layout",
    torch.memory_format: "MemoryFormat",
}
# What the parser of schemas takes for something else, or an operator for its own.
_WORDS = {"Tensor", "SymInt", "Scalar", "Any", "int", "float", "bool", "str", "self", "out"}


@dataclass(frozen=True)
class Signature:
    """The kind of a call: all calls of one kind are calls of one operator.

    values  of each leaf that is a constant its type and the value, else None
    spec    the structure of the arguments
    """

    kinds: Kinds
    values: tuple[Hashable, ...]
    spec: TreeSpec

    @functools.cached_property
    def is_flat(self) -> bool:
        """Whether the arguments of a call are those in the schema, as they are."""
        places = tuple(range(len(self.kinds)))
        return all(self.kinds) and tree_flatten(places)[1] == self.spec

    def given(self, args: tuple[Any, ...]) -> Sequence[Any]:
        """Of a call's arguments those that are in the schema."""
        return args if self.is_flat else _of_kind(tree_flatten(args)[0], self.kinds)

    @classmethod
    def of(cls, what: str, args: tuple[Any, ...]) -> tuple[Signature, list[Any]]:
        """A call's signature, and of its arguments those that are in the schema.

        Raises TypeError for a value that neither a schema nor a key can hold; what: who takes it.
        """
        leaves, spec = tree_flatten(args)
        kinds = tuple(_kind(leaf, _VALUES) for leaf in leaves)
        constants = zip(kinds, leaves, strict=True)
        values = tuple(None if kind else (type(leaf), leaf) for kind, leaf in constants)
        for value in values:
            if value is not None and not _is_hashable(value):
                raise TypeError(
                    f"{what} takes tensors, numbers, bools, strings, dtypes, devices, containers "
                    "of these that torch.utils._pytree knows, and constants that can be hashed; "
                    f"found a {value[0].__qualname__}"
                )
        return cls(kinds, values, spec), _of_kind(leaves, kinds)

    def arguments(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of a call, from those that are in the schema."""
        if self.is_flat:
            return tuple(given)
        constants = [value and value[1] for value in self.values]  # type: ignore[index]
        args: tuple[Any, ...] = tree_unflatten(_merged(self.kinds, constants, given), self.spec)
        return args

    def structured(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """What the arguments in the schema have, in the structure of all; None for a constant."""
        leaves = _merged(self.kinds, [None] * len(self.kinds), given)
        each: tuple[Any, ...] = tree_unflatten(leaves, self.spec)
        return each

    def schema(self, function: Callable[..., Any], written: Sequence[int]) -> str:
        """The arguments as a schema has them, with the names that they have in a function. written:
        those in the schema that are written to, by their numbers.
        """
        args = tree_unflatten(list(range(len(self.kinds))), self.spec)
        counts = [len(tree_flatten(argument)[0]) for argument in args]
        named = zip(self.kinds, _names(function, counts), strict=True)
        there = [(kind, name) for kind, name in named if kind]
        kinds = [f"{k}(a{n}!)" if n in written else k for n, (k, _) in enumerate(there)]
        return ", ".join(f"{kind} {name}" for kind, (_, name) in zip(kinds, there, strict=True))

    def is_known_elsewhere(self) -> bool:
        """Whether another process would have the same operator by the same text."""
        simple = (type(None), bytes)
        return all(value is None or value[0] in simple for value in self.values)  # type: ignore[index]


class Argument(NamedTuple):
    """A result that is an argument which was written to: its number among those in the schema."""

    number: int


@dataclass(frozen=True)
class Results:
    """What a call returns: its structure, and of each leaf that no operator returns what it is: a
    constant, or an `Argument`.
    """

    kinds: Kinds
    others: tuple[Any, ...]
    spec: TreeSpec

    @functools.cached_property
    def is_tensor(self) -> bool:
        """Whether a call returns one tensor of its own and nothing else."""
        return self.kinds == ("Tensor",) and self.spec.is_leaf()

    @functools.cached_property
    def arguments(self) -> list[int]:
        return [other.number for other in self.others if isinstance(other, Argument)]

    @classmethod
    def of(cls, value: Any, written: Mapping[int, int]) -> tuple[Results, list[Any]]:
        """What a value is, and what of it an operator returns. written: the numbers of arguments
        that were written to, by their ids.
        """
        leaves, spec = tree_flatten(value)
        kinds = tuple(None if id(y) in written else _kind(y, _NUMBERS) for y in leaves)
        pairs = zip(kinds, leaves, strict=True)
        others = [
            None if k else Argument(written[id(y)]) if id(y) in written else y for k, y in pairs
        ]
        return cls(kinds, tuple(others), spec), _of_kind(leaves, kinds)

    def value(self, found: Sequence[Any], given: Sequence[Any]) -> Any:
        """The results of a call, from those of the operator and its arguments."""
        if self.is_tensor:
            return found[0]
        others = [given[y.number] if isinstance(y, Argument) else y for y in self.others]
        return tree_unflatten(_merged(self.kinds, others, found), self.spec)

    def text(self) -> str:
        names = [f"argument {k}" for k in range(1 + max(self.arguments, default=0))]
        return str(self.value([kind for kind in self.kinds if kind], names))

    def schema(self) -> str:
        """The results as a schema has them."""
        kinds = [kind for kind in self.kinds if kind]
        return kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"


def _kind(leaf: Any, known: dict[type, str]) -> str | None:
    return "Tensor" if isinstance(leaf, torch.Tensor) else known.get(type(leaf))


def _of_kind(leaves: Sequence[Any], kinds: Kinds) -> list[Any]:
    return [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind]


def _merged(kinds: Kinds, constants: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    each = iter(given)
    return [
        next(each) if kind else constant for kind, constant in zip(kinds, constants, strict=True)
    ]


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _names(function: Callable[..., Any], counts: Sequence[int]) -> list[str]:
    """A name for each leaf: x, or xs_0, xs_1 where an argument has several; a name that schemas
    have no room for ends with an underscore.
    """
    parameters = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    bases = [*parameters[: len(counts)], *(f"arg{k}" for k in range(len(parameters), len(counts)))]
    found: list[str] = []
    for base, count in zip(bases, counts, strict=True):
        for name in [base] if count == 1 else [f"{base}_{k}" for k in range(count)]:
            while name in found or name in _WORDS or keyword.iskeyword(name):
                name += "_"
            found.append(name)
    return found
