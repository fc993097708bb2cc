"""Lists the packages: each stage is a folder of the root and is installed under `normpass`.

The list is computed, so that a new subfolder needs no edit; everything else stands in
pyproject.toml.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
FOLDERS = {
    "normpass": "api",
    "normpass.decomps": "decomps",
    "normpass.passes": "passes",
    "normpass.backend": "backend",
    "normpass.benchmarks": "benchmarks",
    "normpass.examples": "examples",
}


def packages() -> list[str]:
    """The six packages and every package below them, by their installed names."""
    found = []
    for name, folder in FOLDERS.items():
        found += [name, *(f"{name}.{sub}" for sub in find_packages(str(ROOT / folder)))]
    return found


setup(packages=packages(), package_dir=FOLDERS)
