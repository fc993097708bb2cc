"""How Inductor calls bilinear upsampling, and the gradients of it, convolutions and max pooling, on
CPUs: ATen's kernels, with tensors that lie as these will read them.

ATen reads in channels_last if what the gradient is of lies so, else contiguous, and copies what
lies otherwise. Inductor does not ask it:

    convolution     It wants both tensors as the graph was traced, which for a model in the
                    contiguous format is another layout than its own forward has chosen; and since
                    torch 2.12 it orders their dimensions as those of the weight's gradient, which
                    for weights of one input channel (depthwise) or one pixel means nothing. Each
                    tensor is copied two to three times. And where channels lie together oneDNN
                    holds the gradient of a depthwise weight of more than 3 x 3 pixels in blocks of
                    16 x 16 channels, for one in each that is: 40 MB for 512 of 7 x 7 in half
                    precision, where to read contiguous tensors takes no longer.
    max pooling     Since torch 2.13 it adds up in contiguous planes, and before in a loop over each
                    pixel's windows that is not vectorized: 3 and 10 times what ATen takes.
    upsampling      It is decomposed before its gradient is taken, which so adds to each pixel four
                    times, atomically: 20 to 60 times what ATen takes where the channels lie
                    together, a third of a SegFormer's step. Forward it gathers each pixel's four
                    neighbours one by one: up to 10 times what ATen takes.

Graphs of ours ask for what will be read (`mark`); those that others compile are left alone.

Uses of torch._inductor here (lowering.lowerings, fallback_handler and _maybe_layout_constraints;
ir.ExternKernel.require_channels_last; V.graph.current_node), and of torch._ops (OpOverload's
py_kernels and _dispatch_cache), were checked on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey
from torch._prims_common import suggest_memory_format

from normpass.backend.inductor.images import images
from normpass.backend.inductor_mistakes.mistake import replace
from normpass.passes import faults
from normpass.passes.sizes import hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch._ops import OpOverload
    from torch.fx import Graph, Node

    Decompositions = Mapping[OpOverload, Callable[..., Any]]

aten = torch.ops.aten
CONVOLUTION = aten.convolution_backward.default
POOLING = aten.max_pool2d_with_indices_backward.default
ENLARGED = aten.upsample_bilinear2d.default
UPSAMPLING = aten.upsample_bilinear2d_backward.default
# Which arguments are read as images, and which of all tell how.
IMAGES = {CONVOLUTION: (0, 1), POOLING: (0, 7), ENLARGED: (0,), UPSAMPLING: (0,)}
TELLING = {CONVOLUTION: (1, 2), POOLING: (7,), ENLARGED: (), UPSAMPLING: ()}
# Upsampling's channels lie together, however they lay before, if they are enough for a vector.
ENOUGH_CHANNELS = 8
# Depthwise weights of at most so many pixels along each side have kernels of their own in oneDNN.
# For each number of others' gradients it holds a block: too much from so many times the image on.
OF_ITS_OWN = 3
BLOCK = 16 * 16
MUCH = 4
# What oneDNN multiplies; convolutions of other numbers have formats of their own.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
MARK = "normpass_reads_channels_last"


# ---- traced


_upsampling_is_whole: ContextVar[bool] = ContextVar("_upsampling_is_whole", default=False)


@contextmanager
def traced_whole() -> Iterator[None]:
    """Upsampling on CPUs, and its gradients, are not decomposed while the block traces a graph."""
    with faults.survived("upsampling", "a graph", "It is decomposed"):
        _keep_upsampling_whole()
    token = _upsampling_is_whole.set(True)
    try:
        yield
    finally:
        _upsampling_is_whole.reset(token)


class _Upsampling(torch.autograd.Function):
    """Bilinear, with the formula that derivatives.yaml has for upsample_bilinear2d."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        ctx.sizes, ctx.arguments = x.shape, arguments
        with torch._C._AutoDispatchBelowAutograd():
            return ENLARGED(x, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sizes, *how = ctx.arguments
        return UPSAMPLING(*gradients, sizes, ctx.sizes, *how), *(None for _ in ctx.arguments)


@cache
def _keep_upsampling_whole() -> None:
    """Has autograd trace what `traced_whole` is for, once a process, in place of torch's
    decompositions.
    """
    from torch._decomp.decompositions import upsample_compute_output_size
    from torch._subclasses.functional_tensor import FunctionalTensor

    scaled = aten.upsample_bilinear2d.vec

    def is_traced(x: Tensor) -> bool:
        # Tensors of other classes (DTensor) need not know the gradient's operator.
        is_plain = isinstance(x, FunctionalTensor) and x.device.type == "cpu"
        in_transform = torch._C._are_functorch_transforms_active()
        is_faster = x.requires_grad or hint(x.shape[1]) >= ENOUGH_CHANNELS
        return _upsampling_is_whole.get() and is_plain and not in_transform and is_faster

    def with_sizes(x: Tensor, *arguments: Any) -> Any:
        return (_Upsampling.apply if is_traced(x) else stock[ENLARGED])(x, *arguments)

    def with_factors(x: Tensor, sizes: Any, align_corners: bool, factors: Any) -> Any:
        if not is_traced(x):
            return stock[scaled](x, sizes, align_corners, factors)
        sizes = upsample_compute_output_size(x.size(), sizes, factors)
        return with_sizes(x, sizes, align_corners, *(factors or (None, None)))

    ours = {ENLARGED: with_sizes, scaled: with_factors}
    stock = {op: op.py_kernels[DispatchKey.Autograd] for op in ours}
    for op, kernel in ours.items():
        op.py_kernels[DispatchKey.AutogradCPU] = kernel
        op._dispatch_cache.clear()
    # ATen's takes numbers alone, where sizes vary they are symbols.
    UPSAMPLING.py_kernels.setdefault(DispatchKey.Meta, _example_of_upsamplings_gradient)
    UPSAMPLING._dispatch_cache.clear()


def _example_of_upsamplings_gradient(gradient: Tensor, _: Any, sizes: Any, *how: Any) -> Tensor:
    last = suggest_memory_format(gradient)
    return torch.empty(sizes, dtype=gradient.dtype, device=gradient.device, memory_format=last)


def kept_whole(table: Decompositions) -> Decompositions:
    """What stands in a table of decompositions for max pooling's gradient: ATen's on CPUs.

    It takes what was pooled for the shape alone. Here it gets memory without values (which is not
    even allocated, see `_lowering`), so that nobody saves it.
    """
    stock = table.get(POOLING)
    inside: ContextVar[bool] = ContextVar("inside", default=False)

    def backward(gradient: Tensor, x: Tensor, *others: Any) -> Any:
        if inside.get():
            return NotImplemented
        if gradient.device.type != "cpu":
            return stock(gradient, x, *others) if stock else NotImplemented
        token = inside.set(True)
        try:
            shape = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            return POOLING(gradient, shape, *others)
        finally:
            inside.reset(token)

    return {POOLING: backward}


# ---- the graph


def mark(graph: Graph) -> None:
    """Marks what a graph calls with whether it reads channels_last, and gives the examples of what
    it reads these strides: Inductor lays tensors out as their examples are.
    """
    _without_copies(graph)
    convolved = _convolved(graph)
    for op in IMAGES:
        for node in graph.find_nodes(op="call_function", target=op):
            arguments: Any = node.args
            value = arguments[0].meta["val"]
            if value.device.type != "cpu" or (op is CONVOLUTION and value.dtype not in DTYPES):
                continue
            node.meta[MARK] = (
                any(_lies_channels_last(arguments[k]) for k in TELLING[op])
                or (op is CONVOLUTION and not convolved.isdisjoint(arguments[:2]))
                or (op in (ENLARGED, UPSAMPLING) and _is_better_channels_last(op, node))
            )
            if op is CONVOLUTION and _is_held_in_blocks(node):
                node.meta[MARK] = False
            if node.meta[MARK]:
                for k in IMAGES[op]:
                    _lay_out(arguments[k])
                if op is ENLARGED:
                    _lay_out(node)


def _without_copies(graph: Graph) -> None:
    """Takes out copies of what convolutions write to channels_last: on CPUs it lies so. If somebody
    else has what is copied, he may write to it.
    """
    for copy in graph.find_nodes(op="call_function", target=aten.clone.default):
        source: Any = copy.args[0]
        is_of_this_alone = source.target is aten.convolution.default and len(source.users) == 1
        if is_of_this_alone and copy.kwargs.get("memory_format") is torch.channels_last:
            value = copy.meta["val"]
            if value.device.type == "cpu" and value.dtype in DTYPES:
                source.meta["val"] = value
                copy.replace_all_uses_with(source)
                graph.erase_node(copy)


def _convolved(graph: Graph) -> set[Node]:
    """Images that are computed beside convolutions, which Inductor makes channels_last on CPUs: in
    graphs that compute a forward and gradients, for further derivatives.
    """
    forward = graph.find_nodes(op="call_function", target=aten.convolution.default)
    if not any(node.meta["val"].ndim == 4 for node in forward):
        return set()
    return {node for node in images(graph) if node.op == "call_function"}


def _is_better_channels_last(op: OpOverload, node: Node) -> bool:
    """Whether upsampling is, even if what it reads has to be put together for it first."""
    image: Any = node.args[0]
    read, written = (x.meta["val"] for x in (image, node))
    enlarges = hint(read.numel()) <= hint(written.numel())
    return hint(read.shape[1]) >= ENOUGH_CHANNELS and (op is UPSAMPLING or enlarges)


def _is_held_in_blocks(node: Node) -> bool:
    """Whether oneDNN would hold a depthwise weight's gradient in blocks of which one number in each
    is used, much more than the image, and contiguous tensors are read in no more time.
    """
    arguments: Any = node.args
    image, weight = (arguments[k].meta["val"] for k in (1, 2))
    is_transposed, is_wanted = arguments[7], arguments[10][1]
    if is_transposed or not is_wanted or image.ndim != 4 or image.dtype is torch.float32:
        return False
    _, each, *pixels = map(hint, weight.shape)
    is_depthwise = each == 1 and hint(image.shape[1]) > 1
    held = BLOCK * hint(weight.numel())
    return is_depthwise and max(pixels) > OF_ITS_OWN and held > MUCH * hint(image.numel())


def _lies_channels_last(node: Node) -> bool:
    """Whether a tensor lies so, or what it is made of alone, which has its final strides earlier:
    offsets that a forward has saved become indices.
    """
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):  # the results of an operator that has several
        return False
    if value.ndim in LAST and suggest_memory_format(value) is LAST[value.ndim]:
        return True
    made_of = node.all_input_nodes if node.op == "call_function" else []
    return len(made_of) == 1 and _lies_channels_last(made_of[0])


