"""Convolutions over one dimension on CPUs: over an image of one row, whose channels lie together.

oneDNN multiplies channels, and reads and writes them in blocks or together. Tensors of two and
three dimensions may have them together (channels_last) and are read as they lie; those of one may
not, and ATen puts all three of every convolution into blocks and back, in each step: with 64
channels that takes as long as the products. Inductor notes the same of its lowering, and leaves it.

Where convolutions of images are laid out channels_last, which Inductor does with mkldnn, the others
follow here: x.unsqueeze(2), and the squeeze of what comes out, are no work. That is with AVX-512:
with AVX2 oneDNN's kernels of blocks are so much better than those of channels that lie together
that the copies pay (`_has_kernels`), and all stays as it is.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch._prims_common import suggest_memory_format

from normpass.backend.inductor.calls import call, computed
from normpass.passes.sizes import hint

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph, Node

aten = torch.ops.aten
FORWARD = aten.convolution.default
BACKWARD = aten.convolution_backward.default
ROWS = 2  # the dimension of an image that there is one of
OF_BIAS = 2  # which gradient is
ENOUGH_CHANNELS = 8
# For oneDNN's gradient of the weight, with channels together. (Sound has one.)
ENOUGH_CHANNELS_READ = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def as_images(graph: Graph) -> None:
    """Makes convolutions over one dimension, and their gradients, such of images of one row, or
    matrix products where few channels are read.
    """
    if not _has_kernels():
        return
    for op, rewrite in ((FORWARD, _forward), (BACKWARD, _backward)):
        for node in graph.find_nodes(op="call_function", target=op):
            if _gains(node):
                with graph.inserting_before(node):
                    rewrite(graph, node)
                if not node.users:
                    graph.erase_node(node)


def _has_kernels() -> bool:
    """Whether oneDNN has good ones for channels that lie together.

    With AVX2 (EPYC, 2 threads, torch 2.13) the gradient of the weight took 1.0 to 1.5 times as long
    as in blocks, copies and all, and in bfloat16 that of the input 4 to 8 times; a step of four
    layers of 512 channels 1.4 times.
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _gains(node: Node) -> bool:
    arguments: Any = node.args
    image, result = (
        (arguments[1], arguments[0]) if node.target is BACKWARD else (arguments[0], node)
    )
    x, y = image.meta["val"], result.meta["val"]
    return bool(
        x.ndim == y.ndim == 3
        and x.device.type == "cpu"
        and x.dtype in DTYPES
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hint(y.shape[1]) >= ENOUGH_CHANNELS
    )


def _forward(graph: Graph, node: Node) -> None:
    arguments: Any = node.args
    x, weight, bias, *how = arguments
    images = _image(graph, x, node), _unsqueezed(graph, weight, node)
    image = call(graph, node, FORWARD, *images, bias, *_in_two_dimensions(*how))
    image.meta["val"] = _channels_last(node.meta["val"].unsqueeze(ROWS))
    node.replace_all_uses_with(_row(graph, image, node))


def _backward(graph: Graph, node: Node) -> None:
    arguments: Any = node.args
    gradient, x, weight, bias_sizes, *how = arguments
    if hint(x.meta["val"].shape[1]) < ENOUGH_CHANNELS_READ:
        if _has_short_windows(node):
            _from_windows(graph, node)
        return
    images = _image(graph, gradient, node), _image(graph, x, node), _unsqueezed(graph, weight, node)
    gradients = call(graph, node, BACKWARD, *images, bias_sizes, *_in_two_dimensions(*how))
    of_rows = node.meta["val"]
    of_images = [x if x is None else _channels_last(x.unsqueeze(ROWS)) for x in of_rows[:2]]
    gradients.meta["val"] = (*of_images, *of_rows[2:])
    for result in list(node.users):
        _, k = result.args
        found = call(graph, result, operator.getitem, gradients, k)
        found.meta["val"] = gradients.meta["val"][k]
        result.replace_all_uses_with(found if k == OF_BIAS else _row(graph, found, result))
        graph.erase_node(result)


