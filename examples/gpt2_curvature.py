"""Products of a GPT-2's Hessian and Gauss-Newton matrix with vectors, by power iteration.

    python examples/gpt2_curvature.py [--backend eager] [--way hessian_vector] [--steps 20]

Prints the length of each product, which goes to that of the largest eigenvalue: the sharpness of
the loss. There are three ways: `hessian_vector` differentiates a compiled loss twice,
`forward_over_reverse` compiles the whole product, written with torch.func, and
`gauss_newton_vector` compiles an operator of curvlinops, which is written with torch.func, too.
Under its transforms a model that was compiled by itself would run uncompiled.

The model has random weights and the size that nanoGPT proposes for CPUs: four layers of 128, texts
of 64 out of 65 letters. Needs transformers, and curvlinops-for-pytorch for the last way.
"""

# %%
from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LETTERS = 65

# %% [markdown]
# The model and its data: texts of random letters.


# %%
class Letters(nn.Module):
    """A GPT-2 that gives the logits of each next letter, in one row each.

    Attention is written out: that of scaled_dot_product_attention has no second derivative on CPUs.
    """

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        written_out: dict[str, Any] = {"attn_implementation": "eager"}
        config = GPT2Config(
            vocab_size=LETTERS,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            **written_out,
        )
        self.gpt = GPT2LMHeadModel(config)

    def forward(self, text: Tensor) -> Tensor:
        return self.gpt(text).logits[:, :-1].flatten(0, 1)


def model_and_text(
    layers: int = 4,
    width: int = 128,
    length: int = 64,
    batch: int = 12,
    dtype: torch.dtype = torch.float32,
) -> tuple[Letters, Tensor, Tensor]:
    """The model without dropout, a batch of texts, and the letters that it should find."""
    torch.manual_seed(0)
    text = torch.randint(LETTERS, (batch, length))
    return Letters(layers, width, length).to(dtype).eval(), text, text[:, 1:].flatten()


# %% [markdown]
# Power iteration: a vector is multiplied again and again, and turns to the largest eigenvalue.


# %%
def parts(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """A flat vector in the shapes of the parameters."""
    sizes = [p.numel() for p in parameters]
    return [x.view_as(p) for x, p in zip(vector.split(sizes), parameters, strict=True)]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


def power_iteration(product: Callable[[Tensor], Tensor], model: nn.Module) -> Callable[[], Tensor]:
    """A function that multiplies a vector of length one, and goes on with what it returns."""
    vector = torch.randn_like(flat([p.detach() for p in model.parameters()]))

    def step() -> Tensor:
        nonlocal vector
        vector = product(vector / vector.norm())
        return vector

    return step


# %% [markdown]
# The three ways to a product.


# %%
def hessian_vector(compile: Callable[[Any], Any], **sizes: Any) -> Callable[[], Tensor]:
    """By double backward. The loss is compiled with the model: of one that stands outside, the
    second derivative would go through the model once more.
    """
    model, text, target = model_and_text(**sizes)
    parameters = list(model.parameters())

    def loss(text: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model(text), target)

    compiled = compile(loss)

    def product(vector: Tensor) -> Tensor:
        slope = torch.autograd.grad(compiled(text, target), parameters, create_graph=True)
        return flat(torch.autograd.grad(slope, parameters, parts(vector, parameters)))

    return power_iteration(product, model)


def forward_over_reverse(compile: Callable[[Any], Any], **sizes: Any) -> Callable[[], Tensor]:
    """As one compiled function: how the gradient changes in the direction of the vector."""
    model, text, target = model_and_text(**sizes)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (text,)), target)

    def product(vector: Tensor) -> Tensor:
        tangents = parts(vector, list(parameters.values()))
        direction = dict(zip(parameters, tangents, strict=True))
        change = jvp(grad(loss), (parameters,), (direction,))[1]
        return flat(list(change.values()))

    return power_iteration(compile(product), model)


def gauss_newton_vector(compile: Callable[[Any], Any], **sizes: Any) -> Callable[[], Tensor]:
    """By curvlinops, whose operator makes its first products, uncompiled, when it is made."""
    from curvlinops import GGNLinearOperator

    model, text, target = model_and_text(**sizes)
    matrix = GGNLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), [(text, target)]
    )
    return power_iteration(compile(matrix.__matmul__), model)


WAYS = {f.__name__: f for f in (hessian_vector, forward_over_reverse, gauss_newton_vector)}


# %%
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="normpass", help="of torch.compile, or eager")
    parser.add_argument("--way", default="hessian_vector", choices=WAYS)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)

    def compile(module: Any) -> Any:
        eager = options.backend == "eager"
        return module if eager else torch.compile(module, backend=options.backend)

    step = WAYS[options.way](compile)
    for i in range(options.steps):
        print(f"step {i}: a product of length {step().norm().item():.4f}")


# %%
if __name__ == "__main__":
    main()