def _lay_out(node: Node) -> None:
    """Gives the example of what is computed in this graph the strides of channels_last."""
    value = node.meta["val"]
    if node.op == "call_function":
        node.meta["val"] = value.contiguous(memory_format=LAST[value.ndim])


# ---- its lowering


@cache
def install() -> None:
    """Tells Inductor, once a process, how to lower what `mark` has marked."""
    from torch._inductor import lowering

    for op in IMAGES:
        if op not in lowering.lowerings:  # as Inductor would when it meets it in a backward
            lowering.make_fallback(op, lowering.constrain_to_fx_strides, warn=False)
        constraint = lowering._maybe_layout_constraints.get(op)
        if constraint is not None:
            replace(lowering._maybe_layout_constraints, op, _constraint(constraint))
        replace(lowering.lowerings, op, _lowering(op, lowering.lowerings[op]))


def _constraint(stock: Callable[..., Any]) -> Callable[..., Any]:
    def constrain(node: Node, *args: Any, **kwargs: Any) -> Any:
        return (args, kwargs) if MARK in node.meta else stock(node, *args, **kwargs)

    return constrain


def _lowering(op: OpOverload, stock: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    call = fallback_handler(op, add_to_fallback_set=False)

    def lower(*args: Any) -> Any:
        node: Any = V.graph.current_node
        if MARK in node.meta:
            with faults.survived("the gradient of an image", node.name, "Its tensors are copied"):
                return call(*_as_read(op, args, is_channels_last=node.meta[MARK]))
        return stock(*args)

    return lower


def _as_read(op: OpOverload, args: tuple[Any, ...], *, is_channels_last: bool) -> list[Any]:
    """Inductor's arguments of a call, as ATen reads them."""
    from torch._inductor.ir import ExternKernel

    require = {4: ExternKernel.require_channels_last, 5: ExternKernel.require_channels_last_3d}
    read = list(args)
    if is_channels_last:
        for k in IMAGES[op]:
            read[k] = require[len(read[k].get_size())](read[k])
    elif op is CONVOLUTION:  # of the weight too, which tells how
        for k in (0, 1, 2):
            read[k] = ExternKernel.require_contiguous(read[k])
    if op is POOLING:
        read[1] = _without_values(read[1], is_channels_last)
    if op in (ENLARGED, UPSAMPLING) and is_channels_last:
        # Some of the channels of more lie as they should and not together: a `cat` before.
        strides = _strides_channels_last(read[0])
        read[0] = ExternKernel.require_exact_strides(read[0], strides)
    return read


def _without_values(x: Any, is_channels_last: bool) -> Any:
    from torch._inductor.lowering import empty_strided

    strides = _strides_channels_last(x) if is_channels_last else None
    return empty_strided(x.get_size(), strides, dtype=x.get_dtype(), device=x.get_device())


def _strides_channels_last(x: Any) -> list[Any]:
    """Those of an image of Inductor's whose channels lie together."""
    _, c, h, w = x.get_size()
    return [c * h * w, 1, c * w, c]
