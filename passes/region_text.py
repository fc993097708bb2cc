"""Reads a region's text (region.py has the grammar)."""

from __future__ import annotations

import re
from functools import lru_cache

from normpass.passes.region import (
    DTYPES,
    Arg,
    Axis,
    Buffer,
    Join,
    Op,
    Output,
    Region,
    RegionError,
    verify,
)

_LINE = re.compile(r"(?P<head>in turn|[\w.]+)\s+(?P<rest>\S.*)$")
_OP = re.compile(r"(?P<fn>\w+)(?:\[(?P<axes>[\w ]+)\])?\((?P<args>[^()]*)\)$")
_JOIN = re.compile(r"(?P<names>\w+(?: \w+)+) \[(?P<dim>\d+)\]$")
_BUFFER = re.compile(
    r"(?P<name>\w+): (?P<dtype>\w+)\[(?P<dims>[\w() ]*)\](?: \((?P<strides>[^()]*)\))?$"
)


@lru_cache(maxsize=1024)
def parse(text: str) -> Region:
    """Reads a region's text and verifies it. A semicolon ends a line as well.

    Raises:
        RegionError: where a line breaks the grammar, or names what was not defined before it.
    """
    words = {"region": "", "dialect": ""}
    axes: tuple[Axis, ...] = ()
    sizes: tuple[str, ...] = ()
    inputs: list[Buffer] = []
    ops: list[Op] = []
    outputs: list[Output] = []
    joins: list[Join] = []
    for line in filter(None, map(str.strip, text.replace(";", "\n").splitlines())):
        match = _LINE.match(line)
        if match is None:
            raise RegionError(f"expected 'WORD REST' in a region's line, found {line!r}")
        head, rest = match["head"], match["rest"]
        if rest.startswith("= "):
            ops.append(_parse_op(head, rest[2:]))
        elif head in words:
            words[head] = rest
        elif head == "axes":
            axes = tuple(_parse_axis(word) for word in rest.split())
        elif head == "sizes":
            sizes = tuple(word.removesuffix("=?") for word in rest.split())
        elif head == "input":
            inputs.append(_parse_buffer(rest))
        elif head == "output":
            buffer, _, value = rest.partition(" = ")
            outputs.append(Output(_parse_buffer(buffer), value))
        elif head in ("joined", "in turn"):
            joins.append(_parse_join(rest, in_turn=head == "in turn"))
        else:
            raise RegionError(
                "expected region, axes, sizes, dialect, input, output, joined, in turn or a value, "
                f"found {line!r}"
            )
    tensors = tuple(inputs), tuple(ops), tuple(outputs)
    region = Region(words["region"], axes, *tensors, sizes, tuple(joins), words["dialect"])
    verify(region)
    return region


def _parse_axis(word: str) -> Axis:
    name, _, extent = word.partition("=")
    if extent != "?" and not extent.isdigit():
        raise RegionError(f"expected an axis as NAME=INTEGER or NAME=?, found {word!r}")
    return Axis(name, None if extent == "?" else int(extent))


def _parse_buffer(text: str) -> Buffer:
    match = _BUFFER.match(text)
    if match is None or match["dtype"] not in DTYPES:
        raise RegionError(f"expected 'NAME: DTYPE[DIMS] (STRIDES)', found {text!r}")
    dims = tuple(
        () if word == "1" else tuple(word.strip("()").split())
        for word in re.findall(r"\([^()]*\)|\w+", match["dims"])
    )
    strides = None
    if match["strides"] is not None:
        words = match["strides"].replace(",", " ").split()
        strides = tuple(int(w) if w.lstrip("-").isdigit() else w for w in words)
    return Buffer(match["name"], DTYPES[match["dtype"]], dims, strides)


def _parse_join(text: str, *, in_turn: bool) -> Join:
    match = _JOIN.match(text)
    if match is None:
        raise RegionError(f"expected 'NAME NAME ... [DIM]', found {text!r}")
    return Join(tuple(match["names"].split()), int(match["dim"]), in_turn)


def _parse_op(name: str, text: str) -> Op:
    match = _OP.match(text)
    if match is None:
        raise RegionError(f"expected 'FN(ARGS)' or 'FN[AXES](VALUE)' for {name}, found {text!r}")
    args = tuple(_parse_arg(word) for word in match["args"].replace(",", " ").split())
    return Op(name, match["fn"], args, tuple((match["axes"] or "").split()))


def _parse_arg(word: str) -> Arg:
    if word in ("true", "false"):
        return word == "true"
    try:
        return float(word) if word[0] in "-+.0123456789" or word in ("inf", "nan") else word
    except ValueError:
        raise RegionError(f"expected a value's name or a number, found {word!r}") from None
