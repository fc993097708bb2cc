"""Snapshots: texts under expect/ that a test holds against what the code prints today."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

EXPECT = Path(__file__).parents[1] / "expect"


def assert_snapshot(path: str, text: str) -> None:
    """Raises AssertionError unless expect/PATH holds exactly this text.

    With EXPECTTEST_ACCEPT=1 in the environment the file is written instead.
    """
    file = EXPECT / path
    text = text.rstrip("\n") + "\n"
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return
    expected = file.read_text(encoding="utf-8") if file.exists() else ""
    if text == expected:
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "tests").split(" ")[0]
    difference = "".join(
        difflib.unified_diff(
            expected.splitlines(keepends=True),
            text.splitlines(keepends=True),
            f"expect/{path}",
            "printed now",
        )
    )
    raise AssertionError(
        f"expect/{path} {'differs' if expected else 'does not exist'}. To accept what is printed "
        f"now:\n\n    EXPECTTEST_ACCEPT=1 python -m pytest '{test}'\n\n{difference}"
    )
