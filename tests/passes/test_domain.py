"""Axes and dimensions: which views a domain can express, and what it says of those it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tracing import trace

from normpass.passes.axis_table import NotExpressible
from normpass.passes.domain import Domain
from normpass.passes.vocabulary import Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.fx import Graph, Node

X = torch.zeros(6, 4, 10)


def domain_of(function: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> Shown:
    """A domain with every node of a function in it, in the graph's order."""
    graph = trace(function, *inputs, dynamic=dynamic).graph
    domain = Domain()
    nodes = [node for node in graph.nodes if kind_of(node) is not Kind.OTHER]
    for node in nodes:
        domain.add(node)
    placeholders = [node for node in graph.nodes if node in domain.dims and node not in nodes]
    return Shown(domain, placeholders, nodes[-1])


class Shown:
    """A domain in letters: each axis one, by order of first appearance in the inputs."""

    def __init__(self, domain: Domain, inputs: list[Node], last: Node) -> None:
        self.domain = domain
        self.letters: dict[int, str] = {}
        self.inputs = [self.show(node) for node in inputs]
        self.result = self.show(last)

    def show(self, node: Node) -> str:
        words = []
        for dim in self.domain.dims[node]:
            axes = self.domain.resolve(dim)
            for axis in axes:
                self.letters.setdefault(axis, "abcdefghij"[len(self.letters)])
            words.append("".join(self.letters[axis] for axis in axes) or "1")
        return " ".join(words)

    @property
    def extents(self) -> dict[str, str]:
        return {letter: str(self.domain.extent(axis)) for axis, letter in self.letters.items()}


# name: function of X[6, 4, 10], dimensions of X, dimensions of the result
EXPRESSIBLE: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "pointwise": (lambda x: x * 2, "a b c", "a b c"),
    "a broadcast row": (lambda x: x * x[0, 0].new_ones(10), "a b c", "a b c"),
    "permute": (lambda x: x.permute(2, 0, 1), "a b c", "c a b"),
    "negative permute": (lambda x: x.permute(-1, 0, 1), "a b c", "c a b"),
    "transpose": (lambda x: x.transpose(-1, 0), "a b c", "c b a"),
    "flatten": (lambda x: x.view(24, 10), "a b c", "ab c"),
    "flatten all": (lambda x: x.view(-1), "a b c", "abc"),
    "split": (lambda x: x.view(6, 4, 5, 2), "a b cd", "a b c d"),
    "regroup": (lambda x: x.view(3, 8, 10), "ab c d", "a bc d"),
    "regroup across": (lambda x: x.view(12, 20), "a bc d", "ab cd"),
    "unsqueeze": (lambda x: x.unsqueeze(1), "a b c", "a 1 b c"),
    "squeeze": (lambda x: x.view(6, 1, 40).squeeze(1), "a b c", "a bc"),
    "squeeze all": (lambda x: x.view(1, 24, 1, 10).squeeze(), "a b c", "ab c"),
    "expand": (lambda x: x.unsqueeze(0).expand(7, 6, 4, 10), "a b c", "d a b c"),
    "sum": (lambda x: x.sum(1), "a b c", "a c"),
    "sum, kept": (lambda x: x.sum((0, -1), keepdim=True), "a b c", "1 b 1"),
    "sum of all": (lambda x: x.sum(), "a b c", ""),
    "prod": (lambda x: x.prod(1), "a b c", "a c"),
    "variance": (lambda x: torch.var_mean(x, -1)[0], "a b c", "a b"),
    "there and back": (lambda x: x.view(24, 10) + x.view(24, 10).sum(0), "a b c", "ab c"),
    "every second": (lambda x: x[..., 1::2] * 2, "a b cd", "a b c"),
    "one of many": (lambda x: x[:, 3] * 2, "a b c", "a c"),
    "pairs": (
        lambda x: torch.stack(x.unflatten(-1, (5, 2)).unbind(-1), -1).flatten(-2) + x,
        "a b cd",
        "a b cd",
    ),
    "pairs exchanged": (
        lambda x: torch.slice_scatter(x, x[..., 1::2], -1, step=2),
        "a b cd",
        "a b cd",
    ),
    "two spellings": (lambda x: x.view(6, 40) + x.view(6, 8, 5).view(6, 40), "a bc de", "a bde"),
}


