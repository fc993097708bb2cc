"""The ledger of PyTorch's functions, held against the registry; the page made from the registry."""

from __future__ import annotations

import difflib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshots import assert_snapshot

from normpass.decomps import registry
from normpass.decomps.coverage import STATUSES, Entry, ledger, rows, sources, table
from normpass.decomps.coverage.page import RENEW, by_family, page
from normpass.decomps.derivatives.pointwise import BESSEL
from normpass.decomps.registry import Kind, register_rule, rules
from normpass.decomps.torch_versions import BESSEL_HAS_DERIVATIVES

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"

# Functions of the ledger's files that rules name and the ledger does not have.
EXPLAINED = dict.fromkeys(
    (
        "_grouped_mm_mat1_backward",
        "_grouped_mm_mat2_backward",
        "_miopen_ctc_loss_backward",
        "aminmax_backward",
        "aminmax_jvp",
        "grid_sampler_2d_double_backward",
        "grid_sampler_3d_double_backward",
        "infinitely_differentiable_native_rms_norm_backward",
        "linalg_lstsq_residuals_jvp",
        "linalg_lstsq_solution_jvp",
        "rms_norm_jvp",
        "rms_norm_rstd_jvp",
        "safe_logsumexp_jvp",
    ),
    "newer than the ledger",
)


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty registry for the length of a test."""
    monkeypatch.setattr(registry, "_RULES", {})
    monkeypatch.setattr(registry, "_ROOMS", ())


def entry(name: str) -> Entry:
    (found,) = (e for e in rows() if e.row.name == name)
    return found


def enter(kind: Kind, op: str, name: str = "", source: str = "a.cpp: f", shapes: str = "") -> None:
    """A rule that is registered with no more than its record."""
    found = registry.find_op(op) if op else None
    register_rule(kind, found, name, source=source, shapes=shapes or "x: *s -> y: *s")(abs)


def formula(schema: str) -> None:
    """A derivative formula of this schema, without making an operator of it."""
    parsed = torch._C.parse_schema(f"normpass::{schema}")
    op: Any = type("Op", (), {"_schema": parsed, "namespace": "normpass"})()
    name = schema.partition("(")[0]
    register_rule("vjp", op, name, source="a.cpp: f", shapes="x: *s -> y: *s")(abs)


def test_the_ledger_is_whole() -> None:
    assert len(ledger()) == 303
    assert len({row.name for row in ledger()}) == 303
    assert len({row.file for row in ledger()}) == 5
    assert all(row.kind and row.family and row.signature for row in ledger())


def test_every_row_has_one_status() -> None:
    counts = Counter(e.status for e in rows())
    assert sum(counts.values()) == 303
    assert set(counts) <= set(STATUSES)
    assert not counts["open"]
    assert all(bool(e.rules) == (e.status == "ported") for e in rows())
    assert all(e.row.reason for e in rows() if e.status == "out of scope")
    assert not any(e.row.reason for e in rows() if e.status == "open")


def test_overloads_are_numbered_after_a_first() -> None:
    names = {row.name for row in ledger()}
    assert all(row.function in names for row in ledger())


def test_a_source_in_these_files_is_a_row_or_explained() -> None:
    known = {(row.file, row.function) for row in ledger()}
    files = {row.file for row in ledger()}
    named = {place for rule in rules() for place in sources(rule)}
    unknown = {place for place in named - known if place[0] in files}
    assert {function for _, function in unknown} <= set(EXPLAINED), (
        "a rule names a function that its file does not define: correct the source, or say in "
        "EXPLAINED why the ledger lacks it"
    )


def test_the_table() -> None:
    assert_snapshot("coverage.txt", table(rows()))


@pytest.mark.usefixtures("scratch")
def test_without_rules_nothing_is_ported() -> None:
    assert {e.status for e in rows()} == {"open", "out of scope"}


@pytest.mark.usefixtures("scratch")
def test_a_formula_ports_the_row_of_its_name() -> None:
    assert entry("linalg_qr_jvp").status == "open"
    enter("jvp", "", "linalg_qr_jvp")
    assert entry("linalg_qr_jvp").status == "ported"
    assert Counter(e.status for e in rows())["ported"] == 1


@pytest.mark.usefixtures("scratch")
def test_a_source_ports_the_rows_of_its_functions() -> None:
    enter("vjp", "", "f", source=f"a.cpp: g; {MANUAL}: cat_jvp, stack_jvp")
    assert {e.row.name for e in rows() if e.rules} == {"cat_jvp", "stack_jvp"}


@pytest.mark.usefixtures("scratch")
def test_a_rule_ports_what_has_a_reason_too() -> None:
    assert entry("_affine_jvp").status == "out of scope"
    enter("jvp", "", "_affine_jvp")
    assert entry("_affine_jvp").status == "ported"


@pytest.mark.usefixtures("scratch")
def test_an_overload_is_ported_by_a_formula_that_has_its_parameters() -> None:
    formula("norm_backward(Tensor grad, Tensor self, Scalar? p, Tensor norm) -> Tensor")
    assert entry("norm_backward").status == "ported"
    assert entry("norm_backward#2").status == "open"
    more = "Tensor grad, Tensor self, Scalar? p, Tensor norm, int[] dim, bool keepdim"
    formula(f"norm_backward.d({more}) -> Tensor")
    assert [rule.name for rule in entry("norm_backward#2").rules] == ["norm_backward.d"]


@pytest.mark.usefixtures("scratch")
def test_overloads_differ_in_what_is_a_tensor() -> None:
    formula("clamp_backward(Tensor grad, Tensor self, Tensor? min, Tensor? max) -> Tensor")
    assert entry("clamp_backward").status == "open"
    assert entry("clamp_backward#2").status == "ported"


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize(
    ("name", "kind", "ops", "shapes"),
    [
        ("pow_backward", "vjp", ["aten.pow.Tensor_Scalar"], "g: *s -> dself: *s"),
        ("atan2_backward", "vjp", ["aten.atan2.default"], "g: *s -> dself: *s, dother: *s"),
        (
            "copysign_tensor_self_backward",
            "vjp",
            ["aten.copysign.Scalar", "aten.copysign.Tensor"],
            "g: *s -> dself: *s",
        ),
        ("elu_double_backward", "vjp", ["aten.elu_backward.default"], "g -> dself_or_result: *s"),
        ("register convolution", "batching", ["aten.convolution.default"], "x -> y"),
        ("cudnn_batch_norm", "autograd", ["aten.cudnn_batch_norm.default"], "x -> y"),
    ],
)
def test_the_rules_of_all_its_operators_port_a_row(
    name: str, kind: Kind, ops: list[str], shapes: str
) -> None:
    for op in ops:
        assert entry(name).status == "open"
        enter(kind, op, shapes=shapes)
    assert entry(name).status == "ported"
    assert len(entry(name).rules) == len(ops)


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize(
    ("name", "kind", "op", "shapes"),
    [
        # the derivative in another input
        ("pow_backward_exponent", "vjp", "aten.pow.Tensor_Tensor", "g: *s -> dself: *s"),
        # one of two
        ("atan2_backward", "vjp", "aten.atan2.default", "g: *s -> dself: *s"),
        # another kind
        ("pow_backward", "jvp", "aten.pow.Tensor_Scalar", "t: *s -> dself: *s"),
        ("register convolution", "decomposition", "aten.convolution.default", "x -> y"),
        # raises in a build without cuDNN, whatever ours does
        ("cudnn_batch_norm#no-cuDNN", "autograd", "aten.cudnn_batch_norm.default", "x -> y"),
    ],
)
def test_another_rule_does_not_port_a_row(name: str, kind: Kind, op: str, shapes: str) -> None:
    before = entry(name).status
    enter(kind, op, shapes=shapes)
    assert entry(name).status == before != "ported"


def test_the_table_counts_every_row() -> None:
    *lines, total = table(rows()).splitlines()
    cells = [[int(n) for n in line[33:].split()[-3:]] for line in lines[1:]]
    assert [int(n) for n in total.split()[1:]] == [
        sum(column) for column in zip(*cells, strict=True)
    ]
    assert sum(map(sum, cells)) == 303


def test_every_rule_has_one_family() -> None:
    found = [rule for family in by_family().values() for rule in family]
    assert sorted(map(id, found)) == sorted(map(id, rules()))


def test_the_page_has_every_rule() -> None:
    text = page()
    assert not [rule.name for rule in rules() if f"`{rule.name}`" not in text]


def test_the_page_is_the_one_that_is_printed_now() -> None:
    kept = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    # The kept page is that of torch 2.13, which does not differentiate these operators.
    newer = [f"`{op}`" for op in BESSEL if BESSEL_HAS_DERIVATIVES]
    now = [line for line in page().splitlines() if not any(op in line for op in newer)]
    difference = "\n".join(difflib.unified_diff(kept, now, "kept", "now", lineterm=""))
    assert not difference, (
        f"docs/rules.md is out of date. To renew it:\n\n    {RENEW}\n\n{difference}"
    )
