"""Which formulation of a convolution is fastest where all that it is made of is batched.

Measured on CPUs with oneDNN and MKL (two cores, AVX-512, float32), where the time of a grouped
convolution is near the least in most cases. It is not

    where weights outweigh images, as they do in the last layers of a ResNet when each of 16
    examples has its own: to reorder the weights takes longer than to use them. Convolutions one by
    one take a third to two thirds of the time.

    for the gradient of weights whose images are small: of 512 channels of 7 x 7 a product of
    matrices takes 0.4 of the time, of 64 to 128 channels of 56 x 56 with strides 0.6; of 1 x 1 all
    the more. The columns of the input that it copies are at most eight times as large as what it
    computes.

For other devices and for halves nothing was measured, and a grouped convolution is what upstream's
rule takes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# As many convolutions one by one, at most: each is a node of the graph.
MOST_EXAMPLES = 64
# How much larger weights are than images, for an example.
OUTWEIGH = 4
# How much larger the columns are than the gradient of the weight.
MOST_COLUMNS = 8


def one_by_one(examples: int, images: Sequence[int], weight: Sequence[int], like: Tensor) -> bool:
    """Whether examples with these sizes are convolved one by one."""
    return (
        _is_measured(like)
        and _are_known(examples, *images, *weight)
        and examples <= MOST_EXAMPLES
        and math.prod(weight) > OUTWEIGH * math.prod(images)
    )


def by_columns(
    groups: int, image: Sequence[int], result: Sequence[int], kernel: Sequence[int], like: Tensor
) -> bool:
    """Whether the gradient of a weight is a product of matrices. image, result: n c *s of an
    example's input and of what it is convolved to.
    """
    if groups != 1 or not _is_measured(like) or not _are_known(*image, *result, *kernel):
        return False
    n, channels, *space = result
    return math.prod(kernel) == 1 or n * math.prod(space) <= MOST_COLUMNS * channels


def _is_measured(like: Tensor) -> bool:
    return like.device.type == "cpu" and like.dtype.itemsize >= 4


def _are_known(*sizes: int) -> bool:
    return all(isinstance(size, int) for size in sizes)
