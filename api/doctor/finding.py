"""What the doctor finds."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """What is wrong, and what to do about it. `normpass why` knows every problem's text."""

    problem: str
    advice: str
