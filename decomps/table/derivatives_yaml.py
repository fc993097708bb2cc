"""derivatives.yaml as records: which expression gives which gradient and which tangent.

The file belongs to the installed torch, which has it with its code generator. It is a small part of
YAML: mappings two to six blanks deep, whose values are plain or quoted and may go on in the next
lines. What the expressions mean is for expressions.py to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DEFAULT = "Default"
_KEY = re.compile(r"(?P<indent>- |  |    |      )(?P<key>[A-Za-z_][\w, ]*):(?: (?P<value>.*))?")
_COMMENT = re.compile(r"\s#.*")
_DIFFERENTIABILITY = "output_differentiability"
_DISPATCH = "dispatch"


@dataclass(frozen=True)
class Entry:
    """One row of derivatives.yaml, under one dispatch key.

    schema           "add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
    fields           names of arguments or of results, one or several that an expression gives
                     together -> the expression, in C++, or a Formula where it is declared
    differentiable   for each result whether it has a derivative, as True, False or a condition in
                     C++; empty where every result of a floating or complex dtype has
    """

    schema: str
    fields: Mapping[tuple[str, ...], Any] = field(default_factory=dict)
    differentiable: tuple[bool | str, ...] = ()

    @property
    def op(self) -> str:
        """The operator, with its overload if that has a name: "add.Tensor"."""
        return self.schema.partition("(")[0]


@cache
def entries() -> Mapping[str, Mapping[str, Entry]]:
    """Operator -> dispatch key -> row, of the installed torch.

    Raises FileNotFoundError where torch lies there without its code generator.
    """
    try:
        text = files("torchgen").joinpath("packaged/autograd/derivatives.yaml").read_text("utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise FileNotFoundError(
            "expected torchgen/packaged/autograd/derivatives.yaml, which torch brings; found none"
        ) from error
    found: dict[str, dict[str, Entry]] = {}
    for by_key in parse(text):
        found.setdefault(next(iter(by_key.values())).op, {}).update(by_key)
    return found


def parse(text: str) -> Iterator[Mapping[str, Entry]]:
    """The rows of a derivatives.yaml, each by dispatch key. Raises ValueError for a line that is
    none of it.
    """
    rows: list[list[tuple[int, str, str]]] = []
    for indent, key, value in _pairs(text):
        if key == "name":
            rows.append([])
        elif not rows:
            raise ValueError(f"derivatives.yaml begins with a name; found {key}: {value}")
        rows[-1].append((indent, key, value))
    return map(_by_dispatch_key, rows)


def _by_dispatch_key(pairs: list[tuple[int, str, str]]) -> Mapping[str, Entry]:
    (_, _, schema), *rest = pairs
    fields: dict[str, dict[tuple[str, ...], str]] = {DEFAULT: {}}
    differentiable: tuple[bool | str, ...] = ()
    dispatch_key, dispatches = DEFAULT, False
    for indent, key, value in rest:
        if key == _DISPATCH:
            dispatches, fields = True, {}
        elif dispatches and indent == 4:
            dispatch_key = key
            fields[dispatch_key] = {}
        elif key == _DIFFERENTIABILITY:
            differentiable = tuple(map(_flag, value.strip("[]").split(", ")))
        else:
            fields[dispatch_key][tuple(key.split(", "))] = value
    return {key: Entry(schema, found, differentiable) for key, found in fields.items()}


def _flag(text: str) -> bool | str:
    return {"True": True, "False": False}.get(text, text.strip('"'))


def _pairs(text: str) -> Iterator[tuple[int, str, str]]:
    """(indent, key, value) of every mapping, with the lines of a value joined."""
    pending: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _KEY.fullmatch(line)
        if found:
            if pending:
                yield _pair(pending)
            pending = [line]
        elif pending and line.startswith("   "):
            pending.append(line)
        else:
            raise ValueError(
                f"line {number} of derivatives.yaml is no key and goes on none: {line}"
            )
    if pending:
        yield _pair(pending)


def _pair(lines: list[str]) -> tuple[int, str, str]:
    found = _KEY.fullmatch(lines[0])
    assert found
    value = " ".join([found["value"] or "", *map(str.strip, lines[1:])]).strip()
    quote = value[:1]
    if quote in ("'", '"'):
        value = value[1 : value.rindex(quote)].replace('\\"', '"').strip()
    else:
        value = _COMMENT.sub("", value).rstrip()
    return len(found["indent"]), found["key"], value
