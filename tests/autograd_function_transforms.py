"""What is asked of a program with an autograd.Function: derivatives, batches and nestings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import func

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Program = Callable[[Tensor, Tensor], Tensor]


def _summed(f: Program) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: f(x, w).sum()


def _dual(f: Program) -> Any:
    def run(x: Tensor, w: Tensor) -> Any:
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(x, w.cos())
            return torch.autograd.forward_ad.unpack_dual(f(x, w))

    return run


# One example: x and w: 3.
OF_ONE: dict[str, Callable[[Program], Callable[..., Any]]] = {
    "forward": lambda f: f,
    "grad": lambda f: func.grad(_summed(f)),
    "grad both": lambda f: func.grad(_summed(f), argnums=(0, 1)),
    "vjp": lambda f: lambda x, w: func.vjp(f, x, w)[1](w.cos()),
    "jvp": lambda f: lambda x, w: func.jvp(f, (x, w), (w.cos(), x.cos())),
    "jvp in x": lambda f: lambda x, w: func.jvp(lambda x: f(x, w), (x,), (w.cos(),)),
    "dual": _dual,
    "jacfwd": lambda f: func.jacfwd(f),
    "jacrev": lambda f: func.jacrev(f),
    "hessian": lambda f: func.hessian(_summed(f)),
    "grad of grad": lambda f: func.grad(lambda x, w: func.grad(_summed(f))(x, w).sin().sum()),
    "jvp of grad": lambda f: (
        lambda x, w: func.jvp(lambda x: func.grad(_summed(f))(x, w), (x,), (w.cos(),))
    ),
    "grad of jvp": lambda f: func.grad(
        lambda x, w: func.jvp(lambda x: f(x, w), (x,), (w.cos(),))[1].sum()
    ),
    "jvp of jvp": lambda f: (
        lambda x, w: func.jvp(
            lambda x: func.jvp(lambda x: f(x, w), (x,), (w.cos(),))[1], (x,), (w.sin(),)
        )
    ),
}
# Two examples: x and w: 2 3.
OF_MANY: dict[str, Callable[[Program], Callable[..., Any]]] = {
    "vmap": lambda f: func.vmap(f),
    "vmap in x": lambda f: lambda x, w: func.vmap(f, (0, None))(x, w[0]),
    "vmap in w, axis 1": lambda f: (
        lambda x, w: func.vmap(f, (None, 1), out_dims=1)(x[0], w.t().contiguous())
    ),
    "vmap of vmap": lambda f: func.vmap(func.vmap(f)),
    "vmap of grad": lambda f: func.vmap(func.grad(_summed(f))),
    "vmap of grad, shared w": lambda f: (
        lambda x, w: func.vmap(func.grad(_summed(f), argnums=(0, 1)), (0, None))(x, w[0])
    ),
    "grad of vmap": lambda f: func.grad(lambda x, w: func.vmap(f)(x, w).sum(), argnums=(0, 1)),
    "grad of vmap, shared w": lambda f: (
        lambda x, w: func.grad(lambda x, w: func.vmap(f, (0, None))(x, w).sum(), argnums=(0, 1))(
            x, w[0]
        )
    ),
    "vmap of jvp": lambda f: (
        lambda x, w: func.vmap(lambda x, w: func.jvp(f, (x, w), (w.cos(), x.cos())))(x, w)
    ),
    "jvp of vmap": lambda f: lambda x, w: func.jvp(lambda x: func.vmap(f)(x, w), (x,), (w.cos(),)),
    "vmap of hessian": lambda f: func.vmap(func.hessian(_summed(f))),
}


def _leaves(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone().requires_grad_(), w.clone().requires_grad_()


def _backward(f: Program) -> Callable[..., Any]:
    def run(x: Tensor, w: Tensor) -> Any:
        leaves = _leaves(x, w)
        return torch.autograd.grad(f(*leaves).sum(), leaves, allow_unused=True)

    return run


def _backward_in_x(f: Program) -> Callable[..., Any]:
    def run(x: Tensor, w: Tensor) -> Any:
        x, _ = _leaves(x, w)
        return torch.autograd.grad(f(x, w).sum(), x)

    return run


def _double_backward(f: Program) -> Callable[..., Any]:
    def run(x: Tensor, w: Tensor) -> Any:
        leaves = _leaves(x, w)
        value = f(*leaves).sin().sum()
        grads = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
        value = torch.stack([grad.cos().sum() for grad in grads if grad is not None]).sum()
        return torch.autograd.grad(value, leaves, allow_unused=True)

    return run


# Of a program that is compiled by itself; the last where compiled code can be differentiated again.
FROM_OUTSIDE: dict[str, Callable[[Program], Callable[..., Any]]] = {
    "backward": _backward,
    "backward in x": _backward_in_x,
    "double backward": _double_backward,
}
EVERY = {**OF_ONE, **OF_MANY, **FROM_OUTSIDE}


def numbers(asked: str) -> tuple[Tensor, Tensor]:
    """The arguments of what is asked for."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3) if asked in OF_MANY else (3,)
    x, w = (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.3 for _ in range(2))
    return x, w


def compiled(program: Program, asked: str, backend: str, **options: Any) -> Callable[..., Any]:
    """What is asked of a program, compiled into one graph."""
    ask = EVERY[asked]
    if asked in FROM_OUTSIDE:
        return ask(torch.compile(program, backend=backend, fullgraph=True, **options))
    return torch.compile(ask(program), backend=backend, fullgraph=True, **options)
