"""What was measured is found by later processes; what is broken or foreign costs a warning once."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from normpass.backend.entry import FusionPass
from normpass.backend.run import calibration
from normpass.backend.run.calibration import SHIPPED, conditions_of
from normpass.passes.cost import PRICED, Calibration

if TYPE_CHECKING:
    from collections.abc import Iterator

MEASURED = replace(SHIPPED, ours=replace(SHIPPED.ours, launch=1.25e-6, functions=(("exp", 1e-9),)))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a calibration is looked for; there is none yet."""
    path = tmp_path / "some folder" / "costs.json"
    monkeypatch.setenv(calibration.VARIABLE, str(path))
    calibration.calibration.cache_clear()
    yield path
    calibration.calibration.cache_clear()


def in_force() -> Calibration | None:
    return conditions_of("cpu").calibration


def test_what_is_shipped_is_in_force_without_a_file(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not file.exists()
    assert in_force() == SHIPPED
    assert not caplog.records


def test_what_was_saved_is_in_force(file: Path) -> None:
    calibration.save(MEASURED, file)
    assert in_force() == MEASURED
    assert MEASURED != SHIPPED
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_it_is_read_once(file: Path) -> None:
    assert in_force() == SHIPPED
    calibration.save(MEASURED, file)
    assert in_force() == SHIPPED


def test_nothing_was_measured_on_gpus() -> None:
    assert conditions_of("cuda").calibration is None


# What Linux tells of the two kinds of cores of one ARM processor.
CORES = """\
processor\t: 0
Features\t: fp asimd
CPU implementer\t: 0x41
CPU part\t: 0xd05

processor\t: 1
Features\t: fp asimd
CPU implementer\t: 0x41
CPU part\t: 0xd0b
"""


def test_arm_processors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(Path, "read_text", lambda _: CORES)
    name = "aarch64, CPU implementer 0x41, CPU part 0xd05, CPU part 0xd0b"
    assert calibration.processor() == name
    monkeypatch.setattr(Path, "read_text", lambda _: "model name\t: Some Name\n" + CORES)
    assert calibration.processor() == "Some Name"


def damaged(document: dict[str, Any]) -> dict[str, str]:
    """Files that are no calibration of this machine, by what is wrong with them."""
    ours = document["ours"]
    return {
        "no json": json.dumps(document)[:-5],
        "a list": "[1, 2]",
        "another format": json.dumps({**document, "format": calibration.FORMAT + 1}),
        "another processor": json.dumps({**document, "processor": "abacus"}),
        "half of it": json.dumps({k: v for k, v in document.items() if k != "theirs"}),
        "a constant too few": json.dumps(
            {**document, "ours": {k: v for k, v in ours.items() if k != "row"}}
        ),
        "a constant too many": json.dumps({**document, "ours": {**ours, "luck": 1e-9}}),
        "a word": json.dumps({**document, "ours": {**ours, "launch": "long"}}),
        "less than nothing": json.dumps({**document, "ours": {**ours, "memory": -1e-9}}),
        "no number": json.dumps({**document, "ours": {**ours, "memory": float("nan")}}),
        "a function without cost": json.dumps(
            {**document, "ours": {**ours, "functions": [["exp"]]}}
        ),
        "functions that are none": json.dumps({**document, "ours": {**ours, "functions": 3}}),
        "nothing": "",
    }


WRONG = list(damaged({"ours": {}}))


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_broken_or_foreign_is_one_warning(
    wrong: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calibration.save(MEASURED, file)
    file.write_text(damaged(json.loads(file.read_text()))[wrong])
    with caplog.at_level(logging.INFO):
        assert in_force() == in_force() == SHIPPED
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(file) in record.getMessage()


def test_a_folder_in_its_place_is_one_warning(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.mkdir(parents=True)
    assert in_force() == SHIPPED
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize("error", [PermissionError("closed"), RuntimeError("no home directory")])
def test_where_nothing_can_be_looked_for_what_is_shipped_is_in_force(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path() -> Path:
        raise error

    monkeypatch.setattr(calibration, "path", path)
    assert in_force() == SHIPPED
    assert FusionPass().uuid()


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(calibration.VARIABLE, str(tmp_path / "mine"))
    assert calibration.path() == tmp_path / "mine"
    monkeypatch.delenv(calibration.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration.path() == tmp_path / "normpass" / "calibration.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert calibration.path() == tmp_path / ".cache" / "normpass" / "calibration.json"


def test_what_is_shipped_has_all_functions() -> None:
    for costs in (SHIPPED.ours, SHIPPED.theirs):
        missing = {name for name in PRICED if costs.of(name) == 0}
        assert missing <= {"welford"}
    assert SHIPPED.theirs.of("welford") > 0
