"""Which variants of a test run every time, and which in `make sweep` alone.

A test marked `one_in(n)` has an n-th of its variants run every time: those with the least checksums
of their names, so that the choice goes through all of its parameters and is the same everywhere.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest


def chosen(variants: Sequence[str], n: int) -> set[str]:
    """One in n of some names, and one of what is left."""
    order = sorted(variants, key=lambda name: (zlib.crc32(name.encode()), name))
    return set(order[: -(-len(order) // n)])


def mark(items: Sequence[pytest.Item], sweep: pytest.MarkDecorator) -> None:
    """Marks what is left out as of the sweep."""
    variants: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("one_in") and not item.get_closest_marker("sweep"):
            variants[item.nodeid.partition("[")[0]].append(item)
    for of_test in variants.values():
        marker = of_test[0].get_closest_marker("one_in")
        assert marker is not None
        kept = chosen([item.name for item in of_test], *marker.args)
        for item in of_test:
            if item.name not in kept:
                item.add_marker(sweep)
