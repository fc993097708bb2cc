"""`normpass why`: what a message means, by its name or its text."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from normpass.__main__ import main
from normpass.backend.explain.messages import messages

if TYPE_CHECKING:
    import pytest


def test_a_message_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "too-small"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("too-small\n\n    too small: it moves {bytes}")
    assert "normpass bench --calibrate" in text


def test_by_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands in a log or in a report; what is asked for twice is told once."""
    said = "more passes: 3 over memory, where Inductor needs 2"
    warned = "kernel /x.so in the cache is damaged: building it again (normpass why damaged-cache)"
    assert main(["why", said, "more-passes", warned]) == 0
    text = capsys.readouterr().out
    assert [name for name in messages() if f"{name}\n\n    " in text] == [
        "more-passes",
        "damaged-cache",
    ]
    assert text.count("more passes: {number}") == 1


def test_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [*messages()]


def test_what_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "too-smal"]) == 2
    error = capsys.readouterr().err
    assert "expected a message's name or text, got 'too-smal'" in error
    assert "too-small, more-memory" in error


def test_a_reader_that_has_had_enough() -> None:
    """As head, which closes what it reads: no traceback. No torch is imported either."""
    command = [sys.executable, "-X", "importtime", "-m", "normpass", "why"]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "| torch\n" not in done.stderr
