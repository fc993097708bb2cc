"""`normpass doctor`: what a report of a bug should tell of a machine, and the usual mistakes.

    versions   of normpass and what it stands on
    compiler   the C++ compiler, and the vector instructions that Inductor finds
    machine    processor, threads, GPUs and the languages of their kernels
    caches     where kernels are kept, and how much room there is
    settings   what finds the backend, whether rules are registered, and variables that change what
               is compiled
    trial      a layer norm compiled and compared with eager mode, on every device
    model      FILE:NAME, where it is given: its norms, how many are fused, where its graph breaks

and then what is wrong, with what to do about it. Nothing here needs a torch that works.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from normpass.backend.explain.messages import message_of
from normpass.doctor.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from normpass.doctor.facts import Facts

OLDEST = (2, 11)  # of torch, as in pyproject.toml


def doctor(argv: Sequence[str]) -> int:
    """`normpass doctor [FILE:NAME]`: the exit status is 1 if something is wrong."""
    description = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser("normpass doctor", description=description)
    parser.add_argument(
        "target", metavar="FILE:NAME", nargs="?", help="a model to look at, as for normpass explain"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument("--no-trial", action="store_true", help="compile nothing")
    args = parser.parse_args(argv)
    facts: Facts = {"versions": {"python": platform.python_version()}}
    found = [*torch_is_missing()]
    if not found:  # else nothing else can be imported
        from normpass.doctor.examination import BadTarget, examination

        try:
            facts, found = examination(args.target, trial=not args.no_trial)
        except BadTarget as error:
            parser.error(str(error))
    print(as_json(facts, found) if args.json else as_text(facts, found))
    return 1 if found else 0


def torch_is_missing() -> list[Finding]:
    """What is found where there is no torch, or too old a one to be asked for anything."""
    wanted = ".".join(map(str, OLDEST))
    advice = f'pip install "torch>={wanted}"'
    try:
        found = version("torch")
    except PackageNotFoundError:
        return [Finding(f"expected torch {wanted} or newer, found none", advice)]
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        return [Finding(f"expected torch {wanted} or newer, found {found}", advice)]
    return []


def as_json(facts: Facts, found: Sequence[Finding]) -> str:
    findings = [{**each._asdict(), "why": name_of(each)} for each in found]
    return json.dumps({**facts, "findings": findings}, indent=2)


def as_text(facts: Facts, found: Sequence[Finding]) -> str:
    lines = []
    for section, entries in facts.items():
        lines += [section, *(f"  {name:<24} {value}" for name, value in entries.items()), ""]
    for each in found:
        lines += [f"WRONG  {each.problem}", f"       {each.advice}"]
        lines += [f"       normpass why {name}" for name in [name_of(each)] if name]
    return "\n".join([*lines, *([] if found else ["nothing wrong was found"])])


def name_of(finding: Finding) -> str:
    """What `normpass why` knows it by."""
    message = message_of(finding.problem)
    return message.name if message else ""
