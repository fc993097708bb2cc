"""What warnings mean, and the reasons for which a norm is not fused: messages.md as data.

A section of that page has a name, the texts of its messages, in which braces stand for what
differs, and what they mean. tests/backend/test_messages.py holds the texts to what the code says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PAGE = Path(__file__).with_name("messages.md")
# A heading, a block of texts, and the rest up to the next heading.
SECTION = re.compile(
    r"^## ([\w-]+)\n\n```text\n(.*?)\n```\n\n(.*?)(?=\n## |\Z)", re.MULTILINE | re.DOTALL
)
BLANK = re.compile(r"\{[^{}]*\}")
# A warning ends with the command that prints what it means.
POINTER = re.compile(r"\s*\(normpass why ([\w-]+)\)$")


@dataclass(frozen=True)
class Message:
    """name: of the section, "too-small". texts: as they are said, with {words} for what differs.
    meaning: what it says of them and what to do, in Markdown.
    """

    name: str
    texts: tuple[str, ...]
    meaning: str

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """Of each text an expression that a message of that kind matches as a whole."""
        return tuple(re.compile(_pattern(text), re.DOTALL) for text in self.texts)

    def says(self, text: str) -> bool:
        """Whether a message is one of these."""
        return any(pattern.fullmatch(text) for pattern in self.patterns)

    def __str__(self) -> str:
        texts = "\n".join(f"    {text}" for text in self.texts)
        return f"{self.name}\n\n{texts}\n\n{self.meaning}"


def _pattern(text: str) -> str:
    return ".*".join(map(re.escape, BLANK.split(text)))


@cache
def messages() -> dict[str, Message]:
    """Every message by its name, in the order of the page."""
    found = SECTION.findall(PAGE.read_text(encoding="utf-8"))
    return {
        name: Message(name, tuple(texts.splitlines()), meaning.strip())
        for name, texts, meaning in found
    }


def message_of(text: str) -> Message | None:
    """The message that a text is, with or without where it points to; None for one that is none of
    them. Where several could have said it, the one that leaves least to its braces.
    """
    text = POINTER.sub("", text.strip())
    saying = [message for message in messages().values() if message.says(text)]
    return max(saying, key=lambda message: _said(message, text), default=None)


def _said(message: Message, text: str) -> int:
    """How many characters of a text are the message's own."""
    texts = zip(message.texts, message.patterns, strict=True)
    return max(len(BLANK.sub("", own)) for own, pattern in texts if pattern.fullmatch(text))
