"""`normpass bench --models`: its models, and what it calls right."""

from __future__ import annotations

import math
import signal
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from normpass.backend import inductor_mistakes
from normpass.benchmarks import (
    exact,
    gradients,
    model_steps,
    steps,
    zoo,
    zoo_libraries,
    zoo_own,
)
from normpass.benchmarks.cases import DTYPES
from normpass.benchmarks.steps import BACKENDS, Job
from normpass.benchmarks.zoo import Case, Made, Model

if TYPE_CHECKING:
    from collections.abc import Callable

OWN = [model.name for model in zoo_own.MODELS]
OF_LIBRARIES = [model.name for model in zoo_libraries.MODELS]
MLP = Case("mlp", "float32", "contiguous")
WITHOUT_INDUCTOR = {"inductor": "aot_eager", "normpass": "normpass"}


def job(case: Case = MLP, **fields: Any) -> Job:
    return Job(case, "cpu", **{"repeats": 2, "steady": False, "tiny": True, **fields})


@pytest.fixture
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "warm_up_compiler", lambda device: None)


# ---- the models


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OWN)
def test_models_step_in_eager(name: str, dtype: str) -> None:
    for case in zoo.select([name], [dtype]):
        made = case.build("cpu", tiny=True)
        found = gradients.gradients(made, gradients.step_of(job(case).loss, made))
        assert found.keys() == {"loss", *(name for name, _ in made.module.named_parameters())}
        assert all(value.isfinite().all() for value in found.values())
        assert all(p.dtype == DTYPES[dtype] for p in made.module.parameters())
        assert made.module.training


@pytest.mark.parametrize("name", OWN)
def test_the_check_allows_other_rounding(name: str) -> None:
    case = Case(name, "float32", "contiguous")
    made = case.build("cpu", tiny=True)
    right = gradients.oracle(job(case).loss, made)
    allowed = gradients.rounding_errors(job(case).loss, made, right)
    found = gradients.gradients(made, gradients.step_of(job(case).loss, made))
    errors = gradients.relative_errors(found, right)
    assert gradients.judge(errors, allowed, right, torch.float32) is None
    assert all(allowed[name] >= error for name, error in errors.items())
    assert max(allowed.values()) < 1e-3


def test_models_start_the_same() -> None:
    first, second = (MLP.build("cpu", tiny=True) for _ in range(2))
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first.inputs["x"], second.inputs["x"])


def test_images_and_weights_have_the_memory_format() -> None:
    made = Case("resnet", "bfloat16", "channels_last").build("cpu", tiny=True)
    weight, images = made.module.stem[0].weight, made.inputs["images"]
    for tensor in (weight, images):
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()
    assert made.inputs["labels"].dtype == torch.int64


def test_the_decoders_are_causal() -> None:
    for name in ("llama", "gpt"):
        made = Case(name, "float32", "contiguous").build("cpu", tiny=True)
        words = made.inputs["words"]
        changed = words.clone()
        changed[:, 9:] = (changed[:, 9:] + 1) % 50
        torch.testing.assert_close(made.module(words)[:, :9], made.module(changed)[:, :9])
        assert not torch.equal(made.module(words)[:, 9:], made.module(changed)[:, 9:])


def test_cases_are_selected() -> None:
    everything = zoo.select()
    assert {case.model for case in everything} == {*OWN, *OF_LIBRARIES}
    labels = [case.label for case in zoo.select(["resnet", "mlp"], ["bfloat16"])]
    assert labels == ["resnet bfloat16", "resnet bfloat16 channels_last", "mlp bfloat16"]
    assert zoo.select(["mlp"], formats=["channels_last"]) == []


