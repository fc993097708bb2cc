"""The pages of docs/: their code runs, and what they name is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import orders

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "writing_rules.md"


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_the_code_on_writing_rules_runs_from_top_to_bottom(tmp_path: Path) -> None:
    found = blocks(PAGE.read_text("utf-8"))
    assert len(found) == 11
    page = tmp_path / "page.py"  # a file: its rules have a place, and Dynamo finds the source
    page.write_text("\n\n".join(found), "utf-8")
    command = [sys.executable, "-W", "ignore", str(page)]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, env={**os.environ}
    )
    assert ran.returncode == 0, ran.stderr


def test_the_table_of_transforms_is_of_the_cases_there_are() -> None:
    """What is right of them, test_orders.py says."""
    page = (ROOT / "docs" / "transforms.md").read_text("utf-8")
    head, *rows = re.findall(r"^\|(.+)\|$", page.partition("of 300 cases")[0], re.MULTILINE)
    assert [name.strip() for name in head.split("|")] == ["", *orders.NORMS]
    cells = {name: marks for name, *marks in (map(str.strip, row.split("|")) for row in rows[1:])}
    assert list(cells) == list(orders.MIXES)
    for marks in cells.values():
        assert all(re.fullmatch(r"`[=X-]{2}=`", mark) for mark in marks)


def test_the_files_it_names_are_there() -> None:
    named = re.findall(r"`((?:decomps|tests|docs)/[\w./]+)`", PAGE.read_text("utf-8"))
    assert len(named) >= 5
    assert not [name for name in named if not (ROOT / name).exists()]
