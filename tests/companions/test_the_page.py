"""docs/companions.md: each of its programs runs, and normpass is asked for its norms in each."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from companions.loops import OPTIONS
from torch._dynamo.utils import counters

import normpass

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[2] / "docs" / "companions.md"
TEXT = PAGE.read_text("utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
PACKAGES = ("transformers", "accelerate", "lightning", "torchao")

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _as_it_is_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """In a folder of its own, with norms left to others that are as small as a page's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(OPTIONS, "least_bytes")
    yield
    normpass.unregister()
    if "accelerate" in sys.modules:
        state = importlib.import_module("accelerate.state")
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_of_the_page(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = PROGRAMS[number]
    for package in PACKAGES:
        if re.search(rf"^(import|from) {package}\b", program, flags=re.MULTILINE):
            pytest.importorskip(
                package, reason=f"{package} is not installed (the extra `companions`)"
            )
    name = f"companions_page_{number}"
    (tmp_path / f"{name}.py").write_text(program, "utf-8")
    names = vars(importlib.import_module(name))
    monkeypatch.delitem(sys.modules, name)
    assert any("norm" in key for key in counters["normpass"]), "no norm has come to normpass"
    model = names.get("model", names.get("module", names.get("blocks")))
    assert model is None or all(p.isfinite().all() for p in model.parameters())


def test_the_files_it_names_are_there() -> None:
    named = re.findall(r"`((?:docs|tests)/[\w./]+)`|\]\(([\w.]+\.md)\)", TEXT)
    files = [PAGE.parents[1] / path if path else PAGE.parent / link for path, link in named]
    assert len(files) >= 4
    assert not [file for file in files if not file.exists()]


@pytest.mark.parametrize("kind", [torch.nn.Sequential, torch.nn.LayerNorm])
def test_torchs_own_classes_are_not_compiled_in_place(kind: type[torch.nn.Module]) -> None:
    """Should this fail, torch has mended it, and the page need not warn of it any more."""
    module = kind(4) if kind is torch.nn.LayerNorm else kind(torch.nn.LayerNorm(4))
    module.compile(backend="normpass")
    module(torch.randn(3, 4, requires_grad=True))
    assert not counters["stats"]["unique_graphs"]
    assert not counters["normpass"]
