"""`normpass bench --ensembles` on small programs."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional as F

import normpass
from normpass.benchmarks import bench, ensembles

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {
    "models": partial(ensembles.ensemble, "BatchNorm", 8, models=2, batch=3, pixels=6),
    "norms": partial(
        ensembles.of_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), 2, 3, 4, channels=4
    ),
}
OF_EXAMPLES = {
    "images": partial(
        ensembles.per_sample, partial(ensembles.conv_net, "GroupNorm", 8), batch=3, pixels=6
    ),
    "words": partial(ensembles.of_words, 20, 64, 1, batch=3, tokens=5),
    "to images": partial(ensembles.of_images, partial(ensembles.UNet, 8), batch=3, pixels=8),
}


@pytest.mark.parametrize("name", OF_EXAMPLES)
def test_examples_have_gradients_of_their_own(name: str) -> None:
    gradients, (weights, inputs, targets) = OF_EXAMPLES[name]()
    every, last = (gradients(weights, inputs[k:], targets[k:]) for k in (0, 2))
    assert every.keys() == weights.keys()
    for key, found in every.items():
        assert found.shape == (3, *weights[key].shape)
        assert found.count_nonzero()
        torch.testing.assert_close(found[2:], last[key])


@pytest.mark.sweep
def test_what_is_right_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ensembles, "PROGRAMS", SMALL)
    options = ["--ensembles", "--repeats", "2", "--out", str(tmp_path), "--system-allocator"]
    assert bench.main(options) == 0
    found = json.loads((tmp_path / "cpu-ensembles.json").read_text())["programs"]
    assert found.keys() == SMALL.keys()
    for one in found.values():
        assert (
            one["seconds"].keys() == one["peak_bytes"].keys() == {"eager", "inductor", "normpass"}
        )
        assert one["speedup_over_the_better"] > 0
        assert not one["wrong"]


def test_what_is_wrong_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_all(program: Any) -> Any:
        function, args = program()
        doubled = lambda *a: {name: 2 * g for name, g in function(*a).items()}  # noqa: E731
        return {"eager": function, "normpass": doubled}, args

    monkeypatch.setattr(ensembles, "PROGRAMS", SMALL)
    monkeypatch.setattr(ensembles, "compile_all", compile_all)
    options = ["--ensembles", "models", "--repeats", "2", "--out", str(tmp_path)]
    assert bench.main([*options, "--system-allocator"]) == 1
    (one,) = json.loads((tmp_path / "cpu-ensembles.json").read_text())["programs"].values()
    assert one["wrong"].keys() == {"normpass"}
    assert one["seconds"].keys() == {"eager"}


def test_stock_is_not_measured_where_the_rules_are() -> None:
    with normpass.registered(), pytest.raises(RuntimeError, match="while normpass is registered"):
        ensembles.compile_all(SMALL["models"])
