"""What the README shows is so: its programs run, its commands, options, names and files exist."""

from __future__ import annotations

import ast
import re
import sys
import types
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import torch
from oracles import layer_norm as layer_norm_from_primitives
from page_names import called, resolve
from pages import README, ROOT, Page
from snapshots import assert_inline

import normpass
from normpass.__main__ import COMMANDS
from normpass.backend.options import Options

if TYPE_CHECKING:
    from pathlib import Path

# Blocks that are no program and no output: what they hold.
DIAGRAMS = ("your model\n            |  Dynamo",)
OUTPUTS = ("Sequential: 3 fused, 1 not.",)
PROGRAMS = ("normpass.explain(model, x)", "torch.compile(hessian(", "critic = ")

PENALTIES = Page("docs/gradient_penalties.md")
FUNCTIONS = Page("docs/autograd_functions.md")
DEVELOPING = Page("docs/developing.md")


def run(program: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """The names that a program leaves behind, and the value of its last line."""
    file = folder / "program.py"
    file.write_text(program)
    tree = ast.parse(program, str(file))
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    # Dynamo looks up the module of what it compiles, by its name and once in a process.
    module = sys.modules[folder.name] = types.ModuleType(folder.name)
    names = vars(module)
    exec(compile(tree, str(file), "exec"), names)
    return names, eval(compile(ast.Expression(last.value), str(file), "eval"), names)


# --- the blocks ---------------------------------------------------------------------------------


def test_every_block_is_run_or_checked() -> None:
    known = {"python": PROGRAMS, "text": DIAGRAMS + OUTPUTS}
    for block in README.blocks:
        if block.language != "shell":
            held = [part for part in known.get(block.language, ()) if part in block.text]
            assert len(held) == 1, f"line {block.line} of the README: no test knows this block"
    for language, parts in known.items():
        for part in parts:
            README.block(part, language)


def test_the_first_example_prints_what_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(README.block(PROGRAMS[0]).text, tmp_path)
    assert capsys.readouterr().out.strip() == README.block(OUTPUTS[0], "text").text


def test_the_difference_is_shown_as_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = DEVELOPING.block("To accept the new output:", "text").text
    file, name = re.findall(r"'([\w/.]+)::(\w+)'", shown)[0]
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{file}::{name} (call)")
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    monkeypatch.setattr("expecttest.ACCEPT", None)
    test = (ROOT / file).read_text().partition(f"def {name}()")[2]
    expect = test.split('"""')[1].removeprefix("\\\n")
    old, new = (re.findall(rf"^E +\{sign}(\w.*)", shown, re.MULTILINE) for sign in "-+")
    with pytest.raises(AssertionError) as error:
        assert_inline(expect.replace(*old, *new), expect)
    said = "\n".join(f"E       {line}".rstrip() for line in str(error.value).splitlines())
    # What pytest says first, and blank lines but one, are left out.
    assert re.sub(r"(\nE)+\n", "\nE\n", said).endswith(shown)


# Inductor's own lowering of aten.diagonal calls what torch has deprecated.
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning")
def test_the_hessian_is_right(tmp_path: Path) -> None:
    try:
        names, hessian = run(README.block(PROGRAMS[1]).text, tmp_path)
    finally:
        normpass.unregister()
    x = names["x"].double()

    def exact(x: torch.Tensor) -> torch.Tensor:
        return layer_norm_from_primitives(x, (5,)).square().sum()

    expected = torch.autograd.functional.hessian(exact, x)
    torch.testing.assert_close(hessian.double(), expected, rtol=1e-4, atol=1e-4)


def test_the_gradient_penalty_is_right(tmp_path: Path) -> None:
    names, _ = run(README.block(PROGRAMS[2]).text, tmp_path)
    critic, x = names["critic"]._orig_mod, names["x"]
    found = [p.grad for p in critic.parameters()]
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    right = torch.autograd.grad(penalty, list(critic.parameters()), allow_unused=True)
    torch.testing.assert_close(found, list(right), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"),
    reason="this version of torch does not trace torch.autograd.grad",
)
def test_energies_and_forces_are_right(tmp_path: Path) -> None:
    with torch._dynamo.config.patch(trace_autograd_ops=False):  # which the program sets
        names, _ = run(PENALTIES.block("def energy_and_forces(").text, tmp_path)
    leaves = [names["x"], names["w"]]
    found = [leaf.grad for leaf in leaves]
    x, w = (leaf.detach().double().requires_grad_() for leaf in leaves)
    energy = layer_norm_from_primitives(torch.tanh(x @ w), (8,)).square().sum()
    (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    right = torch.autograd.grad(energy + slope.square().sum(), (x, w))
    torch.testing.assert_close([g.double() for g in found], list(right), rtol=1e-3, atol=1e-3)


# Dynamo makes an instance of Function to trace a call.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_clipped_gradient_is_right(tmp_path: Path) -> None:
    try:
        names, slope = run(FUNCTIONS.block("class Clipped(").text, tmp_path)
    finally:
        normpass.unregister()
    torch.testing.assert_close(slope, (2 * names["x"]).clamp(-1, 1))


def test_every_command_is_shown() -> None:
    text = README.text
    missing = [name for name in COMMANDS if not re.search(rf"(normpass|make) {name}\b", text)]
    assert not missing


# --- names and tables ---------------------------------------------------------------------------


def test_decorators_in_the_text_are_there() -> None:
    for decorator in re.findall(r"`@(\w+)`", DEVELOPING.prose):
        home = "manual" if decorator == "manual" else "registry"
        resolve(f"normpass.decomps.{home}.{decorator}")


def test_the_table_of_calls() -> None:
    shown = {
        called(code).replace("rule.", "rule ").split()[0]  # one name, with several decorators
        for row in README.table("call", "what it does")
        for code in re.findall(r"`([^`]+)`", row[0])
    }
    # Report is what explain returns.
    assert shown == {"torch.compile", *normpass.__all__} - {"Report", "__version__"}


def test_the_calls_in_the_docstring_of_the_package() -> None:
    lines = [line for line in (normpass.__doc__ or "").splitlines() if line.startswith("    ")]
    assert len(lines) == 3
    assert {called(re.split(r" {3,}", line.strip())[0]) for line in lines} == {
        "torch.compile",
        "register",
        "explain",
    }


@pytest.mark.parametrize(
    "wrong",
    ["normpass.explian(f)", "normpass.register(eager=True)", "vjp()", "normpass.fuse(gm, fast=1)"],
)
def test_a_call_that_is_not_there_is_found(wrong: str) -> None:
    with pytest.raises((AssertionError, AttributeError, ImportError, TypeError)):
        called(wrong)


def test_the_table_of_options() -> None:
    rows = README.table("option", "default", "meaning")
    shown = {name.strip("`"): ast.literal_eval(default.strip("`")) for name, default, _ in rows}
    defaults = Options()
    assert shown == {option.name: getattr(defaults, option.name) for option in fields(Options)}
    meanings = {name.strip("`"): meaning for name, _, meaning in rows}
    for option in fields(Options):
        variable = option.metadata.get("env", "")
        assert variable in meanings[option.name]
