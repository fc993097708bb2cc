"""Random small programs for hypothesis: blocks of norms, products, views, writes and graph breaks,
nested in residuals, checkpoints and derivatives.

A program is a module of blocks over a tensor of shape n 4, and its oracle the same module with
every norm written out, which eager mode differentiates rightly to any order: its own layer, batch
and instance norm are wrong from the third on.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from higher_order_cases import numbers
from higher_order_programs import NORMS, Rounded
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 4
ROWS = 6


@dataclass(frozen=True)
class Step:
    """name: among STEPS, or among AROUND with the steps that it is around.

    place: which parameter it reads, so that several steps share one. compiled: whether the steps
    inside are a module that is compiled by itself.
    """

    name: str
    place: int = 0
    inside: tuple[Step, ...] = ()
    compiled: bool = False


@dataclass(frozen=True)
class Case:
    """A program and how it is asked for its derivatives.

    whole: whether it is compiled as a whole, beside the blocks that are by themselves.
    returns: what it returns beside its last value. everything: whether its forward hands over every
    product. rows: the numbers of rows of its inputs, one after another.
    """

    steps: tuple[Step, ...]
    whole: bool
    returns: str
    order: int
    dynamic: bool
    everything: bool
    rows: tuple[int, ...]


# ---- steps: x and a parameter of shape 4 4 to a tensor of the shape of x


def _written_to(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    z = y + w.sum()
    y.mul_(w.sum())
    return y.tanh() * z


def _written_in_part(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:3].mul_(x[:, :2] @ w[:2, :2])
    return y


def _written_through_a_view(x: Tensor, w: Tensor) -> Tensor:
    y = x * w[0]
    y.view(-1).add_(x.reshape(-1).cos())
    return y


def _break(x: Tensor, w: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def _halves(x: Tensor, w: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([b, a * b.sin()], -1)


def _expanded(x: Tensor, w: Tensor) -> Tensor:
    return (x[:, None].expand(-1, 3, -1) * w[:3]).tanh().sum(1)


def _convolved(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x[:, None], w[:2, None, :3], padding=1).sin().mean(1)


def _attention(x: Tensor, w: Tensor) -> Tensor:
    return (x @ (x @ w).t()).softmax(-1) @ x


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: x @ w,
    "tanh": lambda x, w: torch.tanh(x),
    "gelu": lambda x, w: F.gelu(x),
    "softmax": lambda x, w: x.softmax(-1) * w[1],
    "detached": lambda x, w: x * (x.detach().sin() @ w),
    "transposed": lambda x, w: x.t().reshape(-1, WIDTH) * w[2],
    "a Function": lambda x, w: Rounded.apply(x) + x * w[3],
    "written to": _written_to,
    "written to in part": _written_in_part,
    "written to through a view": _written_through_a_view,
    "graph break": _break,
    "halves": _halves,
    "expanded": _expanded,
    "convolved": _convolved,
    "attention": _attention,
}
# ---- what is around steps: the block, x and a parameter


Block = Any


def _slope(block: Block, x: Tensor, w: Tensor) -> Tensor:
    """A derivative inside of the program; x may be its input, or a result that has no gradient."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = (block(x) * w[0]).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True, materialize_grads=True)
    return slope


