"""How snapshots fail and how they are accepted, in a small project of their own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNEL = "for (int i = 0; i < n; i++)\n    y[i] = x[i];\n"

TESTS = '''\
"""Texts as they come, and what stands here and in expect/ of an older version of them."""

from snapshots import assert_inline, assert_snapshot


def test_a_region() -> None:
    assert_inline("region a\\naxes r=? c=4\\ny = exp(x)", """\\
region a
axes r=? c=4
y = x
""")


def test_a_region_that_has_grown() -> None:
    assert_inline(
        "\\n".join(f"line {n}" for n in range(7)),
        """""",
    )


def test_another() -> None:
    assert_inline("one", """""")


def test_the_next() -> None:
    assert_inline("two\\nthree", """""")


def test_the_last() -> None:
    assert_inline("four", """""")  # eight lines below test_another, which moves by eight


def test_a_kernel() -> None:
    assert_snapshot("cpp/copy.txt", "for (int i = 0; i < n; i++)\\n    y[i] = x[i];")


def test_a_new_kernel() -> None:
    assert_snapshot("cpp/new.txt", "return;")


def test_a_right_one() -> None:
    assert_inline("right", """right\\n""")
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the settings of this one, whose snapshots are out of date."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests" / "snapshots.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_small.py").write_text(TESTS)
    kernel = tmp_path / "expect" / "cpp" / "copy.txt"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(KERNEL.replace("x[i]", "0"))
    return tmp_path


def pytest_in(
    project: Path, *options: str, accept: bool = False
) -> subprocess.CompletedProcess[str]:
    # Under CI pytest repeats each failure's whole text in its summary.
    ours = ("PYTEST", "EXPECT", "CI", "BUILD_NUMBER")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    if accept:
        environment["EXPECTTEST_ACCEPT"] = "1"
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def outcome(done: subprocess.CompletedProcess[str]) -> str:
    return re.sub(r" in [\d.]+s.*|=+ ", "", done.stdout.strip().splitlines()[-1])


def test_a_difference_is_shown_with_the_command_that_accepts_it(project: Path) -> None:
    done = pytest_in(project)
    assert outcome(done) == "7 failed, 1 passed"
    said = re.sub(r"^E {7}", "", done.stdout, flags=re.MULTILINE)
    assert "\n-y = x\n+y = exp(x)\n" in said
    assert "\n    make accept ARGS=\"'tests/test_small.py::test_a_region'\"\n" in said
    assert "\n-    y[i] = 0;\n+    y[i] = x[i];\n" in said
    assert "expect/cpp/copy.txt: Mismatch" in said
    assert "expecttest/__init__.py" not in said, "the test is shown, not the machinery"
    assert (project / "tests" / "test_small.py").read_text() == TESTS
    assert not (project / "expect" / "cpp" / "new.txt").exists()


def test_the_command_accepts_what_failed_and_no_more(project: Path) -> None:
    """Both kinds, one test at a time, as the messages say."""
    commands = re.findall(r'make accept ARGS="(.*)"', pytest_in(project).stdout)
    assert len(commands) == 7
    kernel = next(c for c in commands if "test_a_kernel" in c)
    assert outcome(pytest_in(project, *shlex.split(kernel), accept=True)) == "1 passed"
    assert (project / "expect" / "cpp" / "copy.txt").read_text() == KERNEL
    region = next(c for c in commands if "test_a_region'" in c)
    assert outcome(pytest_in(project, *shlex.split(region), accept=True)) == "1 passed"
    assert (project / "tests" / "test_small.py").read_text() == TESTS.replace(
        "\ny = x\n", "\ny = exp(x)\n"
    )
    assert outcome(pytest_in(project)) == "5 failed, 3 passed"


def test_all_at_once(project: Path) -> None:
    """Texts that grow move those that stand below them, in a file that Python has read before."""
    assert outcome(pytest_in(project, accept=True)) == "8 passed"
    assert outcome(pytest_in(project)) == "8 passed"
    rewritten = (project / "tests" / "test_small.py").read_text()
    lines = "".join(f"line {n}\n" for n in range(7))
    assert f'        """\\\n{lines}""",\n    )\n' in rewritten
    assert 'assert_inline("two\\nthree", """\\\ntwo\nthree\n""")' in rewritten
    assert (project / "expect" / "cpp" / "new.txt").read_text() == "return;\n"


def test_one_text_cannot_serve_two_parameters(project: Path) -> None:
    (project / "tests" / "test_small.py").write_text(
        "import pytest\n"
        "from snapshots import assert_inline\n\n\n"
        '@pytest.mark.parametrize("n", [1, 2])\n'
        "def test_n(n: int) -> None:\n"
        '    assert_inline(str(n), """""")\n'
    )
    done = pytest_in(project, accept=True)
    assert outcome(done) == "1 failed, 1 passed"
    assert "accepting different values" in done.stdout


def test_several_workers_do_not_edit_one_file(project: Path) -> None:
    done = pytest_in(project, "-n", "2", "-k", "region", accept=True)
    assert "inline snapshots are accepted by one process" in done.stdout
    assert (project / "tests" / "test_small.py").read_text() == TESTS
