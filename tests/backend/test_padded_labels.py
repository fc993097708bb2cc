"""The mend of multilabel_margin_loss (padded_labels.py): labels are looked at as stock does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional as F

from normpass.backend.inductor_mistakes import install, uninstall

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _mended() -> Iterator[None]:
    install()
    yield
    uninstall()


@pytest.mark.parametrize("shape", [(1, 5), (3, 4), (5,), (3, 5, 1)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_labels_of_another_shape_are_an_error(shape: tuple[int, ...], dynamic: bool) -> None:
    """As in stock: its first row is not taken for all."""
    compiled = torch.compile(F.multilabel_margin_loss, backend="aot_eager", dynamic=dynamic)
    with pytest.raises(RuntimeError, match=r"expected a target|inconsistent target size"):
        compiled(torch.randn(3, 5), torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize(
    "shapes", [((), ()), ((), (1,)), ((1,), ()), ((5,), (5,)), ((3, 5), (3, 5))]
)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_labels_of_every_shape_that_torch_takes(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], reduction: str
) -> None:
    """A number alone is one class."""
    compiled = torch.compile(F.multilabel_margin_loss, backend="aot_eager")
    x, labels = torch.randn(shapes[0]), torch.zeros(shapes[1], dtype=torch.long)
    got, want = (f(x, labels, reduction=reduction) for f in (compiled, F.multilabel_margin_loss))
    torch.testing.assert_close(got, want)
