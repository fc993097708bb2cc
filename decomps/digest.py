"""What compiled code is known by in caches: the sources that made it."""

from __future__ import annotations

import hashlib
import uuid
from functools import cache
from pathlib import Path

_OURS = Path(__file__).parent
# Stands for rules without a file, such as those typed at a prompt: no later process finds it.
_THIS_PROCESS = uuid.uuid4().hex


@cache
def of_folder(folder: Path) -> str:
    """A hash of the sources below a folder of ours."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".py", ".h"):
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def of_rules() -> str:
    """A hash of the sources of all rules: ours, and those that others registered."""
    digest = hashlib.sha256(of_folder(_OURS).encode())
    for file, rules in sorted(_of_others().items()):
        path = Path(file)
        digest.update(path.read_bytes() if path.is_file() else _THIS_PROCESS.encode())
        digest.update("; ".join(sorted(rules)).encode())
    return digest.hexdigest()[:16]


def _of_others() -> dict[str, list[str]]:
    """Where rules of others stand, and which; those outside of files and in C have one place, "".

    Their helpers in other files are not seen: a rule is what the decorated function says.
    """
    # Imports torch, which `import normpass` does not.
    from normpass.decomps import registry

    found: dict[str, list[str]] = {}
    for rule in registry.loaded():
        file = rule.code.co_filename if rule.code else ""
        if not Path(file).is_relative_to(_OURS):
            found.setdefault(file, []).append(f"{rule.kind} {rule.name} {rule.place}")
    return found