def _without_a_tape(block: Block, x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        factor = block(x)
    return x * factor


AROUND: dict[str, Callable[[Block, Tensor, Tensor], Tensor]] = {
    "sequence": lambda block, x, w: block(x),
    "residual": lambda block, x, w: x + block(x),
    "twice": lambda block, x, w: block(block(x)),
    "checkpoint": lambda block, x, w: checkpoint(block, x, use_reentrant=False),
    "slope": _slope,
    "without a tape": _without_a_tape,
}


class Program(nn.Module):
    """Steps one after another.

    oracle: whether nothing is compiled, and norms are formulas. is_compiled: whether this runs in
    compiled code, where torch's norms are right; else they are formulas.
    """

    def __init__(
        self,
        steps: tuple[Step, ...],
        parameters: nn.ParameterList,
        *,
        oracle: bool,
        is_compiled: bool,
    ) -> None:
        super().__init__()
        self.__class__ = _with_code_of_its_own(Program)
        self.steps, self.shared, self.written_out = steps, parameters, not is_compiled
        compile = [step.compiled and not oracle for step in steps]
        self.inside = nn.ModuleList(
            Program(step.inside, parameters, oracle=oracle, is_compiled=is_compiled or alone)
            for step, alone in zip(steps, compile, strict=True)
        )
        self.blocks = [
            compiled(block) if alone else block
            for block, alone in zip(self.inside, compile, strict=True)
        ]

    def forward(self, x: Tensor) -> Tensor:
        for step, block in zip(self.steps, self.blocks, strict=True):
            w = self.shared[step.place]
            if step.name in AROUND:
                x = AROUND[step.name](block, x, w)
            elif step.name in NORMS:
                x = NORMS[step.name][self.written_out](x, w)
            else:
                x = STEPS[step.name](x, w)
        return x


def _with_code_of_its_own(cls: type[nn.Module]) -> type[nn.Module]:
    """A class like this one. What Dynamo finds out about a frame, such as that it is not to be
    compiled, it keeps with its code, which blocks of one class share: a block's checkpoint would be
    recomputed by other code than it was recorded with.
    """
    code = cls.forward.__code__.replace()
    return type(cls.__name__, (cls,), {"forward": FunctionType(code, cls.forward.__globals__)})


class Returning(nn.Module):
    """A program's results: its last value, and what else a model returns."""

    def __init__(self, program: Program, returns: str) -> None:
        super().__init__()
        self.program, self.returns = program, returns

    def forward(self, x: Tensor) -> Any:
        y = self.program(x)
        if self.returns == "its input":
            return y, x
        if self.returns == "views":
            return y[0], y.t()
        if self.returns == "an integer":
            return y, y.argmax()
        return y


RETURNS = ("one value", "its input", "views", "an integer")


def compiled(module: nn.Module, *, dynamic: bool | None = None) -> Any:
    return torch.compile(module, backend="normpass", dynamic=dynamic, options={"inner": "eager"})


def parameters() -> nn.ParameterList:
    """Numbers of about one, so that derivatives of a dozen steps stay of the size of numbers."""
    first, second = numbers(WIDTH, WIDTH).detach(), numbers(WIDTH + 1, WIDTH)[1:].detach()
    return nn.ParameterList([first * 0.4 + torch.eye(WIDTH), second * 0.4 + torch.eye(WIDTH)])


def oracle(case: Case, parameters: nn.ParameterList) -> nn.Module:
    program = Program(case.steps, parameters, oracle=True, is_compiled=False)
    return Returning(program, case.returns)


def program(case: Case, parameters: nn.ParameterList) -> Any:
    program = Program(case.steps, parameters, oracle=False, is_compiled=case.whole)
    ours = Returning(program, case.returns)
    return compiled(ours, dynamic=case.dynamic or None) if case.whole else ours


# ---- strategy


def _steps(names: list[str], inside: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[Any]:
    plain = st.builds(Step, st.sampled_from(names), st.integers(0, 1))
    around = st.builds(
        Step, st.sampled_from(sorted(AROUND)), st.integers(0, 1), inside, st.booleans()
    )
    return st.lists(st.one_of(plain, plain, around), min_size=1, max_size=most).map(tuple)


_NAMES = [*STEPS, *NORMS, *NORMS]  # every other step, about, is a norm
_INNERMOST = st.lists(
    st.builds(Step, st.sampled_from(_NAMES), st.integers(0, 1)), min_size=1, max_size=2
).map(tuple)
_INNER = _steps(_NAMES, _INNERMOST, 2)


def cases() -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        steps=_steps(_NAMES, _INNER, 4),
        whole=st.booleans(),
        returns=st.sampled_from(RETURNS),
        order=st.sampled_from([2, 2, 3]),
        dynamic=st.booleans(),
        everything=st.booleans(),
        rows=st.sampled_from([(ROWS,), (ROWS, ROWS), (ROWS, 9)]),
    )
