"""The notebooks of examples/ are those that the scripts give, and they run."""

from __future__ import annotations

import ast
import importlib
from typing import TYPE_CHECKING, Any

import pytest

from normpass.examples.notebooks import build

if TYPE_CHECKING:
    from pathlib import Path

# What the test extra does not install, by the names with which scripts import it.
OPTIONAL = ("matgl", "opacus", "transformers")


def test_each_script_has_a_notebook_and_no_more() -> None:
    found = {path.stem for path in build.FOLDER.glob("*.ipynb")}
    assert found == set(build.SCRIPTS) == set(build.ARGUMENTS), f"to make them: {build.ACCEPT}"


@pytest.mark.parametrize("name", build.SCRIPTS)
def test_the_cells_are_those_of_the_script(name: str) -> None:
    found, expected = build.sources(build.read(name)), build.sources(build.notebook(name))
    assert found == expected, (
        f"{build.path_of(name).name} is not what {build.SCRIPTS[name].name} gives now; "
        f"to make it anew: {build.ACCEPT}"
    )


@pytest.mark.parametrize("name", build.SCRIPTS)
def test_what_it_printed_is_saved_without_traces_of_a_machine(name: str) -> None:
    cells = [cell for cell in build.read(name).cells if cell.cell_type == "code"]
    assert not any(cell.metadata for cell in cells)
    for output in (output for cell in cells for output in cell.outputs):
        build.tidied(output)
    assert cells[-1].outputs, f"nothing is saved of a run; to run it: {build.ACCEPT} ARGS={name}"
    assert cells[-1].outputs[-1].text.strip()


@pytest.mark.parametrize("name", build.SCRIPTS)
def test_the_first_cell_is_the_docstring(name: str) -> None:
    docstring = ast.get_docstring(ast.parse(build.SCRIPTS[name].read_text("utf-8")))
    assert docstring is not None
    (kind, text), *_, (last_kind, last) = build.sources(build.notebook(name))
    assert (kind, last_kind) == ("markdown", "code")
    assert text.startswith("# ")
    assert f"python examples/{name}.py" in text
    assert set(docstring.replace(".", "").split()) <= set(text.replace(".", "").split())
    called = ast.parse(last).body[0]
    assert isinstance(called, ast.Expr)
    assert isinstance(called.value, ast.Call)
    assert ast.literal_eval(called.value.args[0]) == list(build.ARGUMENTS[name])


def test_a_path_in_an_output_is_an_error() -> None:
    output = importlib.import_module("nbformat.v4").new_output
    kept = output("stream", name="stdout", text="1/2, and/or; python examples/maml.py: 3 ms")
    assert build.tidied(kept) == kept
    with pytest.raises(ValueError, match="expected no absolute path in an output, found '/home/"):
        build.tidied(output("stream", name="stdout", text="saved as /home/somebody/file.txt"))


def test_pieces_are_joined_and_warnings_left_out() -> None:
    """A kernel sends what is printed in as many pieces as the clock has it."""
    output = importlib.import_module("nbformat.v4").new_output
    pieces = [("stdout", "a\n"), ("stderr", "a warning"), ("stdout", "b\n")]
    (one,) = build.joined([output("stream", name=name, text=text) for name, text in pieces])
    assert (one.name, one.text) == ("stdout", "a\nb\n")


def test_a_script_without_its_last_cell_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "short.py"
    script.write_text('"""A title."""\n\n# %%\nprint(1)\n')
    monkeypatch.setitem(build.SCRIPTS, "short", script)
    with pytest.raises(ValueError, match=r"short: expected .* in a cell of its own, the last one"):
        build.notebook("short")


def imported(name: str) -> list[str]:
    """What a script imports and the test extra does not install."""
    text = build.SCRIPTS[name].read_text("utf-8")
    return [package for package in OPTIONAL if f"from {package}" in text]


# With all of its steps a notebook takes a minute; two in eager mode show that every cell runs.
@pytest.mark.one_in(len(build.SCRIPTS))
@pytest.mark.parametrize("name", build.SCRIPTS)
def test_a_notebook_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in imported(name):
        pytest.importorskip(package, reason=f"{package} is not installed (the extra `examples`)")
    monkeypatch.setitem(build.ARGUMENTS, name, ("--steps", "2", "--backend", "eager"))
    made: Any = build.executed(build.notebook(name))
    printed = made.cells[-1].outputs[-1].text
    assert "step 0: " in printed
    assert all(cell.execution_count for cell in made.cells if cell.cell_type == "code")
