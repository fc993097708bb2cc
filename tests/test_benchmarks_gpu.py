"""What is measured on a GPU, without one: the check, the clock, the peers, what a case records, and
the targets. Everything runs on tiny CPU tensors.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from normpass.benchmarks import gpu_clock, gpu_host, gpu_peers, gpu_report, gpu_targets
from normpass.benchmarks.gpu_cases import FUNCTIONAL, PHASES, GpuCase
from normpass.benchmarks.gpu_check import errors_of, reference, wrong
from normpass.benchmarks.gpu_clock import Budget, DeviceClock, Place, Rotation
from normpass.benchmarks.gpu_measure import COPY, CaseResult, copied_bytes, measure
from normpass.benchmarks.gpu_peers import PEERS, Peer
from normpass.benchmarks.gpu_variants import (
    EAGER,
    NORMPASS,
    OURS,
    STOCK,
    Variant,
    compiled,
    of_autograd,
    of_peer,
    usable,
    variants,
)
from normpass.benchmarks.measure import Timing, interleave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

CPU = Place.of("cpu")
SHAPES = {
    "layer_norm": (8, 64),
    "rms_norm": (8, 64),
    "batch_norm": (4, 8, 3, 3),
    "group_norm": (2, 64, 3, 3),
}
EVERY = [
    (norm, phase) for norm, shape in SHAPES.items() for phase in PHASES
    if phase != "vmapped" or len(shape) == 2
]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of tensors this small others would only stand in its way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def case_of(norm: str, phase: str, dtype: str = "float32", **more: Any) -> GpuCase:
    return GpuCase(norm, SHAPES[norm], dtype, phase, **more)


# ---- the check


@pytest.mark.parametrize(("norm", "phase"), EVERY)
def test_eager_mode_agrees_with_the_reference(norm: str, phase: str) -> None:
    case = case_of(norm, phase)
    tensors = case.tensors("cpu")
    right = reference(case, tensors)
    assert tuple(right) == case.outputs
    errors = errors_of(case, compiled(case)(tensors)(), right)
    assert max(errors.values()) < 1e-5
    assert wrong(case, errors, errors, right) is None


@pytest.mark.parametrize(("norm", "phase"), EVERY)
def test_the_reference_is_the_same_in_parts(
    norm: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(norm, phase)
    tensors = case.tensors("cpu")
    whole = reference(case, tensors)
    monkeypatch.setattr("normpass.benchmarks.gpu_check.PART", 64)
    parts = reference(case, tensors)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_output_that_is_off_is_seen(dtype: str) -> None:
    case = case_of("layer_norm", "backward", dtype)
    tensors = case.tensors("cpu")
    right, outputs = reference(case, tensors), [*compiled(case)(tensors)()]
    eager = errors_of(case, outputs, right)
    assert wrong(case, eager, eager, right) is None
    assert wrong(case, eager, None, right) is None  # eager mode could not do it
    outputs[1] = outputs[1] * 1.1
    errors = errors_of(case, outputs, right)
    for known in (eager, None):
        reason = wrong(case, errors, known, right)
        assert reason is not None
        assert reason.startswith("dweight is ")
    outputs[1] = outputs[1] * torch.nan
    assert errors_of(case, outputs, right)["dweight"] == float("inf")


# ---- clocks, buffers, budget


def test_buffers_rotate_beyond_the_cache() -> None:
    place = Place("cuda", 50 * 2**20, 256 * 10**6)
    assert place.sets(25 * 10**6) == 11
    assert place.sets(10**9) == 2
    assert place.sets(1) == gpu_clock.MOST_SETS
    assert CPU.sets(1) == 2
    seen: list[int] = []
    rotation = Rotation([lambda k=k: seen.append(k) for k in range(3)])  # type: ignore[misc]
    for _ in range(5):
        rotation()
    assert seen == [0, 1, 2, 0, 1]


def test_a_host_that_is_late_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is made to wait until all calls are queued before it begins."""
    clock, waited = DeviceClock(), []
    first = clock.ahead

    def sample(step: Callable[[], object], calls: int) -> tuple[float, bool]:
        waited.append(clock.ahead)
        return 1.0 * calls, len(waited) < 3

    monkeypatch.setattr(clock, "_sample", sample)
    assert clock(lambda: None, 2) == 2.0
    assert waited == [first, 2 * first, 4 * first]
    monkeypatch.setattr(clock, "_sample", lambda step, calls: (3.0, True))
    assert clock(lambda: None, 1) == 3.0  # it gives up somewhere
    assert clock.ahead == DeviceClock.MOST_AHEAD


