"""What work costs on this machine, and whatever else a decision depends on.

`normpass bench --calibrate` writes what it measured to a file that is read here, once a process
and when the first region is weighed. Without it the shipped constants are in force (SHIPPED).
"""

from __future__ import annotations

import json
import logging
import os
import platform
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from normpass.backend.run.caches import caches_of, capability, multiprocessors, private_cache
from normpass.passes.cost import Calibration, Conditions, Costs

log = logging.getLogger(__name__)

VARIABLE = "NORMPASS_CALIBRATION"
# Of what the constants mean: a file of another one is foreign.
FORMAT = 1

# Of Zen 4 with AVX-512, torch 2.13. A launch is what a region of ours takes more than Inductor's
# loops between two sweeps of the last cache, where two cores are busy: less by far in a warm loop.
SHIPPED = Calibration(
    ours=Costs(
        launch=13e-6,
        memory=30e-12,
        cache=12.6e-12,
        column=0.0,
        truth=5.7e-9,
        row=2.0e-9,
        regroup=1.0e-9,
        functions=(
            ("exp", 0.104e-9),
            ("log", 0.489e-9),
            ("tanh", 0.156e-9),
            ("erf", 0.179e-9),
            ("sigmoid", 0.165e-9),
            ("sin", 0.210e-9),
            ("pow", 2.37e-9),
            ("div", 0.017e-9),
            ("sqrt", 0.084e-9),
            ("rsqrt", 0.184e-9),
        ),
    ),
    theirs=Costs(
        launch=1e-6,
        memory=30e-12,
        cache=12.6e-12,
        column=6.3e-12,
        truth=5.7e-9,
        row=1.4e-9,
        regroup=0.0,
        functions=(
            ("exp", 0.270e-9),
            ("log", 0.500e-9),
            ("tanh", 1.42e-9),
            ("erf", 0.492e-9),
            ("sigmoid", 0.346e-9),
            ("sin", 0.218e-9),
            ("pow", 2.37e-9),
            ("div", 0.017e-9),
            ("sqrt", 0.087e-9),
            ("rsqrt", 0.188e-9),
            ("welford", 0.062e-9),
        ),
    ),
)


def conditions_of(device: str) -> Conditions:
    """What decisions about a device's regions depend on, here."""
    if device == "cuda":
        here = caches_of(device), private_cache(), multiprocessors()
        return Conditions(*here, None, capability())
    return Conditions(caches_of(device), private_cache(), torch.get_num_threads(), calibration())


def path() -> Path:
    """Where calibrations lie: what the environment says, or a folder of the user's."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "normpass" / "calibration.json"


def processor() -> str:
    """The processor's name, as the system tells it: on ARM, which has none, by the numbers of who
    made its cores and of what they are.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    pairs = [(key.strip(), value.strip()) for key, _, value in (x.partition(":") for x in lines)]
    named = [value for key, value in pairs if key == "model name"]
    cores = dict.fromkeys(f"{k} {v}" for k, v in pairs if k in {"CPU implementer", "CPU part"})
    if not named and cores:
        named = [", ".join((platform.machine(), *cores))]
    return next(iter(named), platform.processor() or platform.machine())


@cache
def calibration() -> Calibration:
    """What is in force: this machine's calibration, or what is shipped."""
    try:
        file = path()
        if not file.exists():
            return SHIPPED
    except (OSError, RuntimeError) as error:  # a folder of somebody else's; no home
        log.info("no calibration is looked for: %s", error)
        return SHIPPED
    try:
        return read(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning(
            "the calibration in %s is not used: %s (normpass why calibration-not-used)", file, error
        )
        return SHIPPED


def save(measured: Calibration, file: Path) -> None:
    """Writes what was measured on this machine."""
    document = {"format": FORMAT, "processor": processor(), **asdict(measured)}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(file)


def read(file: Path) -> Calibration:
    """What a file says.

    Raises:
        ValueError: if it is broken, or of another machine.
    """
    document = json.loads(file.read_text())
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"expected a calibration of format {FORMAT}")
    if document.get("processor") != processor():
        raise ValueError(f"expected one of {processor()}, found {document.get('processor')}")
    return Calibration(_costs(document["ours"]), _costs(document["theirs"]))


def _costs(document: dict[str, Any]) -> Costs:
    functions = tuple((str(name), _positive(cost)) for name, cost in document["functions"])
    numbers = {name: _positive(value) for name, value in document.items() if name != "functions"}
    return Costs(**numbers, functions=functions)


def _positive(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"expected seconds, found {value!r}")
    return float(value)
