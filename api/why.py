"""`normpass why`: what a warning or a reason means, and what to do."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from normpass.backend.explain.messages import message_of, messages

if TYPE_CHECKING:
    from collections.abc import Sequence


def why(argv: Sequence[str]) -> int:
    """`normpass why NAME ...`: print what these messages mean; without a name list all."""
    parser = argparse.ArgumentParser("normpass why", description=why.__doc__)
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="a message's name, or its text in quotation marks"
    )
    names = parser.parse_args(argv).names
    page = messages()
    if not names:
        for message in page.values():
            print(f"{message.name:<24}{message.texts[0]}")
        return 0
    found = [page.get(name) or message_of(name) for name in names]
    unknown = [name for name, message in zip(names, found, strict=True) if message is None]
    if unknown:
        known = ", ".join(page)
        print(
            f"normpass why: expected a message's name or text, got {unknown[0]!r}; the names are "
            f"{known}",
            file=sys.stderr,
        )
        return 2
    print("\n\n".join(dict.fromkeys(map(str, found))))
    return 0