def test_a_clock_can_be_given_and_calls_are_limited() -> None:
    asked: list[int] = []

    def clock(step: Callable[[], object], calls: int) -> float:
        asked.append(calls)
        return calls * 1e-6

    times = interleave({"one": lambda: None}, 3, "cpu", clock=clock, most_calls=7)
    assert times["one"].median == pytest.approx(1e-6)
    assert asked[-3:] == [7, 7, 7]


def test_a_budget_is_spent() -> None:
    times = iter([0.0, 6.0, 6.0, 11.0])
    budget = Budget(10, lambda: next(times))
    assert not budget.is_spent()
    assert budget.is_spent(0.5)
    assert budget.is_spent()
    assert not Budget(None).is_spent()


# ---- variants and peers


def ours_for_peers(monkeypatch: pytest.MonkeyPatch, module: Any) -> Peer:
    """A peer of which `module` stands for what is imported."""

    def prepare(library: Any, tensors: Any) -> gpu_peers.Prepared:
        return gpu_peers._given(library.norm, tensors)

    peer = Peer("ours", "a.library", "torch", {"rms_norm": prepare})
    monkeypatch.setattr(gpu_peers.importlib, "import_module", lambda name: module)
    return peer


def test_every_peer_has_an_entry_that_says_why_it_is_missing() -> None:
    absent = {peer.name: peer.status()["missing"] for peer in PEERS}
    assert {"liger", "quack", "apex", "transformer engine", "cudnn"} <= absent.keys()
    for peer in PEERS:
        status = peer.status()
        assert (status["missing"] is None) != (status["version"] is None)
        assert bool(usable([peer])) == (status["missing"] is None)
    nowhere = Peer("nowhere", "normpass_has_no_such_module", "nowhere", {})
    assert "No module named 'normpass_has_no_such_module'" in str(nowhere.status()["missing"])


def test_a_broken_installation_is_a_missing_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libcudart.so.99 is not there")

    monkeypatch.setattr(gpu_peers.importlib, "import_module", broken)
    assert PEERS[0].status()["missing"] == "OSError: libcudart.so.99 is not there"


def test_a_peer_is_measured_and_one_that_raises_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Library:
        @staticmethod
        def norm(x: Tensor, weight: Tensor) -> Tensor:
            if x.dtype == torch.float16:
                raise RuntimeError("no kernel image\nfor this device")
            return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)

    peer = ours_for_peers(monkeypatch, Library)
    entries = [Variant(EAGER, compiled), of_peer(peer)]
    found = measure(case_of("rms_norm", "backward"), CPU, entries, 2)
    assert {"ours", EAGER, COPY} == found.seconds.keys()
    found = measure(case_of("rms_norm", "backward", "float16"), CPU, entries, 2)
    assert found.failed == {"ours": "RuntimeError: no kernel image"}
    assert EAGER in found.seconds
    assert not peer.takes(case_of("layer_norm", "backward"))
    assert not peer.takes(case_of("rms_norm", "vmapped"))


def test_a_module_has_the_numbers_of_the_case() -> None:
    case = case_of("layer_norm", "backward", "bfloat16")
    tensors = case.tensors("cpu")
    made = gpu_peers._of_module(torch.nn.LayerNorm(64), tensors)
    torch.testing.assert_close(made.parameters[0].detach(), tensors["weight"])
    step = of_autograd("backward", made.forward, tensors, made.parameters)
    assert wrong(case, errors_of(case, step(), r := reference(case, tensors)), None, r) is None


def test_all_variants_are_there_and_can_be_left_out() -> None:
    assert [each.name for each in variants()][:3] == [EAGER, STOCK, OURS]
    assert [each.name for each in variants(without=[STOCK])][:2] == [EAGER, OURS]


