"""A page of Markdown as data: its code blocks, its tables and what it names in backticks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Block:
    """A code block. language: what follows the fence; "shell" where it is only indented. line: of
    the page, from 1, where the text of the block begins.
    """

    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Page:
    """path: from the root of the repository."""

    path: str

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All of them, in order."""
        found = []
        lines = self.text.splitlines()
        at = 0
        while at < len(lines):
            start = at
            if lines[at].startswith("```"):
                start = at + 1
                at = lines.index("```", start)
                found.append(Block(lines[start - 1][3:], "\n".join(lines[start:at]), start + 1))
            elif lines[at].startswith("    ") and (not at or not lines[at - 1].strip()):
                while at < len(lines) and lines[at].startswith("    "):
                    at += 1
                text = "\n".join(line[4:] for line in lines[start:at])
                found.append(Block("shell", text, start + 1))
            at += 1
        return tuple(found)

    def block(self, part: str, language: str = "python") -> Block:
        """The first block of a language that holds some text."""
        return next(b for b in self.blocks if b.language == language and part in b.text)

    @cached_property
    def prose(self) -> str:
        """The page without its blocks."""
        text = re.sub(r"^```.*?^```$", "", self.text, flags=re.MULTILINE | re.DOTALL)
        return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)

    @cached_property
    def in_backticks(self) -> tuple[str, ...]:
        """Every piece of code in the running text and the tables, line breaks as spaces."""
        return tuple(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", self.prose))

    def table(self, *heading: str) -> list[tuple[str, ...]]:
        """The rows under a heading, each cell as it is written."""
        lines = iter(self.text.splitlines())
        for line in lines:
            if cells(line) == heading:
                next(lines)
                rows = []
                while (row := next(lines, "")).startswith("|"):
                    rows.append(cells(row))
                return rows
        raise LookupError(f"{self.path} has no table headed {heading}")


def cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


README = Page("README.md")
# Pages of the site, by their paths; what it makes from the code is not among them.
DOCS = tuple(
    Page(path.relative_to(ROOT).as_posix()) for path in sorted((ROOT / "docs").glob("*.md"))
)
