"""What caches know rules by: the text of whoever wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from normpass.decomps import digest, registry

if TYPE_CHECKING:
    from pathlib import Path

# Rules of each decorator, whose function stands in some other file of ours once it is registered.
BEGINNING = "import torch\nfrom normpass.decomps.conventions import Result, like\n"
RULES = {
    "register_rule": """
from normpass.decomps.registry import register_rule
@register_rule("vjp", name="own", source="mine", shapes="x: *n -> *n")
def own(x):
    return FACTOR * x
""",
    "decomposition": """
from normpass.decomps.registry import decomposition
@decomposition(
    torch.ops.aten.softplus.default, source="mine", shapes="x: *n -> *n",
    results=(Result(like("self")),),
)
def own(x, beta, threshold):
    return FACTOR * x
""",
    "slopes": """
from normpass.decomps.registry import slopes
slopes({"aten.softplus.default": lambda x: FACTOR * x}, source="mine")
""",
}


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty registry for the length of a test."""
    monkeypatch.setattr(registry, "_RULES", {})
    monkeypatch.setattr(registry, "_ROOMS", ())


def digest_with(file: str, text: str) -> str:
    registry._RULES.clear()
    exec(compile(text, file, "exec"), {})
    return digest.of_rules()


@pytest.mark.parametrize("decorator", RULES)
def test_another_text_is_another_digest(decorator: str, tmp_path: Path) -> None:
    def saved(factor: int) -> str:
        file, text = tmp_path / "own.py", BEGINNING + RULES[decorator]
        file.write_text(text.replace("FACTOR", str(factor)))
        return digest_with(str(file), file.read_text())

    ours = digest.of_rules()
    first = saved(3)
    assert first != ours
    assert saved(3) == first
    assert saved(5) != first


def test_what_is_typed_at_a_prompt_is_found_by_this_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (BEGINNING + RULES["slopes"]).replace("FACTOR", "3")
    here = digest_with("<stdin>", text)
    assert digest_with("<stdin>", text) == here
    monkeypatch.setattr(digest, "_THIS_PROCESS", "another")
    assert digest_with("<stdin>", text) != here


def test_our_own_rules_are_known_by_our_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert registry.rules()
    assert not digest._of_others()