# ---- a case


def wrong_variant(case: GpuCase) -> Any:
    """Twice what the norm is."""
    doubled = case.spec._replace(function=lambda *given: 2 * case.spec.function(*given))

    def bind(tensors: Any) -> Any:
        given = tuple(tensors[n].requires_grad_() for n in ("weight", "bias") if n in tensors)
        return of_autograd(case.phase, doubled.function, tensors, given)

    return bind


def test_what_is_wrong_is_told_and_not_timed() -> None:
    case = case_of("layer_norm", "both", "bfloat16")
    found = measure(case, CPU, [Variant(EAGER, compiled), Variant("doubled", wrong_variant)], 2)
    assert found.seconds.keys() == {EAGER, COPY}
    assert found.wrong["doubled"].startswith("y is ")
    assert found.errors["doubled"]["y"] == pytest.approx(1.0, abs=0.01)
    written = found.as_dict()
    assert "doubled" not in written["fraction_of_copy"]
    assert any("doubled is wrong" in part for part in gpu_report.line_of(written).split(", "))


def test_normpass_is_measured_on_a_cpu_with_what_it_fused() -> None:
    """The one case here that is compiled: by Inductor, and by normpass for a region of its own."""
    case = case_of("layer_norm", "backward", "bfloat16")
    found = measure(case, CPU, variants(fuse_all=True), 2)
    assert not found.wrong
    assert not found.failed
    assert {EAGER, STOCK, OURS, COPY} <= found.seconds.keys()
    assert "layer_norm_backward" in found.fused[OURS]
    written = found.as_dict()
    assert written["fraction_of_copy"][OURS] == pytest.approx(
        case.least_bytes()
        / found.seconds[OURS].median
        / (copied_bytes(case) / found.seconds[COPY].median)
    )


@pytest.mark.parametrize("phase", FUNCTIONAL)
def test_functions_of_tensors_are_timed_too(phase: str) -> None:
    found = measure(case_of("layer_norm", phase), CPU, [Variant(EAGER, compiled)], 2)
    assert found.seconds.keys() == {EAGER, COPY}


def test_nothing_is_copied_where_nothing_is_right() -> None:
    def cannot(case: GpuCase) -> Any:
        raise ValueError

    found = measure(case_of("rms_norm", "forward"), CPU, [Variant(EAGER, cannot)], 2)
    assert found.failed == {EAGER: "ValueError: "}
    assert not found.seconds
    assert found.as_dict()["fraction_of_copy"] == {}


def test_host_time_is_that_of_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(program: Any, name: str, tensors: Any) -> Callable[[], object]:
        if name == STOCK and "forward" in program.__qualname__:
            raise RuntimeError("not today")
        return lambda: program(*tensors)

    monkeypatch.setattr(gpu_host, "called", called)
    monkeypatch.setattr(gpu_host, "CALLS", 2)
    forward, backward = gpu_host.measure_host(CPU, 2)
    assert forward["failed"] == {STOCK: "RuntimeError: not today"}
    assert backward["seconds"].keys() == {STOCK, *NORMPASS}


# ---- targets, from results that are made up


def result(norm: str, phase: str, seconds: dict[str, float], **more: Any) -> dict[str, Any]:
    """A case of 300 MB of least traffic at 4 TB/s for a copy, 75 us."""
    shape = (16384, 2 * 1525) if norm in gpu_targets.ROW_NORMS else (8, 320, 138, 138)
    case = GpuCase(norm, shape, more.pop("dtype", "bfloat16"), phase)
    timings = {name: Timing(s, s, s) for name, s in {**seconds, COPY: 75e-6}.items()}
    return CaseResult(case, 2, timings, **more).as_dict()


def document(**found: Any) -> dict[str, Any]:
    return {"cases": [], "host": [], "models": [], **found}


def judged(**found: Any) -> dict[str, gpu_targets.Target]:
    keys = ("copy", "peer", "stock", "gn", "gn eager", "bn", "bn eager", "double", "host", "steps")
    return dict(zip(keys, gpu_targets.targets(document(**found)), strict=True))


