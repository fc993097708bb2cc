"""The gradient of an image of few channels on CPUs: a matrix product, and for each pixel a sum over
the windows that it is in.

oneDNN computes channels in blocks of 16, and an image has one or three: most of what it computes of
the image's gradient is thrown away, so that this takes four times as long as the weight's, which
has as many multiplications. It is wanted by gradient penalties, adversarial examples and guidance.

    columns = gradient[n y x o] * weight[o (i j c)]         what each window gives to its pixels
    image[n y x c] = sum over i, j of columns[n (y + p - i) (x + p - j) i j c]

With a stride s a pixel is in windows for which i is y + p modulo s alone: the pixels of one residue
are an image of their own, and these are interleaved. Windows that lie side by side, as a vision
transformer's patches, are only put in order.

Measured on Zen 4 (float32, two threads, alternating steps of a convolution with SiLU, forward and
all gradients, images of 8 to 224 pixels): 1.06x to 1.7x as fast with 1 to 4 channels, 1.1x with 6
and 8, the same with 12, 2.1x for patches of 16 x 16; the image's gradient is 1.2 to 6 times closer
to the exact one. In bfloat16 it is slower (0.6x to 1.2x), and left to oneDNN. Of the step of a
small critic that is 8 %, of a ConvNeXt's or ViT's with gradients at images too little to measure.
"""

from __future__ import annotations

import math
import operator
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from normpass.backend.inductor.calls import computed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Graph, Node

aten = torch.ops.aten
BACKWARD = aten.convolution_backward.default
OF_IMAGE = 0  # which gradient is
FEW_CHANNELS = 8
# Products are computed in vectors of so many columns: with fewer, MKL takes four times as long.
VECTOR = 16
# They take at most so many times the memory of the gradient that they are made of.
MOST_COLUMNS = 3
# Each pixel of a window is a term of the sums, and each residue a loop: 9 terms take the compiler
# 0.3 s, 25 of them 1.5 to 3 s. 49 take 3 s, for which a ResNet's step was no faster.
MOST_PIXELS, MOST_RESIDUES = 25, 16
SIDES = (0, 1)  # y and x


def as_products(graph: Graph) -> None:
    """Takes the gradients of images of few channels out of those of convolutions."""
    for node in graph.find_nodes(op="call_function", target=BACKWARD):
        if not _gains(node):
            continue
        with graph.inserting_before(node):
            image = _of_image(graph, node)
        for result in list(node.users):
            if result.args[1] == OF_IMAGE:
                result.replace_all_uses_with(image)
                graph.erase_node(result)
        arguments: Any = node.args
        node.args = (*arguments[:-1], [False, *arguments[-1][1:]])
        node.meta["val"] = (None, *node.meta["val"][1:])
        if not node.users:
            graph.erase_node(node)


def _gains(node: Node) -> bool:
    arguments: Any = node.args
    gradient, x, weight = (operand.meta["val"] for operand in arguments[:3])
    strides, padding, dilation, transposed, _, groups, mask = arguments[4:]
    if x.ndim != 4 or not mask[OF_IMAGE] or transposed or groups != 1 or set(dilation) != {1}:
        return False
    many, few, *window = weight.shape
    sizes = *gradient.shape[1:], *x.shape[1:], *weight.shape
    return bool(
        x.device.type == "cpu"
        and x.dtype is torch.float32
        and all(isinstance(n, int) and n for n in sizes)
        and few <= FEW_CHANNELS
        and _columns(weight) <= MOST_COLUMNS * many
        and all(window[k] >= strides[k] for k in SIDES)
        and (
            _are_patches(window, strides, padding)
            or (math.prod(window) <= MOST_PIXELS and math.prod(strides) <= MOST_RESIDUES)
        )
        and all(user.target is operator.getitem for user in node.users)
    )


def _are_patches(window: Sequence[int], strides: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether each pixel is in one window at most."""
    return [*window] == [*strides] and not any(padding)


def _columns(weight: Tensor) -> int:
    """How many numbers a window has, in whole vectors."""
    return -(-math.prod(weight.shape[1:]) // VECTOR) * VECTOR


def _of_image(graph: Graph, node: Node) -> Node:
    """The gradient of the image, with its channels together."""
    arguments: Any = node.args
    gradient, x, weight, _, strides, padding, *_ = arguments
    many, few, *window = weight.meta["val"].shape
    size, result = (operand.meta["val"].shape[2:] for operand in (x, gradient))
    # So many of each residue; the last may be beyond the image.
    pixels = [-(-size[k] // strides[k]) for k in SIDES]
    columns = _columns(weight.meta["val"])

    def compute(op: Any, *arguments: Any) -> Node:
        return computed(graph, node, op, *arguments)

    rows = compute(aten.permute.default, gradient, [0, 2, 3, 1])
    rows = compute(aten.reshape.default, rows, [-1, many])
    windows = compute(aten.permute.default, weight, [0, 2, 3, 1])
    windows = compute(aten.reshape.default, windows, [many, -1])
    windows = compute(aten.constant_pad_nd.default, windows, [0, columns - few * math.prod(window)])
    found = compute(aten.mm.default, rows, windows)
    found = compute(aten.view.default, found, [-1, *result, columns])

    def added(residue: tuple[int, ...]) -> Node:
        """Pixels of one residue, n y x c: what each takes from the windows that it is in."""
        image: Node | None = None
        for at in product(*map(range, window)):
            begun = [residue[k] + padding[k] - at[k] for k in SIDES]
            if any(begun[k] % strides[k] for k in SIDES):
                continue
            first = (at[0] * window[1] + at[1]) * few
            part = compute(aten.slice.Tensor, found, 3, first, first + few)
            # Pixel q is in window q + d.
            before = [-(begun[k] // strides[k]) for k in SIDES]
            after = [pixels[k] - result[k] - before[k] for k in SIDES]
            pads = [0, 0, before[1], after[1], before[0], after[0]]
            part = compute(aten.constant_pad_nd.default, part, pads)
            image = part if image is None else compute(aten.add.Tensor, image, part)
        assert image is not None
        return image

    def beside(images: list[Node], dim: int) -> Node:
        """One after another along a new dimension."""
        apart = [compute(aten.unsqueeze.default, image, dim) for image in images]
        return compute(aten.cat.default, apart, dim)

    if _are_patches(window, strides, padding):
        image = compute(aten.slice.Tensor, found, 3, 0, math.prod(window) * few)
        image = compute(aten.view.default, image, [-1, *result, *window, few])
        image = compute(aten.permute.default, image, [0, 1, 3, 2, 4, 5])
        covered = [result[k] * window[k] for k in SIDES]
        image = compute(aten.reshape.default, image, [-1, *covered, few])
    elif strides == [1, 1]:
        image = added((0, 0))
        covered = [*size]
    else:
        rows_of = [[added((y, x)) for x in range(strides[1])] for y in range(strides[0])]
        image = beside([beside(images, 3) for images in rows_of], 2)
        covered = [pixels[k] * strides[k] for k in SIDES]
        image = compute(aten.reshape.default, image, [-1, *covered, few])
    if covered != [*size]:
        ends = [size[k] - covered[k] for k in SIDES]
        image = compute(aten.constant_pad_nd.default, image, [0, 0, 0, ends[1], 0, ends[0]])
    return compute(aten.permute.default, image, [0, 3, 1, 2])
