"""Calls of the Functions of custom_functions.py and what they compute, in plain torch, under every
transform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import custom_functions as functions
import torch
import torch.autograd.forward_ad as forward_ad
from custom_functions import Settings
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import normpass

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Transform = Callable[[Callable[..., Any], tuple[Tensor, ...]], Any]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


X, Y, ROW = numbers(3, 4), numbers(3, 4, seed=1), numbers(4, seed=2)


@dataclass(frozen=True)
class Case:
    """call(f, *tensors) of the operator or of the formula; all of its tensors have derivatives."""

    op: Any
    formula: Callable[..., Any]
    tensors: tuple[Tensor, ...] = (X,)
    call: Callable[..., Any] = lambda f, *tensors: f(*tensors)

    def of(self, f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: self.call(f, *tensors)

    def arguments(self) -> tuple[Any, ...]:
        """What the operator is called with."""
        found: list[tuple[Any, ...]] = []
        self.call(lambda *args: (found.append(args), self.op(*args))[1], *self.tensors)
        return found[0]


INDEX = torch.tensor([[0, 0, 3], [1, 2, 1], [3, 3, 3]])


def structured(f: Any, x: Tensor) -> Any:
    return f(x, Settings(3, [0.5, 2.0]), "plus", torch.float64, None, torch.sin)


def described(f: Any, x: Tensor) -> Tensor:
    found = f(x)
    if f is not torch.sinh:
        found, size, text, named = found
        assert (size, text, named["largest"][1]) == (x.shape[-1], "sinh", None)
        found = found + 0 * named["largest"][0]
    return found


def straight_through(x: Tensor) -> Tensor:
    return x + ((4 * x).round() / 4 - x).detach()


def scratch(x: Tensor) -> Tensor:
    return (x * x + 1) * (torch.arange(x.shape[-1]) > 0)


def passed(x: Tensor) -> tuple[Tensor, Tensor]:
    one, other = 2 * x, 3 * x
    return x.detach() + one - one.detach(), x.detach().mT + (other - other.detach()).mT


CASES = [
    Case(
        normpass.as_op(functions.Swish),
        lambda x, a: x * (a * x).sigmoid(),
        (X,),
        lambda f, x: f(x, 2.0),
    ),
    Case(normpass.as_op(functions.Exp), torch.exp),
    Case(normpass.as_op(functions.Product), torch.mul, (X, ROW)),
    Case(normpass.as_op(functions.Sorted), lambda x: tuple(torch.sort(x, dim=-1))),
    Case(normpass.as_op(functions.Both), lambda x: (x.sin(), x.cos())),
    Case(normpass.as_op(functions.Tripled), lambda x, y: 3 * x * y, (X, Y)),
    Case(normpass.as_op(functions.Structured), lambda x, *_: 2.5 * x**3 + 1, (X,), structured),
    Case(normpass.as_op(functions.Rounded), straight_through),
    Case(normpass.as_op(functions.Cube), lambda x: x**3),
    Case(normpass.as_op(functions.Total), lambda x: x.sum(-1)),
    Case(normpass.as_op(functions.InNumPy, fake=torch.empty_like), lambda x: x**3),
    Case(
        normpass.as_op(functions.Item, fake=lambda x, y: torch.empty_like(x)),
        lambda x, y: x * y.max(),
        (X,),
        lambda f, x: f(x, Y),
    ),
    Case(normpass.as_op(functions.Scratch), scratch),
    Case(normpass.as_op(functions.Passed), passed),
    Case(normpass.as_op(functions.Slope), lambda x: 3 * x**2),
    Case(normpass.as_op(functions.Described), torch.sinh, (X,), described),
    Case(
        normpass.as_op(functions.Gathered),
        lambda x, index, factors: x.gather(-1, index) * factors[0] * factors[1],
        (X,),
        lambda f, x: f(x, INDEX, [torch.tensor(2.0), torch.tensor(3.0)]),
    ),
]

BY_NAME = {case.op.__name__: case for case in CASES}


def swish_of_two(x: Tensor) -> Tensor:
    found: Tensor = BY_NAME["Swish"].op(x, 2.0)
    return found


def plain_swish(x: Tensor) -> Tensor:
    return x * (2.0 * x).sigmoid()


# --- transforms ---------------------------------------------------------------------------------


def loss(f: Callable[..., Any]) -> Callable[..., Tensor]:
    """Of what a function returns one number, in which each has a weight and a curvature."""

    def total(*tensors: Tensor) -> Tensor:
        out = f(*tensors)
        each = [y for y in (out if isinstance(out, tuple) else (out,)) if y.is_floating_point()]
        return sum((y.sin() * _weights(y)).sum() for y in each)  # type: ignore[return-value]

    return total


def _weights(y: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)


def _along(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.cos(3 * t + 1) for t in tensors)


def _all(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(range(len(tensors)))


def pushed(f: Callable[..., Any], directions: tuple[Tensor, ...]) -> Callable[..., Any]:
    return lambda *t: jvp(f, t, directions)[1]


def paired(f: Callable[..., Tensor], directions: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    def pairing(*t: Tensor) -> Tensor:
        gradients = grad(f, _all(t))(*t)
        return sum((g * v).sum() for g, v in zip(gradients, directions, strict=True))

    return pairing


def tape(f: Callable[..., Any], t: tuple[Tensor, ...]) -> list[Tensor]:
    """The first three derivatives."""
    leaves = [x.clone().requires_grad_() for x in t]
    found, value = [], loss(f)(*leaves)
    for _ in range(3):
        gradients = torch.autograd.grad(value, leaves, create_graph=True)
        found += [g.detach() for g in gradients]
        value = sum((g.sin() * v).sum() for g, v in zip(gradients, _along(t), strict=True))
    return found


def dual(f: Callable[..., Any], t: tuple[Tensor, ...]) -> Tensor | None:
    with forward_ad.dual_level():
        moved = map(forward_ad.make_dual, t, _along(t))
        return forward_ad.unpack_dual(loss(f)(*moved)).tangent


def batch(t: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.stack([x, 2 * x, x - 1]) for x in t)


def over_first(f: Callable[..., Any], dim: int, **options: Any) -> Callable[..., Any]:
    """f under vmap over one dimension of its first argument, which the others do not have."""
    return lambda x, *rest: vmap(f, in_dims=(dim, *(None for _ in rest)), **options)(x, *rest)


TRANSFORMS: dict[str, Transform] = {
    "value": lambda f, t: f(*t),
    "tape": tape,
    "dual": dual,
    "grad": lambda f, t: grad(loss(f), _all(t))(*t),
    "vjp": lambda f, t: vjp(loss(f), *t)[1](torch.tensor(2.0, dtype=torch.float64)),
    "jvp": lambda f, t: pushed(loss(f), _along(t))(*t),
    "jacrev": lambda f, t: jacrev(loss(f), _all(t))(*t),
    "jacfwd": lambda f, t: jacfwd(loss(f), _all(t))(*t),
    "hessian": lambda f, t: hessian(loss(f), _all(t))(*t),
    "grad grad": lambda f, t: grad(paired(loss(f), _along(t)), _all(t))(*t),
    "jvp grad": lambda f, t: pushed(grad(loss(f), _all(t)), _along(t))(*t),
    "grad jvp": lambda f, t: grad(pushed(loss(f), _along(t)), _all(t))(*t),
    "jvp jvp": lambda f, t: pushed(pushed(loss(f), _along(t)), t)(*t),
    "jvp grad grad": lambda f, t: pushed(grad(paired(loss(f), t), _all(t)), _along(t))(*t),
    "vmap": lambda f, t: vmap(f)(*batch(t)),
    "vmap of one": lambda f, t: over_first(f, 0)(batch(t)[0], *t[1:]),
    "vmap over the last": lambda f, t: over_first(f, 2, out_dims=1)(
        batch(t)[0].movedim(0, 2), *t[1:]
    ),
    "vmap vmap": lambda f, t: over_first(over_first(f, 1), 0)(
        torch.stack([batch(t)[0].movedim(0, 1)] * 2), *t[1:]
    ),
    "vmap grad": lambda f, t: vmap(grad(loss(f), _all(t)))(*batch(t)),
    "vmap grad of one": lambda f, t: over_first(grad(loss(f), _all(t)), 1)(
        batch(t)[0].movedim(0, 1), *t[1:]
    ),
    "grad vmap": lambda f, t: grad(lambda *b: vmap(loss(f))(*b).sin().sum(), _all(t))(*batch(t)),
    "grad vmap of one": lambda f, t: grad(
        lambda *b: over_first(loss(f), 0)(*b).sin().sum(), _all(t)
    )(batch(t)[0], *t[1:]),
    "vmap jvp": lambda f, t: vmap(lambda v: jvp(lambda x: loss(f)(x, *t[1:]), t[:1], (v,))[1])(
        batch(t)[0]
    ),
    "jvp vmap": lambda f, t: pushed(vmap(loss(f)), _along(batch(t)))(*batch(t)),
    "vmap hessian": lambda f, t: vmap(hessian(loss(f), _all(t)))(*batch(t)),
    "grad vmap grad": lambda f, t: grad(
        lambda *b: sum(g.sin().sum() for g in vmap(grad(loss(f), _all(t)))(*b)), _all(t)
    )(*batch(t)),
}
