"""normpass.SyncBatchNorm: over several processes it is the batch norm of one that has all images,
in one graph.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import oracles
import pytest
import rank_norms
import torch
from rank_norms import Case, exact, together
from ranks import Ranks, needs_gloo
from torch import Tensor, nn

import normpass
from normpass.decomps.activation.torch_internals import all_gather

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs_gloo
CASES = {
    "images": Case(),
    "channels last": Case(channels_last=True),
    "unequal shares": Case(images=(1, 5)),
    "a process without images": Case(images=(4, 0)),
    "rows": Case(images=(6, 3), shape=()),
    "volumes": Case(shape=(2, 3, 4)),
    "no weight": Case(arguments=(("affine", False),)),
    "no running statistics": Case(arguments=(("track_running_stats", False),)),
    "cumulative average": Case(arguments=(("momentum", None),)),
    "float32": Case(dtype=torch.float32),
    "bfloat16": Case(dtype=torch.bfloat16),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks") / "store") as ranks:
        yield ranks


def joined(case: Case, answers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The ranks' results as one process would have them: images one after another, gradients of
    parameters summed. What each has of its own is the same everywhere.
    """
    found = {}
    for name, first in answers[0].items():
        each = [answer[name] for answer in answers]
        if name.startswith(("y", "dx")):
            found[name] = torch.cat(each)
        elif name.startswith("gradient"):
            found[name] = torch.stack(each).sum(0)
        else:
            assert all(torch.equal(one, first) for one in each)
            found[name] = first
    return found


@pytest.mark.one_in(10)
@pytest.mark.parametrize("backend", [None, "normpass"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_batch_norm_of_all_images(name: str, backend: str | None, ranks: Ranks) -> None:
    case = CASES[name]
    answers = ranks(rank_norms.synchronized, case, backend)
    found = joined(case, [answer for answer, _ in answers])
    replaced, right = together(case), exact(case)
    assert found.keys() == replaced.keys() == right.keys()
    for what, ours in found.items():
        assert ours.dtype == replaced[what].dtype, what
        if what == "num_batches_tracked":
            assert ours == replaced[what] == right[what]
        else:
            oracles.assert_no_less_accurate(ours, replaced[what], right[what], what)
    if case.channels_last:
        assert all(a["y0"].is_contiguous(memory_format=torch.channels_last) for a, _ in answers)
    for answer, counts in answers if backend else ():
        if answer["y0"].numel():
            assert any(key.startswith("fused") for key in counts), counts
            assert any(key.endswith("backward") for key in counts), counts
        assert not any(key.startswith("refused") for key in counts), counts


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "normpass") for name in ("images", "channels last", "cumulative average")),
        ("images", "eager"),
        ("images", None),
        ("a process without images", None),
    ],
)
def test_torchs_own_with_the_rules(name: str, backend: str | None, ranks: Ranks) -> None:
    """In one graph under any backend; in eager mode on CPUs, with register(eager=True)."""
    case = CASES[name]
    answers = ranks(rank_norms.torchs_own, case, backend)
    found, right = joined(case, [answer for answer, _ in answers]), exact(case)
    for what, ours in found.items():
        torch.testing.assert_close(ours, right[what], rtol=1e-12, atol=1e-12, check_dtype=False)
    for _, counts in answers if backend == "normpass" else ():
        assert any(key.startswith("fused") and key.endswith("backward") for key in counts)


def test_torchs_own_is_as_before_afterwards(ranks: Ranks) -> None:
    for message in ranks(rank_norms.torchs_own_alone):
        assert "expected input tensor to be on GPU" in message


@pytest.mark.parametrize(
    "whose", ["the norm's", pytest.param("the conversion's", marks=pytest.mark.sweep)]
)
def test_groups_of_processes(whose: str, tmp_path: Path) -> None:
    """Two processes together and one alone: each group has the statistics of its own images."""
    with Ranks(3, tmp_path / "store") as three:
        answers = three(partial(rank_norms.in_groups, whose=whose), [[0, 1], [2]])
    case = Case((3, 3, 3))
    for members in ([0, 1], [2]):
        rows = slice(3 * members[0], 3 * members[-1] + 3)
        for step, (x, _) in enumerate(case.batches()):
            norm: Any = case.norm()
            y = torch.cat([answers[rank][f"y{step}"] for rank in members])
            exact_y = oracles.batch_norm(x[rows], norm.weight, norm.bias)
            torch.testing.assert_close(y, exact_y, rtol=1e-12, atol=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", [None, "normpass", "inductor"])
def test_a_network_under_data_parallel(backend: str | None, ranks: Ranks) -> None:
    net = rank_norms.network()
    net(rank_norms.pixels()).square().mean().backward()
    for found in ranks(rank_norms.in_a_network, backend):
        for ours, parameter in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(all_gather is None, reason="torch 2.11's collectives have first derivatives")
@pytest.mark.parametrize("backend", [pytest.param(None, marks=pytest.mark.sweep), "normpass"])
def test_second_derivatives(backend: str | None, ranks: Ranks) -> None:
    """The ranks' penalties add up to one process's, and so do their gradients."""
    net = rank_norms.network()
    right = rank_norms.penalty_gradients(net, net, rank_norms.pixels().requires_grad_())
    answers = ranks(rank_norms.second_order, backend)
    for parts, whole in zip(zip(*answers, strict=True), right, strict=True):
        torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-9, atol=1e-10)


def test_alone_it_is_a_batch_norm() -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3, eps=1e-3), nn.BatchNorm1d(4, affine=False)).eval()
    x = torch.randn(2, 3, 4, 4)
    found = normpass.SyncBatchNorm.convert_sync_batchnorm(plain[0])
    assert found.eps == 1e-3
    assert not found.training
    for mode in (False, True):
        plain.train(mode)
        found.train(mode)
        torch.testing.assert_close(found(x), plain[0](x), rtol=0, atol=0)


def test_what_is_converted_keeps_its_tensors() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.SyncBatchNorm(3), nn.ReLU()))
    state = dict(net.named_parameters()) | dict(net.named_buffers())
    found = normpass.SyncBatchNorm.convert_sync_batchnorm(net)
    assert found is net
    kinds = [type(m) for m in net.modules() if not list(m.children())]
    assert kinds == [normpass.SyncBatchNorm, normpass.SyncBatchNorm, nn.ReLU]
    now = dict(net.named_parameters()) | dict(net.named_buffers())
    assert now.keys() == state.keys()
    assert all(now[name] is state[name] for name in state)


@pytest.mark.parametrize("shape", [(3,), (2, 0, 4)])
def test_what_is_no_batch(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected at least two dimensions"):
        normpass.SyncBatchNorm(3)(torch.zeros(shape))
