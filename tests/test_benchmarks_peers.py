"""`normpass bench --peers`: what it asks, how it judges, the file it writes and the page of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import normpass
from normpass.benchmarks import bench, peers, peers_capability, peers_page, peers_times
from normpass.benchmarks.machine import installed
from normpass.benchmarks.peers_capability import (
    ASKED,
    SHAPE,
    asked,
    in_torch,
    outcome,
    parameters_of,
    start,
)
from normpass.benchmarks.peers_norms import FROM_OUTSIDE, NORMS, Norm
from normpass.benchmarks.peers_times import Problem, Timed
from normpass.benchmarks.peers_ways import WAYS, Way, as_it_is, missing

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).parents[1]
TO = in_torch()
X, V, C = start(), TO.along, TO.cotangent


def cube(x: Tensor) -> Tensor:
    return x * x * x


# Of sum(x^3 * c), whose derivatives are known without any library.
OF_A_CUBE = {
    "forward": X**3,
    "backward": 3 * X**2 * C,
    "double backward": 6 * X * C * V,
    "third order": 6 * C * V**2,
    "jvp": (3 * X**2 * C * V).sum(),
    "jvp of jvp": (6 * X * C * V**2).sum(),
    "vmap of grad": torch.stack([3 * X**2 * C, 3 * (X + V) ** 2 * C]),
    "vmap of jvp": torch.stack([(3 * X**2 * C * V).sum(), (3 * (X + V) ** 2 * C * V).sum()]),
    "hessian": torch.diag((6 * X * C)[0].flatten()).reshape(1, *SHAPE[1:], 1, *SHAPE[1:]),
    FROM_OUTSIDE: 6 * X * C * V,
}


@pytest.mark.parametrize("mix", ASKED)
def test_what_is_asked_is_what_it_is_called(mix: str) -> None:
    torch.testing.assert_close(asked(mix, TO, cube, as_it_is)(X), OF_A_CUBE[mix])


@pytest.mark.parametrize("name", NORMS)
def test_formulas_are_the_operators(name: str) -> None:
    given = parameters_of(name)
    torch.testing.assert_close(
        NORMS[name].primitives(torch)(X, *given), NORMS[name].in_torch(X, *given)
    )


def doubled(function: Any) -> Any:
    return lambda *x: 2 * function(*x)


def refusing(function: Any) -> Any:
    raise TypeError("expected a smaller function\nand a second line")


def of_another_shape(function: Any) -> Any:
    return lambda *x: function(*x)[:1]


@pytest.mark.parametrize(
    ("compiled", "said"),
    [
        (as_it_is, "right"),
        (doubled, "wrong: 1.0e+00 of the largest number away"),
        (refusing, "fails: TypeError: expected a smaller function"),
        (of_another_shape, "wrong: expected the shape [4, 6, 5], found [1, 6, 5]"),
    ],
)
def test_a_way_is_judged(monkeypatch: pytest.MonkeyPatch, compiled: Any, said: str) -> None:
    monkeypatch.setitem(WAYS, "another", Way(None, "torch", compiled))
    assert outcome(("another", "layer_norm", "backward")) == said


def test_a_library_that_is_not_there_is_named() -> None:
    absent = Way("no_such_library", "no-such-library", as_it_is)
    assert missing(absent) == "not installed"
    broken = replace(absent, package="torch")  # installed, but its module is not
    said = missing(broken)
    assert said is not None
    assert said.startswith(f"torch {installed('torch')} cannot be imported: ModuleNotFoundError")
    assert missing(WAYS["eager"]) is None


@pytest.mark.parametrize("way", ["Inductor", "normpass"])
def test_what_is_compiled_is_asked_the_same(way: str) -> None:
    assert outcome((way, "rms_norm", "backward")) == "right"


@pytest.mark.skipif(installed("jax") is None, reason="JAX is not installed (extra peers)")
@pytest.mark.parametrize("mix", ["backward", "jvp of jvp", FROM_OUTSIDE])
def test_jax_is_asked_the_same(mix: str) -> None:
    assert outcome(("JAX, jit", "group_norm", mix)) == "right"


def test_what_is_timed_is_the_derivative() -> None:
    """Of a cube, whose derivatives are known."""
    norm = Norm(cube, lambda library, x: cube(x), lambda shape: ())
    for phase in ("backward", "forward+backward", "double backward", "per sample"):
        problem = Problem(Timed("softmax", (3, 4, 5), "float32", phase))
        problem.norm = norm
        (x,), dy, v = problem.inputs, problem.dy, problem.along
        want = {
            "double backward": 6 * x * dy * v,
            "per sample": 3 * x**2 * cube(x).cos(),
        }.get(phase, 3 * x**2 * dy)
        found = problem.step(WAYS["eager"])()
        (found,) = found if isinstance(found, tuple) else (found,)
        torch.testing.assert_close(found, want)


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, "doubled", Way(None, "torch", doubled))
    case = Timed("rms_norm", (6, 16), "float32", "forward+backward")
    result = peers_times.measure(case, ["eager", "doubled"], repeats=2)
    assert result.times.keys() == {"eager"}
    assert "dx is 1.0e+00 away from float64" in result.wrong["doubled"]
    assert result.ratio("eager") is None


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two norms, two mixes, two cases, and ways that compile nothing."""
    ways = {name: WAYS[name] for name in ("eager", "normpass, eager")}
    ways["normpass"] = replace(WAYS["normpass"], compiled=as_it_is)
    ways["thunder"] = Way("no_such_library", "no-such-library", as_it_is)
    for module in (peers, peers_capability, peers_times):
        monkeypatch.setattr(module, "WAYS", ways)
    norms = {name: NORMS[name] for name in ("rms_norm", "softmax")}
    monkeypatch.setattr(peers_capability, "NORMS", norms)
    for module in (peers, peers_capability):
        monkeypatch.setattr(module, "ASKED", ("backward", "jvp"))
    some = [
        Timed("rms_norm", (8, 16), "float32", "backward"),
        Timed("softmax", (8, 16), "float32", "double backward"),
    ]
    monkeypatch.setattr(peers, "cases", lambda: some)


