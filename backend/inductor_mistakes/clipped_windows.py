"""The gradient of average pooling divides by the size of windows that reach beyond the input.

Checked on torch 2.11, 2.13 and 2.15: lowering.lowerings, fallback_avg_pool2d_backward and
fallback_avg_pool3d_backward, and V.graph.sizevars.statically_known_leq.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.inductor_mistakes.mistake import Mistake, decision, replace, together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from normpass.backend.inductor_mistakes.mistake import Undo

aten = torch.ops.aten
ISSUE = 198119


@together
def mend() -> Iterator[Undo]:
    from torch._inductor import lowering

    fallbacks = {
        aten.avg_pool2d_backward.default: lowering.fallback_avg_pool2d_backward,
        aten.avg_pool3d_backward.default: lowering.fallback_avg_pool3d_backward,
    }
    table: dict[Any, Any] = lowering.lowerings
    for op, fallback in fallbacks.items():
        if op in table:
            yield replace(table, op, _either(table[op], fallback))


def _either(original: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    def avg_pool_backward(
        gradient: Any,
        x: Any,
        kernel: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None = None,
    ) -> Any:
        arguments = (kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
        if not (ceil_mode and count_include_pad and divisor_override is None) or _fit(
            gradient, x, kernel, stride or kernel, padding
        ):
            return original(gradient, x, *arguments)
        return fallback(gradient, x, *arguments)

    return avg_pool_backward


@decision(ISSUE, otherwise=False)
def _fit(gradient: Any, x: Any, kernel: Any, stride: Any, padding: Any) -> bool:
    """Whether it is known that the last window along each axis ends within the padded input."""
    from torch._inductor.virtualized import V

    n = len(kernel)
    stride, padding = (each if len(each) == n else list(each) * n for each in (stride, padding))
    sizes = zip(gradient.get_size()[-n:], x.get_size()[-n:], kernel, stride, padding, strict=True)
    return all(
        V.graph.sizevars.statically_known_leq((outputs - 1) * step + window, size + 2 * pad)
        for outputs, size, window, step, pad in sizes
    )


MISTAKE = Mistake(
    name="clipped_windows",
    issue=ISSUE,
    fix=None,
    wrong=(
        "The backward of average pooling with ceil_mode divides by the size of a whole window "
        "where the last one reaches beyond the padded input, and the forward by what is inside."
    ),
    mend=mend,
)
