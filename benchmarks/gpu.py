"""`python benchmarks/gpu.py`: everything that is measured on an NVIDIA GPU, by one command.

    norms      every case of gpu_cases.py: checked against float64, then timed against stock
               Inductor, eager mode and the libraries that are installed, with a device copy of as
               many bytes as the roof
    host       what a call costs the host
    models     whole training steps, their time and peak memory
    targets    what was aimed at and what was found

The file of results is written after every case: a run that is stopped loses nothing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from normpass.benchmarks.cases import parse_shape
from normpass.benchmarks.gpu_cases import DTYPES, FUNCTIONS, PHASES, GpuCase, listed
from normpass.benchmarks.gpu_clock import Budget, Place, gpu, is_lost
from normpass.benchmarks.gpu_host import measure_host
from normpass.benchmarks.gpu_measure import REPEATS, CaseResult, measure, said
from normpass.benchmarks.gpu_models import MODELS
from normpass.benchmarks.gpu_peers import PEERS
from normpass.benchmarks.gpu_report import line_of, plot, results_path, save, tell
from normpass.benchmarks.gpu_steps import measure_model
from normpass.benchmarks.gpu_targets import is_about_a_target
from normpass.benchmarks.gpu_variants import NORMPASS, STOCK, variants
from normpass.benchmarks.machine import machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from normpass.benchmarks.norms import Shape

    Document = dict[str, Any]

RESULTS = Path("benchmarks/results")
NO_GPU = 2
MEASURED = ("cases", "host", "models")
LOST = (
    "a kernel went astray and the GPU does nothing more in this process: what failed first in this "
    "case is at fault; --without leaves it out, and --resume goes on with the file"
)
# --quick: enough to see whether all is well, in three minutes.
QUICK: tuple[tuple[str, Shape, str, bool], ...] = (
    ("layer_norm", (16384, 4096), "backward", False),
    ("rms_norm", (16384, 4096), "backward", False),
    ("layer_norm", (4096, 1024), "backward", False),
    ("layer_norm", (4096, 16384), "backward", False),
    ("batch_norm", (256, 256, 14, 14), "backward", True),
    ("group_norm", (8, 320, 64, 64), "backward", False),
    ("layer_norm", (16384, 4096), "double backward", False),
    ("layer_norm", (16384, 4096), "forward", False),
)
QUICK_REPEATS = 10
# Of a time budget: what norms may take before models begin.
NORMS_PART = 0.7


@dataclass
class Options:
    """Those of the command; models: None for where all is measured."""

    norm: list[str] = field(default_factory=list)
    shape: list[Shape] = field(default_factory=list)
    dtype: list[str] = field(default_factory=list)
    phase: list[str] = field(default_factory=list)
    quick: bool = False
    models: bool | None = None
    norms: bool = True
    without: list[str] = field(default_factory=list)
    resume: Path | None = None
    repeats: int | None = None
    seconds: float | None = None
    out: Path = RESULTS
    list: bool = False
    device: str = "cuda"

    @property
    def wants_models(self) -> bool:
        """Asked for, or nothing else was."""
        narrowed = self.quick or self.norm or self.shape or self.dtype or self.phase
        return not narrowed if self.models is None else self.models

    @property
    def on_gpu(self) -> bool:
        """Off it everything is of the sizes of tests."""
        return torch.device(self.device).type == "cuda"


def parse(argv: Sequence[str] | None) -> Options:
    """The options of the command."""
    parser = argparse.ArgumentParser("gpu.py", description=(__doc__ or "").split("\n")[0])
    more: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--norm", choices=list(FUNCTIONS), help="only this; repeatable", **more)
    parser.add_argument("--shape", type=parse_shape, help="such as 4096x1024; repeatable", **more)
    parser.add_argument("--dtype", choices=list(DTYPES), help="bfloat16; repeatable", **more)
    parser.add_argument("--phase", choices=PHASES, help="repeatable", **more)
    parser.add_argument("--quick", action="store_true", help="a few cases, under three minutes")
    parser.add_argument(
        "--models",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whole training steps too; by default where no choice is made of norms",
    )
    parser.add_argument("--no-norms", dest="norms", action="store_false", help="models alone")
    names = [*NORMPASS, STOCK, *(peer.name for peer in PEERS)]
    parser.add_argument("--without", choices=names, help="leave this out; repeatable", **more)
    parser.add_argument("--resume", type=Path, help="go on with a file of results of this GPU")
    parser.add_argument("--repeats", type=int, help=f"samples of each variant, {REPEATS}")
    parser.add_argument("--seconds", type=float, help="stop after so many, with what there is")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder, {RESULTS}")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(argv, namespace=Options())
    if options.repeats is not None and options.repeats < 2:
        parser.error(f"--repeats must be at least 2, got {options.repeats}")
    return options


def cases_of(options: Options) -> list[GpuCase]:
    """What was asked for, what the targets are about first."""
    if not options.norms:
        return []
    if options.quick and not options.shape:
        asked = [
            GpuCase(norm, shape, dtype, phase, last, "quick")
            for dtype in options.dtype or ("bfloat16",)
            for norm, shape, phase, last in QUICK
        ]
        chosen = options.norm or FUNCTIONS, options.phase or PHASES
        return [each for each in asked if each.norm in chosen[0] and each.phase in chosen[1]]
    cases = listed(options.norm, options.shape, options.dtype, options.phase)
    return sorted(cases, key=lambda case: not is_about_a_target(case))


def no_gpu(device: str) -> str | None:
    """What is missing, and what there is instead; None where there is a GPU or none is needed."""
    if torch.device(device).type != "cuda":
        return None
    if torch.version.cuda and torch.cuda.is_available():
        return None
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    count = torch.cuda.device_count()
    return (
        "expected an NVIDIA GPU that torch can use, found torch "
        f"{torch.__version__}, {built}, with {count} usable GPUs. What normpass's kernels move on "
        "an H200 is computed without one by: python -m normpass.benchmarks.roofline"
    )


class Run:
    """One run of the command: what is measured, and the file that it goes to."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options, self.console = options, console
        self.place = Place.of(options.device)
        self.budget = Budget(options.seconds)
        about = gpu(options.device)
        self.path = results_path(options.out, about["name"])
        self.document: Document = {
            "gpu": about,
            "machine": machine(options.device),
            "peers": {peer.name: peer.status() for peer in PEERS},
            "options": {**vars(options), "out": None, "resume": None},
            "complete": False,
            **{key: [] for key in MEASURED},
        }
        if options.resume:
            self.go_on_with(options.resume)

    def go_on_with(self, path: Path) -> None:
        """What another run has measured is not measured again.

        Raises:
            ValueError: if that was another GPU.
        """
        before = json.loads(path.read_text())
        here, there = self.document["gpu"]["name"], before["gpu"]["name"]
        if here != there:
            raise ValueError(f"expected results of {here} in {path}, found some of {there}")
        self.document |= {key: before[key] for key in MEASURED}
        whole = [found for found in before["cases"] if not found["device_lost"]]
        self.document["cases"] = whole
        self.path = path

    def note(self, key: str, found: Any) -> None:
        """Adds to the document and writes it."""
        self.document[key] += found
        self.document["elapsed_seconds"] = self.budget.spent
        save(self.document, self.path)

    def all(self) -> None:
        """Measures what was asked for, until the time is spent."""
        if not self.document["host"]:
            self.note("host", guarded(lambda: measure_host(self.place), self.console))
        done = self.norms(cases_of(self.options))
        if self.options.wants_models:
            done = self.models() and done
        self.document["complete"] = done
        self.note("cases", [])

    def norms(self, cases: Sequence[GpuCase]) -> bool:
        """Whether there was time for all."""
        part = NORMS_PART if self.options.wants_models else 1.0
        compared = variants(fuse_all=not self.place.is_gpu, without=self.options.without)
        there = {found["label"] for found in self.document["cases"]}
        cases = [case for case in cases if case.label not in there]
        repeats = self.options.repeats or (QUICK_REPEATS if self.options.quick else REPEATS)
        for number, case in enumerate(cases, 1):
            if self.budget.is_spent(part):
                return False
            try:
                result = measure(case, self.place, compared, repeats)
            except Exception as error:  # such as tensors that do not fit
                result = CaseResult(case, 0, failed={"case": said(error)})
            found = {**result.as_dict(), "device_lost": is_lost(self.place.device)}
            self.note("cases", [found])
            told = f"{number}/{len(cases)} {line_of(found)}"
            self.console.print(told, markup=False, highlight=False)
            if found["device_lost"]:
                self.console.print(LOST)
                return False
            self.place.free()
        return True

    def models(self) -> bool:
        """Whether there was time for all."""
        there = {found["model"] for found in self.document["models"]}
        for model in MODELS.values():
            if model.name in there:
                continue
            if self.budget.is_spent() or is_lost(self.place.device):
                return False
            self.place.free()
            tiny = not self.place.is_gpu
            how = {"repeats": self.options.repeats} if self.options.repeats else {}
            try:
                found = measure_model(model, self.place, tiny=tiny, **how)
            except Exception as error:  # such as a model that does not fit
                found = {"model": model.name, "failed": {"model": said(error)}}
                found |= {"wrong": {}, "seconds": {}, "peak_bytes": {}}
            self.note("models", [found])
            self.console.print(f"{model.name} measured", markup=False, highlight=False)
        return True


