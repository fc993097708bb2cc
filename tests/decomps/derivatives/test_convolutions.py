"""Convolutions of which a part is not there, or does not move."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from normpass.decomps.registry import derivative

NUMBERS = ([1], [1], [1], False, [0], 1)


def test_the_tangent_of_each_part_alone() -> None:
    x, w, b = torch.rand(2, 3, 5), torch.rand(4, 3, 3), torch.rand(4)
    primals, tangents = (x, w, b), (torch.rand_like(x), torch.rand_like(w), torch.rand_like(b))
    rule = derivative("convolution_jvp")
    for k, tangent in enumerate(tangents):
        moved = [(p, tangent if i == k else None) for i, p in enumerate(primals)]
        _, expected = torch.func.jvp(
            lambda v, k=k: torch.convolution(*primals[:k], v, *primals[k + 1 :], *NUMBERS),
            (primals[k],),
            (tangent,),
        )
        assert_close(rule(*(v for pair in moved for v in pair), *NUMBERS), expected)


def test_a_bias_that_is_not_there_has_no_gradient() -> None:
    assert derivative("convolution_backward_jvp_grad_bias")(torch.rand(2, 3, 4), None) is None
