"""Copies of the clone and environments to install them into, which hold what is declared, no more.

Nothing is downloaded: an environment borrows the packages of the one that runs the tests, by links
to those that normpass requires, and those that they require.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# Where a package of the wheel lies in the clone; the longest name that fits a file counts.
FOLDERS = {
    "api": "normpass",
    **{
        name: f"normpass/{name}"
        for name in ("decomps", "passes", "backend", "benchmarks", "examples")
    },
}


def files_of_clone() -> list[str]:
    """What a clone of the tree as it is would hold: tracked and new files, paths from the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def clone(folder: Path) -> Path:
    """A copy of the tree in a new folder, as `git clone` makes it."""
    for name in files_of_clone():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, without normpass until it is installed."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *arguments: str | Path, cwd: Path) -> str:
        """What Python prints, started in a folder; AssertionError with its errors if it fails."""
        # A user's shell has none of what leads this process to the tree under test.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
        done = subprocess.run(
            [self.python, *arguments],
            cwd=cwd,
            env={**kept, "VIRTUAL_ENV": str(self.folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, what: str | Path, *options: str, cwd: Path) -> None:
        """`pip install`, with the dependencies that are there."""
        command = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        self.run(*command, *options, what, cwd=cwd)


def borrow(folder: Path) -> Path:
    """Links to what normpass requires, and to pip and setuptools, which install it."""
    for place in sorted(places_of(required("normpass", "pip", "setuptools") - {"normpass"})):
        (folder / place.name).symlink_to(place)
    return folder


def empty_environment(folder: Path, borrowed: Path) -> Environment:
    """An environment with what was borrowed and nothing else."""
    venv.create(folder)
    # A folder named in a .pth file is searched, and its own .pth files are not read: those of the
    # environment that runs the tests would bring the editable install with them.
    base = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "posix_prefix", vars=base))
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    return Environment(folder)


def required(*names: str) -> set[str]:
    """These distributions and all that they require, in one another's turn."""
    found: set[tuple[str, str]] = set()
    left = [(name, "") for name in names]
    while left:
        name, extra = left.pop()
        if (name, extra) in found:
            continue
        try:
            texts = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue  # what torch runs without, as it does here
        found.add((name, extra))
        for text in texts:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                left += [(needed.name, wanted) for wanted in ("", *needed.extras)]
    return {name for name, _ in found}


def places_of(names: set[str]) -> set[Path]:
    """What these distributions have put into site-packages."""
    places = set()
    for name in names:
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            if file.parts[0] not in ("..", "__pycache__") and not file.name.endswith(".pth"):
                places.add(Path(str(distribution.locate_file(file.parts[0]))))
    return places


def build_wheel(source: Path, into: Path) -> Path:
    """The wheel of a clone, as `pip wheel` makes it with the setuptools that is here."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    options = ["--no-build-isolation", "--wheel-dir", str(into), "."]
    done = subprocess.run(
        [*command, *options], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = into.glob("*.whl")
    return wheel
