"""The batching rules of convolution against a loop over the examples, in float64."""

from __future__ import annotations

import operator
import re
import sys
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from convolution_cases import CASES, INFO, V, batchings, loop, over_v, stacked
from snapshots import assert_snapshot
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normpass.decomps.activation import registered
from normpass.decomps.registry import batch_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.testing._internal.opinfo.core import OpInfo

aten = torch.ops.aten

SAMPLED = (
    "2d_groups1_plain",
    "2d_groups2_strided",
    "2d_transposed_groups2_strided",
    "1d_transposed_groups1_padded beyond its strides",
)
NAMES = [pytest.param(n, marks=[] if n in SAMPLED else pytest.mark.sweep) for n in CASES]
MASKS = list(product((True, False), repeat=3))


WAYS = {"groups": (False, False), "one by one": (True, False), "columns": (False, True)}


@pytest.fixture(params=WAYS)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of a convolution whose arguments are all batched, whatever would be chosen."""
    one_by_one, by_columns = WAYS[request.param]
    rules = sys.modules[batch_rule(aten.convolution.default).function.__module__]
    monkeypatch.setattr(rules, "one_by_one", lambda *_: one_by_one)
    monkeypatch.setattr(rules, "by_columns", lambda groups, *_: by_columns and groups == 1)


def check(op: Any, args: Sequence[Any], dims: Sequence[int | None]) -> None:
    in_dims = (*dims, *(None,) * (len(args) - len(dims)))
    outs, out_dims = batch_rule(op)(INFO, in_dims, *args)
    expected = loop(op, args, in_dims)
    for found, right in zip(stacked(outs, out_dims), expected, strict=True):
        assert (found is None) == (right is None)
        if right is not None:
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-11)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", NAMES)
def test_a_convolution_wherever_each_argument_is_batched(name: str) -> None:
    case = CASES[name]
    x, w, b = case.tensors()
    for dims in batchings(3):
        if dims[2] == 1:
            continue  # a bias has one axis: v is first or last
        values = [over_v(t, d) for t, d in zip((x, w, b), dims, strict=True)]
        check(aten.convolution.default, [*values, *case.numbers], dims)
        if dims[2] is None:
            check(aten.convolution.default, [*values[:2], None, *case.numbers], dims[:2])


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_wherever_each_argument_is_batched(name: str) -> None:
    case = CASES[name]
    x, w, b = case.tensors()
    g = torch.randn_like(aten.convolution(x, w, b, *case.numbers))
    for number, dims in enumerate(batchings(3)):
        values = [over_v(t, d) for t, d in zip((g, x, w), dims, strict=True)]
        # Every mask where v is first or nowhere, and each in turn for the other places.
        masks = MASKS if {*dims} <= {None, 0} else [MASKS[number % len(MASKS)]]
        for mask in masks:
            args = [*values, [len(b)], *case.numbers, list(mask)]
            check(aten.convolution_backward.default, args, dims)


# --- the operator database ----------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Records how aten.convolution is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.convolution.default:
            self.found.append(args)
        return func(*args, **(kwargs or {}))


def calls_of(info: OpInfo, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """What a convolution's samples call: a string for the padding is numbers there."""
    with Calls() as calls:
        for sample in info.sample_inputs("cpu", dtype, requires_grad=False):
            info.op(sample.input, *sample.args, **sample.kwargs)
    return calls.found


CONVOLUTIONS = [info for info in op_db if re.search(r"\.conv(_transpose)?\dd$", info.name)]


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("info", CONVOLUTIONS, ids=lambda info: info.name)
def test_every_sample_of_the_operator_database(info: OpInfo, dtype: torch.dtype) -> None:
    found = calls_of(info, dtype)
    assert found
    for x, w, b, *numbers in found:
        y = aten.convolution(x, w, b, *numbers)
        for batched in product((None, 0), repeat=3):
            if batched == (None,) * 3 or (b is None and batched[2] is not None):
                continue
            values = [
                t if d is None else over_v(t, d) for t, d in zip((x, w, b), batched, strict=True)
            ]
            check(aten.convolution.default, [*values, *numbers], batched)
            values = [over_v(t, d) for t, d in zip((y, x, w), batched, strict=True)]
            args = [*values, [y.shape[1]], *numbers, [True] * 3]
            check(aten.convolution_backward.default, args, batched)


# --- through vmap -------------------------------------------------------------------------------


