"""A reproducer for each known mistake of Inductor's: the function, its inputs and how wrong its
compiled values and gradients are.

    python tests/inductor_mistake_cases.py NAME    in a process of its own, that mend taken out
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensor = torch.Tensor

# Relative to the largest element: rounding and the order of sums.
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5}
THREADS = 2
CALLS = 200
# Seconds after which a process is killed, because what wrong code wrote may make a thread wait for
# ever: with its compilation, and once it has compiled.
FIRST_CALL, LATER_CALLS = 120, 30


@dataclass(frozen=True)
class Case:
    """mistake: its name in inductor_mistakes. make: the inputs; those that float are differentiated
    where there are gradients. corrupts: whether wrong code writes where it must not. fails: whether
    there is no code. since: the first version of torch that compiles this function into loops which
    show the mistake. written: whether the caller then writes to each result, which changes no other
    and no input.
    """

    mistake: str
    function: Callable[..., Any]
    make: Callable[[], tuple[Tensor, ...]]
    gradients: bool = True
    corrupts: bool = False
    fails: bool = False
    since: str = "2.11"
    written: bool = False


def scattered(g: Tensor, i: Tensor, h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Loops over (2, 32, 64) fuse with loops over (2, 32, 8, 8), which read what was scattered."""
    q = F.conv2d(h.sin(), w)
    z = torch.zeros(2, 32, 64, dtype=g.dtype).index_add(2, i, g).view(2, 32, 8, 8)
    y = z * 2
    return q, z, y, h.cos() + F.conv2d(y, w)


def pooled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The backward of the pooling scatters into zeros that the convolution's backward reads."""
    y = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear")[:, :, 1:7, 1:8]
    conv = F.conv2d(y, weight, bias, padding=1)
    pool = F.max_pool2d(conv, 3, 1, 1)
    return torch.where(conv > pool.mean((2, 3), keepdim=True), conv, pool)