@pytest.mark.usefixtures("small")
def test_it_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.randn(1 << 20).exp()  # by several threads, as there are: forks have to do without
    options = ["--out", str(tmp_path), "--system-allocator", "--repeats", "2"]
    assert bench.main(["--peers", *options]) == 0
    assert "thunder is left out: not installed" in capsys.readouterr().out
    document = json.loads((tmp_path / peers.FILE).read_text())
    assert document["capability"]["ways"]["normpass"] == {
        "rms_norm": {"backward": "right", "jvp": "right"},
        "softmax": {"backward": "right", "jvp": "right"},
    }
    assert document["times"]["machine"]["versions"]["torch"] == torch.__version__
    for case in document["times"]["cases"]:
        assert case["seconds"].keys() == {"eager", "normpass"}
        assert not case["wrong"]

    before = document["times"]
    assert bench.main(["--peers", "capability", *options]) == 0
    assert json.loads((tmp_path / peers.FILE).read_text())["times"] == before
    page = tmp_path / "page.md"
    page.write_text("\n".join(f"<!-- {name} -->\n<!-- end -->" for name in peers_page.PLACES))
    assert peers_page.main([str(tmp_path / peers.FILE), str(page)]) == 0
    text = page.read_text()
    assert "| backward | 2 | 2 | 2 |" in text
    assert "| jvp | `===` | `===` |" in text
    assert "| backward | rms_norm | 8x16 | float32 |" in text


def test_stock_is_not_measured_where_the_rules_are(tmp_path: Path) -> None:
    with normpass.registered(), pytest.raises(RuntimeError, match="while normpass is registered"):
        bench.main(["--peers", "--out", str(tmp_path)])


def test_the_page_is_of_the_results() -> None:
    text = (ROOT / peers_page.PAGE).read_text("utf-8")
    assert peers_page.page(text, json.loads((ROOT / peers_page.RESULTS).read_text())) == text


def test_what_was_not_measured_is_said_to_be_so() -> None:
    text = "\n".join(f"<!-- {name} -->\n<!-- end -->" for name in peers_page.PLACES)
    assert peers_page.page(text, {}).count("Not measured yet.") == len(peers_page.PLACES)


def test_means_are_geometric_and_of_what_both_have_right() -> None:
    def case(**seconds: float) -> dict[str, Any]:
        timings = {name: {"median": each} for name, each in seconds.items()}
        return {"phase": "backward", "dtype": "float32", "seconds": timings}

    cases = [case(normpass=1, eager=2, jax=3), case(normpass=0.5, eager=4), case(eager=1, jax=1)]
    *_, row = peers_page.averaged(cases)
    assert row == "| backward | float32 | 4.00x (2.00x) | 3.00x (3.00x) |"


def test_a_page_without_a_place_is_refused() -> None:
    document = json.loads((ROOT / peers_page.RESULTS).read_text())
    with pytest.raises(ValueError, match="expected one place <!-- asked --> in the page, found 0"):
        peers_page.page("# Nothing", document)


def test_what_the_page_says_of_all_is_so() -> None:
    """Every way is asked the same; with the rules, and in JAX, every case is right."""
    document = json.loads((ROOT / peers_page.RESULTS).read_text())
    ways = document["capability"]["ways"]
    assert [*ways] == [name for name in WAYS if name != "thunder"]
    for name in ("normpass, eager", "normpass, registered", "JAX", "JAX, jit"):
        said = {each for by_mix in ways[name].values() for each in by_mix.values()}
        assert said == {"right"}, name
    alone = [said for by_mix in ways["normpass"].values() for said in by_mix.values()]
    assert not [said for said in alone if said.startswith("wrong")]
    for by_norm in ways.values():
        assert by_norm.keys() == NORMS.keys()
        assert all(by_mix.keys() == set(ASKED) for by_mix in by_norm.values())
