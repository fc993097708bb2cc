"""Whether every public name has a type that a user's checker knows: the last part of `make types`.

pyright judges (--verifytypes) everything that a package has, folders that are nobody's business
too. Of that, what counts are the names in `normpass.__all__` and `normpass.rule.__all__` and what
belongs to them: a class's attributes and methods, a function's parameters and result, and the
classes that those lead to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import normpass


def public_names() -> set[str]:
    """As a user writes them, and as they are called where they are defined."""
    names = {f"normpass.{name}" for name in normpass.__all__}
    names |= {f"normpass.rule.{name}" for name in normpass.rule.__all__}
    defined = [getattr(normpass, name) for name in normpass.__all__]
    defined += [getattr(normpass.rule, name) for name in normpass.rule.__all__]
    places = {f"{x.__module__}.{x.__qualname__}" for x in defined if hasattr(x, "__qualname__")}
    return names | places


def judged() -> list[dict[str, Any]]:
    """What pyright says of each name of the package.

    Raises:
        SystemExit: where it has found no package, with its words.
    """
    command = [sys.executable, "-m", "pyright", "--verifytypes", "normpass", "--ignoreexternal"]
    # It takes torch from the first Python on the path, which without this need not have it.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [*command, "--outputjson"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    symbols: list[dict[str, Any]] = report["typeCompleteness"]["symbols"]
    if not symbols:
        said = [each["message"] for each in report["generalDiagnostics"]]
        raise SystemExit(f"expected pyright to find normpass; it says: {'; '.join(said)}")
    return symbols


def incomplete(symbols: list[dict[str, Any]], public: set[str]) -> list[str]:
    """A line for each public name whose type is not known, or not the same to every checker."""
    lines = []
    for symbol in symbols:
        name: str = symbol["name"]
        parts = name.split(".")
        owners = {".".join(parts[:k]) for k in range(1, len(parts) + 1)}
        known = symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]
        if owners & public and not known:
            why = "; ".join(each["message"] for each in symbol["diagnostics"])
            lines.append(f"{name}: {' '.join(why.split())}")
    return lines


def main() -> int:
    """0 where all are known, 1 where some are not; prints which."""
    symbols, public = judged(), public_names()
    missing = sorted(public - {symbol["name"] for symbol in symbols} - {"normpass.__version__"})
    lines = incomplete(symbols, public) + [f"{name}: pyright does not know it" for name in missing]
    print("\n".join(lines) or f"types of all {len(normpass.__all__)} public names are complete")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
