"""Graphs whose sizes vary: what is compiled of one for all of them, and what for each by itself.

Some formulas take a size for known: those of a product of all elements, of glu. What holds them,
and what is compiled of the same graph after it, is compiled for each size that comes.

Private, checked on torch 2.11, 2.13 and 2.15: guards and frozen of ShapeEnv;
torch._dispatch.python.enable_python_dispatcher; _disable_saved_tensors_hooks_during_tracing of
torch._dynamo.utils; Mod and FloorDiv of torch.utils._sympy.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing as _without_hooks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Mod

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from normpass.backend.higher_order.program import Program

# By ShapeEnv.
_TAKEN_FOR_KNOWN: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class SomeSizesOnly(RuntimeError):
    """What is compiled while the sizes of a graph vary holds for some of them."""


@contextlib.contextmanager
def without_guards(env: Any) -> Iterator[None]:
    """Raises SomeSizesOnly if what is compiled in the block holds for some sizes only: Dynamo has
    done with its guards, and would not notice other sizes. So does anything else of that graph from
    then on: these sizes are taken for known, and nothing would be guarded.
    """
    if env is None:
        yield
        return
    if found := _TAKEN_FOR_KNOWN.get(env):
        raise SomeSizesOnly(found)
    before, frozen = len(env.guards), env.frozen
    env.frozen = False
    try:
        yield
    finally:
        env.frozen = frozen
        conditions = [guard.expr for guard in env.guards]
        known, new = conditions[:before], conditions[before:]
        if left := [str(expr) for expr in _simplified(new, known) if expr is not sympy.true]:
            found = f"expected code for all sizes; found some for {', '.join(left)} only"
            _TAKEN_FOR_KNOWN[env] = found
    if found:
        raise SomeSizesOnly(found)


def _simplified(new: Sequence[Any], known: Sequence[Any]) -> list[Any]:
    """Conditions on sizes, where others hold: true is what follows from a size being a multiple,
    as that of the channels of a group norm.
    """
    zeros = [eq.lhs for eq in known if isinstance(eq, sympy.Eq) and eq.rhs == 0]
    multiples = [zero.args for zero in zeros if isinstance(zero, Mod)]
    exact = {FloorDiv(size, factor): size / factor for size, factor in multiples}
    return [sympy.sympify(expr).xreplace(exact) for expr in new]


@contextlib.contextmanager
def traced(program: Program) -> Iterator[None]:
    """A block in which a program runs with fake tensors, as it does while it is traced. What is
    saved there, hooks for saved tensors do not see: a checkpoint counts what it is given.

    Raises:
        SomeSizesOnly: as `without_guards`.
    """
    mode = program.fake_mode
    with without_guards(mode.shape_env), _without_hooks(), mode, enable_python_dispatcher():
        yield


def of(inputs: Sequence[Any]) -> Hashable:
    """What distinguishes inputs of one graph for code that takes their sizes for known."""
    return tuple((x.shape, x.stride()) if isinstance(x, Tensor) else x for x in inputs)


def known(program: Program, inputs: Sequence[Any]) -> Program:
    """The same program for inputs that are like these ones."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        examples = [
            _like(x, example) if isinstance(x, Tensor) else x
            for x, example in zip(inputs, program.examples, strict=True)
        ]
    return replace(program, examples=examples)


def _like(x: Tensor, example: Tensor) -> Tensor:
    """Within a FakeTensorMode."""
    found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return found.requires_grad_(example.requires_grad)
