"""Which norms of the benchmark's models stay with Inductor, and why, as `explain` says it: under
snapshot in expect/refused/.
"""

from __future__ import annotations

import pytest
import refusals
from expecttest import ACCEPT
from snapshots import EXPECT, assert_snapshot

from normpass.benchmarks import zoo, zoo_libraries, zoo_own
from normpass.decomps import torch_versions

pytestmark = pytest.mark.skipif(
    torch_versions.RELEASE != refusals.TORCH, reason="the graphs of other versions of torch differ"
)


# The slowest, which a minute is for.
SLOW = {"convnext"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(model.name, marks=[pytest.mark.sweep] if model.name in SLOW else [])
        for model in zoo_own.MODELS
    ],
)
def test_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_snapshot(f"refused/{name}.txt", refusals.report(name, monkeypatch))


@pytest.mark.sweep
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [model.name for model in zoo_libraries.MODELS])
def test_of_libraries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = zoo.zoo()[name].package
    assert package is not None
    pytest.importorskip(package, reason=f"{package} is not installed (the extra `models`)")
    file, needed = EXPECT / "refused" / f"{name}.txt", refusals.made_with(name)
    if file.exists() and not ACCEPT and not file.read_text().startswith(f"# {needed}\n"):
        pytest.skip(f"{needed} is installed, and {file.name} was made with others")
    assert_snapshot(f"refused/{name}.txt", refusals.report(name, monkeypatch))