def scattered_tiles(x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """The product is made in tiles, as one factor is transposed, and added to rows by index."""
    product = x.t() * y
    return torch.zeros(8, 16).index_put((index,), product, accumulate=True), product.sum(1)


def pooled_volume(x: Tensor) -> Tensor:
    """The indices lie as the input does, channels last."""
    return F.adaptive_max_pool3d(x, (2, 3, 5))


def short_rows(x: Tensor) -> Tensor:
    """The product is a sum over tiles; a row ends 2 elements into a vector, and there are 18."""
    gelu = (x * 0.5) * (torch.erf(x * 0.7071067811865476) + 1)
    right = F.pad(gelu.permute(3, 2, 1, 0), (0, 0, 0, 10), value=0.5)
    return torch.matmul(F.pad(gelu, (0, 0, 0, 0, 0, 10), value=0.5), right)


def norm_twice(x: Tensor) -> Tensor:
    """Rows lie in columns, so that a tile has several, and the second norm's backward passes a row
    on to the first's.
    """
    x = F.layer_norm(x.t(), x.shape[:1])
    return F.layer_norm(x, x.shape[1:])


def written_in_place(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    """Into a part of what cat made, with values of its own, and where all rows are one."""
    h = x.sin()
    joined = torch.cat([h, y.cos()])
    h = h.index_add(0, i, y[:3])
    own = y.exp()
    own = own.index_add(0, i, own[1:4])
    expanded = x[:1].cos().expand(5, -1).index_add(0, i, y[:3])
    return joined, h, own, expanded


def held_while_overwritten(x: Tensor, s: Tensor) -> Tensor:
    result = torch.slice_scatter(x, s, 0, 1, 3)
    x.zero_()
    return result


def swapped(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """Two inputs swap their values, and a third one's rows move down."""
    before = x.clone()
    x.copy_(y)
    y.copy_(before)
    z[1:] = z[:-1].clone()
    return x, y, z


def scaled_by_one(x: Tensor) -> tuple[Tensor, ...]:
    ones, y = torch.ones(8), x.sin()
    return x * ones, (x / ones - torch.zeros(8)).view(-1), y, y + torch.zeros(())


def pooled_to_the_end(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2, 2, ceil_mode=True)


def largest(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """What the maximum is taken of is computed in the forward and again in the backward."""
    norm = torch.linalg.vector_norm(y.tanh(), float("inf"), -1)
    return x.tanh().amax(-1), norm, x.sin().view(37, 1, 5).amax(-1)


def pooled_across(x: Tensor) -> Tensor:
    return F.max_pool2d(x.transpose(2, 3), 7)


def largest_of_all(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (x.t() + y).argmax().double(), (x.t() * 2).argmin().double()


def summed_scatter(x: Tensor, y: Tensor) -> Tensor:
    return torch.slice_scatter(x, y, 1, 0, 6).sum(1)


def loss_of_labels(x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return (
        F.multilabel_margin_loss(x.sin(), labels),
        F.multilabel_margin_loss(x, labels, reduction="none"),
        F.multilabel_margin_loss(x[1], labels[1], reduction="sum"),
    )


def summed_into_one(x: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
    one = x.new_zeros(1, 3).index_add(0, i, x.sin())
    rows = x.new_zeros(4, 1).index_add(1, j, x[:4, :1].expand(4, 37).tanh())
    return one, rows, x.new_zeros(1).index_add(0, i, x[:, 0] * x[:, 1])


def double(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


CASES = {
    "scattered": Case(
        "forgotten_renames",
        scattered,
        lambda: (
            double(2, 32, 256),
            torch.arange(256) // 4,
            double(2, 32, 8, 8),
            double(32, 32, 1, 1),
        ),
        gradients=False,
    ),
    "pooled": Case(
        "forgotten_renames",
        pooled,
        lambda: (double(2, 3, 8, 8), double(5, 3, 3, 3), double(5)),
        since="2.12",
    ),
    "scattered_tiles": Case(
        "atomic_tiles",
        scattered_tiles,
        lambda: (torch.randn(16, 348), torch.randn(348, 16), torch.randint(0, 8, (348,))),
        corrupts=True,
    ),
    "pooled_volume": Case(
        "indices_of_pools",
        pooled_volume,
        lambda: (double(2, 4, 4, 6, 10).contiguous(memory_format=torch.channels_last_3d),),
    ),
    "short_rows": Case(
        "tails_of_tiles",
        short_rows,
        lambda: (torch.randn(1, 8, 18, 18).contiguous(memory_format=torch.channels_last),),
        corrupts=True,
    ),
    "norm_twice": Case("shared_rows", norm_twice, lambda: (double(32, 256),)),
    "written_in_place": Case(
        "scatters_in_place",
        written_in_place,
        lambda: (double(5, 8), double(5, 8), torch.tensor([3, 0, 2])),
    ),
    "held_while_overwritten": Case(
        "overwritten_scatters",
        held_while_overwritten,
        lambda: (double(5, 8), double(2, 8)),
        gradients=False,
    ),
    "swapped": Case(
        "clones_of_inputs",
        swapped,
        lambda: (double(5, 8), double(5, 8), double(6, 16)),
        gradients=False,
    ),
    "scaled_by_one": Case("neutral_results", scaled_by_one, lambda: (double(5, 8),), written=True),
    "scaled_by_the_number_one": Case(
        "neutral_results",
        lambda x: (x / 1, x * 1.0, 0 + x),
        lambda: (double(5, 8),),
        since="2.14",
        written=True,
    ),
    "pooled_to_the_end": Case("clipped_windows", pooled_to_the_end, lambda: (double(2, 3, 7, 7),)),
    "largest": Case("equal_maxima", largest, lambda: (double(37, 5), double(37, 5))),
    "pooled_across": Case("positions_in_windows", pooled_across, lambda: (double(2, 3, 23, 21),)),
    "largest_of_all": Case(
        "positions_in_tensors",
        largest_of_all,
        lambda: (double(33, 17), double(17, 33)),
        gradients=False,
    ),
    "summed_scatter": Case(
        "collapsed_scatters", summed_scatter, lambda: (double(4, 13, 33), double(4, 6, 33))
    ),
    "summed_into_one": Case(
        "additions_to_one_place",
        summed_into_one,
        lambda: (double(37, 3), torch.zeros(37, dtype=torch.long), torch.zeros(37).long()),
        fails=True,
    ),
    "summed_into_one, float": Case(
        "additions_to_one_place",
        summed_into_one,
        lambda: (torch.randn(37, 3), torch.zeros(37, dtype=torch.long), torch.zeros(37).long()),
        fails=True,
    ),
    "loss_of_labels": Case(
        "padded_labels",
        loss_of_labels,
        lambda: (
            double(5, 5),
            torch.tensor(
                [
                    *([1, 3, -1, 0, 2], [2, -1, -1, -1, -1], [4, 3, 2, 1, 0]),
                    *([-1, 1, 2, 3, 4], [3, 3, 1, -1, 3]),
                ]
            ),
        ),
    ),
}


def error(
    case: Case, backend: str = "normpass", calls: int = 1, dynamic: bool | None = None
) -> float:
    """How far compiled values and gradients are from eager's, in units of rounding: right is below
    1. The backward is compiled, and runs, in a thread of its own. With more calls than one, what is
    written beyond a buffer is more likely to be found when memory is freed.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = case.make()
    options: dict[str, Any] = {"cpp.threads": THREADS}
    if backend == "normpass":
        options = {"inductor": options}
    compiled = torch.compile(case.function, backend=backend, options=options, dynamic=dynamic)
    for call in range(calls):
        if call == 1:
            signal.alarm(LATER_CALLS)
        found = _results(compiled, case, inputs)
    right = _results(case.function, case, inputs)
    return max(_distance(a, b) for a, b in zip(found, right, strict=True))


def _results(function: Any, case: Case, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    inputs = tuple(x.clone() for x in inputs)
    wanted = [x.requires_grad_() for x in inputs if case.gradients and x.is_floating_point()]
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    gradients: list[Tensor] = []

    def backward() -> None:
        gradients.extend(torch.autograd.grad(outputs, wanted, [(3 * y).sin() for y in outputs]))

    if wanted:
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert gradients, "the backward raised an error"
    results = [y.detach() for y in (*outputs, *gradients)]
    if case.written:
        for k, result in enumerate(results):
            result.add_(k + 1)
        results += [x.detach() for x in inputs]
    return results


def _distance(found: Tensor, right: Tensor) -> float:
    assert found.dtype == right.dtype
    assert found.shape == right.shape
    largest = max(float(right.abs().max()), 1.0)
    distance = float((found - right).abs().max()) / largest / ROUNDING[right.dtype]
    return distance if distance == distance else float("inf")


def main(name: str, mended: str = "") -> None:
    from normpass.backend import inductor_mistakes

    torch.set_num_threads(THREADS)
    signal.alarm(FIRST_CALL)
    case = CASES[name]
    with nullcontext() if mended else inductor_mistakes.without(case.mistake):
        print(error(case, calls=1 if mended else CALLS), flush=True)
    # What wrong code wrote may end the process in any destructor.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