@pytest.mark.parametrize("name", [name for name in EXPRESSIBLE if name != "two spellings"])
def test_dimensions(name: str) -> None:
    function, source, result = EXPRESSIBLE[name]
    shown = domain_of(function, X)
    assert shown.inputs[0] == source
    assert shown.result == result


def test_two_spellings_of_one_dimension_split_its_axis() -> None:
    """[40] as [8, 5] and as [4, 10] has [4, 2, 5] behind both."""
    shown = domain_of(EXPRESSIBLE["two spellings"][0], X)
    assert shown.result == "a bcd"
    assert shown.inputs == ["a b cd"]
    assert shown.extents == {"a": "6", "b": "4", "c": "2", "d": "5"}


def test_an_axis_split_by_one_tensor_is_split_in_all() -> None:
    def grouped(x: Tensor, w: Tensor) -> Tensor:
        return (x.view(6, 2, 2, 10).sum(2, keepdim=True) + x.view(6, 2, 2, 10)).view(
            6, 4, 10
        ) * w.view(4, 1)

    shown = domain_of(grouped, X, torch.zeros(4))
    assert shown.inputs == ["a bc d", "bc"]
    assert shown.result == "a bc d"


def test_one_tensor_twice_is_one() -> None:
    shown = domain_of(lambda x: x + x.permute(0, 1, 2), X)
    assert shown.inputs == ["a b c"]


def test_broadcast_dimensions_have_no_axes() -> None:
    shown = domain_of(lambda x, s: x + s, X, torch.zeros(6, 1, 1))
    assert shown.inputs == ["a b c", "a 1 1"]


def test_symbolic_extents_split_where_they_divide() -> None:
    def grouped(x: Tensor) -> Tensor:
        y = x.view(x.shape[0], 2, 2, x.shape[2])
        return (y - y.sum((2, 3), keepdim=True)).view(x.shape[0] * 4, x.shape[2])

    def fixed(x: Tensor) -> Tensor:
        return grouped(x.view(x.shape[0], 4, x.shape[2]))

    shown = domain_of(fixed, X, dynamic=True)
    assert shown.result == "abc d"
    assert shown.extents["b"] == shown.extents["c"] == "2"
    assert not shown.extents["a"].isdigit()


def test_symbolic_products_regroup() -> None:
    shown = domain_of(lambda x: x.view(x.shape[0] * x.shape[1], x.shape[2]), X, dynamic=True)
    assert (shown.inputs, shown.result) == (["a b c"], "ab c")


# name: function of X, and what is said
INEXPRESSIBLE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a matrix product": (
        lambda x: x.view(24, 10) @ x.view(24, 10).t(),
        "neither pointwise, reduction nor view",
    ),
    "an empty slice": (lambda x: x[:, 2:2] * 2, "no part of known size"),
    "steps that leave some over": (lambda x: x[..., ::3] * 2, "no part of known size"),
    "steps that leave some out": (lambda x: x[:, :2:2] * 2, "no part of known size"),
    "parts of two dimensions": (lambda x: x[:4, :2] * 2, "pieces in two dimensions"),
    "a part of a product": (lambda x: x.view(24, 10)[5:] + x[0, 0], "a product of axes is cut"),
    "extents that do not divide": (lambda x: x.view(24, 10).view(16, 15), "where 16 fit"),
    "a chain of views": (
        lambda x: x.view(24, 10).view(-1)[None].view(15, 16).view(240).view(6, 40).view(4, 60) + 1,
        "a view puts",
    ),
}


@pytest.mark.parametrize("name", INEXPRESSIBLE)
def test_what_cannot_be_expressed_says_why(name: str) -> None:
    function, message = INEXPRESSIBLE[name]
    graph = trace(function, X).graph
    with pytest.raises(NotExpressible, match=message):
        add_all(Domain(), graph)


