"""register and unregister: torch's global state is what it was, whoever else touches it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor import config, decomposition
from torch._inductor.custom_graph_pass import CustomGraphPass

from normpass.decomps.activation import (
    inductor_state,
    is_registered,
    register,
    registered,
    unregister,
)
from normpass.decomps.registry import decompositions

if TYPE_CHECKING:
    from collections.abc import Iterator

aten = torch.ops.aten
OP = aten.native_layer_norm_backward.default


class Counting(CustomGraphPass):
    """A pass that counts its graphs and the operators in them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.graphs = 0
        self.called: set[Any] = set()

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs += 1
        self.called |= {node.target for node in graph.nodes}

    def uuid(self) -> str:
        return self.name


def state() -> tuple[Any, ...]:
    """Everything that register may change, tables by the identity of their functions."""
    return (
        dict(decomposition.decompositions),
        dict(decomposition.fast_random_decomps()),
        config._config["post_grad_custom_pre_pass"].default,  # type: ignore[attr-defined]
        config.post_grad_custom_pre_pass,
    )


def passes() -> tuple[Any, ...]:
    """What is configured: no pass, one, or from torch 2.13 on several."""
    value = config.post_grad_custom_pre_pass
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Each test starts unregistered and leaves torch as it found it."""
    assert not is_registered()
    decomposition.fast_random_decomps()
    before = state()
    yield
    unregister()
    assert not is_registered()
    assert state() == before


def test_register_and_unregister() -> None:
    stock = decomposition.select_decomp_table()[OP]
    register()
    assert is_registered()
    table = decomposition.select_decomp_table()
    assert {op: table[op] for op in decompositions()} == decompositions()
    with config.patch(fallback_random=True):
        assert decomposition.select_decomp_table()[OP] is table[OP]
    unregister()
    assert decomposition.select_decomp_table()[OP] is stock


def test_twice_and_never() -> None:
    unregister()
    register()
    once = state()
    register()
    assert state() == once
    unregister()
    unregister()
    assert not is_registered()


def test_the_cached_table_may_come_later() -> None:
    cached = decomposition.fast_random_decomps
    cached.cache_clear()
    register()
    assert cached.cache_info().currsize == 0, "made early, it would miss later registrations"
    assert decomposition.select_decomp_table()[OP] is decompositions()[OP]
    unregister()
    assert decomposition.select_decomp_table()[OP] is decomposition.decompositions[OP]
    assert decomposition.decompositions[OP] is not decompositions()[OP]


def test_an_operator_that_inductor_does_not_decompose_is_removed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = (decomposition.decompositions, decomposition.fast_random_decomps())
    for table in tables:
        monkeypatch.delitem(table, OP)
    with registered():
        assert all(table[OP] is decompositions()[OP] for table in tables)
    assert all(OP not in table for table in tables)


def test_a_decomposition_that_somebody_changed_after_us_is_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = decomposition.decompositions
    monkeypatch.setitem(table, OP, table[OP])  # puts back what is there now
    register()
    table[OP] = theirs = lambda *args: None
    unregister()
    assert table[OP] is theirs


def test_blocks() -> None:
    with registered():
        assert is_registered()
        with registered():
            assert is_registered()
        assert is_registered()
    assert not is_registered()
    register()
    with registered():
        pass
    assert is_registered(), "what was registered around a block stays"


def test_a_block_ends_by_an_exception() -> None:
    with pytest.raises(RuntimeError, match="inside"), registered():
        raise RuntimeError("inside")
    assert not is_registered()


def test_unregister_inside_a_block() -> None:
    with registered():
        unregister()
        assert not is_registered()
    assert not is_registered()


def test_threads() -> None:
    """Overlapping blocks: installed as long as any is open, everything restored after the last."""
    wrong: list[bool] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(25):
            with registered():
                ours = decompositions()[OP]
                if decomposition.select_decomp_table()[OP] is not ours or not is_registered():
                    wrong.append(True)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not is_registered()


def test_other_threads_see_the_pass() -> None:
    """Settings of Inductor are local to a thread; what register does is not."""
    seen: list[int] = []
    register(post_grad_pass=Counting("ours"))
    thread = threading.Thread(target=lambda: seen.append(len(passes())))
    thread.start()
    thread.join()
    assert seen == [1]


@pytest.mark.parametrize(
    ("several", "listed"),
    [(True, True), (True, False), (False, False)],
    ids=["a list", "one of several", "one pass (2.11)"],
)
def test_passes_of_others_are_kept(
    several: bool, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor_state, "_takes_several", lambda: several)
    theirs, ours, graph = Counting("theirs"), Counting("ours"), torch.fx.Graph()
    value = [theirs] if listed else theirs
    with config.patch(post_grad_custom_pre_pass=value):
        register(post_grad_pass=ours)
        for each in passes():
            assert each.uuid()
            each(graph)
        assert (theirs.graphs, ours.graphs) == (1, 1)
        unregister()
        assert config.post_grad_custom_pre_pass is value
        for each in passes():
            each(graph)
        assert (theirs.graphs, ours.graphs) == (2, 1)


@pytest.mark.skipif(
    not inductor_state._takes_several(), reason="this torch takes one pass: nobody can append one"
)
def test_a_pass_that_somebody_appended_after_us_stays() -> None:
    first, ours, last = Counting("first"), Counting("ours"), Counting("last")
    with config.patch(post_grad_custom_pre_pass=first):
        register(post_grad_pass=ours)
        config.post_grad_custom_pre_pass = [*passes(), last]
        unregister()
        assert passes() == (first, last)
    with config.patch(post_grad_custom_pre_pass=None):
        register(post_grad_pass=ours)
        config.post_grad_custom_pre_pass = wrapped = [*passes(), last]
        unregister()
        assert passes() == (last,)
        for each in wrapped:
            each(torch.fx.Graph())
        assert (ours.graphs, last.graphs) == (0, 1), "kept by somebody, our place does nothing"


def test_the_last_pass_given_is_the_one_that_runs() -> None:
    a, b = Counting("a"), Counting("b")
    register(post_grad_pass=a)
    with registered(post_grad_pass=b):
        passes()[0](torch.fx.Graph())
    register()
    passes()[0](torch.fx.Graph())
    assert (a.graphs, b.graphs) == (1, 1)


def test_uuid_tells_caches_what_is_installed() -> None:
    """It changes with the pass and when unregistered; a pass without one bypasses the caches."""
    register()
    (slot,) = passes()
    assert slot.uuid()
    bare = slot.uuid()
    register(post_grad_pass=Counting("ours"))
    full = slot.uuid()
    register(post_grad_pass=lambda graph: None)
    assert slot.uuid() is None
    unregister()
    assert len({bare, full, slot.uuid()}) == 3


@pytest.mark.parametrize("use", [register, lambda: registered().__enter__()])
def test_a_torch_that_cannot_be_changed_stays_unchanged(
    use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no tables")

    monkeypatch.setattr("normpass.decomps.activation.inductor_tables", fail)
    with pytest.raises(RuntimeError, match="no tables"):
        use()
    assert not is_registered()
    monkeypatch.undo()
    with registered():
        assert len(passes()) == 1, "a failed attempt is not in the way of the next"


def test_running_stats() -> None:
    with pytest.raises(ValueError, match="expected one of 'error', 'mean'; found 'update'"):
        register(running_stats="update")
    assert not is_registered()


def test_inductor_uses_the_rules_and_the_pass(tmp_path: Any, monkeypatch: Any) -> None:
    """Also where AOTAutograd's cache holds the graphs of torch's own decompositions."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    norm = torch.nn.GroupNorm(2, 4)
    x, g = torch.randn(3, 4, 5, 5), torch.randn(3, 4, 5, 5)

    def gradients(function: Any) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        torch._dynamo.reset()
        y = function(leaf)
        return [y, *torch.autograd.grad(y, [leaf, *norm.parameters()], g)]

    def compiled() -> Any:
        return torch.compile(norm, backend="inductor", fullgraph=True)

    calls: list[str] = []
    table = decompositions()
    ours = table[aten.native_group_norm_backward.default]

    def counted(*args: Any) -> Any:
        calls.append("backward")
        return ours(*args)

    expected = gradients(norm)
    gradients(compiled())
    table[aten.native_group_norm_backward.default] = counted
    monkeypatch.setattr("normpass.decomps.registry.decompositions", lambda: table)
    register()
    gradients(compiled())
    assert calls, "the cached graph of torch's decomposition was used"
    seen = Counting("ours")
    register(post_grad_pass=seen)
    found = gradients(compiled())
    assert seen.graphs == 2, "forward and backward"
    assert aten.native_group_norm_backward.default not in seen.called
    for ours_i, expected_i in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_i, expected_i)
    unregister()
    calls.clear()
    gradients(compiled())
    assert not calls
    assert seen.graphs == 2
