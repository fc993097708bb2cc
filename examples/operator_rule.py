"""An operator of one's own with its rules: diodes fitted by Newton's method, all of them at once.

    python examples/operator_rule.py [--backend inductor] [--diodes 256] [--steps 6]

The current of a diode behind a resistance solves an equation in which it stands inside and outside
of a logarithm: y + log(y) = z, whose solution y(z) is Wright's omega function. PyTorch does not
have it. Here it is an operator that iterates until nothing moves any more: autograd, vmap and
compilers know nothing of that loop, and need not. Three rules say what the operator means to them:

    derivative       dy/dz = y / (1 + y), from the result, and so of any order and in any mode
    batching         under vmap: the same call on all examples
    decomposition    for compilers: as many steps as are always enough, which become one kernel

Each step of the fit takes the gradient and the Hessian of each diode's loss by torch.func, and is
compiled as one function. Look at the errors of the parameters: once they are small, each is about
the square of the one before, down to rounding. Newton's method does that only with right
derivatives of both orders.
"""

# %%
from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad, jacfwd, vmap

import normpass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# %% [markdown]
# The operator. With u = log(y) the equation is e^u + u = z, whose left side is convex: Newton's
# method finds u from any start that lies above it.


# %%
def start(z: Tensor) -> Tensor:
    """Above log(y), and near it for large and for small z."""
    return torch.where(z > 1, z.clamp(min=1).log(), z)


def nearer(u: Tensor, z: Tensor) -> Tensor:
    e = u.exp()
    return u - (e + u - z) / (1 + e)


@torch.library.custom_op("examples::wright_omega", mutates_args=())
def wright_omega(z: Tensor) -> Tensor:
    """y + log(y) = z: *s -> *s"""
    u, last = start(z), torch.full_like(z, torch.inf)
    while (u < last).any():  # down, until rounding stops it
        u, last = torch.minimum(u, nearer(u, z)), u
    return u.exp()


@wright_omega.register_fake
def _(z: Tensor) -> Tensor:
    return torch.empty_like(z)


# %% [markdown]
# Its rules.


# %%
@normpass.rule.derivative(wright_omega)
def wright_omega_backward(grad: Tensor, result: Tensor) -> Tensor:
    """dy (1 + 1 / y) = dz"""
    return grad * result / (1 + result)


@normpass.rule.batching(wright_omega)
def wright_omega_batched(info: Any, in_dims: Any, z: Tensor) -> tuple[Tensor, int]:
    return wright_omega(z), in_dims[0]


@normpass.rule.decomposition(wright_omega)
def wright_omega_decomposed(z: Tensor) -> Tensor:
    u = start(z)
    for _ in range(6):
        u = nearer(u, z)
    return u.exp()


# %% [markdown]
# The use: three parameters of each of many diodes, from currents at some voltages.


# %%
def log_current(parameters: Tensor, voltage: Tensor) -> Tensor:
    """Of one diode, v -> v. With its scale a = ideality * 25.85 mV, saturation current s and
    resistance r the parameters are log(a / r), log(s r / a) and 1 / a: 3
    """
    z = parameters[1] + parameters[2] * voltage
    return parameters[0] + z - wright_omega(z)  # which is log(a / r * y)


def loss(parameters: Tensor, voltage: Tensor, measured: Tensor) -> Tensor:
    return (log_current(parameters, voltage) - measured).square().mean()


def slope(parameters: Tensor, voltage: Tensor, measured: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient, twice: to be differentiated, and as it is."""
    found = grad(loss)(parameters, voltage, measured)
    return found, found


def newton(parameters: Tensor, voltage: Tensor, measured: Tensor) -> Tensor:
    """Better parameters of one diode, 3 -> 3."""
    hessian, gradient = jacfwd(slope, has_aux=True)(parameters, voltage, measured)
    return parameters - torch.linalg.solve(hessian, gradient)


class Fit:
    """Called, it takes one step and returns how far the parameters are from the right ones: the
    largest difference of each diode.
    """

    def __init__(self, compile: Callable[[Any], Any], diodes: int = 256) -> None:
        torch.manual_seed(0)
        typical, spread = torch.tensor([[-4, -16, 27], [0.2, 0.3, 0.3]], dtype=torch.float64)
        self.right = typical + spread * (2 * torch.rand(diodes, 3, dtype=torch.float64) - 1)
        self.found = typical.repeat(diodes, 1)
        self.voltage = torch.linspace(0.3, 1.2, 40, dtype=torch.float64)
        self.measured = vmap(log_current, in_dims=(0, None))(self.right, self.voltage)
        self.newton = compile(vmap(newton, in_dims=(0, None, 0)))

    def error(self) -> Tensor:
        return (self.found - self.right).abs().amax(1)

    def __call__(self) -> Tensor:
        self.found = self.newton(self.found, self.voltage, self.measured)
        return self.error()


# %%
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="normpass", help="of torch.compile, or eager")
    parser.add_argument("--diodes", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(argv)
    normpass.register()

    def compile(function: Any) -> Any:
        eager = options.backend == "eager"
        return function if eager else torch.compile(function, backend=options.backend)

    step = Fit(compile, options.diodes)
    print(f"start: largest error {step.error().max().item():.1e}")
    for i in range(options.steps):
        print(f"step {i}: largest error {step().max().item():.1e}")


# %%
if __name__ == "__main__":
    main()
