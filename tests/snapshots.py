"""Snapshots, on expecttest: short texts stand in the test that prints them, kernels and long texts
in files under expect/. `make accept` brings both up to date.
"""

from __future__ import annotations

import os
from pathlib import Path

import expecttest

EXPECT = Path(__file__).parents[1] / "expect"


class EditHistory(expecttest.EditHistory):
    """What was accepted, by the line where it stood before anything was.

    expecttest 0.3.0 notes it under the line where it has got to, and looks it up under the first:
    of many texts that grow in one file, some meet another's and are refused.
    """

    def adjust_lineno(self, fn: str, lineno: int) -> int:
        self.first = lineno
        return super().adjust_lineno(fn, lineno)

    def record_edit(self, fn: str, lineno: int, delta: int, expect: str) -> None:
        self.state.setdefault(fn, []).append((lineno, delta))
        self.seen.setdefault(fn, {})[self.first] = expect


expecttest.EDIT_HISTORY = EditHistory()


def assert_inline(actual: str, expect: str) -> None:
    """Raises AssertionError unless a text is the one that stands in the call.

    expect: a triple-quoted literal, which accepting rewrites where it stands; so a test with
    parameters cannot have one.
    """
    __tracebackhide__ = True  # pytest shows the test, and not what is called in here
    _refuse_workers()
    message = ""
    try:
        expecttest.assert_expected_inline(_text(actual), expect, skip=1, assert_eq=_assert_eq)
    except AssertionError as error:
        message = str(error)
    if message:
        raise AssertionError(message)


def assert_snapshot(path: str, actual: str) -> None:
    """Raises AssertionError unless expect/PATH holds exactly this text; accepting writes it."""
    __tracebackhide__ = True
    file, actual = EXPECT / path, _text(actual)
    expect = file.read_text(encoding="utf-8") if file.exists() else ""
    if expect == actual:
        return
    if expecttest.ACCEPT:
        print(f"Accepting new output at expect/{path}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(actual, encoding="utf-8")
        return
    message = ""
    try:
        _assert_eq(expect, actual, msg="")
    except AssertionError as error:
        message = f"expect/{path}: {error}"
    raise AssertionError(message)


def _text(actual: str) -> str:
    """The last line ends as the others do."""
    return actual.rstrip("\n") + "\n"


def _assert_eq(expect: str, actual: str, *, msg: str) -> None:
    """With the command that accepts; while accepting, what goes wrong is something else."""
    expecttest.assert_eq(expect, actual, msg=msg if expecttest.ACCEPT else _accept())


def _accept() -> str:
    test = os.environ.get("PYTEST_CURRENT_TEST", "tests").rpartition(" (")[0]
    return f"To accept the new output:\n\n    make accept ARGS=\"'{test}'\""


def _refuse_workers() -> None:
    """expecttest keeps track of the lines it moves, in one process."""
    if expecttest.ACCEPT and int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        raise RuntimeError("inline snapshots are accepted by one process: make accept, or -n 0")