@pytest.mark.sweep
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_models_of_libraries(name: str, no_warm_up: None) -> None:
    package = zoo.zoo()[name].package
    assert package is not None
    pytest.importorskip(package, reason=f"{package} is not installed (the extra `models`)")
    for case in zoo.select([name]):
        made = case.build("cpu", tiny=True)
        step = gradients.step_of(job(case).loss, made)
        assert all(value.isfinite().all() for value in gradients.gradients(made, step).values())
    found = steps.measure(job(Case(name, "float32", "contiguous")), WITHOUT_INDUCTOR)
    assert found["failed"] == found["wrong"] == {}
    assert found["fused"]


# ---- right or wrong


@pytest.mark.sweep
def test_a_model_is_measured_in_a_process_of_its_own() -> None:
    found = steps.in_fresh_process(job())
    assert found["failed"] == found["wrong"] == {}
    assert found["faults"] == []
    assert found["model"] == "mlp"
    assert found["compiled_first"] == "inductor"
    assert set(found["seconds"]) == {"eager", "inductor", "normpass", "inductor again"}
    assert set(found["peak_bytes"]) == {"eager", "inductor", "normpass"}
    assert all(seconds > 0 for seconds in found["compile_seconds"].values())
    assert {"norm": "layer_norm", "module": "1", "phase": "forward"} in found["fused"]


def test_a_model_is_right_under_normpass(no_warm_up: None) -> None:
    case = Case("llama", "float32", "contiguous")
    found = steps.measure(job(case, stock_first=False), WITHOUT_INDUCTOR)
    assert found["failed"] == found["wrong"] == {}
    assert found["compiled_first"] == "normpass"
    assert found["errors"]["normpass"]["gradient"] < 1e-5
    assert found["fused"]
    assert all(row["reason"] for row in found["refused"])
    # Where a norm stands in a function, its file is named without a folder.
    rows = (*found["fused"], *found["refused"])
    assert any(row["module"].startswith("zoo_own.py:") for row in rows)


def backward_off_by(factor: float) -> Callable[..., Any]:
    """A backend whose gradients are off by a factor, its loss right."""

    def forward(graph: torch.fx.GraphModule, inputs: object) -> Any:
        return make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, inputs: object) -> Any:
        return make_boxed_func(lambda *args: [g if g is None else g * factor for g in graph(*args)])

    return aot_autograd(fw_compiler=forward, bw_compiler=backward)


def test_a_wrong_gradient_is_told_and_not_timed(no_warm_up: None) -> None:
    backends = {"inductor": "aot_eager", "normpass": backward_off_by(1.0001)}
    found = steps.measure(job(), backends)
    assert found["failed"] == {}
    assert list(found["wrong"]) == ["normpass"]
    assert "away from float64, at most" in found["wrong"]["normpass"]
    assert not found["wrong"]["normpass"].startswith("loss")
    assert set(found["seconds"]) == {"eager", "inductor", "inductor again"}
    assert model_steps.ratios(found) is None


def test_what_does_not_compile_is_told(no_warm_up: None) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: object) -> Any:
        raise ValueError("no such thing")

    found = steps.measure(job(), {"inductor": "aot_eager", "normpass": broken})
    assert list(found["failed"]) == ["normpass"]
    assert "no such thing" in found["failed"]["normpass"]
    assert set(found["seconds"]) == {"eager", "inductor", "inductor again"}


