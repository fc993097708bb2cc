"""What the README shows is so: its programs run, its commands, options, names and files exist."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import itertools
import re
import shlex
import subprocess
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import readme
import torch
from oracles import layer_norm as layer_norm_from_primitives
from snapshots import assert_inline

import normpass
from normpass.__main__ import COMMANDS, main
from normpass.backend.options import Options
from normpass.backend.program import verify

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

# Blocks that are no program and no output: what they hold.
DIAGRAMS = ("your model\n            |  Dynamo",)
OUTPUTS = ("Sequential: 3 fused, 1 not.", "To accept the new output:")
PROGRAMS = (
    "normpass.explain(model, x)",
    "torch.compile(hessian(",
    "@decomposition(",
    "critic = ",
    "def energy_and_forces(",
    "class Clipped(",
)

# In backticks, and for a reader to fill in or for a command to make.
STAND_INS = {"NAME.py", "NAME_leaves.py", "__init__.py", "decomps/norms/weight.py"}
# Variables of other programs, which the README sets.
VARIABLES = {"EXPECTTEST_ACCEPT", "TORCH_LOGS"}


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
    for block in readme.blocks():
        if block.language != "shell":
            held = [part for part in known.get(block.language, ()) if part in block.text]
            assert len(held) == 1, f"line {block.line} of the README: no test knows this block"
    for language, parts in known.items():
        for part in parts:
            readme.block(part, language)


def test_the_first_example_prints_what_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(readme.block(PROGRAMS[0]).text, tmp_path)
    assert capsys.readouterr().out.strip() == readme.block(OUTPUTS[0], "text").text


def test_the_difference_is_shown_as_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = readme.block(OUTPUTS[1], "text").text
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
        names, hessian = run(readme.block(PROGRAMS[1]).text, tmp_path)
    finally:
        normpass.unregister()
    x = names["x"].double()

    def exact(x: torch.Tensor) -> torch.Tensor:
        return layer_norm_from_primitives(x, (5,)).square().sum()

    expected = torch.autograd.functional.hessian(exact, x)
    torch.testing.assert_close(hessian.double(), expected, rtol=1e-4, atol=1e-4)


def test_the_gradient_penalty_is_right(tmp_path: Path) -> None:
    names, _ = run(readme.block(PROGRAMS[3]).text, tmp_path)
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
        names, _ = run(readme.block(PROGRAMS[4]).text, tmp_path)
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
        names, slope = run(readme.block(PROGRAMS[5]).text, tmp_path)
    finally:
        normpass.unregister()
    torch.testing.assert_close(slope, (2 * names["x"]).clamp(-1, 1))


# --- commands -----------------------------------------------------------------------------------


@functools.cache
def targets() -> dict[str, str]:
    """The targets of the Makefile, each with the line of its recipe that takes ARGS, or with ""."""
    found = {}
    for name, recipe in re.findall(
        r"^([a-z]+):(?!=).*\n((?:\t.*\n|\n(?=\t))*)", MAKEFILE, re.MULTILINE
    ):
        lines = recipe.replace("\\\n", " ").splitlines()
        found[name] = next((line.strip() for line in lines if "$(ARGS)" in line), "")
    return found


@functools.cache
def help_of(*command: str) -> str:
    """What `COMMAND --help` prints, for a command of ours, pytest or a script of the tests."""
    if command[0] == "normpass":
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([*command[1:], "--help"])
        return said.getvalue()
    start = ["-m", "pytest"] if command[0] == "pytest" else []
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *start, *command[1:], "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def command_of(target: str) -> tuple[str, ...]:
    """What `make TARGET ARGS=...` hands its arguments to."""
    words = shlex.split(targets()[target].partition("$(BIN)/")[2])
    return tuple(itertools.takewhile(lambda word: not word.startswith(("-", "$")), words))


def check_options(words: Sequence[str], *commands: tuple[str, ...]) -> None:
    """One of the commands takes all options among these words."""
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    for option in options:
        pattern = re.compile(rf"(?<![\w-]){re.escape(option)}(?![\w-])")
        assert any(pattern.search(help_of(*command)) for command in commands), option


def check_variable(name: str) -> None:
    ours = {option.metadata.get("env") for option in fields(Options)} | {verify.VARIABLE}
    known = name in ours | VARIABLES or re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE)
    assert known, f"{name} is no variable of normpass or of the Makefile"


def check_make(words: Sequence[str]) -> None:
    named = [word for word in words if "=" not in word]
    assert set(named) <= targets().keys()
    for name, _, value in (word.partition("=") for word in words if "=" in word):
        check_variable(name)
        if name == "ARGS":
            taking = [command_of(target) for target in named or targets() if targets()[target]]
            check_options(shlex.split(value), *taking)


def check_command(text: str) -> None:
    """Raises AssertionError unless what a user is told to type is there."""
    words = shlex.split(text, comments=True)
    while words and (name := re.match(r"([A-Z_]+)=", words[0])):
        check_variable(name[1])
        if name[1] == "ARGS":
            check_make(words[:1])
        del words[0]
    if not words:
        return
    program, *rest = words
    if program == "make":
        check_make(rest)
    elif program == "normpass":
        if rest[0] != "COMMAND":
            assert rest[0] in COMMANDS
            check_options(rest[1:], ("normpass", rest[0]))
    elif program == "pytest":
        check_options(rest, ("pytest",))
    elif program.startswith("-"):
        check_options(words, *(("normpass", command) for command in COMMANDS))
    else:
        assert text.split(" #")[0].strip() in ("pip install .", "git diff expect tests"), text


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=f"line {block.line + n}")
        for block in readme.blocks()
        if block.language == "shell"
        for n, line in enumerate(block.text.splitlines())
    ],
)
def test_a_line_to_type_is_a_command(line: str) -> None:
    check_command(line)


def test_commands_in_the_text_are_there() -> None:
    commands = re.compile(r"(make|normpass|pip|pytest|git) |-|[A-Z_]+=")
    found = [code for code in readme.in_backticks() if commands.match(code)]
    assert len(found) > 10
    for code in found:
        check_command(code)


@pytest.mark.parametrize(
    "wrong",
    [
        "make tset",
        "make demo ARGS=--quikc",
        'make operators ARGS="--olny norm"',
        "make test TROCH=torch==2.11.0",
        "normpass explian model.py:model",
        "normpass bench --vampp",
        "--regsitered",
        "NORMPASS_DEBGU=folder",
        "pip instal .",
    ],
)
def test_a_command_that_is_not_there_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check_command(wrong)


def test_every_command_is_shown() -> None:
    text = readme.README.read_text(encoding="utf-8")
    missing = [name for name in COMMANDS if not re.search(rf"(normpass|make) {name}\b", text)]
    assert not missing


# --- names and tables ---------------------------------------------------------------------------


def resolve(dotted: str) -> Any:
    """The value of torch.x.y, nn.x, F.x or normpass.x, whose modules are imported on the way."""
    first, *rest = dotted.split(".")
    homes = {"nn": "torch.nn", "F": "torch.nn.functional"}
    module = homes.get(first, first)
    found: Any = importlib.import_module(module)
    for name in rest:
        module = f"{module}.{name}"
        if not hasattr(found, name):
            importlib.import_module(module)
        found = getattr(found, name)
    return found


def test_names_of_python_in_the_text_are_there() -> None:
    dotted = re.compile(r"(?<![\w.])(?:torch|nn|F|normpass)(?:\.[A-Za-z_]\w*)+")
    names = {name for code in readme.in_backticks() for name in dotted.findall(code)}
    names = {name for name in names if not re.search(r"\.(py|cpp|h)$", name)}
    assert len(names) > 15
    for name in names:
        resolve(name)
    for decorator in re.findall(r"`@(\w+)`", readme.prose()):
        home = "manual" if decorator == "manual" else "registry"
        resolve(f"normpass.decomps.{home}.{decorator}")


def test_files_in_the_text_are_there() -> None:
    path = re.compile(r"[a-z_]+/[\w/]*(\.\w+)?|\w+\.(py|md|toml|txt)")
    names = {code for code in readme.in_backticks() if path.fullmatch(code)}
    assert len(names) > 10
    made = set((ROOT / ".gitignore").read_text().split())  # by commands
    assert not [name for name in names - STAND_INS - made if not (ROOT / name).exists()]


def called(code: str) -> str:
    """The function of a call as a user would write it; AssertionError where it takes no such call.

    A default that is shown is the one there is.
    """
    (statement,) = ast.parse(code).body
    assert isinstance(statement, ast.Expr)
    call = statement.value
    assert isinstance(call, ast.Call), code
    name = ast.unparse(call.func)
    signature = inspect.signature(resolve(name if "." in name else f"normpass.{name}"))
    keywords = {k.arg: k.value for k in call.keywords if k.arg}
    signature.bind(*(None for _ in call.args), **keywords)
    for keyword, value in keywords.items():
        default = signature.parameters[keyword].default
        if isinstance(value, ast.Constant) and name != "torch.compile":
            assert value.value == default, f"{code}: the default is {default!r}"
    return name.removeprefix("normpass.")


def test_the_table_of_calls() -> None:
    shown = {
        called(code).replace("rule.", "rule ").split()[0]  # one name, with several decorators
        for row in readme.table("call", "what it does")
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
    rows = readme.table("option", "default", "meaning")
    shown = {name.strip("`"): ast.literal_eval(default.strip("`")) for name, default, _ in rows}
    defaults = Options()
    assert shown == {option.name: getattr(defaults, option.name) for option in fields(Options)}
    meanings = {name.strip("`"): meaning for name, _, meaning in rows}
    for option in fields(Options):
        variable = option.metadata.get("env", "")
        assert variable in meanings[option.name]
