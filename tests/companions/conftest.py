"""What the tests of companions share: every norm is fused, whichever line turns the backend on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch._inductor.config
from companions.loops import OPTIONS

from normpass.backend.options import Options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@pytest.fixture(autouse=True)
def _whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """OPTIONS are the defaults: most packages take a backend's name and no options, and tiny norms
    are not worth a kernel. Graphs from Inductor's cache would not be counted.
    """
    parse = Options.parse

    def with_ours(given: Mapping[str, Any] | None) -> Options:
        return parse({**OPTIONS, **(given or {})})

    monkeypatch.setattr(Options, "parse", with_ours)
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield
