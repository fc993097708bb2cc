"""Further derivatives of graphs whose sizes vary: of operators that take sizes for known, of those
that only seem to, and what happens where there are too many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from higher_order_cases import IGNORED, assert_same, compiled, derivatives, numbers
from higher_order_programs import NORMS
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F

from normpass.backend.higher_order import derivatives as derivatives_of_compiled
from normpass.backend.higher_order import sizes
from normpass.backend.higher_order.sizes import SomeSizesOnly

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., Any]

pytestmark = IGNORED


def _image(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w)[None, None]


def _regular(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    return h.t() @ h + torch.eye(4, dtype=x.dtype)


def _folded(x: Tensor, w: Tensor) -> Tensor:
    return F.fold((x @ w).t().reshape(1, 4, -1), (x.shape[0] + 1, 2), (2, 2)).sin()


# x: n 4, w: 4 4
OPERATORS: dict[str, Function] = {
    # Sizes in C++ or in Python, which only a Python dispatcher keeps apart.
    "interpolate": lambda x, w: F.interpolate((x @ w)[None], scale_factor=2).sin(),
    "interpolate images": lambda x, w: F.interpolate(
        _image(x, w), scale_factor=2, mode="bilinear"
    ).sin(),
    "local response norm": lambda x, w: F.local_response_norm((x @ w)[None], 2),
    "fold": _folded,
    "bilinear": lambda x, w: F.bilinear(x, x.sin(), w[None]),
    # Each size by itself.
    "prod": lambda x, w: (x @ w).prod(1),
    "glu": lambda x, w: F.glu(x @ w).sin(),
    "grid sample": lambda x, w: F.grid_sample(
        w[None, None], x.view(1, -1, 2, 2).tanh(), align_corners=True
    ),
    "singular values": lambda x, w: torch.linalg.svdvals(x @ w),
    # With a check that AOTAutograd takes for an effect.
    "inverse": lambda x, w: torch.linalg.inv(_regular(x, w)),
    "determinant": lambda x, w: torch.linalg.det(_regular(x * 0.3, w)),
    # All others.
    "standard deviation": lambda x, w: (x @ w).std(0),
    "logsumexp": lambda x, w: (x @ w).logsumexp(0),
    "max pool": lambda x, w: F.max_pool2d(_image(x, w), 2).sin(),
    "average pool": lambda x, w: F.avg_pool2d(_image(x, w), 2).sin(),
    "adaptive pool": lambda x, w: F.adaptive_avg_pool2d(_image(x, w), 2).sin(),
    "prelu": lambda x, w: F.prelu(x @ w, w[0]).sin(),
    "renorm": lambda x, w: torch.renorm(x @ w, 2, 0, 0.5),
    "norm": lambda x, w: (x @ w).norm(dim=0),
    "cummax": lambda x, w: (x @ w).cummax(0)[0].sin(),
    "cumprod": lambda x, w: (x @ w).cumprod(0),
    "unfold": lambda x, w: (x @ w).unfold(0, 2, 1).sin(),
    "reflected": lambda x, w: F.pad((x @ w)[None], (1, 1), mode="reflect").sin(),
    "replicated": lambda x, w: F.pad(_image(x, w), (1, 1, 1, 1), mode="replicate").sin(),
    "gather": lambda x, w: (x @ w).gather(1, (x > 0).long()).sin(),
    "cross entropy": lambda x, w: F.cross_entropy(x @ w, x.argmax(1)),
    "cosine similarity": lambda x, w: F.cosine_similarity(x @ w, x),
    "sort": lambda x, w: (x @ w).msort().sin(),
    "median": lambda x, w: (x @ w).median(0)[0].sin(),
    "convolution": lambda x, w: F.conv1d(_image(x, w).flatten(2), w[:1, None, :3]).sin(),
    "einsum": lambda x, w: torch.einsum("ij,jk,ik->i", x, w, x),
}
SAMPLED = ("interpolate", "fold", "bilinear", "glu", "inverse", "max pool")


def check(name: str, order: int, inner: str = "eager") -> None:
    function, w = OPERATORS[name], numbers(4, 4)
    ours = torch.compile(function, backend="normpass", dynamic=True, options={"inner": inner})
    for rows in (6, 7):
        x = numbers(rows, 4)
        found, right = (derivatives(f, x, w, order=order) for f in (ours, function))
        # What one of them knows to be zero, the other may compute.
        pairs = [(a, b) for a, b in zip(found, right, strict=True) if (a, b) != (None, None)]
        assert pairs
        assert_same([_or_zeros(a, b) for a, b in pairs], [_or_zeros(b, a) for a, b in pairs])


def _or_zeros(x: Tensor | None, like: Tensor | None) -> Any:
    return torch.zeros_like(like) if x is None else x


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SAMPLED)
def test_operators_with_varying_sizes(name: str) -> None:
    check(name, order=2)


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_every_operator_with_varying_sizes(name: str, inner: str) -> None:
    check(name, order=3, inner=inner)


def test_sizes_that_nothing_takes_for_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm's double backward in C++ would. Sizes vary from the second call on."""

    def fail(program: Any, inputs: Any) -> Any:
        raise AssertionError(
            f"expected code for all sizes; found {len(inputs)} inputs of their own"
        )

    monkeypatch.setattr(sizes, "known", fail)
    norm = nn.BatchNorm2d(1, track_running_stats=False).double()
    labels = torch.arange(8) % 5

    def loss(x: Tensor, w: Tensor) -> Tensor:
        h = norm(x.view(-1, 1, 2, 2)).flatten(1)
        return F.cross_entropy(h @ w.view(4, 5), labels[: len(h)])

    ours, w = compiled(loss), numbers(20)
    for examples in (3, 7, 3, 4, 7):
        x = numbers(examples, 4)
        assert_same(derivatives(ours, x, w), derivatives(loss, x, w))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("limit", [8, 1])
def test_sizes_that_a_formula_takes_for_known(
    limit: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is compiled by itself, up to a limit; more run uncompiled, by the rules: from the third
    order on eager mode's batch norm is wrong.
    """
    norm, written_out = NORMS["batch norm"]
    monkeypatch.setattr(derivatives_of_compiled, "MOST_SIZES", limit)
    found: list[int] = []
    original = sizes.known

    def counted(program: Any, inputs: Any) -> Any:
        found.append(len(inputs))
        return original(program, inputs)

    monkeypatch.setattr(sizes, "known", counted)

    def halves(norm: Function) -> Function:
        return lambda x, w: F.glu(norm(x, w).sin() @ w)

    ours = torch.compile(halves(norm), backend="normpass", dynamic=True, options={"inner": "eager"})
    w = numbers(4, 4)
    for rows in (3, 7, 3):
        x = numbers(rows, 4)
        right = derivatives(halves(written_out), x, w, order=3)
        assert_same(derivatives(ours, x, w, order=3), right)
    of_the_graph_itself = [n for n in found if n == min(found)]
    assert len(of_the_graph_itself) == min(limit, 2)
    assert ("expected at most 1 of them, found more" in caplog.text) == (limit == 1)


def test_what_is_compiled_by_itself() -> None:
    """Another shape, other strides, another number; not other values."""
    x = torch.zeros(3, 3)
    others = [(torch.zeros(3, 4), 3), (torch.zeros(3, 6)[:, ::2], 3), (x, 4)]
    assert sizes.of((x, 3)) == sizes.of((x + 1, 3))
    assert len({sizes.of((x, 3)), *map(sizes.of, others)}) == 4


def test_what_is_taken_for_known_stays_so() -> None:
    """The second block guards nothing that the first one has not: it would pass."""
    env = ShapeEnv()
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.empty(3), symbolic_context=dynamic, source=ConstantSource("x"))
    for _ in range(2):
        with pytest.raises(SomeSizesOnly, match="expected code for all sizes"):  # noqa: SIM117
            with sizes.without_guards(env):
                assert x.shape[0] == 3
