"""Which variants of a test run every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sampling

TESTS = """
import pytest

@pytest.mark.one_in(4)
@pytest.mark.parametrize("n", range(10))
def test_many(n): pass

@pytest.mark.one_in(4)
@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_few(n): pass

def test_one(): pass
"""
CONFIG = """
[pytest]
addopts = -m "not sweep"
markers =
    sweep
    one_in(n)
"""


@pytest.mark.parametrize(("count", "n", "kept"), [(10, 4, 3), (3, 4, 1), (8, 4, 2), (5, 1, 5)])
def test_one_in_so_many_and_one_of_the_rest(count: int, n: int, kept: int) -> None:
    names = [f"test_f[{k}]" for k in range(count)]
    found = sampling.chosen(names, n)
    assert len(found) == kept
    assert found <= {*names}
    assert found == sampling.chosen(names[::-1], n)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    tests = Path(sampling.__file__).parent
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tests)!r})\n"
        "from conftest_of_ours import pytest_collection_modifyitems\n"
    )
    (tmp_path / "conftest_of_ours.py").write_text((tests / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ((), 3 + 1 + 1),
        (("-m", "sweep"), 7 + 1),
        (("-m", "sweep or not sweep"), 13),
        # Who asks for a variant by its name gets it.
        (("test_it.py::test_many[0]", "test_it.py::test_many[1]"), 2),
    ],
)
def test_what_is_run(project: Path, arguments: tuple[str, ...], count: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert f"{count} passed" in done.stdout, done.stdout + done.stderr
