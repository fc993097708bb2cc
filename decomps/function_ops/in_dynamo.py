"""A call in Dynamo's graph: a function of tensors, numbers and text that returns tensors.

What else an argument holds goes by a name that stands for it, and the structure of the results is
known once Dynamo has run the call on fake tensors.
"""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from normpass.decomps.function_ops.signature import Results

constants: dict[str, Any] = {}
_NAMES: dict[Any, str] = {}
_PREFIX = f"normpass constant {uuid.uuid4().hex} "
_PLAIN = (
    torch.Tensor,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(None),
)


def named(leaf: Any) -> Any:
    """A leaf of the arguments as it can stand in a graph."""
    return leaf if isinstance(leaf, _PLAIN) else _name(leaf)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name(value: Any) -> str:
    try:
        name = _NAMES.setdefault((type(value), value), f"{_PREFIX}{len(_NAMES)}")
    except TypeError:  # unhashable, which the call refuses
        name = f"{_PREFIX}refused"
    constants[name] = value
    return name


def value(leaf: Any) -> Any:
    """What `named` stands for."""
    return constants.get(leaf, leaf) if type(leaf) is str else leaf


# --- results ------------------------------------------------------------------------------------


class _Last(threading.local):
    results: Results | None = None


class _Place(NamedTuple):
    """Stands for a result of the operator."""

    number: int


_LAST = _Last()
_BUILDERS: dict[str, Callable[[Any], Any]] = {}


def kept(results: Results, found: tuple[Any, ...], given: Sequence[Any]) -> tuple[Any, ...]:
    """The results of an operator, and the arguments that are: in a structure that `structured`
    then knows.
    """
    _LAST.results = results
    return (*found, *(given[k] for k in results.arguments))


def structured(flat: tuple[Any, ...]) -> Any:
    """What the Function returns, from what the call in the graph does."""
    return _BUILDERS[_last()](flat)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _last() -> str:
    """The name of a builder of the results of the last call."""
    results = _LAST.results
    assert results is not None
    count = sum(kind is not None for kind in results.kinds)
    places = [_Place(k) for k in range(count)]
    arguments = {k: _Place(count + n) for n, k in enumerate(results.arguments)}
    template = results.value(places, arguments)  # type: ignore[arg-type]
    name = repr(template)
    _BUILDERS.setdefault(name, _builder(template))
    return name


def _builder(template: Any) -> Callable[[Any], Any]:
    """A function that makes a structure from what is to stand at its places. Of closures: Dynamo
    does not look into a TreeSpec.
    """
    if isinstance(template, _Place):
        return lambda flat: flat[template.number]
    if isinstance(template, dict):
        named = {key: _builder(part) for key, part in template.items()}
        return lambda flat: {key: build(flat) for key, build in named.items()}
    if not isinstance(template, list | tuple):
        return lambda flat: template
    parts, kind = [_builder(part) for part in template], type(template)
    if hasattr(kind, "_fields"):
        return lambda flat: kind(*[build(flat) for build in parts])
    if kind is list:
        return lambda flat: [build(flat) for build in parts]
    return lambda flat: tuple([build(flat) for build in parts])
