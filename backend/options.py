"""Every option of the backend, its environment variable and its default."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Options:
    """Options of `torch.compile(model, backend="normpass", options={...})`."""

    inner: str = field(
        default="inductor",
        metadata={
            "help": "what compiles the rest of the graph: inductor, or eager to run it uncompiled",
            "choices": ("inductor", "eager"),
        },
    )
    fuse: bool = field(default=True, metadata={"help": "whether to fuse regions at all"})
    least_bytes: int | None = field(
        default=None,
        metadata={
            "help": "regions that move fewer bytes stay with Inductor, and all others are fused "
            "that need no more passes; None for those that are estimated to be faster"
        },
    )
    recompute: bool | None = field(
        default=None,
        metadata={
            "help": "whether the backward computes again what would be saved for matrix products "
            "alone, from what is saved anyway; None for where it was measured to cost no time, on "
            "CPUs"
        },
    )
    onednn: bool = field(
        default=True,
        metadata={
            "help": "whether large float32 matrix products are oneDNN's on processors that MKL has "
            "no fast code for"
        },
    )
    gpu: str | None = field(
        default=None,
        metadata={
            "help": "what kernels for GPUs are written in, triton or cuda, where both can be; "
            "tuned for the fastest of these and of several settings, timed once; None for cuda "
            "where it keeps on chip what programs of Triton read again, or takes fewer launches",
            "choices": ("triton", "cuda", "cuda_bulk", "tuned", None),
            "env": "NORMPASS_GPU",
        },
    )
    double_backward: bool = field(
        default=True,
        metadata={
            "help": "whether compiled code can be differentiated again: create_graph=True, to any "
            "order"
        },
    )
    debug: str | None = field(
        default=None,
        metadata={
            "help": "a folder for numbered graphs and kernels",
            "env": "NORMPASS_DEBUG",
        },
    )
    inductor: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={"help": "settings of torch._inductor.config for this model"},
    )

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Options:
        """Options from a user's dictionary and the environment.

        Raises:
            ValueError: an option there is not, or a value it does not take, with what there is.
        """
        given = dict(options or {})
        known = {option.name: option for option in fields(cls)}
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ValueError(f"unknown normpass option {name!r}{hint}; there are:\n{table()}")
        for name, option in known.items():
            variable = option.metadata.get("env")
            if name not in given and variable and variable in os.environ:
                given[name] = os.environ[variable]
        return cls(**given).checked()

    def checked(self) -> Options:
        """The options themselves.

        Raises:
            ValueError: a value that an option does not take, with what it takes.
        """
        known = {option.name: option for option in fields(self)}
        for name, option in known.items():
            choices = option.metadata.get("choices")
            if choices and getattr(self, name) not in choices:
                raise ValueError(
                    f"option {name}: expected one of {', '.join(map(str, choices))}, found "
                    f"{getattr(self, name)!r}"
                )
        for name in ("fuse", "recompute", "onednn", "double_backward"):
            value, expected = getattr(self, name), "True or False"
            if known[name].default is None:
                expected = "True, False or None"
            if not isinstance(value, bool) and (value is not None or "None" not in expected):
                raise ValueError(f"option {name}: expected {expected}, found {value!r}")
        if self.least_bytes is not None and not isinstance(self.least_bytes, int):
            raise ValueError(
                "option least_bytes: expected a number of bytes or None, found "
                f"{self.least_bytes!r}"
            )
        return self


def table() -> str:
    """All options with defaults and meaning, a line each."""
    lines = []
    for option in fields(Options):
        default = option.default if option.name != "inductor" else {}
        variable = option.metadata.get("env")
        environment = f" [{variable}]" if variable else ""
        lines.append(f"  {option.name} = {default!r}{environment}: {option.metadata['help']}")
    return "\n".join(lines)