def test_nothing_is_passed_that_was_not_measured() -> None:
    found = judged()
    assert {target.passed for target in found.values()} == {None}
    assert {target.verdict for target in found.values()} == {"not measured"}


def test_rows_are_judged_by_the_copy_the_peers_and_inductor() -> None:
    fast = result("layer_norm", "backward", {OURS: 80e-6, STOCK: 120e-6, "liger": 81e-6})
    slow = result("rms_norm", "backward", {OURS: 100e-6, STOCK: 120e-6, "quack": 90e-6})
    found = judged(cases=[fast])
    assert found["copy"].passed
    assert found["peer"].passed
    assert found["stock"].passed
    assert found["stock"].found == "1.50x of 1"
    found = judged(cases=[fast, slow])
    assert found["copy"].passed is False
    assert found["copy"].found.startswith("1 of 2, lowest ")
    assert found["peer"].passed is False
    assert next(iter(found["peer"].cases)) == slow["label"]
    assert found["stock"].cases[slow["label"]] == pytest.approx(1.2)
    assert found["stock"].passed  # sqrt(1.5 * 1.2) = 1.34


def test_what_was_wrong_misses_and_what_is_of_another_dtype_does_not_count() -> None:
    other = result("layer_norm", "backward", {OURS: 1.0, STOCK: 1e-6}, dtype="float32")
    assert judged(cases=[other])["stock"].passed is None
    lost = result("layer_norm", "backward", {STOCK: 1e-6}, wrong={OURS: "dx is off"})
    found = judged(cases=[lost])
    assert found["copy"].passed is False
    assert found["stock"].passed is False
    assert "1 lost" in found["stock"].found


def test_images_double_backward_host_and_steps_are_judged() -> None:
    group = result("group_norm", "backward", {OURS: 100e-6, STOCK: 160e-6, EAGER: 110e-6})
    batch = result("batch_norm", "backward", {OURS: 1.0, STOCK: 1.4, EAGER: 3.0, "cudnn": 1.3})
    double = result("layer_norm", "double backward", {OURS: 1.0, STOCK: 2.5})
    host = [{"program": "p", "seconds": {OURS: {"median": 18e-6}, STOCK: {"median": 12e-6}}}]
    models = [
        {"model": "gpt2", "speedup_over_inductor": 1.2},
        {"model": "vit", "speedup_over_inductor": 0.995},
    ]
    found = judged(cases=[group, batch, double], host=host, models=models)
    assert found["gn"].passed
    assert found["gn eager"].passed is False
    assert found["bn"].passed is False
    assert found["bn eager"].passed
    assert found["bn eager"].found.startswith("1.30x")  # cuDNN's, which is the better
    assert found["double"].passed
    assert found["host"].passed is False
    assert found["host"].found == "+6.0 us"
    assert found["steps"].passed
    models[0]["speedup_over_inductor"] = 0.9
    assert judged(models=models)["steps"].passed is False


@pytest.fixture
def everything() -> dict[str, Any]:
    failed = result("layer_norm", "backward", {EAGER: 1.0}, failed={OURS: "KeyError: x"})
    refused = result("rms_norm", "backward", {OURS: 1.0}, refused={OURS: ["rms_norm: too small"]})
    return {
        **document(cases=[failed, refused]),
        "peers": {"liger": {"version": None, "missing": "No module named 'liger_kernel'"}},
        "complete": False,
        "elapsed_seconds": 12.0,
    }


def test_all_that_is_missing_is_told(everything: dict[str, Any]) -> None:
    lines = [*gpu_report.complaints(everything)]
    assert lines[0] == "liger is not installed: No module named 'liger_kernel'"
    assert any("normpass failed: KeyError: x" in line for line in lines)
    assert any("normpass left to Inductor: rms_norm: too small" in line for line in lines)
    assert lines[-1].startswith("stopped after 12 s")


def test_a_result_has_every_field_of_its_class() -> None:
    written = CaseResult(case_of("rms_norm", "forward"), 2).as_dict()
    assert {field.name for field in dataclasses.fields(CaseResult)} <= written.keys()
    assert written["label"] == "rms_norm 8x64 float32 forward"
