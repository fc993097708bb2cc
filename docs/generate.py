"""Writes what pages take from the code: `python docs/generate.py`, as `make docs` does.

docs/generated/ has the walk of one layer norm (graph, region, program, kernels, pictures), the help
of each command, the mistakes of PyTorch's with their reproducers, and the plots of benchmarks.
Nothing in there is edited by hand or committed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from domain_picture import domain_picture
from torch import nn

import normpass
from normpass.__main__ import COMMANDS, main
from normpass.backend import inductor_mistakes
from normpass.backend.codegen import cuda, triton
from normpass.backend.options import Options
from normpass.backend.program.dialect import gpu_machine
from normpass.backend.program.listing import listing
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes
from normpass.backend.run.dialects import program
from normpass.benchmarks.plots import bars
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from normpass.backend.explain.report import FusedNorm
    from normpass.backend.inductor_mistakes.mistake import Mistake

DOCS = Path(__file__).parent
OUT = DOCS / "generated"
RESULTS = DOCS.parent / "benchmarks" / "results"
H200 = 90  # capability times ten


def write(name: str, text: str) -> None:
    """A file, left as it is where nothing changes: Sphinx reads again what is newer."""
    path = OUT / name
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


# ---- one layer norm


def walk() -> None:
    """What each stage makes of the backward of a layer norm of 4096 rows of 1024 numbers."""
    model, x = nn.LayerNorm(1024), torch.randn(4096, 1024, requires_grad=True)
    report = normpass.explain(model, x, options={"least_bytes": 0})
    (region,) = (each for each in report.regions if each.phase == "backward")
    (graph,) = (each for each in report.graphs if each.phase == "backward")
    report.save(OUT / "report.html")
    write("graph.txt", "\n".join(line.text for line in graph.before) + "\n")
    write("graph_after.txt", "\n".join(line.text for line in graph.after) + "\n")
    write("region.txt", region.text + "\n")
    write("domain.svg", domain_picture(parse(region.text)))
    write("program.txt", listing(program(region.fused)) + "\n")
    write("kernel.cpp", without_region(region.source, "//"))
    for dialect, suffix in (("triton", "py"), ("cuda", "cu")):
        write(f"kernel.{suffix}", without_region(for_gpu(region, dialect), "#", "//"))


def for_gpu(region: FusedNorm, dialect: str) -> str:
    """The kernel of a region in one of the languages for GPUs, as for an H200."""
    fused = region.fused
    parsed, classes = replace(parse(fused.text), dialect=dialect), size_classes(fused.sizes)
    plan = make_plan(parsed, gpu_machine(parsed, classes, H200), classes)
    text: str = (cuda if dialect == "cuda" else triton).generate(plan).text
    return text


def without_region(source: str, *marks: str) -> str:
    """A kernel without the region that stands above it in comments, which the page has shown."""
    lines = source.splitlines()
    is_comment = tuple(f"{mark} " for mark in marks)
    first = next(k for k, line in enumerate(lines) if not line.startswith(is_comment))
    return "\n".join(lines[first:]).strip() + "\n"


# ---- commands


def commands() -> None:
    """What each command says of itself."""
    parts = []
    for name, (_, what) in COMMANDS.items():
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([name, "--help"])
        help_text = f"```text\n{said.getvalue().rstrip()}\n```"
        parts += [f"## {name}", f"{what[0].upper()}{what[1:]}.", help_text]
    write("commands.md", "\n\n".join(parts) + "\n")


def options() -> None:
    """Every option of the backend."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option in fields(Options):
        default = getattr(Options(), option.name)
        variable = option.metadata.get("env")
        named = f" (environment: `{variable}`)" if variable else ""
        rows.append(f"| `{option.name}` | `{default!r}` | {option.metadata['help']}{named} |")
    write("options.md", "\n".join(rows) + "\n")


# ---- mistakes


def mistakes() -> None:
    """Each mistake of Inductor's that is mended, with the programs of the tests that show it."""
    sys.path.insert(0, str(DOCS.parent / "tests"))
    cases = importlib.import_module("inductor_mistake_cases").CASES
    parts = []
    for mistake in inductor_mistakes.MISTAKES:
        functions = [case.function for case in cases.values() if case.mistake == mistake.name]
        parts += [f"### {mistake.name}", described(mistake), *map(reproducer, functions[:1])]
    write("mistakes.md", "\n\n".join(parts) + "\n")


def described(mistake: Mistake) -> str:
    until = f"to before {mistake.fixed}" if mistake.fixed else "on, and in the newest"
    link = "https://github.com/pytorch/pytorch"
    fix = f"; its mend there is [{mistake.fix}]({link}/pull/{mistake.fix})" if mistake.fix else ""
    issue = f"[issue {mistake.issue}]({link}/issues/{mistake.issue})"
    return f"{mistake.wrong}\n\nPyTorch's {issue}, from torch {mistake.since} {until}{fix}."


def reproducer(function: Any) -> str:
    return f"```py\n{inspect.getsource(function).rstrip()}\n```"


# ---- examples


def notebooks() -> None:
    """The notebooks of examples/, where Sphinx finds them."""
    (OUT / "examples").mkdir(exist_ok=True)
    for path in sorted((DOCS.parent / "examples" / "notebooks").glob("*.ipynb")):
        write(f"examples/{path.name}", path.read_text(encoding="utf-8"))


# ---- plots

OVER = ("eager", "inductor")


def plots() -> None:
    """How many times as fast training steps of models are as with Inductor and in eager mode."""
    for name in ("cpu-models", "cpu-models-intel"):
        cases = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["cases"]
        panels = {
            dtype: [(label(case), ratios(case)) for case in timed(cases, dtype)]
            for dtype in ("float32", "bfloat16")
        }
        bars(panels, [f"over {other}" for other in OVER], OUT / f"{name}.svg")


def timed(cases: list[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """Those that have a time in every way: what is wrong somewhere is not timed there."""
    every = {*OVER, "normpass"}
    return [c for c in cases if c["dtype"] == dtype and every <= (c.get("seconds") or {}).keys()]


def ratios(case: dict[str, Any]) -> list[float]:
    own = case["seconds"]["normpass"]["median"]
    return [case["seconds"][other]["median"] / own for other in OVER]


def label(case: dict[str, Any]) -> str:
    return str(case["model"]) + ("" if case["format"] == "contiguous" else ", channels last")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for part in (walk, commands, options, mistakes, notebooks, plots):
        part()
