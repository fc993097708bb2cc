"""A wheel, `pip install .` and `pip install -e .`: the package is whole wherever Python starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from installing import (
    FOLDERS,
    Environment,
    borrow,
    build_wheel,
    clone,
    empty_environment,
    files_of_clone,
)
from pages import README

WHERE = "import normpass; print(normpass.__file__)"
# What a first user does: an import of each stage, and torch finds the backend by its name.
FIRST_STEPS = """
import normpass, normpass.backend.entry, normpass.passes.pipeline, normpass.benchmarks.demo
import torch._dynamo
assert torch._dynamo.lookup_backend("normpass") is normpass.backend.entry.normpass
assert normpass.rules()
"""


def runs_the_example(environment: Environment, folder: Path) -> None:
    """The README's first example as a file of a folder, started there."""
    script = folder / "example.py"
    script.write_text(README.block("normpass.explain").text)
    said = environment.run(script.name, cwd=folder)
    assert "3 fused, 1 not" in said.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make wheel` has built, or else one that is built here."""
    if "NORMPASS_WHEEL" in os.environ:
        return Path(os.environ["NORMPASS_WHEEL"]).resolve(strict=True)
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(clone(folder / "source"), folder)


@pytest.fixture(scope="module")
def borrowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all environments here: what Inductor caches depends on where torch lies."""
    return borrow(tmp_path_factory.mktemp("borrowed"))


@pytest.fixture
def environment(tmp_path: Path, borrowed: Path) -> Environment:
    return empty_environment(tmp_path / "environment", borrowed)


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    expected = set()
    for name in files_of_clone():
        folder, _, rest = name.partition("/")
        if folder in FOLDERS and not name.startswith("benchmarks/results/"):
            expected.add(f"{FOLDERS[folder]}/{rest}")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected
    suffixes = {Path(name).suffix or Path(name).name for name in held}
    assert {".py", ".h", ".html", ".tsv", ".typed"} <= suffixes


def test_a_wheel_in_an_empty_environment(
    wheel: Path, environment: Environment, tmp_path: Path
) -> None:
    environment.install(wheel, cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = Path(environment.run("-c", WHERE, cwd=elsewhere).strip())
    assert found.is_relative_to(environment.folder / "lib")
    assert found.parts[-3:] == ("site-packages", "normpass", "__init__.py")
    runs_the_example(environment, elsewhere)
    version = environment.run("-m", "normpass", "--version", cwd=elsewhere).split()[-1]
    assert wheel.name.startswith(f"normpass-{version}-")


@pytest.mark.sweep
def test_pip_install_in_a_clone_and_python_there(environment: Environment, tmp_path: Path) -> None:
    root = clone(tmp_path / "clone")
    environment.install(".", cwd=root)
    found = Path(environment.run("-c", WHERE, cwd=root).strip())
    assert found.is_relative_to(environment.folder), "what is installed, not what lies in the clone"
    environment.run("-c", FIRST_STEPS, cwd=root)
    runs_the_example(environment, root)


@pytest.mark.sweep
def test_an_editable_install_in_the_clone_and_elsewhere(
    environment: Environment, tmp_path: Path
) -> None:
    root = clone(tmp_path / "clone")
    environment.install(".", "--editable", cwd=root)
    for cwd in (root, tmp_path):
        found = Path(environment.run("-c", WHERE, cwd=cwd).strip())
        assert found == root / "api" / "__init__.py"
    environment.run("-c", FIRST_STEPS, cwd=root)
    runs_the_example(environment, root)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_clears_away_a_folder_that_would_hide_the_package(
    environment: Environment, tmp_path: Path
) -> None:
    """`git pull` over the commit that made api/ leaves normpass/__pycache__ behind, a namespace
    package that Python finds in the clone before an editable install.
    """
    root = clone(tmp_path / "clone")
    environment.install(".", "--editable", cwd=root)
    stale = root / "normpass" / "__pycache__" / "__init__.cpython-311.pyc"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert environment.run("-c", WHERE, cwd=root).strip() == "None"
    make = ["make", "check", f"PYTHON={sys.executable}"]
    subprocess.run(make, cwd=root, check=True, capture_output=True)
    assert not (root / "normpass").exists()
    assert Path(environment.run("-c", WHERE, cwd=root).strip()) == root / "api" / "__init__.py"

    mine = root / "normpass" / "notes.txt"
    mine.parent.mkdir()
    mine.touch()
    subprocess.run(make, cwd=root, check=True, capture_output=True)
    assert mine.exists(), "a folder that holds anything else is somebody's own"
