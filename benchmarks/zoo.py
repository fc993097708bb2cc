"""The models of `normpass bench --models`: weights, inputs and loss, all random and of fixed seeds.

    zoo_own.py          models written out here, in plain torch
    zoo_libraries.py    models of transformers and diffusers, from their configurations

Nothing is downloaded. A case is a model in a dtype and a memory format.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from normpass.benchmarks.cases import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Loss = Callable[..., Tensor]

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
BOTH = tuple(FORMATS)
EXTRA = "normpass[models]"


class Made(NamedTuple):
    """A module in training mode, and what its loss takes by name."""

    module: nn.Module
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        name: what the command line calls it.
        make: sizes -> module and inputs, on the CPU, in float32 and contiguous.
        loss: module and inputs -> a scalar. It is compiled with the model.
        sizes: what is measured; a step of eager takes 0.1 to 1 s on two cores.
        tiny: the same for tests; sizes that it leaves out stay.
        package: what has to be installed; None for plain torch.
        formats: memory formats of images and weights.
    """

    name: str
    make: Callable[..., Made]
    loss: Loss
    sizes: Mapping[str, Any]
    tiny: Mapping[str, Any]
    package: str | None = None
    formats: tuple[str, ...] = ("contiguous",)

    def build(self, *, tiny: bool = False, seed: int = 0) -> Made:
        """Module and inputs with the numbers of that seed."""
        torch.manual_seed(seed)
        made = self.make(**{**self.sizes, **(self.tiny if tiny else {})})
        return Made(made.module.train(), made.inputs)


@dataclass(frozen=True)
class Case:
    """One row of the benchmark: the names of a model, a dtype and a memory format."""

    model: str
    dtype: str
    format: str

    @property
    def label(self) -> str:
        """For people: `resnet bfloat16 channels_last`; contiguous goes without saying."""
        return (
            f"{self.model} {self.dtype}{'' if self.format == 'contiguous' else ' ' + self.format}"
        )

    def build(self, device: str, *, tiny: bool = False) -> Made:
        """Module and inputs on a device, in the dtype and memory format; integers stay integers."""
        dtype, layout = DTYPES[self.dtype], FORMATS[self.format]
        module, inputs = zoo()[self.model].build(tiny=tiny)

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.to(device, dtype if value.is_floating_point() else None)
            return value.contiguous(memory_format=layout) if value.dim() == 4 else value

        module = module.to(device, dtype).to(memory_format=layout)  # type: ignore[call-overload]
        return Made(module, {name: placed(value) for name, value in inputs.items()})


@cache
def zoo() -> dict[str, Model]:
    """All models by name; the libraries of some of them may be missing."""
    from normpass.benchmarks import zoo_libraries, zoo_own

    return {model.name: model for model in (*zoo_own.MODELS, *zoo_libraries.MODELS)}


def select(
    models: Sequence[str] = (), dtypes: Sequence[str] = (), formats: Sequence[str] = ()
) -> list[Case]:
    """The cases that match, everything where nothing is asked for."""
    return [
        Case(name, dtype, layout)
        for name in models or zoo()
        for layout in zoo()[name].formats
        for dtype in dtypes or DTYPES
        if layout in (formats or FORMATS)
    ]


def left_out(cases: Iterable[Case]) -> dict[str, list[str]]:
    """What cannot be built: package that is not installed -> models that need it."""
    missing: dict[str, list[str]] = {}
    for name in dict.fromkeys(case.model for case in cases):
        package = zoo()[name].package
        if package and find_spec(package) is None:
            missing.setdefault(package, []).append(name)
    return missing