def network(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Two convolutions, one of them transposed, of one image: c h w."""
    y = F.conv2d(x[None], w, b, stride=2, padding="valid").tanh()
    return F.conv_transpose2d(y, w, stride=2)[0].sin()


def penalty(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return sum(g.square().sum() for g in grad(lambda *a: network(*a).sum(), (0, 1))(x, w, b))


def two_levels(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    inner = vmap(lambda x, w: penalty(x, w, b), (0, None))
    return vmap(inner, (None, 0))(x, w)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "examples": vmap(network, (0, None, None)),
    "weights": vmap(network, (None, 0, None)),
    "both": vmap(network, (0, 0, 0)),
    "gradients of examples": vmap(grad(lambda *a: network(*a).sum(), (0, 1, 2)), (0, None, None)),
    "gradients of models": vmap(grad(lambda *a: network(*a).sum(), (0, 1, 2)), (0, 0, None)),
    "gradient through vmap": grad(lambda *a: vmap(network, (0, 0, None))(*a).sum(), (0, 1)),
    "second order": vmap(grad(penalty, (0, 1)), (0, 0, None)),
    "tangents": vmap(
        lambda x, w, b: jvp(lambda x, w: network(x, w, b), (x, w), (x.cos(), w.sin()))[1],
        (0, 0, None),
    ),
    "two levels": two_levels,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_is_compiled_is_what_eager_mode_does(name: str) -> None:
    x, w = torch.randn(V, 3, 7, 7, dtype=torch.float64), torch.randn(V, 3, 3, 2, 2).double()
    b = torch.randn(V, 3, dtype=torch.float64)
    given = {"examples": (x, w[0], b[0]), "weights": (x[0], w, b[0]), "both": (x, w, b)}
    given["gradients of examples"] = given["examples"]
    args = given.get(name, (x, w, b[0]))
    transform = TRANSFORMS[name]
    with registered():
        compiled = torch.compile(lambda *a: transform(*a), fullgraph=True, backend="aot_eager")(
            *args
        )
    torch.testing.assert_close(compiled, transform(*args), rtol=1e-11, atol=1e-11)


# --- graphs -------------------------------------------------------------------------------------


def graph(op: Any, args: Sequence[Any], dims: Sequence[int | None]) -> str:
    """The operators that a rule calls, and the shapes of what they return."""
    count = len(dims)
    in_dims = (*dims, *(None,) * (len(args) - count))

    def rule(*tensors: Tensor) -> Any:
        return batch_rule(op)(INFO, in_dims, *tensors, *args[count:])[0]

    lines = []
    for node in make_fx(rule, tracing_mode="fake")(*args[:count]).graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            results = [v for v in tree_leaves(node.meta["val"]) if isinstance(v, torch.Tensor)]
            shapes = " ".join(str(list(v.shape)) for v in results)
            lines.append(f"    {node.target}  {shapes}")
    return "\n".join(lines)


def test_nothing_is_copied_that_lies_right() -> None:
    """Images of 8 channels by 3 x 3 weights: over v as they come first, and as a convolution of
    weights over v leaves them, beside the channels.
    """
    numbers = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    x, w, y = torch.randn(V, 2, 8, 32, 32), torch.randn(V, 4, 8, 3, 3), torch.randn(V, 2, 4, 32, 32)
    beside, forward = torch.randn(2, V, 8, 32, 32), aten.convolution.default
    inside = torch.randn(2, V, 4, 32, 32)
    backward, dx, dw = aten.convolution_backward.default, [True, False, False], [False, True, False]
    one = torch.randn(V, 1, 4, 32, 32), torch.randn(V, 1, 8, 32, 32)
    cases = {
        "y of examples": (forward, (x, w[0], None, *numbers), (0, None)),
        "y of models, for one image": (forward, (x[0], w, None, *numbers), (None, 0)),
        "y of models": (forward, (beside, w, None, *numbers), (1, 0)),
        "y of examples, inside of the images": (forward, (beside, w[0], None, *numbers), (1, None)),
        "dx of those": (backward, (inside, beside, w[0], None, *numbers, dx), (1, 1, None)),
        "dx of examples": (backward, (y, x, w[0], None, *numbers, dx), (0, 0, None)),
        "dw of examples": (backward, (*one, w[0], None, *numbers, dw), (0, 0, None)),
    }
    text = "\n".join(f"{name}\n{graph(*case)}" for name, case in cases.items())
    assert not re.search("clone|copy|cat|stack", text), text
    assert_snapshot("batching/convolution.txt", text + "\n")


# --- dtypes, sizes and errors -------------------------------------------------------------------


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_less_accurate_than_the_operator(dtype: torch.dtype) -> None:
    case = CASES["2d_groups1_strided"]
    x, w, b = (over_v(t.to(dtype), 0) for t in case.tensors(torch.float32))
    (y,) = loop(lambda *a: aten.convolution(*a, *case.numbers), (x, w, b), (0, 0, 0))
    g = torch.randn_like(y)
    for op, args in (
        (aten.convolution.default, (x, w, b, *case.numbers)),
        (aten.convolution_backward.default, (g, x, w, [3], *case.numbers, [True] * 3)),
    ):
        dims = (0, 0, 0, *(None,) * (len(args) - 3))
        outs, out_dims = batch_rule(op)(INFO, dims, *args)
        exact = loop(op, [a.double() if isinstance(a, torch.Tensor) else a for a in args], dims)
        rows = zip(stacked(outs, out_dims), loop(op, args, dims), exact, strict=True)
        for found, theirs, right in rows:
            assert found.dtype == dtype
            scale = 2 * torch.finfo(dtype).eps * right.abs().max()
            assert (found - right).abs().max() <= (theirs - right).abs().max() + scale


def test_a_number_for_all_axes() -> None:
    case, one = CASES["2d_groups1_plain"], ([1], [1], [1], False, [0], 1)
    x, w, b = case.tensors()
    for dims in batchings(2):
        values = [over_v(t, d) for t, d in zip((x, w), dims, strict=True)]
        check(aten.convolution.default, [*values, b, *one], dims)
    g = torch.randn_like(aten.convolution(x, w, b, *one))
    values = [over_v(t, 0) for t in (g, x, w)]
    check(aten.convolution_backward.default, [*values, [3], *one, [True] * 3], (0, 0, 0))


@pytest.mark.parametrize("dims", [(0, None, None), (None, None, 0)], ids=str)
def test_no_examples(dims: tuple[int | None, ...]) -> None:
    """torch's own rule says that there are no images either, where it does not fail."""
    case = CASES["2d_groups1_plain"]
    tensors = case.tensors()
    y = aten.convolution(*tensors, *case.numbers)
    values = [
        t if d is None else t.new_empty(0, *t.shape) for t, d in zip(tensors, dims, strict=True)
    ]
    info = SimpleNamespace(batch_size=0, randomness="error")
    rule = batch_rule(aten.convolution.default)
    (found,), (dim,) = rule(info, (*dims, *(None,) * 6), *values, *case.numbers)
    assert dim is not None
    assert found.movedim(dim, 0).shape == (0, *y.shape)


def channels_of_its_own(x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:2], x.shape[2] + 1, *x.shape[3:])