class Dropping(nn.Module):
    """Draws random numbers by a module and by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.attention_dropout = 0.25
        self.config = Namespace(attn_pdrop=0.125)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.linear(x))
        return nn.functional.dropout(y, self.attention_dropout, self.training)


def dropping() -> Made:
    return Made(Dropping(), {"x": torch.randn(4, 8), "target": torch.zeros(4, 8)})


def test_models_with_dropout_are_compared_without(
    no_warm_up: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"dropping": Model("dropping", dropping, zoo_own.regress, {}, {})}
    monkeypatch.setattr(zoo, "zoo", lambda: models)
    monkeypatch.setattr(steps, "zoo", lambda: models)
    backends = {"inductor": "aot_eager", "normpass": "aot_eager"}
    found = steps.measure(job(Case("dropping", "float32", "contiguous")), backends)
    assert found["random"]
    assert found["failed"] == found["wrong"] == {}
    assert found["errors"]["normpass"]["gradient"] < 1e-5
    assert "inductor again" in found["seconds"]


def test_dropout_is_off_for_a_while() -> None:
    model = Dropping()
    with exact.without_dropout(model):
        assert (model.drop.p, model.attention_dropout, model.config.attn_pdrop) == (0, 0, 0)
    assert (model.drop.p, model.attention_dropout, model.config.attn_pdrop) == (0.5, 0.25, 0.125)


def test_relative_errors_of_gradients() -> None:
    right = {"loss": torch.tensor(4.0), "a": torch.tensor([2.0, -100.0]), "b": torch.tensor([0.0])}
    right = {name: value.double() for name, value in right.items()}
    got = {"loss": torch.tensor(5.0), "a": torch.tensor([3.0, -100.0]), "b": torch.tensor([5e-4])}
    errors = gradients.relative_errors(got, right)
    # b is measured against a thousandth of a.
    assert errors == pytest.approx({"loss": 0.25, "a": 0.01, "b": 0.005})
    assert gradients.worst(errors) == {"loss": 0.25, "gradient": pytest.approx(0.01), "of": "a"}
    for bad in (torch.tensor([1.0]), torch.tensor([1.0, math.nan])):
        assert gradients.relative_errors({**got, "a": bad}, right)["a"] == math.inf
    del got["b"]  # zeros
    assert gradients.relative_errors(got, right)["b"] == 0
    del got["a"]
    assert gradients.relative_errors(got, right)["a"] == math.inf
    assert gradients.relative_errors({**got, "c": torch.zeros(2)}, right)["c"] == 0
    assert gradients.relative_errors({**got, "c": torch.ones(2)}, right)["c"] == math.inf


def test_the_verdict_on_gradients() -> None:
    # The gradient of d is all rounding: eager's error in it says nothing about the others.
    right = {name: torch.ones(2) for name in ("loss", "a", "b", "c")} | {"d": torch.zeros(2)}
    eager = {"loss": 1e-8, "a": 1e-6, "b": 2e-6, "c": 0.0, "d": 1e-3}

    def judged(**errors: float) -> str | None:
        return gradients.judge(errors, eager, right, torch.float32)

    assert judged(loss=1e-6, a=7e-6, b=7e-6, c=7e-6, d=3e-3, e=0.0) is None
    assert judged(loss=2e-6) == "loss is 2.0e-06 away from float64, at most 1.9e-06 is right"
    assert "a is 9.0e-06 away from float64, at most 8.0e-06" in str(judged(a=9e-6))
    assert "c is 9.0e-06" in str(judged(c=9e-6))
    assert "c is nan" in str(judged(c=math.nan))
    assert "e is inf" in str(judged(e=math.inf))
    eager["b"] = math.inf
    assert "eager's own gradients" in str(judged(a=0.0))


def test_stock_is_compiled_with_its_mistakes() -> None:
    keys = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        keys.append(inductor_mistakes.key())
        return graph.forward

    made = MLP.build("cpu", tiny=True)
    inductor_mistakes.uninstall()
    unmended = inductor_mistakes.key()
    for name in ("normpass", "inductor"):
        inductor_mistakes.install()
        steps.compile_step(job(), made, dict.fromkeys(BACKENDS, backend), name)
    assert keys[-1] == unmended
    inductor_mistakes.install()
    assert keys[0] == inductor_mistakes.key()


def test_a_process_that_fails_is_told() -> None:
    found = steps.in_fresh_process(job(Case("no_such_model", "float32", "contiguous")))
    assert found["model"] == "no_such_model"
    assert "exit status 1" in found["failed"]["case"]
    assert "KeyError: 'no_such_model'" in found["failed"]["case"]
    text = steps.end_of(-signal.SIGSEGV, "one\n\ntwo\n")
    assert text == "killed by SIGSEGV\none\ntwo"
