"""The usual mistakes in how a machine is set up."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from normpass.backend.options import Options
from normpass.backend.program import verify
from normpass.backend.run import calibration, toolchain
from normpass.doctor.facts import backend, installed
from normpass.doctor.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
VARIABLES = sorted(
    (
        *(variable for each in fields(Options) if (variable := each.metadata.get("env"))),
        *(calibration.VARIABLE, verify.VARIABLE),
    )
)
LEAST_ROOM = 256 << 20  # bytes: what a model's kernels take, many times


def findings() -> Iterator[Finding]:
    """The usual mistakes that were made here."""
    yield from of_building()
    yield from of_caches()
    yield from of_variables()
    yield from of_installing()


def of_building() -> Iterator[Finding]:
    """What keeps code from being compiled, or makes it slow."""
    if reason := toolchain.cannot_build():
        yield Finding(
            f"CPU code cannot be compiled: {reason}", "models run uncompiled until it can"
        )
    if not toolchain.vectors() and platform.machine() in ("x86_64", "AMD64", "aarch64", "arm64"):
        yield Finding(
            "Inductor finds no vector instructions: all code runs several times slower",
            f"look for files that hide modules of Python's own (such as nt.py) in {sys.path[0]!r}, "
            "and for a compiler that is older than the processor",
        )


def of_caches() -> Iterator[Finding]:
    """A cache holds code that is run: nobody else may write there."""
    try:
        folder = toolchain.cache_dir()
    except OSError:  # of_building says so
        return
    if shutil.disk_usage(folder).free < LEAST_ROOM:
        yield Finding(
            f"the disk of {folder} is nearly full",
            "make room, or set TORCHINDUCTOR_CACHE_DIR to another folder",
        )
    headers = toolchain.header_dir()
    places = {folder: "TORCHINDUCTOR_CACHE_DIR", headers: "TMPDIR"}
    for place, variable in places.items():
        for each in (place, place.parent):
            if owner := somebody_else(each):
                yield Finding(
                    f"the cache {each} can be written to by {owner}, and code in it is run",
                    f"set {variable} to a folder of your own",
                )
                return


def somebody_else(folder: Path) -> str:
    """Who but the user may write to a folder: its owner, or everybody; empty if nobody."""
    if not hasattr(os, "getuid") or not folder.exists():
        return ""
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0):
        return f"user {found.st_uid}"
    return "everybody" if found.st_mode & stat.S_IWOTH else ""


def of_variables() -> Iterator[Finding]:
    """Variables that are misspelled, or switch off what is looked for."""
    for name in OFF:
        if os.environ.get(name) == "1":
            yield Finding(f"{name}=1: torch.compile compiles nothing", f"unset {name}")
    for name in os.environ:
        if name.startswith("NORMPASS_") and name not in VARIABLES:
            known = ", ".join(VARIABLES)
            yield Finding(f"{name} is no variable of normpass's", f"expected one of {known}")
    try:
        Options.parse(None)
    except ValueError as error:
        yield Finding(f"the environment has an option that is refused: {error}", "unset it")


def of_installing() -> Iterator[Finding]:
    """What is missing beside normpass, or hides it."""
    if torch.cuda.is_available() and installed("triton") == "not installed":
        yield Finding("there is a GPU and no Triton", "pip install triton")
    if backend() is None:
        yield Finding(
            'torch finds no backend "normpass": it was imported, but not installed',
            "pip install it, or import normpass.backend.entry and pass its function `normpass`",
        )
