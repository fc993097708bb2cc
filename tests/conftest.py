"""What every test gets: a private compiler cache, a clean Dynamo, a fixed seed.

The environment is set here, at import, before any test module imports torch.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING, ClassVar

import pytest
import sampling

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OWNER = "NORMPASS_TEST_CACHE_OWNER"

# One cache folder for the whole run, shared by the workers of pytest-xdist, which inherit the
# environment: the user's own cache is neither used nor filled.
if OWNER not in os.environ:
    os.environ[OWNER] = str(os.getpid())
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="normpass-tests-")
# Decisions are those of the shipped constants, whatever this machine's user has measured.
os.environ["NORMPASS_CALIBRATION"] = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "none")
# Programs are looked through after every pass.
os.environ.setdefault("NORMPASS_VERIFY", "1")
# The graphs of tests are small: a pool of compiling processes costs more than it saves.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: threads that wait must not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class Unfused(logging.Handler):
    """The warnings of kernels that could not be built: their regions run all the same, and right,
    so that no test of numbers would notice.
    """

    seen: ClassVar[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "could not be built: " in message:
            self.seen.append(message)


for _runner in ("runtime", "gpu_kernel"):
    logging.getLogger(f"normpass.backend.run.{_runner}").addHandler(Unfused())


def pytest_unconfigure() -> None:
    """Remove the cache folder, in the process that made it."""
    if os.environ.get(OWNER) == str(os.getpid()):
        shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves to the sweep what `one_in` leaves out, unless a variant is asked for by its name."""
    if not any("[" in argument for argument in config.args):
        sampling.mark(items, pytest.mark.sweep)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where there is none, and say so."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device and there is none")


@pytest.fixture(autouse=True)
def _clean_compiler() -> Iterator[None]:
    """No compiled code, counters, registration or random state of one test reaches the next."""
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        import torch._dynamo.utils

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    if "normpass.passes.faults" in sys.modules:
        from normpass.passes import faults

        seen = faults.reported()
        faults.forget()
        assert not seen, f"faults of ours, survived: {seen}"
    unfused = list(Unfused.seen)
    Unfused.seen.clear()
    assert not unfused, unfused
    if "torch" in sys.modules:
        import torch

        # What fails in the middle of forward mode can leave its level open (torch's own jvp does so
        # where AOTAutograd refuses a graph): eager mode then refuses all that the tests ask of it.
        with torch.autograd.forward_ad.dual_level():
            pass


@pytest.fixture
def faults_are_meant(_clean_compiler: None) -> Iterator[None]:
    """For tests that break something of ours: what is reported does not fail them, nor what could
    not be built.
    """
    yield
    from normpass.passes import faults

    faults.forget()
    Unfused.seen.clear()


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for one test that counts what is compiled or found there."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def compiler_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache for what Triton compiles."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 is set: nothing compiles in this process")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
