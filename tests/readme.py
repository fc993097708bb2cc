"""The README as data: its code blocks, its tables and what it names in backticks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


@dataclass(frozen=True)
class Block:
    """A code block. language: what follows the fence; "shell" where it is only indented."""

    language: str
    text: str
    line: int


def blocks() -> tuple[Block, ...]:
    """All of them, in order; line: of the README, from 1, where the text of the block begins."""
    found = []
    lines = README.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        start = at
        if lines[at].startswith("```"):
            start = at + 1
            at = lines.index("```", start)
            found.append(Block(lines[start - 1][3:], "\n".join(lines[start:at]), start + 1))
        elif lines[at].startswith("    "):
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            text = "\n".join(line[4:] for line in lines[start:at])
            found.append(Block("shell", text, start + 1))
        at += 1
    return tuple(found)


def block(part: str, language: str = "python") -> Block:
    """The first block of a language that holds some text."""
    return next(b for b in blocks() if b.language == language and part in b.text)


def prose() -> str:
    """The README without its blocks."""
    text = re.sub(r"^```.*?^```$", "", README.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def in_backticks() -> tuple[str, ...]:
    """Every piece of code in the running text and the tables, line breaks as spaces."""
    return tuple(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose()))


def table(*heading: str) -> list[tuple[str, ...]]:
    """The rows under a heading, each cell as it is written."""
    lines = iter(README.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if cells(line) == heading:
            next(lines)
            rows = []
            while (row := next(lines)).startswith("|"):
                rows.append(cells(row))
            return rows
    raise LookupError(f"the README has no table headed {heading}")


def cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
