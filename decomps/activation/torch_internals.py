"""Every private name of torch that the rules use, and what is left out where torch lacks it.

They stand in torch_names.py, and no other module of decomps names them (tests/test_house.py holds
that). A name is looked up when it is first imported from here; `missing()`, which register() asks,
looks at all of them, so that a later torch which has lost one costs what depends on it and nothing
else. Used all the same, a name that is not there raises MissingInternal.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from normpass.decomps.activation.torch_names import (
    BATCHING,
    EAGER,
    FUNCTION_OPS,
    FUNCTIONS,
    INTERNALS,
    LEVELS,
    NODES,
    PASS,
    RULES,
    SYNC,
    TABLE,
    TRACES,
    WITH,
    ZEROS,
    Internal,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    # As annotations: for __getattr__ these are values.
    from torch._C import DispatchKey as DispatchKey
    from torch._C import DispatchKeySet as DispatchKeySet
    from torch._functorch.autograd_function import VmapInfo as VmapInfo
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._subclasses import FakeTensor as FakeTensor
    from torch._subclasses import FakeTensorMode as FakeTensorMode
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.utils._pytree import TreeSpec as TreeSpec

    AnyBatchNorm = _BatchNorm

__all__ = [  # for those who ask what is left out; the names of torch's are found by __getattr__
    "BATCHING",
    "EAGER",
    "FUNCTIONS",
    "FUNCTION_OPS",
    "INTERNALS",
    "LEVELS",
    "NODES",
    "PASS",
    "RULES",
    "SYNC",
    "TABLE",
    "TRACES",
    "ZEROS",
]


class MissingInternal(RuntimeError):
    """This torch lacks a private name that was used; the message says which."""


class Missing:
    """Stands for a name that is not there: nobody has to ask before importing it."""

    def __init__(self, internal: Internal) -> None:
        self._internal = internal

    def _fail(self, *_: Any, **__: Any) -> NoReturn:
        raise MissingInternal(
            f"torch {torch.__version__} has no {self._internal.path}, without which normpass "
            f"leaves out {self._internal.part}"
        )

    __call__ = __instancecheck__ = __mro_entries__ = __and__ = __rand__ = _fail

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._fail()


def __getattr__(name: str) -> Any:
    internal = INTERNALS.get(name)
    if internal is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = find(internal.path)
    except AttributeError:
        return None if internal.optional else Missing(internal)
    if not name.startswith("_"):
        globals()[name] = found
    return found


def find(path: str) -> Any:
    """What stands at this path of modules and attributes. Raises AttributeError."""
    found: Any = torch
    walked = "torch"
    for part in path.split(".")[1:]:
        walked += f".{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(walked)
            except ImportError:
                raise AttributeError(path) from None
    return found


# --- what is missing ----------------------------------------------------------------------------


def missing() -> list[Internal]:
    """The names that this torch lacks, and cannot be done without."""
    return [each for each in INTERNALS.values() if not each.optional and not _is_there(each.path)]


def _is_there(path: str) -> bool:
    try:
        find(path)
    except AttributeError:
        return False
    return True


def left_out(lacking: Iterable[Internal]) -> frozenset[str]:
    """The parts that depend on these names."""
    parts = {each.part for each in lacking}
    return frozenset(parts.union(*(WITH.get(part, ()) for part in parts)))


def warning_of(lacking: Iterable[Internal]) -> str:
    """Says which names are missing, in which torch, and what is left out for it."""
    lines = (f"    {each.path}: without it {each.part} are left out" for each in lacking)
    found = "".join(f"\n{line}" for line in lines)
    return (
        f"torch {torch.__version__} lacks private names that normpass uses: {found}\n"
        "(normpass why private-names)"
    )


# --- attributes ---------------------------------------------------------------------------------


def forward_level() -> int:
    """The level of torch.autograd.forward_ad; negative outside of forward mode."""
    level: int = torch.autograd.forward_ad._current_level
    return level


def kernels_by_key(op: OpOverload) -> dict[Any, Any]:
    """The kernels in Python of an operator, by dispatch key."""
    return op.py_kernels


def kernels_by_mode(op: OpOverload) -> dict[Any, Any]:
    """Its kernels in Python by the mode that is on."""
    return op.python_key_table


def dispatch_cache(op: OpOverload) -> dict[Any, Any]:
    """What the Python dispatcher calls for a key, from its first call on: C++ reads it."""
    return op._dispatch_cache


def set_dispatch_cache(op: OpOverload, cache: dict[Any, Any]) -> None:
    """Puts another dictionary in its place: C++ asks the operator for it at each call."""
    op._dispatch_cache = cache


def own_kernel(op: OpOverload, key: DispatchKey) -> Any:
    """Calls an operator's C++ kernel of a key."""
    return functools.partial(op._op_dk, key)


def functorch_table() -> dict[Any, Any]:
    """The rules of custom_function_call, by the kind of level."""
    return __getattr__("custom_function_call").functorch_table


def destroy(library: torch.library.Library) -> None:
    """Takes out what a library has put in."""
    library._destroy()


def memory_of(x: torch.Tensor) -> Any:
    """Equal for two tensors with one storage, of any number. Raises where there is none."""
    return x.untyped_storage()._cdata
