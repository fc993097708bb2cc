"""Where a norm stands, as named_modules() has it."""

from __future__ import annotations

import pytest

from normpass.passes.names import dotted


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self'].layers[0]._modules['norm']", "layers.0.norm"),
        ("L['self'].layers.__getitem__(0).norm", "layers.0.norm"),
        # as diffusers' models are, whose attributes are looked up otherwise
        ("L['net'].__dict__['_modules']['up_blocks']['0'].norm", "up_blocks.0.norm"),
        ("L['f'].__closure__[0].cell_contents.norm", "norm"),
        ("L['self'].my_modules.norm", "my_modules.norm"),
        ("L['self']", ""),
    ],
)
def test_paths_of_dynamo(path: str, expected: str) -> None:
    assert dotted(path) == expected