def guarded(function: Callable[[], list[Any]], console: Console) -> list[Any]:
    """What a function finds, and nothing where it raises."""
    try:
        return function()
    except Exception as error:
        console.print(f"host time is not measured: {said(error)}", markup=False)
        return []


def lost(document: Document) -> Iterator[str]:
    """Where normpass was wrong or failed."""
    for each in (*document["cases"], *document["models"], *document["host"]):
        if {*each.get("wrong", {}), *each["failed"]} & {*NORMPASS, "case", "model"}:
            yield str(each.get("label") or each.get("model") or each.get("program"))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 where normpass was wrong or failed, 2 without a GPU."""
    options = parse(argv)
    if options.list:
        print("\n".join(case.label for case in cases_of(options)))
        if options.wants_models:
            print("\n".join(f"{name} training step" for name in MODELS))
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    if missing := no_gpu(options.device):
        console.print(missing, markup=False, highlight=False, soft_wrap=True)
        return NO_GPU
    try:
        run = Run(options, console)
    except (OSError, ValueError, KeyError) as error:
        console.print(f"cannot go on: {said(error)}", markup=False, highlight=False)
        return 1
    try:
        run.all()
    except KeyboardInterrupt:
        console.print("interrupted: what there is was written")
    tell(run.document, console)
    console.print(f"saved {run.path}")
    if plot(run.document, run.path.with_suffix(".png")):
        console.print(f"saved {run.path.with_suffix('.png')}")
    else:
        console.print("no plot: nothing was timed, or matplotlib is not there (the extra `bench`)")
    return 1 if any(lost(run.document)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
