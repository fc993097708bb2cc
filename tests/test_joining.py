"""What somebody meets who joins: workflows, forms, releases. That pages name what is there, says
test_pages.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING

import public_types
import pytest
import yaml
from installing import build_wheel, clone
from page_commands import check_command, targets
from pages import README, ROOT, Page

import normpass

if TYPE_CHECKING:
    from pathlib import Path

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"
FORMS = sorted(set(TEMPLATES.glob("*.yml")) - {TEMPLATES / "config.yml"})
CONTRIBUTING = Page("CONTRIBUTING.md")
CHANGELOG = Page("CHANGELOG.md")


def workflow(name: str) -> dict[str, dict]:
    """The jobs of a workflow."""
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text("utf-8"))["jobs"]


def commands(job: dict) -> list[str]:
    """What a job runs, once for each entry of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    runs = [step["run"] for step in job["steps"] if "run" in step]
    found = []
    for run in runs:
        filled = [run]
        for key, values in matrix.items():
            place = f"${{{{ matrix.{key} }}}}"
            filled = [text.replace(place, value) for text in filled for value in values]
        found += filled
    return found


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("custom.github-workflows-require-timeout", WORKFLOWS),
        ("vendor.github-issue-forms", FORMS),
        ("vendor.github-issue-config", [TEMPLATES / "config.yml"]),
    ],
)
def test_workflows_and_forms_are_as_their_schemas_say(schema: str, files: list[Path]) -> None:
    assert files
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_there_is(path: Path) -> None:
    found = [c for job in workflow(path.name).values() for c in commands(job)]
    made = [command for command in found if command.startswith("make ")]
    assert made
    for command in made:
        check_command(command)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_do_little(path: Path) -> None:
    """Nothing but reading, but for the job that publishes, and actions by their versions."""
    text = path.read_text("utf-8")
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    writing = {
        name: job["permissions"]
        for name, job in workflow(path.name).items()
        if "permissions" in job
    }
    publishing = {"publish": {"id-token": "write"}}
    assert writing == (publishing if path.name == "release.yml" else {})
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert all(re.fullmatch(r"[\w./-]+@(v\d+|release/v\d+)", action) for action in used)


def test_ci_tests_the_versions_of_the_table() -> None:
    shown = {cells[0] for cells in README.table("PyTorch", "tested", "what differs")}
    tested = workflow("ci.yml")["tests"]["strategy"]["matrix"]["torch"]
    assert set(tested) == shown


def test_ci_does_what_is_to_pass() -> None:
    """Every command of .ci/run, on hosted runners side by side."""
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    wanted = re.findall(r"^make .*$", script, re.MULTILINE)
    run = [c for job in workflow("ci.yml").values() for c in commands(job)]
    assert wanted
    missing = [w for w in wanted if not any(c == w or c.startswith(f"{w} TORCH=") for c in run)]
    assert not missing


def test_the_table_of_ci_is_that_of_the_workflows() -> None:
    rows = CONTRIBUTING.table("workflow", "job", "limit in minutes")
    shown = {(name, re.search(r"`(make \w+)", job)[1], limit) for name, job, limit in rows}
    first = {
        (name, " ".join(commands(job)[0].split()[:2]), str(job["timeout-minutes"]))
        for name in ("ci.yml", "nightly.yml")
        for job in workflow(name).values()
    }
    assert shown == first
    for name, job, _ in rows:
        said = re.findall(r"`(make [^`]+)`", job)
        run = [c for each in workflow(name).values() for c in commands(each)]
        assert all(any(c.startswith(s) for c in run) for s in said), (said, run)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_ask_for_the_doctor_and_the_report(path: Path) -> None:
    form = yaml.safe_load(path.read_text("utf-8"))
    labels = {x["id"]: x["attributes"]["label"] for x in form["body"] if "id" in x}
    assert "normpass doctor" in labels["doctor"]
    assert "normpass.explain" in labels["explain"]


def test_every_target_that_tests_is_explained() -> None:
    """What takes long, by its name."""
    shown = {code.split()[1] for (code, _) in _targets_in_the_table()}
    others = {"test", "accept", "demo", "bench", "lint", "types", "format", "clean", "help"}
    others |= {"check", "docs", "always"}
    assert shown == targets().keys() - others


def _targets_in_the_table() -> list[tuple[str, str]]:
    return [
        (name.strip("`"), what) for name, what in CONTRIBUTING.table("target", "what it is for")
    ]


def test_hooks_need_nothing_from_elsewhere() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    config = yaml.safe_load(text)
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}


def test_the_changelog_is_of_this_version() -> None:
    """The newest version in it is the package's, or Unreleased says which one it will be."""
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGELOG.text, re.MULTILINE)
    names = [name for name, _ in headings]
    assert names[0] == "Unreleased"
    assert all(date for _, date in headings[1:]), "a released version has a date"
    released = names[1:]
    numbers = [tuple(map(int, name.split("."))) for name in released]
    assert numbers == sorted(numbers, reverse=True)
    if normpass.__version__ not in released:
        assert f"What will be {normpass.__version__}" in CHANGELOG.text


def test_incomplete_types_are_found() -> None:
    known = {"isTypeKnown": True, "isTypeAmbiguous": False, "diagnostics": []}
    unknown = {**known, "isTypeKnown": False, "diagnostics": [{"message": "no\n annotation"}]}
    symbols = [
        {"name": "normpass.vjp", **known},
        {"name": "normpass.a.Report.rows", **unknown},
        {"name": "normpass.a.helper", **unknown},
    ]
    lines = public_types.incomplete(symbols, {"normpass.vjp", "normpass.a.Report"})
    assert lines == ["normpass.a.Report.rows: no annotation"]
    assert {"normpass.vjp", "normpass.rule.batching"} < public_types.public_names()


def test_a_wheel_from_the_source_archive_is_the_same(tmp_path: Path) -> None:
    source = clone(tmp_path / "clone")
    archive = source_archive(source, tmp_path)
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for folder in ("from_archive", "from_clone"):
        (tmp_path / folder).mkdir()
    assert contents(build_wheel(unpacked, tmp_path / "from_archive")) == contents(
        build_wheel(source, tmp_path / "from_clone")
    )


def source_archive(source: Path, folder: Path) -> Path:
    """What `make dist` has built, or else one that is built here."""
    if "NORMPASS_DIST" in os.environ:
        (archive,) = (ROOT / os.environ["NORMPASS_DIST"]).glob("*.tar.gz")
        return archive
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, folder],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.glob("*.tar.gz")
    return archive


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, but for the list of their digests, whose order is free."""
    with zipfile.ZipFile(wheel) as opened:
        return {n: opened.read(n) for n in opened.namelist() if not n.endswith("/RECORD")}
