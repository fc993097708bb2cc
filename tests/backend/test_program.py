"""Programs: what they say of themselves, what is found in broken ones, and that a printer needs
nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import bounded
import numpy_dialect
import pytest
import random_regions
import torch
import triton_regions
from hypothesis import HealthCheck, assume, given, settings
from launched import forward
from snapshots import assert_snapshot

from normpass.backend.program.listing import listing
from normpass.backend.program.machine import CPU, GPU, Machine
from normpass.backend.program.plan import make_plan
from normpass.backend.program.tree import (
    Accumulate,
    Allocate,
    Begin,
    Finish,
    Jam,
    Keep,
    Lanes,
    Load,
    Loop,
    Recall,
    Store,
    rewritten,
    walk,
)
from normpass.backend.program.verify import ProgramError, verify
from normpass.passes.region import product
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from normpass.backend.program.tree import Node, Plan


# ---- what they say of themselves


def region(name: str, **changed: str) -> str:
    """The text of a region of triton_regions; see its `fill`."""
    return triton_regions.fill(getattr(triton_regions, name.upper()), **changed)


PROGRAMS = {
    "layer_norm_backward": region("layer_norm_backward", c="4096"),
    "layer_norm_backward_wide": region("layer_norm_backward", c="65536"),
    "softmax_short_rows": region("softmax", c="64", t="bf16"),
    "group_norm_backward_nhwc": region("group_norm_backward", c="8", x="r s (g d)"),
    "batch_norm_backward": region("batch_norm_backward", c="64", x="r c s"),
    "modulated_backward": region("modulated_backward", c="1024"),
    "three_levels": region("three_levels", c="512"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_snapshot(name: str) -> None:
    plans = {kind: make_plan(parse(PROGRAMS[name]), m) for kind, m in (("CPU", CPU), ("GPU", GPU))}
    text = "\n\n".join(f"# {kind}\n{listing(plan)}" for kind, plan in plans.items())
    assert_snapshot(f"programs/{name}.txt", text)


def test_a_debug_folder_has_each_stage_of_a_kernel(tmp_path: Path) -> None:
    options = {"debug": str(tmp_path), "least_bytes": 0, "inner": "eager"}
    norm = torch.compile(torch.nn.LayerNorm(64), backend="normpass", options=options)
    norm(torch.randn(8, 64))
    files = tmp_path.glob("*kernel0_layer_norm*")
    found = {file.suffix: file.read_text().splitlines()[0] for file in files}
    assert found == {
        ".region": "region layer_norm",
        ".program": "program layer_norm  r=8 c=64, lanes along c",
        ".cpp": "// region layer_norm",
    }


# ---- what is found in broken ones


def without(kind: type[Node]) -> Callable[[Plan], Plan]:
    """The program without its first node of a kind."""

    def broken(plan: Plan) -> Plan:
        done = False

        def pruned(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
            nonlocal done
            kept = []
            for node in nodes:
                if isinstance(node, kind) and not done:
                    done = True
                elif isinstance(node, Loop):
                    kept.append(replace(node, body=pruned(node.body)))
                else:
                    kept.append(node)
            return tuple(kept)

        found = replace(plan, body=pruned(plan.body))
        assert done
        return found

    return broken


def changed(change: Callable[[Node], Node]) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, body=rewritten(plan.body, change))


def loops(axis: str, **fields: Any) -> Callable[[Plan], Plan]:
    """The program with other loops over an axis."""
    return changed(
        lambda node: (
            replace(node, **fields) if isinstance(node, Loop) and node.axis.name == axis else node
        )
    )


BROKEN = {
    "a value that nothing defines": (without(Load), "to be there"),
    "a sum without a beginning": (without(Begin), "to have begun"),
    "a sum that never ends": (without(Finish), r"expected \['sum_gw', 'n'\] to be there"),
    "a tensor that is not written": (without(Store), "expected stores of"),
    "an array that is never written": (without(Keep), "expected an array of"),
    "sums without memory": (without(Allocate), r"memory of dw\('c',\)"),
    "workers inside of one worker": (loops("c", parallel=True), "expected a loop of one worker"),
    "lanes along rows": (loops("r", kind=Lanes()), "expected lanes along"),
    "columns that go together": (loops("c", kind=Jam(4)), "rows of r together"),
}
KEEPS_EXPONENTIALS = region("softmax", c="4096")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_program_is_found(name: str) -> None:
    broken, message = BROKEN[name]
    text = KEEPS_EXPONENTIALS if "array" in name else PROGRAMS["layer_norm_backward"]
    plan = make_plan(parse(text), CPU)
    verify(plan, "nothing")
    with pytest.raises(ProgramError, match=message):
        verify(broken(plan), "this test")


def test_a_launch_combines_what_an_earlier_one_left() -> None:
    plan = make_plan(parse(PROGRAMS["layer_norm_backward"]), GPU)
    verify(plan, "nothing")
    with pytest.raises(ProgramError, match="expected partial results of"):
        verify(replace(plan, launches=plan.launches[::-1]), "this test")


def test_shared_sums_are_added_up_in_one_loop() -> None:
    """A second one would begin anew, and what the first added up would be lost."""
    plan = make_plan(parse(PROGRAMS["layer_norm_backward"]), CPU)
    rows = next(node for node in plan.body if any(isinstance(n, Accumulate) for n in walk(node)))
    k = plan.body.index(rows)
    twice = replace(plan, body=(*plan.body[:k], rows, *plan.body[k:]))
    with pytest.raises(ProgramError, match="shared sums in one loop each, found several for"):
        verify(twice, "this test")


@pytest.mark.parametrize(
    ("text", "apart"),
    [
        (forward({"r": 4096, "c": 1024}, "r c", "c"), False),
        (forward({"r": 512, "c": 8192}, "r c", "c"), True),  # four rows at a time
        (forward({"n": 100352, "c": 16}, "n c", "n"), True),  # lanes go along outside of rows
        (forward({"n": 100352, "c": 64}, "n c", "n"), False),
        (forward({"n": 2, "c": 32, "s": 9216}, "n c s", "s", strides=" (294912, 1, 32)"), True),
    ],
    ids=["rows", "rows together", "few channels last", "channels last", "rows side by side"],
)
def test_what_is_written_between_two_vectors_of_a_line(text: str, apart: bool) -> None:
    """Parts of lines are not written past the caches then: the rest of them comes too late."""
    plan = make_plan(parse(text))
    stores = [node for node in walk(*plan.body) if isinstance(node, Store)]
    assert [node.apart for node in stores if node.output.buffer.name == "y0"] == [apart]


def test_axes_have_different_names() -> None:
    plan = make_plan(parse(PROGRAMS["layer_norm_backward"]), CPU)
    with pytest.raises(ProgramError, match="axes of different names"):
        verify(replace(plan, axes=(*plan.axes, plan.axes[0])), "this test")


def test_what_is_found_says_where() -> None:
    """The pass, the loops around, what was expected and found, and the program."""
    plan = without(Accumulate)(make_plan(parse(PROGRAMS["layer_norm_backward"]), CPU))
    verify(plan, "nothing")  # a sum of nothing is one all the same
    with pytest.raises(ProgramError) as caught:
        verify(without(Recall)(plan), "this test")
    message = str(caught.value)
    assert message.startswith("after this test, inside ['c']: expected ['dw'] to be there, found")
    assert "program layer_norm_backward" in message


# ---- a dialect of a page


MACHINES = {
    "arrays of exponentials": Machine(workers=1, kept=64 * 1024),
    "groups in lanes": Machine(workers=8, kept=64, regroups=True),
    "sums added up last": Machine(workers=1, kept=0, partial=0),
    "as on CPUs": CPU,
    "blocks everywhere": replace(CPU, blocking=replace(numpy_dialect.SMALL_BLOCKS, narrow=0)),
    "narrow blocks": replace(
        CPU, workers=2, blocking=replace(numpy_dialect.SMALL_BLOCKS, narrow=100)
    ),
}


@pytest.mark.parametrize("machine", MACHINES)
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(random_regions.cases() | random_regions.grouped_cases() | random_regions.chained_cases())
def test_numpy_loops(machine: str, case: random_regions.Case) -> None:
    extents = min(case.extents, key=lambda extents: product(extents.values()))
    sizes = case.sizes(extents)
    known = case.region.extents(sizes)
    assume(product(known[axis.name] for axis in case.region.axes) <= 500)
    inputs = random_regions.tensors(case, extents)
    expected = bounded.evaluate(case.region, inputs, sizes)
    found = numpy_dialect.run(case.region, MACHINES[machine], inputs, sizes)
    for output, result, want in zip(case.region.outputs, found, expected, strict=True):
        bounded.assert_within(result, want, f"{output.buffer.name}\n{case.region}\n")


@pytest.mark.parametrize("name", ["layer_norm_backward", "modulated_backward", "three_levels"])
def test_numpy_loops_of_norms(name: str) -> None:
    text = parse(region(name, c="7", r="5", t="f64"))
    inputs = [
        torch.randn(text.shape(buffer, text.extents(())), dtype=torch.float64).abs() + 0.5
        for buffer in text.inputs
    ]
    expected = bounded.evaluate(text, inputs, ())
    for result, want in zip(numpy_dialect.run(text, CPU, inputs, ()), expected, strict=True):
        bounded.assert_within(result, want, name)
