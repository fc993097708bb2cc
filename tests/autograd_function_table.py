"""What is right of compiled autograd.Functions, without the rules and with them, as a table.

    python tests/autograd_function_table.py

Each case is a child of one process that has torch in its memory, so that none sees what another has
left behind.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch._dynamo.backends.debugging
from autograd_function_transforms import EVERY, compiled, numbers
from autograd_functions import PROGRAMS

import normpass

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


def mark(program: str, asked: str, registered: bool) -> str:
    """What is true of one case, in this process."""
    right = attempted(EVERY[asked](PROGRAMS[program]), asked)
    if registered:
        normpass.register()
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


def in_a_child(program: str, asked: str, registered: bool) -> str:
    """The same in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, mark(program, asked, registered).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found or "E"


def table(registered: bool) -> list[str]:
    """One row a program, one column a thing that is asked for."""
    rows = {p: "".join(in_a_child(p, a, registered) for a in ASKED) for p in PROGRAMS}
    count = Counter("".join(rows.values()))
    counts = ", ".join(f"{count[key]} {told}" for key, told in MARKS.items() if count[key])
    return [counts, "", *(f"{name:<28}{row}" for name, row in rows.items())]


def warm_up() -> None:
    """What is imported at a first use is so once for all children."""
    with normpass.registered():
        for asked in ("hessian", "vmap of jvp", "backward"):
            compiled(lambda x, w: x * w.sin(), asked, "aot_eager")(*numbers(asked))
    torch._dynamo.reset()


def main() -> None:
    """Prints the tables."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    warm_up()
    print("autograd.Functions compiled with fullgraph=True, backend aot_eager, torch 2.13\n")
    for key, told in MARKS.items():
        print(f"  {key}  {told}")
    print()
    for index, asked in enumerate(ASKED):
        print(f"{'':<28}{'|' * index}+{'-' * (len(ASKED) - index)} {asked}")
    for title, registered in (("stock", False), ("after normpass.register()", True)):
        print("\n".join(["", f"{title}: {(rows := table(registered))[0]}", *rows[1:]]))


if __name__ == "__main__":
    main()
