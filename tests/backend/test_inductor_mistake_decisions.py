"""What the mends of Inductor's mistakes leave alone: code that is right stays as fast as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from normpass.backend.inductor_mistakes import (
    clones,
    equal_maxima,
    in_place,
    install,
    neutral,
    overwritten,
    uninstall,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
X = torch.zeros(5, 8)
ROW = X[:1].clone(), torch.tensor([2])


def functional(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """As AOTAutograd makes it: functional, writes to inputs are copies at its end."""
    return make_fx(torch.func.functionalize(function), tracing_mode="fake")(*inputs)


def only(graph: Graph, target: Any) -> Node:
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


# --- scatters in place --------------------------------------------------------------------------


def plain(x: Tensor, v: Tensor, i: Tensor) -> Tensor:
    return x.sin().index_put((i,), v)


def beside_another_cat(x: Tensor, v: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([x, v]), x.sin().index_put((i,), v)


def expanded(x: Tensor, v: Tensor, i: Tensor) -> Tensor:
    return v.sin().expand(5, -1).index_put((i,), v)


def from_itself(x: Tensor, v: Tensor, i: Tensor) -> Tensor:
    y = x.sin()
    return y.index_put((i,), y[1:2])


def joined(x: Tensor, v: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return torch.cat([y, v]), y.index_put((i,), v)


def written_back(x: Tensor, v: Tensor, i: Tensor) -> Tensor:
    x[i] = v
    return x.sin()


def written_back_through_views(x: Tensor, v: Tensor, i: Tensor) -> Tensor:
    x.permute(1, 0)[:, i] = v.permute(1, 0)
    return x.sin()


def then_overwritten(x: Tensor, v: Tensor, i: Tensor) -> Tensor:
    y = x.index_put((i,), v)
    x.copy_(x.cos())
    return y


INPUTS_KEEP, OTHERS_KEEP = overwritten._is_what_remains, in_place._keeps_what_is_needed


@pytest.mark.parametrize(
    ("allows", "function", "allowed"),
    [
        (OTHERS_KEEP, plain, True),
        (OTHERS_KEEP, beside_another_cat, True),
        (OTHERS_KEEP, expanded, False),
        (OTHERS_KEEP, from_itself, False),
        (OTHERS_KEEP, joined, False),
        (INPUTS_KEEP, plain, True),
        (INPUTS_KEEP, written_back, True),
        (INPUTS_KEEP, written_back_through_views, True),
        (INPUTS_KEEP, then_overwritten, False),
    ],
)
def test_scatters_stay_in_place(
    allows: Callable[[Node], bool], function: Callable[..., Any], allowed: bool
) -> None:
    node = only(functional(function, X, *ROW).graph, aten.index_put.default)
    assert allows(node) == allowed


# --- clones -------------------------------------------------------------------------------------


def swap(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    before = x.clone()
    x.copy_(y)
    y.copy_(before)
    return z.clone() * 2


def test_clones_are_kept_of_inputs_that_change() -> None:
    graph = functional(swap, X, X + 1, X + 2).graph
    sources = [node.args[0] for node in clones._copies_of_written_inputs(graph)]
    x, _, z = graph.find_nodes(op="placeholder")
    assert x in sources
    assert z not in sources


# --- neutral elements ---------------------------------------------------------------------------


def test_what_nobody_is_handed_may_be_x_itself() -> None:
    graph = functional(lambda x: ((x * 1).exp(), (x / 1).view(-1), x + 0), X).graph
    kept = {node.target for node in neutral._handed_out(graph)}
    assert kept == {aten.div.Tensor, aten.add.Tensor}


# --- maxima -------------------------------------------------------------------------------------


def saved(loss: Callable[[Tensor], Tensor]) -> list[str]:
    """What the forward must save of the joint graph of a function of (37, 5)."""
    marked = []

    def partition(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
        equal_maxima._mark(joint)
        for node in joint.graph.nodes:
            if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
                marked.append(str(node.target))
        return default_partition(joint, *args, **kwargs)

    x = torch.zeros(37, 5, requires_grad=True)
    aot_function(
        loss,
        lambda graph, _: make_boxed_func(graph),
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )(x)
    return marked


def test_what_is_compared_with_its_maximum_is_saved() -> None:
    assert saved(lambda x: x.tanh().amax(-1)) == ["aten.tanh.default"]
    assert saved(lambda x: x.sin().view(37, 1, 5).amax(-1)) == ["aten.sin.default"]


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda x: x.tanh().softmax(-1).cos(), id="softmax"),
        pytest.param(lambda x: x.tanh().sum(-1).cos(), id="sum"),
        pytest.param(lambda x: x.amax(-1), id="maximum of an input"),
        pytest.param(lambda x: x.tanh() - x.sin().detach().amax(-1, keepdim=True), id="detached"),
    ],
)
def test_nothing_else_is_saved(loss: Callable[[Tensor], Tensor]) -> None:
    assert saved(loss) == []


# --- average pooling ----------------------------------------------------------------------------


@pytest.fixture
def _mended() -> Iterator[None]:
    install()
    yield
    uninstall()


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("_mended", "fresh_cache")
@pytest.mark.parametrize(
    ("size", "pool", "loops"),
    [
        (8, {"ceil_mode": True}, True),
        (7, {"ceil_mode": True}, False),
        (7, {"ceil_mode": True, "count_include_pad": False}, True),
        (7, {"ceil_mode": True, "kernel_size": 3, "padding": 1}, True),
        (8, {"ceil_mode": True, "kernel_size": 3, "padding": 1}, False),
    ],
)
def test_gradients_of_average_pooling_stay_loops(
    size: int, pool: dict[str, Any], loops: bool
) -> None:
    """A call of the operator itself is right, and is not fused with its neighbours."""

    def f(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, **{"kernel_size": 2, "stride": 2, **pool})

    x = torch.randn(2, 3, size, size, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(f)
    _, (_, backward) = run_fw_bw_and_get_code(lambda: compiled(x))
    assert ("avg_pool2d_backward.default" not in backward) == loops
