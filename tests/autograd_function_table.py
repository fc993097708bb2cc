"""What is right of compiled autograd.Functions, without the rules and with them, as a table.

    python tests/autograd_function_table.py

Each row of stock torch is a process of its own: what it fails at leaves it in a state in which
later traces fail.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from autograd_function_transforms import EVERY, compiled, numbers
from autograd_functions import PROGRAMS

import normpass

if TYPE_CHECKING:
    from collections.abc import Iterable

ASKED = [name for name in EVERY if name != "double backward"]
MARKS = {
    ".": "right",
    "W": "a wrong number, silently",
    "E": "an error",
    "c": "compiles what eager mode refuses",
    "-": "refused, as in eager mode",
}


def attempted(f: Any, asked: str) -> Any:
    """What comes out, or the error."""
    try:
        return f(*numbers(asked))
    except Exception as error:
        return error


def mark(program: str, asked: str) -> str:
    """What is true of one case."""
    right = attempted(EVERY[asked](PROGRAMS[program]), asked)
    found = attempted(compiled(PROGRAMS[program], asked, "aot_eager"), asked)
    if isinstance(right, Exception):
        return "-" if isinstance(found, Exception) else "c"
    if isinstance(found, Exception):
        return "E"
    try:
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)
    except AssertionError:
        return "W"
    return "."


def rows(programs: Iterable[str], registered: bool) -> dict[str, str]:
    """The rows of some programs, from a process of their own."""
    command = [sys.executable, __file__, "registered" if registered else "stock", *programs]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(programs, done.stdout.split(), strict=True))


def table(registered: bool) -> list[str]:
    """One row a program, one column a thing that is asked for."""
    if registered:
        found = rows(list(PROGRAMS), registered)
    else:
        found = {name: rows([name], registered)[name] for name in PROGRAMS}
    count = Counter("".join(found.values()))
    counts = ", ".join(f"{count[key]} {told}" for key, told in MARKS.items() if count[key])
    return [counts, "", *(f"{name:<28}{marks}" for name, marks in found.items())]


def print_rows(programs: Iterable[str], registered: bool) -> None:
    """The marks of some programs, a line each."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if registered:
        normpass.register()
    for program in programs:
        for asked in ASKED:
            torch._dynamo.reset()
            print(mark(program, asked), end="", flush=True)
        print(flush=True)


def main() -> None:
    """Prints the tables."""
    if sys.argv[1:]:
        print_rows(sys.argv[2:], sys.argv[1] == "registered")
        return
    print("autograd.Functions compiled with fullgraph=True, backend aot_eager, torch 2.13\n")
    for key, told in MARKS.items():
        print(f"  {key}  {told}")
    print()
    for index, asked in enumerate(ASKED):
        print(f"{'':<28}{'|' * index}+{'-' * (len(ASKED) - index)} {asked}")
    for title, registered in (("stock", False), ("after normpass.register()", True)):
        print("\n".join(["", f"{title}: {(lines := table(registered))[0]}", *lines[1:]]))


if __name__ == "__main__":
    main()
