"""What the cache of a machine knows of a kernel by its region: the library, and which inputs may be
written over. A process that finds it neither plans nor prints the kernel: ten milliseconds each.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from normpass.backend.run import toolchain
from normpass.decomps import digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from normpass.backend.program.machine import Machine
    from normpass.backend.program.sizes import SizeClass


@dataclass(frozen=True)
class Facts:
    """library: its key (toolchain.key_of). overwritable: of each output the inputs that it may be
    written over (program/in_place.py).
    """

    library: str
    overwritable: Mapping[str, Sequence[str]]


def name_of(text: str, classes: Sequence[SizeClass], machine: Machine) -> str:
    """What a kernel is known by before it is printed: all that its source depends on."""
    return toolchain.key_of("\n".join((text, repr(tuple(classes)), repr(machine), _sources())))


@cache
def _sources() -> str:
    backend = Path(__file__).parents[1]
    return digest.of_folder(backend) + digest.of_folder(backend.parent / "passes")


def recall(name: str) -> Facts | None:
    """None if nothing is known, or nothing that can be read."""
    with suppress(OSError, ValueError, TypeError):
        return Facts(**json.loads(_place(name).read_text()))
    return None


def remember(name: str, facts: Facts) -> None:
    """Where nothing can be written, nothing is."""
    with suppress(OSError):
        if recall(name) != facts:
            toolchain.write(_place(name), json.dumps(asdict(facts)).encode())


def _place(name: str) -> Path:
    return toolchain.cache_dir() / f"{name}.json"