WRONG: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "channels": lambda x, w, b: (channels_of_its_own(x), w, b),
    "axes": lambda x, w, b: (x[..., 0], w, b),
    "a window beyond the image": lambda x, w, b: (x[..., :1, :1], w, b),
    "a bias too long": lambda x, w, b: (x, w, torch.cat([b, b], -1)),
    "dtypes": lambda x, w, b: (x, w.float(), b),
}


@pytest.mark.parametrize("dims", [(0, None, None), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_an_error_with_torchs_text(
    name: str, dims: tuple[int | None, ...]
) -> None:
    case = CASES["2d_groups1_dilated"]
    x, w, b = WRONG[name](*(over_v(t, 0) for t in case.tensors()))
    values = [t if d == 0 else t[0] for t, d in zip((x, w, b), dims, strict=True)]

    def convolve(*tensors: Tensor) -> Tensor:
        return aten.convolution(*tensors, *case.numbers)

    with pytest.raises(RuntimeError) as theirs:
        vmap(convolve, dims)(*values)
    with pytest.raises(RuntimeError) as ours:
        batch_rule(aten.convolution.default)(INFO, (*dims, *(None,) * 6), *values, *case.numbers)
    if (name, dims[2]) == ("a bias too long", 0):  # theirs adds it, and says that it cannot
        assert "expected bias to be 1-dimensional with 9 elements" in str(ours.value)
    else:
        assert str(ours.value).partition("\n")[0] == str(theirs.value).partition("\n")[0]


# --- as users run them --------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["inductor", "normpass"])
def test_channels_last(backend: str) -> None:
    """An ensemble, and each example by itself, whose images lie with their channels last."""
    x = torch.randn(V, 4, 9, 9, 6).permute(0, 1, 4, 2, 3)
    w, b = torch.randn(V, 8, 6, 3, 3), torch.randn(V, 8)

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.group_norm(F.conv2d(x, w, b, padding=1), 2).sin().square().sum()

    def both(x: Tensor, w: Tensor, b: Tensor) -> Any:
        models = vmap(grad(loss, (0, 1, 2)))(x, w, b)
        examples = vmap(grad(lambda x: loss(x[None], w[0], b[0])))(x[0])
        weights = vmap(grad(lambda w, x: loss(x[None], w, b[0])), (None, 0))(w[0], x[0])
        return models, examples, weights

    right = both(x.double(), w.double(), b.double())
    with registered():
        found = torch.compile(both, backend=backend, fullgraph=True)(x, w, b)
    eager = both(x, w, b)
    for ours, theirs, exact in zip(*map(tree_leaves, (found, eager, right)), strict=True):
        scale = torch.finfo(torch.float32).eps * exact.abs().max()
        assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 4 * scale
