"""The commands that look at a user's model or at the rules: explain, kernels, coverage."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

INPUTS = "example_inputs"


class BadTarget(Exception):
    """FILE:NAME does not name something to explain; the message says what was expected."""


@dataclass(frozen=True)
class Target:
    """What a user pointed at, and the inputs to call it with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_target(text: str) -> Target:
    """Import FILE and take NAME and its inputs from it.

    NAME is a module instance, a function, or a module class that is built without arguments. Its
    inputs are `example_inputs`, of NAME itself or of FILE: a function that returns them, or the
    inputs themselves; a tuple or list is the positional arguments, a dict the keyword arguments,
    anything else the only argument.

    Raises:
        BadTarget: when a part of this is missing.
    """
    file, _, name = text.rpartition(":")
    if not file or not name:
        raise BadTarget(f"expected FILE:NAME, such as model.py:model, got {text!r}")
    module = import_file(Path(file))
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise BadTarget(f"{file} has no {name!r}; it has {', '.join(public) or 'no names'}")
    found = getattr(module, name)
    if not callable(found):
        raise BadTarget(
            f"expected {text} to be a torch.nn.Module, a module class or a function, "
            f"got {type(found).__name__}"
        )
    args, kwargs = inputs_of(found, module, text)
    return Target(instantiate(found, text), args, kwargs)


def import_file(path: Path) -> Any:
    """Run a Python file as a module; its folder can be imported from, as when it is a script.

    Raises:
        BadTarget: when there is no such file.
    """
    if not path.is_file():
        raise BadTarget(f"expected a Python file, found none at {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadTarget(f"expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    # Registered like any import: dataclasses and pickling in the file look it up there.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def instantiate(found: Any, text: str) -> Callable[..., Any]:
    """A module class becomes an instance; everything else is taken as it is."""
    if not isinstance(found, type):
        return found
    try:
        built = found()
    except TypeError as error:
        raise BadTarget(
            f"{text} is a class that cannot be built without arguments ({error}): "
            "name an instance instead"
        ) from error
    if not callable(built):
        raise BadTarget(f"expected instances of {text} to be callable, they are not")
    return built


def inputs_of(found: Any, module: Any, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments to call the target with."""
    for owner in (found, module):
        if hasattr(owner, INPUTS):
            inputs = getattr(owner, INPUTS)
            inputs = inputs() if callable(inputs) else inputs
            break
    else:
        raise BadTarget(
            f"expected {INPUTS}() beside {text}, a function that returns the tuple of arguments "
            "to call it with; found none"
        )
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def parse_target(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[Any, Target]:
    """The options and the target; a wrong target ends the program with one sentence."""
    parser.add_argument("target", metavar="FILE:NAME", help="a model; FILE has example_inputs()")
    args = parser.parse_args(argv)
    try:
        return args, load_target(args.target)
    except BadTarget as error:
        parser.error(str(error))


def explain(argv: Sequence[str]) -> int:
    """`normpass explain FILE:NAME`: print the report, save it as a page on request."""
    parser = argparse.ArgumentParser("normpass explain")
    parser.add_argument("--html", metavar="OUT", type=Path, help="also save a self-contained page")
    parser.add_argument("--source", action="store_true", help="also print the generated kernels")
    parser.add_argument(
        "--time",
        action="store_true",
        help="also time each region's kernel against Inductor's kernels for the same nodes, on "
        "random tensors: compiles every region that differs with Inductor",
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="also measure the memory of a step, and list what is saved for the backward, beside "
        "stock Inductor: compiles the model once more, and runs it five times more",
    )
    args, target = parse_target(parser, argv)
    report = report_of(target, measure=[name for name in ("time", "memory") if vars(args)[name]])
    print(report)
    if args.source:
        print_kernels(report)
    if args.html:
        report.save(args.html)
        print(f"saved {args.html}")
    return 0


def kernels(argv: Sequence[str]) -> int:
    """`normpass kernels FILE:NAME`: print the source of every generated kernel."""
    _, target = parse_target(argparse.ArgumentParser("normpass kernels"), argv)
    report = report_of(target)
    if not report.regions:
        print("nothing was fused, so there are no kernels; normpass explain says why")
        return 1
    print_kernels(report)
    return 0


def coverage(argv: Sequence[str]) -> int:
    """`normpass coverage`: the rules against the functions of PyTorch that they are to replace."""
    from normpass.decomps import coverage as ledger
    from normpass.decomps.coverage.operator import named, of_operator
    from normpass.decomps.coverage.page import by_family, page

    parser = argparse.ArgumentParser("normpass coverage", description=coverage.__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--open", action="store_true", help="list what is not ported yet")
    what.add_argument("--rules", action="store_true", help="list every rule")
    what.add_argument("--page", metavar="OUT", type=Path, help="write the reference page of rules")
    what.add_argument(
        "--op", metavar="NAME", help="list what there is of one operator, such as aten.renorm"
    )
    parser.add_argument(
        "--family", metavar="NAME", help="list or count one family only, such as norm or linalg"
    )
    args = parser.parse_args(argv)
    if args.op is not None:
        try:
            overloads = named(args.op)
        except ValueError as wrong:
            parser.error(str(wrong))
        found = [(str(op), *each) for op in overloads for each in of_operator(op)]
        print_table(args.op, ("operator", "what", "where"), found)
        return 0

    families = by_family()
    entries = ledger.rows()
    known = sorted({*families, *(entry.row.family for entry in entries)})
    if args.family not in (None, *known):
        parser.error(f"expected a family, one of {', '.join(known)}; got {args.family!r}")
    if args.page:
        args.page.parent.mkdir(parents=True, exist_ok=True)
        args.page.write_text(page(), encoding="utf-8")
        print(f"saved {args.page}")
        return 0

    entries = tuple(e for e in entries if args.family in (None, e.row.family))
    rules = [r for name, some in families.items() if args.family in (None, name) for r in some]
    if args.rules:
        listed = [(rule.kind, rule.name, rule.shapes, rule.source) for rule in rules]
        print_table(f"{len(rules)} rules", ("kind", "name", "shapes", "source"), listed)
    elif args.open:
        rows = [entry.row for entry in entries if entry.status == "open"]
        cells = [(row.family, row.kind, row.name, row.signature) for row in rows]
        print_table(f"{len(rows)} open", ("family", "kind", "name", "signature"), cells)
    else:
        print(ledger.table(entries))
        print(f"\n{len(entries)} definitions in PyTorch's files, {len(rules)} rules")
    return 0


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table as wide as the terminal, or 160 columns where there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        # Text, because shapes and names may hold brackets, which rich would take for its markup.
        table.add_row(*map(Text, row))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def report_of(target: Target, measure: Sequence[str] = ()) -> Any:
    """`normpass.explain` of a target."""
    import normpass

    return normpass.explain(target.function, *target.args, measure=measure, **target.kwargs)


def print_kernels(report: Any) -> None:
    """Every kernel of a report, each once, under the modules that use it."""
    users: dict[str, list[Any]] = {}
    for region in report.regions:
        users.setdefault(region.source, []).append(region)
    for source, regions in users.items():
        where = ", ".join(f"{region.phase} of {region.module or 'the graph'}" for region in regions)
        mark = "#" if regions[0].target == "triton" else "//"
        print(f"{mark} {regions[0].name}: {where}\n{source}\n")
