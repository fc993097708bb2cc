"""Whether commands that a page tells its readers to type are there, with their options."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from pages import ROOT

from normpass.__main__ import COMMANDS, main
from normpass.backend.options import Options
from normpass.backend.program import verify

if TYPE_CHECKING:
    from collections.abc import Sequence

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# Variables of other programs, which pages set.
VARIABLES = {"EXPECTTEST_ACCEPT", "TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR", "CXX"}
# Commands of other programs.
OF_OTHERS = {
    ". .venv/bin/activate",
    "pre-commit install",
    "pre-commit run --all-files",
    "git diff expect tests",
}


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
    if not words or shlex.join(words) in OF_OTHERS:
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
    elif program == "python":
        check_program(rest)
    elif program.startswith("-"):
        check_options(words, *(("normpass", command) for command in COMMANDS))
    else:
        assert (program, rest[:1]) == ("pip", ["install"]), text


def check_program(words: Sequence[str]) -> None:
    """A script of the repository, or a module of normpass, with its options."""
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words
        return
    assert (ROOT / words[0]).exists(), words
    if words[0].startswith("examples/"):
        options = [word for word in words if word.startswith("--")]
        missing = [each for each in options if f'"{each}"' not in (ROOT / words[0]).read_text()]
        assert not missing, missing
