"""The registry: what a rule must have, what is asked of it, and what the errors say."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from samples import tensor_names

from normpass.decomps import registry
from normpass.decomps.conventions import Result, like
from normpass.decomps.registry import (
    KINDS,
    Rule,
    batch_rule,
    decomposition,
    decompositions,
    derivative,
    register_rule,
    rules,
)
from normpass.decomps.shapes import parse

aten = torch.ops.aten


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty registry for the length of a test."""
    monkeypatch.setattr(registry, "_RULES", {})
    monkeypatch.setattr(registry, "_ROOMS", ())


def names_on_the_left(rule: Rule) -> list[str]:
    return list(parse(rule.shapes).arguments)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule.kind}:{rule.name}")
def test_every_rule_is_complete(rule: Rule) -> None:
    assert rule.kind in KINDS
    assert re.search(r"\w+\.(cpp|cu|py|yaml): \w+", rule.source), "source is 'file: function'"
    if rule.op is not None:
        assert names_on_the_left(rule) == tensor_names(rule), "shapes name the parameters"
    assert inspect.unwrap(rule.function).__doc__, "the mathematics is in the docstring"
    if rule.kind == "decomposition":
        assert rule.op is not None
        results = rule.shapes.split("->")[1].split(",")
        assert len(results) == len(rule.op._schema.returns)


def test_the_operators_of_the_norms_are_there() -> None:
    expected = {
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten._fused_rms_norm.default,
        aten._fused_rms_norm_backward.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.native_batch_norm_backward.default,
        aten.batch_norm_backward.default,
        aten.cudnn_batch_norm_backward.default,
        aten.miopen_batch_norm_backward.default,
        aten._safe_softmax.default,
        aten._weight_norm_interface_backward.default,
    }
    found = {op for op in decompositions() if op.namespace == "aten"}
    assert found == expected, "a new decomposition is entered here too"


def test_the_table_is_fresh() -> None:
    decompositions().clear()
    assert decompositions()


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_of_each_kind(kind: registry.Kind) -> None:
    @register_rule(kind, aten.tanh.default, "tanh", source="a.cpp: f", shapes="x: *n -> y: *n")
    def rule(x: torch.Tensor) -> torch.Tensor:
        return x

    (found,) = rules()
    assert found.function is rule
    assert found(3) == 3
    assert (found.kind, found.op, found.name) == (kind, aten.tanh.default, "tanh")


@pytest.mark.usefixtures("scratch")
def test_lookup() -> None:
    @register_rule("batching", aten.tanh.default, source="a.cpp: f", shapes="x: *n -> y: *n")
    def batched(info: object, in_dims: object, x: object) -> str:
        return "batched"

    @register_rule("double_backward", name="tanh_double_backward", source="a", shapes="x -> y")
    def twice(x: object) -> str:
        return "twice"

    assert batch_rule(aten.tanh.default)(None, (0,), 1) == "batched"
    assert batch_rule(aten.tanh) is batch_rule(aten.tanh.default)
    assert derivative("tanh_double_backward")(1) == "twice"


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize(
    ("source", "shapes", "name", "message"),
    [
        ("", "x -> y", "f", "names no source"),
        ("a.cpp: f", "", "f", "needs shapes such as"),
        ("a.cpp: f", "x y", "f", "found 'x y'"),
        ("a.cpp: f", "x -> y", "", "needs an op or a name"),
    ],
)
def test_an_incomplete_rule_is_an_error(source: str, shapes: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register_rule("vjp", name=name, source=source, shapes=shapes)(lambda x: x)
    assert rules() == ()


@pytest.mark.usefixtures("scratch")
def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"one of decomposition, autograd, .*found 'vpj'"):
        register_rule("vpj", name="f", source="a", shapes="x -> y")(abs)  # type: ignore[arg-type]


@pytest.mark.usefixtures("scratch")
def test_the_same_rule_twice_names_both_places() -> None:
    def first(x: object) -> object:
        return x

    def second(x: object) -> object:
        return x

    enter = register_rule("vjp", name="f", source="a.cpp: f", shapes="x -> y")
    enter(first)
    register_rule("jvp", name="f", source="a.cpp: f", shapes="x -> y")(first)
    places = [f"{__file__}:{f.__code__.co_firstlineno}" for f in (first, second)]
    with pytest.raises(ValueError, match=".*".join(map(re.escape, places))):
        enter(second)
    assert len(rules()) == 2


def test_asking_for_what_is_not_there() -> None:
    with pytest.raises(KeyError, match=r"no batching rule named 'aten\.tanh\.default"):
        batch_rule(aten.tanh)
    with pytest.raises(KeyError, match="no derivative formula named 'layer_norm_double_backwar'"):
        derivative("layer_norm_double_backwar")


@pytest.mark.usefixtures("scratch")
def test_near_matches_are_listed() -> None:
    register_rule("vjp", name="layer_norm_backward", source="a", shapes="x -> y")(abs)
    with pytest.raises(KeyError, match="near matches: layer_norm_backward"):
        derivative("layer_norm_backwards")
    with pytest.raises(KeyError, match="none of the 1 registered has a similar name"):
        derivative("qr")


@pytest.mark.usefixtures("scratch")
def test_a_decomposition_has_to_fit_the_schema() -> None:
    enter = decomposition(
        aten.tanh.default, source="a", shapes="x -> y", results=[Result(like("self"))]
    )
    with pytest.raises(ValueError, match=r"aten::tanh takes \(self\).*formula takes \(x, y\)"):
        enter(lambda x, y: x)


@pytest.mark.usefixtures("scratch")
def test_an_operator_that_this_torch_lacks_has_no_rule() -> None:
    enter = decomposition("aten.no_such_norm.default", source="a", shapes="x -> y", results=[])
    assert enter(abs) is abs
    assert rules() == ()
    with pytest.raises(ValueError, match="expected the name of an overload"):
        decomposition("aten.tanh", source="a", shapes="x -> y", results=[])(abs)
