"""All that is examined, in its order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from normpass.commands import BadTarget, load_target
from normpass.doctor import mistakes, model
from normpass.doctor.facts import Facts, devices, examined
from normpass.doctor.trial import tried

if TYPE_CHECKING:
    from normpass.doctor.finding import Finding

__all__ = ["BadTarget", "examination"]


def examination(target: str | None, *, trial: bool) -> tuple[Facts, list[Finding]]:
    """Facts by section, and what is wrong.

    target: a model's FILE:NAME, or None. trial: whether anything may be compiled.

    Raises:
        BadTarget: if the target names nothing that can be called.
    """
    loaded = None if target is None else load_target(target)
    facts, found = examined(), [*mistakes.findings()]
    if not trial or any(os.environ.get(name) == "1" for name in mistakes.OFF):
        return facts, found
    facts["trial"] = {}
    for device in devices():
        facts["trial"][device], wrong = tried(device)
        found += wrong
    if target is not None and loaded is not None:
        facts["model"], wrong = model.examined(target, loaded)
        found += wrong
    return facts, found
