"""Gradients of whole models of other libraries against eager, in float64, parameter by parameter.

`make models` runs them all; they are skipped where the extra `models` is not installed.
"""

from __future__ import annotations

from typing import Any

import pytest
from model_families import DIFFUSERS, TRANSFORMERS, Family, compare, wrong

from normpass.backend import inductor_mistakes
from normpass.passes import saved

ALL_REGIONS = {"least_bytes": 0}
ALL_RECOMPUTED = {**ALL_REGIONS, "recompute": True}
OPTIONS = [
    pytest.param({}, id="default"),
    pytest.param(ALL_REGIONS, id="all-regions"),
    pytest.param(ALL_RECOMPUTED, id="all-recomputed"),
]


@pytest.fixture(autouse=True)
def whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are small: what is not worth it at their size is computed again all the same."""
    monkeypatch.setattr(saved, "LEAST_BYTES", 0)
    monkeypatch.setattr(saved, "LEAST_WORK", 0)


def need(family: Family) -> None:
    pytest.importorskip(
        family.package, reason=f"{family.package} is not installed (the extra `models`)"
    )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", DIFFUSERS)
def test_gradients_of_diffusers(name: str, options: dict[str, Any]) -> None:
    need(DIFFUSERS[name])
    assert not wrong(compare(DIFFUSERS[name], options=options))


@pytest.mark.filterwarnings("default")
@pytest.mark.sweep
@pytest.mark.parametrize("options", OPTIONS[1:])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_gradients_of_transformers(name: str, options: dict[str, Any]) -> None:
    need(TRANSFORMERS[name])
    assert not wrong(compare(TRANSFORMERS[name], options=options))


@pytest.mark.filterwarnings("default")
def test_a_model_that_inductor_gets_wrong() -> None:
    """Stock's UNet2DConditionModel without what mends pytorch issue 185509."""
    family = DIFFUSERS["UNet2DConditionModel"]
    need(family)
    (mistake,) = (m for m in inductor_mistakes.MISTAKES if m.issue == 185509)
    if not mistake.concerns(inductor_mistakes.version()):
        pytest.skip(f"pytorch issue {mistake.issue} is fixed in torch {mistake.fixed}")
    with inductor_mistakes.without(mistake.name):
        assert wrong(compare(family, "inductor"), 1e-3)
