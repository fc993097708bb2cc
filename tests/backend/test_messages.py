"""What messages mean: every text that the code can say is on the page, and no other."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import normpass
from normpass.backend.explain.messages import BLANK, POINTER, message_of, messages

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
STAGES = ("decomps", "passes", "backend", "api")

# What takes a reason or a warning, and what returns one: only these say something to a user.
TAKING = {"NotLowered", "NotExpressible", "UnsupportedPlanError", "Finding"}
WARNING = {"warning", "warn", "_warn_once"}
RETURNING = {
    "passes/profit.py": None,  # all of its functions that return text
    "passes/faults.py": {"report"},
    "backend/explain/norm_modules.py": {"_reason", "_not_reached", "_no_reductions", "_no_region"},
    "backend/inductor/inductor_call.py": {"no_call"},
    "backend/run/toolchain.py": {"missing_compiler", "cannot_build"},
    "backend/program/team.py": {"refused"},
    "decomps/activation/torch_internals.py": {"warning_of"},
}
# Texts that hold another message, or whose words come from the caller.
HOLDING = {"{}", "Warn from backward"}


def template(node: ast.expr | None) -> str | None:
    """A string with {} for what is put into it; None for what is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return text.replace("%s", "{}")
        case ast.JoinedStr(values):
            return "".join(template(each) or "{}" for each in values)
    return None


def assigned(function: ast.AST, name: str) -> str | None:
    """What a name is set to in a function."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return template(value)
    return None


def called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def said_by(file: str, function: ast.FunctionDef) -> Iterator[str | None]:
    """The messages of one function."""
    returning = RETURNING.get(file, set())
    text = ast.unparse(function.returns) if function.returns else ""
    returns = "str" in text and (returning is None or function.name in returning)
    for node in ast.walk(function):
        match node:
            case ast.Return(value) if returns:
                yield template(value)
            case ast.Call(args=[first, *_]) if called(node) in TAKING | WARNING:
                named = assigned(function, first.id) if isinstance(first, ast.Name) else None
                yield template(first) or named
            case ast.Call(args=[first]) if called(node) == "__init__" and file.startswith("passes"):
                yield template(first)


@cache
def said() -> dict[str, str]:
    """Every message in the code, with {} for what differs, and where it stands."""
    found = {}
    for stage in STAGES:
        for path in sorted((ROOT / stage).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    texts = (text for text in said_by(file, node) if text)
                    found |= dict.fromkeys(texts, f"{file}: {node.name}")
    return {text: place for text, place in found.items() if text not in HOLDING}


def on_the_page() -> dict[str, str]:
    """The same texts from the page, and the names of their sections."""
    return {
        BLANK.sub("{}", text): message.name
        for message in messages().values()
        for text in message.texts
    }


@pytest.mark.parametrize("text", said())
def test_what_is_said_is_on_the_page(text: str) -> None:
    own = POINTER.sub("", text)
    section = on_the_page().get(own)
    assert section, f"{said()[text]} says {own!r}, which backend/explain/messages.md has not"
    pointer = POINTER.search(text)
    assert pointer is None or pointer[1] == section


def test_what_is_on_the_page_is_said() -> None:
    own = {POINTER.sub("", text) for text in said()}
    assert not on_the_page().keys() - own


def test_every_warning_says_where_more_is() -> None:
    """A reason is in a report, which says it; a warning stands alone in a log."""
    for stage in STAGES:
        for path in (ROOT / stage).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and called(node) in WARNING and node.args:
                    text = template(node.args[0])
                    assert text is None or text in HOLDING or POINTER.search(text), (path, text)


def test_a_section_says_what_to_do() -> None:
    page = messages()
    assert len(page) > 30
    for name, message in page.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", name)
        assert len(message.meaning.split()) > 8, name
    texts = [text for message in page.values() for text in message.texts]
    assert len(set(texts)) == len(texts)
    linked = re.findall(r"\]\(#([\w-]+)\)", "".join(message.meaning for message in page.values()))
    assert {*linked} <= page.keys()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("too small: it moves 3.1 MB, a kernel of its own pays from 4.2 MB", "too-small"),
        ("more memory: 1 B, where Inductor writes over what it reads", "more-memory"),
        ("short rows: they lie in pieces of 16 elements", "short-rows"),
        ("aten.sort.default is neither pointwise, reduction nor view", "no-operator-of-a-norm"),
        ("a fault of normpass in planning: ValueError: a: b", "fault"),
        (
            "the model runs uncompiled: expected a C++ compiler (g++), found none: x "
            "(normpass why uncompiled)",
            "uncompiled",
        ),
        ("reduces int64; regions hold float32", "types"),
        ("reduced to tears", None),
    ],
)
def test_a_message_is_recognized(text: str, name: str | None) -> None:
    found = message_of(text)
    assert (found and found.name) == name


def test_reasons_of_a_report_are_recognized() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.BatchNorm1d(8).eval())
    report = normpass.explain(model, torch.randn(4, 8))
    names = {found.name for norm in report.refused if (found := message_of(norm.reason))}
    assert {"too-small", "nothing-to-fuse"} <= names
    assert all(message_of(norm.reason) for norm in report.refused)