def _has_short_windows(node: Node) -> bool:
    """Whether the weight has a gradient, and little is read for an element of the result."""
    arguments: Any = node.args
    gradient, x, weight = (operand.meta["val"] for operand in arguments[:3])
    dilation, transposed, _, groups, (_, of_weight, _) = arguments[6:]
    if not of_weight or transposed or groups != 1 or list(dilation) != [1]:
        return False
    sizes = (*gradient.shape, *x.shape, *weight.shape)
    channels, *window = weight.shape
    return all(isinstance(n, int) and n for n in sizes) and math.prod(window) <= 4 * channels


def _from_windows(graph: Graph, node: Node) -> None:
    """The gradients of the weight and the bias, of a sum over windows: n t o, n t (i k) -> o i k"""
    arguments: Any = node.args
    gradient, x, weight, _, (stride,), (padding,), *_, mask = arguments
    channels, *window = weight.meta["val"].shape

    def compute(op: Any, *arguments: Any) -> Node:
        return computed(graph, node, op, *arguments)

    padded = compute(aten.constant_pad_nd.default, x, [padding, padding]) if padding else x
    windows = compute(aten.unfold.default, padded, 2, window[1], stride)
    rows = compute(aten.permute.default, windows, [0, 2, 1, 3])
    rows = compute(aten.reshape.default, rows, [-1, math.prod(window)])
    of_rows = compute(aten.permute.default, gradient, [1, 0, 2])
    of_rows = compute(aten.reshape.default, of_rows, [channels, -1])
    of_weight = compute(aten.mm.default, of_rows, rows)
    found = {1: compute(aten.view.default, of_weight, [channels, *window])}
    if mask[2]:
        found[2] = compute(aten.sum.dim_IntList, gradient, [0, 2])
    for result in list(node.users):
        k: Any = result.args[1]
        if k in found:
            result.replace_all_uses_with(found[k])
            graph.erase_node(result)
    node.args = (*arguments[:-1], [mask[0], False, False])
    node.meta["val"] = (node.meta["val"][0], None, None)


def _in_two_dimensions(
    stride: Any, padding: Any, dilation: Any, transposed: Any, output_padding: Any, *others: Any
) -> tuple[Any, ...]:
    """The rest of a convolution's arguments, with what they are along the one row."""
    return [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output_padding], *others


def _image(graph: Graph, operand: Node, reader: Node) -> Node:
    """n c t -> n c 1 t, with its channels together: from the start where it is computed in this
    graph, else in a copy.
    """
    image = _unsqueezed(graph, operand, reader)
    together = _channels_last(image.meta["val"])
    if operand.op == "call_function":
        image.meta["val"], operand.meta["val"] = together, together.squeeze(ROWS)
    elif suggest_memory_format(image.meta["val"]) is not torch.channels_last:
        if _is_one_channel(image.meta["val"]):
            image = call(graph, reader, aten.as_strided.default, image, *_layout(together))
        else:
            image = call(graph, reader, aten.clone.default, image)
            image.kwargs = {"memory_format": torch.channels_last}
        image.meta["val"] = together
    return image


def _is_one_channel(image: Tensor) -> bool:
    """Then its strides alone say whether channels lie together; they are to be numbers here."""
    is_static = all(isinstance(n, int) for n in (*image.shape, *image.stride()))
    return is_static and image.shape[1] == 1 and image.is_contiguous()


def _layout(image: Tensor) -> tuple[list[int], list[int]]:
    return list(image.shape), list(image.stride())


def _unsqueezed(graph: Graph, operand: Node, reader: Node) -> Node:
    image = call(graph, reader, aten.unsqueeze.default, operand, ROWS)
    image.meta["val"] = operand.meta["val"].unsqueeze(ROWS)
    return image


def _row(graph: Graph, image: Node, meant: Node) -> Node:
    """n c 1 t -> n c t; in place of another node."""
    row = call(graph, meant, aten.squeeze.dim, image, ROWS)
    row.meta["val"] = image.meta["val"].squeeze(ROWS)
    return row


def _channels_last(image: Tensor) -> Tensor:
    """An example as Inductor lays out images: it lays tensors out as their examples are."""
    return torch.empty_like(image, memory_format=torch.channels_last)
