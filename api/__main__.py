"""The console script `normpass`, also `python -m normpass`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from normpass import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

# Each command parses its own options: name -> (module:function, what it does).
COMMANDS = {
    "demo": ("normpass.benchmarks.demo:main", "train three small models on real data, compared"),
    "explain": ("normpass.commands:explain", "what is fused in a model, what is not, and why"),
    "kernels": ("normpass.commands:kernels", "print the generated kernels of a model"),
    "doctor": ("normpass.doctor:doctor", "what there is to compile with here, and what is wrong"),
    "why": ("normpass.why:why", "what a warning or a reason means, and what to do"),
    "bench": ("normpass.benchmarks.bench:main", "time norms and models against eager and Inductor"),
    "coverage": ("normpass.commands:coverage", "count what is ported, list the rules"),
}
USAGE = "\n".join(
    [
        "usage: normpass COMMAND [options]     (normpass COMMAND --help lists them)",
        "",
        *(f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items()),
        "",
        f"normpass {__version__}",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 for success, 1 for failure, 2 for a wrong call."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "--version"):
        print(USAGE)
        return 0 if args else 2
    command, rest = args[0], args[1:]
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"normpass: expected one of {known}; got {command!r}", file=sys.stderr)
        return 2
    module, function = COMMANDS[command][0].split(":")
    try:
        return int(getattr(import_module(module), function)(rest))
    except KeyboardInterrupt:
        print("normpass: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever reads the output, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    raise SystemExit(main())
