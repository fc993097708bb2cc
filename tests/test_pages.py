"""What the pages of the repository show is so: their programs and commands run, and what they name
is there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import orders
import page_runner
import pytest
from page_commands import check_command
from page_names import resolve
from pages import DOCS, README, ROOT, Page

# Pages at the root, which hosting sites know by their names.
OTHERS = tuple(
    Page(name)
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md")
    if (ROOT / name).exists()
)
PAGES = (README, *DOCS, *OTHERS)
# Of these others run the programs: tests/companions, tests/test_readme.py. Those of deployment.md
# and distributed.md go on from a model of the reader's; developing.md shows a part of a file.
RUN_ELSEWHERE = {
    *("docs/companions.md", "docs/deployment.md", "docs/distributed.md"),
    "docs/developing.md",
}
RUN = tuple(
    page
    for page in DOCS
    if page.path not in RUN_ELSEWHERE
    and any(block.language in ("python", "sh") for block in page.blocks)
)

# In backticks, and for a reader to fill in or for a command to make.
STAND_INS = {
    *(
        "backend/codegen/NAME.py",
        "backend/codegen/NAME_leaves.py",
        "NAME.py",
        "NAME_leaves.py",
        "__init__.py",
        "decomps/norms/weight.py",
    ),
    *("model.py", "report.html", "model.pt2"),
}
# Not the marks of a table, such as XX=-===.
COMMANDS = re.compile(r"(?![=X-]+$)((make|normpass|pip|pytest|git) |--[a-z]|[A-Z_]+=)")
# What these name in backticks is in the languages of rules, of tables and of other packages.
NO_COMMANDS = {"docs/rules.md", "docs/transforms.md", "docs/companions.md"}
DOTTED = re.compile(r"(?<![\w.])(?:torch|nn|F|normpass)(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(r"[a-z_.]+/[\w/]*(\.\w+)?|\w+\.(py|md|toml|txt)")
FOLDERS = ("decomps/", "passes/", "backend/", "benchmarks/", "tests/", "docs/", "examples/", "api/")


def of(pages: tuple[Page, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", [pytest.param(page, id=page.path) for page in pages])


def run_in(folder: Path, page: str) -> subprocess.CompletedProcess[str]:
    """A page's programs in a process of their own: they register rules, and set options."""
    runner = Path(page_runner.__file__)
    command = [sys.executable, "-W", "ignore", str(runner), page]
    quiet = {name: value for name, value in os.environ.items() if name != "NORMPASS_VERIFY"}
    return subprocess.run(
        command, cwd=folder, env=quiet, capture_output=True, text=True, check=False
    )


@of(RUN)
def test_a_page_runs_from_top_to_bottom(page: Page, tmp_path: Path) -> None:
    done = run_in(tmp_path, page.path)
    assert done.returncode == 0, done.stderr


def test_a_rule_that_is_shown_is_the_one_there_is() -> None:
    shown = Page("docs/developing.md").block("@decomposition(").text
    assert shown in (ROOT / "decomps" / "norms" / "weight_norm.py").read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n", None),
        ("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n", ":2: expected what the page shows"),
        ("```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n", "line 8, in <module>"),
        ("```sh\nnormpass why too-small\n```\n\n```text\ntoo-small\n...\n```\n", None),
        ("```sh\nnormpass why too-smal\n```\n", "status 2"),
        ("```python\n# a.py\nx = 1\n```\n\n```python\nimport a\nassert a.x == 1\n```\n", None),
    ],
)
def test_the_runner(text: str, said: str | None, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    done = run_in(tmp_path, str(page))
    assert done.returncode == (said is not None), done.stderr
    assert said is None or said in done.stderr


# --- commands -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=f"{page.path}:{block.line + n}")
        for page in PAGES
        for block in page.blocks
        if block.language in ("shell", "sh")
        for n, line in enumerate(block.text.splitlines())
    ],
)
def test_a_line_to_type_is_a_command(line: str) -> None:
    check_command(line)


@of(tuple(page for page in PAGES if page.path not in NO_COMMANDS))
def test_commands_in_the_text_are_there(page: Page) -> None:
    for code in page.in_backticks:
        if COMMANDS.match(code):
            check_command(code)


@pytest.mark.parametrize(
    "wrong",
    [
        "make tset",
        "make demo ARGS=--quikc",
        'make operators ARGS="--olny norm"',
        "make test TROCH=torch==2.11.0",
        "normpass explian model.py:model",
        "normpass bench --vampp",
        "--regsitered",
        "NORMPASS_DEBGU=folder",
        "pip instal .",
    ],
)
def test_a_command_that_is_not_there_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check_command(wrong)


# --- names, files and links ---------------------------------------------------------------------


@of(PAGES)
def test_names_of_python_in_the_text_are_there(page: Page) -> None:
    names = {name for code in page.in_backticks for name in DOTTED.findall(code)}
    for name in names:
        if not re.search(r"\.(py|cpp|h)$", name):
            resolve(name)


@of(PAGES)
def test_files_in_the_text_are_there(page: Page) -> None:
    names = {code for code in page.in_backticks if PATH.fullmatch(code)}
    made = set((ROOT / ".gitignore").read_text().split())  # by commands
    missing = [name for name in names - STAND_INS - made if not (ROOT / name).exists()]
    own = [name for name in missing if name.startswith(FOLDERS) or "/" not in name]
    assert not own


@of(PAGES)
def test_links_to_files_lead_somewhere(page: Page) -> None:
    """Anchors, and what is only there once it is generated, the site's builder looks up."""
    folder = (ROOT / page.path).parent
    text = re.sub(r"`[^`]*`", "", page.prose)
    for link in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text):
        assert link.startswith("generated/") or (folder / link).exists(), link


def test_the_table_of_transforms_is_of_the_cases_there_are() -> None:
    """What is right of them, test_orders.py says."""
    page = (ROOT / "docs" / "transforms.md").read_text("utf-8")
    head, *rows = re.findall(r"^\|(.+)\|$", page.partition("of 300 cases")[0], re.MULTILINE)
    assert [name.strip() for name in head.split("|")] == ["", *orders.NORMS]
    cells = {name: marks for name, *marks in (map(str.strip, row.split("|")) for row in rows[1:])}
    assert list(cells) == list(orders.MIXES)
    for marks in cells.values():
        assert all(re.fullmatch(r"`[=X-]{2}=`", mark) for mark in marks)
