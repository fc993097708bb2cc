"""What numbers depend on, to be saved beside them."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from normpass.backend.run.calibration import processor


def machine(device: str) -> dict[str, Any]:
    """Versions, processor, threads, date, and how busy the machine is."""
    cuda = torch.device(device).type == "cuda"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {
            "normpass": installed("normpass"),
            # Its own word: the package's version leaves the build out (2.15.0 for 2.15.0+cu132).
            "torch": torch.__version__,
            "triton": installed("triton"),
        },
        "device": device,
        "cpu": processor(),
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
    }


def installed(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
