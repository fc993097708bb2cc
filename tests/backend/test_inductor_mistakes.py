"""Known mistakes of Inductor's: right with their mends, wrong without, torch as it was after."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import inductor_mistake_cases
import pytest
from inductor_mistake_cases import CASES, Case, error
from torch._inductor.exc import InductorError
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

import normpass
from normpass.backend import inductor_mistakes
from normpass.backend.entry import FusionPass
from normpass.backend.inductor import rest
from normpass.backend.inductor_mistakes import (
    MISTAKES,
    equal_maxima,
    install,
    key,
    overwritten,
    padded_labels,
    uninstall,
    without,
)
from normpass.backend.inductor_mistakes.mistake import Mistake, together, wrap
from normpass.backend.inductor_mistakes.mistake import replace as replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

MISTAKE = {mistake.name: mistake for mistake in MISTAKES}


def patched() -> list[Any]:
    """Everything of torch's that a mend may replace."""
    from torch import _prims_common
    from torch._decomp import decomposition_table
    from torch._inductor import compile_fx, lowering
    from torch._inductor.codegen.cpp import (
        CppKernelProxy,
        CppTile2DKernel,
        CppVecKernel,
        OuterLoopFusedSchedulerNode,
    )
    from torch._inductor.decomposition import decompositions, select_decomp_table
    from torch._inductor.fx_passes import joint_graph, post_grad, reinplace
    from torch._inductor.scheduler import SchedulerNode

    return [
        vars(SchedulerNode)["recompute_size_and_body"],
        vars(CppTile2DKernel)["store"],
        vars(CppVecKernel)["store"],
        vars(CppKernelProxy)["aggregate_reduction_buffers"],
        vars(OuterLoopFusedSchedulerNode)["check_outer_fusion_loop_level_attr"],
        post_grad.remove_noop_ops,
        joint_graph.remove_no_ops,
        compile_fx.min_cut_rematerialization_partition,
        _prims_common.clone_preserve_strides,
        dict(lowering._maybe_layout_constraints),
        # Others join the table when Inductor compiles for the first time.
        {
            op: lowered
            for op, lowered in lowering.lowerings.items()
            if any(word in str(op) for word in ("aten.max", "aten.min", "aten.a", "pool"))
        },
        dict(reinplace.inplaceable_ops),
        dict(padded_labels.OP.py_kernels),
        [
            table[padded_labels.OP]
            for table in (decomposition_table, decompositions, select_decomp_table())
        ],
    ]


def in_this_version() -> list[str]:
    return [m.name for m in MISTAKES if m.concerns(inductor_mistakes.version())]


def skip_unless_in_this_version(case: Case) -> None:
    mistake, found = MISTAKE[case.mistake], TorchVersion(inductor_mistakes.version())
    if not mistake.concerns(found):
        span = f"{mistake.since} up to {mistake.fixed}"
        pytest.skip(f"pytorch issue {mistake.issue} is in torch {span}")
    if found < case.since:
        pytest.skip(f"torch {case.since} is the first whose loops show it for this function")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Each test starts and ends with torch's own functions. (How the rest of our graphs is lowered
    stays, once a process has compiled one.)
    """
    uninstall()
    for part in rest.PARTS:
        part.install()
    before = patched()
    assert not any(hasattr(function, "__wrapped__") for function in before)
    yield
    normpass.unregister()
    uninstall()
    assert patched() == before


# --- the numbers --------------------------------------------------------------------------------


def test_every_mistake_has_a_reproducer() -> None:
    assert {case.mistake for case in CASES.values()} == set(MISTAKE)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_right_with_the_mend(name: str) -> None:
    assert error(CASES[name]) < 1


@pytest.mark.usefixtures("fresh_cache")
def test_right_with_the_mend_in_graphs_of_others() -> None:
    """Our own graphs call ATen's pooling, which scatters nothing. What is compiled here would be
    found again by tests of stock Inductor, whose cache knows nothing of mends.
    """
    install()
    assert error(CASES["pooled"], "inductor") < 1


@pytest.mark.parametrize(
    "name",  # each takes seconds, and mends know nothing of sizes
    [pytest.param(n, marks=[pytest.mark.sweep] * (not n.startswith("short"))) for n in CASES],
)
def test_right_with_sizes_that_vary(name: str) -> None:
    """And no mend meets a size it cannot handle: conftest.py fails a test with a reported fault."""
    assert error(CASES[name], dynamic=True) < 1


def test_right_where_the_forward_is_run_again() -> None:
    """Under activation checkpointing the maximum, and what is compared with it, are recomputed."""

    case = CASES["largest"]

    def checkpointed(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return checkpoint(case.function, *inputs, use_reentrant=False)

    assert error(replace(case, function=checkpointed)) < 1


@pytest.mark.sweep  # it is torch's code alone that is tested
@pytest.mark.parametrize("name", CASES)
def test_wrong_without_it(name: str) -> None:
    """In stock Inductor. If this fails, torch has mended it: correct the record's versions."""
    case = CASES[name]
    skip_unless_in_this_version(case)
    if case.corrupts:
        assert _in_a_process_of_its_own(name) > 1000
        return
    with without(case.mistake):
        if case.fails:
            with pytest.raises(InductorError):
                error(case, "inductor")
            return
        assert error(case, "inductor") > 1000


