"""Cross entropies of a vocabulary: their gradients are one sweep, no value is one of every word's.

The reference is float64 mathematics from primitives; the error allowed is eager's own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import oracles
import pytest
import torch
from compiled import compile_fused, no_recompiles
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

from normpass.backend.explain import record
from normpass.passes.pipeline import Fused
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from normpass.passes.region import Region

WORDS = 1003
WEIGHT = torch.rand(WORDS, generator=torch.Generator().manual_seed(1)) + 0.5
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "another word is ignored": {"ignore_index": 3},
    "weights": {"weight": WEIGHT},
    "smoothing": {"label_smoothing": 0.1},
}


def batch(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits, and words: the first and the last among them, and some that are ignored."""
    generator = torch.Generator().manual_seed(rows)
    words = torch.randint(WORDS, (rows,), generator=generator)
    words[:4] = torch.tensor([0, WORDS - 1, -100, 3])
    logits = 3 * torch.randn(rows, WORDS, generator=generator)
    return logits.to(dtype).requires_grad_(), words


def loss(logits: Tensor, words: Tensor, **options: Any) -> Tensor:
    words = words.where(words >= 0, options.get("ignore_index", -100))
    return F.cross_entropy(logits.float(), words, **options)


def exact_loss(
    logits: Tensor,
    words: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The same in primitives, for double precision."""
    counts = (words >= 0) & (words != ignore_index)
    log_p = logits - logits.exp().sum(1, keepdim=True).log()
    w = torch.ones(WORDS, dtype=logits.dtype) if weight is None else weight.to(logits.dtype)
    one = w[words.clamp(min=0)] * counts
    here = -log_p[torch.arange(len(words)), words.clamp(min=0)] * one
    spread = -(log_p * w).mean(1) * counts
    each = (1 - label_smoothing) * here + label_smoothing * spread
    if reduction == "none":
        return each
    return each.sum() / one.sum() if reduction == "mean" else each.sum()


def gradient(f: Callable[..., Tensor], logits: Tensor, words: Tensor, **options: Any) -> Tensor:
    """Of the sum of all losses, each times a number of its own."""
    found = f(logits, words, **options)
    factors = torch.linspace(-1, 2, found.numel(), dtype=found.dtype).view(found.shape)
    return torch.autograd.grad(found, logits, factors)[0]


def backward_region(heard: list[Any]) -> Region:
    (found,) = (d for d in heard if isinstance(d, Fused) and d.phase == "backward")
    return parse(found.text)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients(options: dict[str, Any], dtype: torch.dtype) -> None:
    logits, words = batch(37, dtype)
    with record.listen() as heard:
        ours = gradient(compile_fused(loss), logits, words, **options)
    region = backward_region(heard)
    added = [op.fn for op in region.ops if op.is_reduction]
    # Smoothing counts every word, and weights are given for every word.
    assert added == ["sum"] * len({"label_smoothing", "weight"} & {*options})
    # One number a word and a row: the logits, and their gradient.
    whole = [b for b in (*region.inputs, *(o.buffer for o in region.outputs)) if len(b.axes) == 2]
    assert [buffer.dtype for buffer in whole] == [dtype, dtype]
    eager = gradient(loss, logits, words, **options)
    right = logits.detach().double().requires_grad_()
    exact = gradient(exact_loss, right, words, **options)
    oracles.assert_no_less_accurate(ours, eager, exact, "the logits' gradient")


def test_any_number_of_rows() -> None:
    compiled = compile_fused(loss, dynamic=None)

    def found(rows: int) -> Tensor:
        logits, words = batch(rows, torch.float32)
        torch._dynamo.mark_dynamic(logits, 0)
        torch._dynamo.mark_dynamic(words, 0)
        return gradient(compiled, logits, words)

    with record.listen() as heard:
        found(8)
    assert not any(op.is_reduction for op in backward_region(heard).ops)
    with no_recompiles():
        for rows in (5, 41):
            check_gradient(found(rows), rows)


def test_any_number_of_words() -> None:
    """Which no number of positions is known of, so that Inductor has the gradient."""
    compiled = compile_fused(loss, dynamic=True)
    check_gradient(gradient(compiled, *batch(8, torch.float32)), 8)


def check_gradient(ours: Tensor, rows: int) -> None:
    logits, words = batch(rows, torch.float32)
    right = logits.detach().double().requires_grad_()
    oracles.assert_no_less_accurate(
        ours, gradient(loss, logits, words), gradient(exact_loss, right, words), f"{rows} rows"
    )


def test_the_gradient_is_written_over_logits_that_nobody_else_has() -> None:
    """As Inductor does. Where the forward returns them, they stay as they are."""
    states = torch.randn(1024, 8, requires_grad=True)
    layer, words = torch.nn.Linear(8, 8192, bias=False), torch.randint(8192, (1024,))

    def forward(states: Tensor, words: Tensor, *, returned: bool) -> tuple[Tensor, ...]:
        logits = layer(states)
        loss = F.cross_entropy(logits, words)
        return (loss, logits) if returned else (loss,)

    for returned in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(forward, backend="normpass", fullgraph=True)
        with record.listen() as heard:
            results, code = run_and_get_code(
                partial(forward_and_backward, compiled, states, words, returned=returned)
            )
        (decision,) = (d for d in heard if d.phase == "backward")
        assert isinstance(decision, Fused), decision
        assert ("= normpass_call_site()" in code[-1]) is returned
        if returned:
            torch.testing.assert_close(results[1], layer(states))


def forward_and_backward(
    compiled: Callable[..., tuple[Tensor, ...]], states: Tensor, words: Tensor, *, returned: bool
) -> tuple[Tensor, ...]:
    results = compiled(states, words, returned=returned)
    results[0].backward()
    return results