def add_all(domain: Domain, graph: Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function":
            domain.add(node)


def test_a_tensor_plus_its_transpose_runs_along_one_axis_twice() -> None:
    with pytest.raises(NotExpressible, match="runs along one axis twice"):
        domain_of(lambda x: x + x.t(), torch.zeros(5, 5))


def test_crossing_groups_do_not_unify() -> None:
    """[2, 3] flattened beside [3, 2] flattened: no axes are behind both."""
    with pytest.raises(NotExpressible, match=r"a dimension of \d elements meets one of \d"):
        domain_of(lambda x, y: x.view(6) + y.view(6), torch.zeros(2, 3), torch.zeros(3, 2))


def scaled(x: Tensor, factor: float) -> Tensor:
    return x.sum(-1) * factor


# name: function of X whose sizes are known only at run time
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a size": lambda x: scaled(x, x.shape[2]),
    "a count": lambda x: scaled(x, x.shape[0] * x.shape[2]),
    "one more": lambda x: scaled(x, x.shape[2] + 1),
    "a quotient": lambda x: scaled(x, 2.0 / x.shape[2]),
    "degrees of freedom": lambda x: scaled(x, 2 / (x.shape[1] * x.shape[2] - 1)),
    "a root": lambda x: scaled(x, x.shape[2] ** 0.5),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_known_at_run_time_is_told_by_sizes(name: str) -> None:
    assert domain_of(NUMBERS[name], X, dynamic=True).result == "a b"


def test_a_number_that_sizes_do_not_tell_is_refused() -> None:
    with pytest.raises(NotExpressible, match="is a number known only at run time"):
        domain_of(lambda x: scaled(x, x.shape[2] // 3), X, dynamic=True)
    # A size of no tensor of the domain.
    with pytest.raises(NotExpressible, match="is a number known only at run time"):
        domain_of(lambda x, y: scaled(x, 1 / y.shape[0]), X, torch.zeros(7), dynamic=True)


@pytest.mark.parametrize("shape", [(0, 4, 10), (6, 0, 10), (0, 0, 1)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    """They have a domain or have none; nothing divides by zero on the way."""
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: x - x.sum(-1, keepdim=True),
        lambda x: x.view(-1) + 1,
        lambda x: x.view(shape[1], -1, shape[0], 5) if 0 not in shape[:2] else x.flatten(0, 1),
    ]
    for function in functions:
        try:
            shown = domain_of(function, torch.zeros(shape))
        except NotExpressible:
            continue
        assert "0" in shown.extents.values()


def test_a_copy_grows_alone() -> None:
    graph = trace(lambda x: x.view(6, 2, 2, 10) + 1, X).graph
    view, add = (node for node in graph.nodes if node.op == "call_function")
    domain = Domain()
    domain.place(view.args[0])
    other = domain.copy()
    other.add(view)
    other.add(add)
    assert view not in domain.dims
    assert len(domain.axes(view.args[0])) == 3
    assert len(other.axes(view.args[0])) == 4


def test_equal_pieces_are_one_axis() -> None:
    """Thirds and halves are six pieces, and all of them run along the same axis."""

    def f(x: Tensor) -> Tensor:
        return torch.cat([x[4:], x[:4]]) * torch.cat([x[6:], x[:6]])

    domain = domain_of(f, torch.zeros(12)).domain
    assert domain.in_equal_pieces(6) == 6
    assert len({piece for node in domain.dims for piece in domain.pieces_of(node)}) == 1
    with pytest.raises(NotExpressible, match="6 equal pieces"):
        domain_of(f, torch.zeros(12)).domain.in_equal_pieces(5)


def test_what_was_checked_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chain of nodes with tensors of their own: each node looks at its own dimensions, and
    not at those of all before it.
    """

    def chain(x: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            x = x * other
        return x

    graph = trace(chain, torch.randn(4, 8), *(torch.randn(8) for _ in range(64))).graph
    looked = []
    whole_axes_of = Domain.whole_axes_of

    def counted(domain: Domain, dims: Any) -> Any:
        looked.append(dims)
        return whole_axes_of(domain, dims)

    monkeypatch.setattr(Domain, "whole_axes_of", counted)
    domain = Domain()
    add_all(domain, graph)
    assert len(domain.dims) == 129
    assert len(looked) < 2 * len(domain.dims)