@pytest.mark.sweep
def test_inductors_own_children_do_not_compile_without_it(fresh_cache: Path) -> None:
    mode = {"TORCHINDUCTOR_FX_COMPILE_MODE": "subprocess"}
    mode["TORCHINDUCTOR_CACHE_DIR"] = str(fresh_cache)
    assert _in_a_process_of_its_own("scattered", "mended", **mode) < 1


def _in_a_process_of_its_own(*arguments: str, **environment: str) -> float:
    """The error, or infinity if the process was killed for what it wrote."""
    command = [sys.executable, inductor_mistake_cases.__file__, *arguments]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode < 0:
        return float("inf")
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


# --- caches -------------------------------------------------------------------------------------


def test_wrong_code_does_not_come_back_from_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what stock Inductor left there nor what we did before a mistake was known."""
    case = CASES["scattered"]
    skip_unless_in_this_version(case)
    with without():
        assert error(case, "inductor") > 1000
        assert error(case) > 1000
    assert error(case) < 1
    uninstall()
    with normpass.registered():
        assert error(case, "inductor") < 1
    # The graphs are in the cache, and only the key keeps them from being found.
    monkeypatch.setattr(inductor_mistakes, "key", lambda: "")
    assert error(case) > 1000


def test_the_key_is_part_of_the_passes_identity() -> None:
    install()
    mended = FusionPass().uuid()
    assert all(name in mended for name in in_this_version())
    with without():
        assert key() == ""
        if in_this_version():
            assert FusionPass().uuid() != mended
    assert FusionPass().uuid() == mended


# --- what is patched, and when ------------------------------------------------------------------


def test_install_and_uninstall() -> None:
    before = patched()
    assert key() == ""
    install()
    mended = patched()
    assert key().split() == in_this_version()
    assert (mended != before) == bool(in_this_version())
    install()
    assert patched() == mended
    uninstall()
    assert patched() == before
    assert key() == ""


def test_the_rules_bring_the_mends() -> None:
    before = patched()
    normpass.register()
    normpass.register()
    assert key().split() == in_this_version()
    with normpass.registered():
        assert key().split() == in_this_version()
    assert key().split() == in_this_version()
    normpass.unregister()
    assert patched() == before


def test_what_the_backend_mended_stays_when_the_rules_go() -> None:
    with normpass.registered():
        install()
    assert key().split() == in_this_version()


def test_one_mend_is_taken_out() -> None:
    install()
    for name in in_this_version():
        with without(name):
            assert key().split() == [other for other in in_this_version() if other != name]
            with without():
                assert key() == ""
            assert name not in key()
    assert key().split() == in_this_version()


def test_changes_that_belong_together_are_made_together() -> None:
    table = {"a": 1, "b": 2}

    @together
    def change(b: int | None) -> Iterator[Callable[[], None]]:
        yield replaced(table, "a", 10)
        yield replaced(table, "a", 100)
        if b is None:
            raise RuntimeError("there is no b")
        yield replaced(table, "b", b)

    with pytest.raises(RuntimeError, match="there is no b"):
        change(None)
    assert table == {"a": 1, "b": 2}
    undo = change(20)
    assert table == {"a": 100, "b": 20}
    undo()
    assert table == {"a": 1, "b": 2}


def test_an_unknown_name_is_an_error() -> None:
    with (
        pytest.raises(ValueError, match=r"forgotten_renames.*found \['forgoten'\]"),
        without("forgoten"),
    ):
        pass


def test_threads() -> None:
    """Blocks overlap in several threads: mended in each of them, and put back after the last."""
    before, failures = patched(), []

    def work() -> None:
        for _ in range(20):
            with normpass.registered():
                if key().split() != in_this_version():
                    failures.append(key())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert patched() == before


@pytest.mark.parametrize("version", ["2.15.0+cu132", "2.15.0", "2.16.1", "3.0.0"])
def test_versions_without_mistakes_are_left_alone(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = tuple(mistake for mistake in MISTAKES if mistake.fixed is not None)
    assert fixed
    monkeypatch.setattr(inductor_mistakes, "MISTAKES", fixed)
    monkeypatch.setattr(inductor_mistakes, "version", lambda: version)
    before = patched()
    install()
    assert patched() == before
    assert key() == ""


@pytest.mark.parametrize(
    ("version", "concerned"),
    [
        ("2.11.0+cu130", False),
        ("2.12.0", True),
        ("2.13.0+cpu", True),
        ("2.14.0+cu132", True),
        ("2.14.1+cu132", False),
        ("2.14.1", False),
        ("2.15.0.dev20261001+cpu", False),
    ],
)
def test_versions(version: str, concerned: bool) -> None:
    mistake = Mistake("x", 1, 2, "", lambda: lambda: None, since="2.12", fixed="2.14.1")
    assert mistake.concerns(version) == concerned


def test_a_mistake_that_is_not_fixed_concerns_every_version() -> None:
    mistake = Mistake("x", 1, 2, "", lambda: lambda: None)
    assert mistake.concerns("2.11.0")
    assert mistake.concerns("9.0.0+cpu")


def test_without_what_a_mend_wraps_nothing_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Other:
        pass

    gone = Mistake("gone", 123, 124, "", lambda: wrap(Other, "store", lambda original: original))
    monkeypatch.setattr(inductor_mistakes, "MISTAKES", (gone, *MISTAKES))
    with caplog.at_level("INFO", logger="normpass"):
        install()
        install()
    assert caplog.text.count("pytorch issue 123 is not mended") == 1
    assert key().split() == in_this_version()


@pytest.mark.usefixtures("faults_are_meant")
def test_a_fault_in_a_mend_costs_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fresh_cache: Path
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("no such node")

    monkeypatch.setattr(overwritten, "_comes_from", broken)  # asked with a safe answer
    monkeypatch.setattr(equal_maxima, "_compared", broken)  # without one
    assert error(CASES["held_while_overwritten"]) < 1
    error(CASES["largest"])
    text = caplog.text
    assert "the mend of pytorch issue 198094 of a graph: KeyError: 'no such node'" in text
    assert text.count("The safe way is taken: results stay right") == 1
    assert "the mend of pytorch issue 186799 of a graph: KeyError: 'no such node'" in text
    assert "Inductor compiles it as it is: results may be wrong" in text


def test_a_function_that_somebody_replaced_after_us_is_theirs() -> None:
    class Owner:
        def method(self) -> str:
            return "torch"

    def around(original: Callable[..., str]) -> Callable[..., str]:
        return lambda self: "ours, " + original(self)

    undo = wrap(Owner, "method", around)
    assert Owner().method() == "ours, torch"
    Owner.method = theirs = lambda self: "theirs"  # type: ignore[method-assign, assignment, misc]
    undo()
    assert vars(Owner)["method"] is theirs
