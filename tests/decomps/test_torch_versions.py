"""What decomps/torch_versions.py says of torch, against the torch that is here."""

from __future__ import annotations

import pytest
import torch

from normpass.decomps import torch_versions


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0", (2, 13)), ("2.15.0+cu132", (2, 15)), ("2.15.0a0+git1234", (2, 15))],
)
def test_a_release_is_told_from_a_build(version: str, release: tuple[int, int]) -> None:
    assert torch_versions.release(version) == release


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_numbers_of_dtypes_are_those_of_torch() -> None:
    for number, dtype in torch_versions._SCALAR_TYPES.items():
        made = torch.ops.aten.empty.memory_format([0], dtype=number, device="meta")
        assert made.dtype is dtype


def test_dtypes_in_either_form() -> None:
    given = [6, torch.float64, 15]
    assert torch_versions.dtypes(given) == [torch.float32, torch.float64, torch.bfloat16]
