"""Results that are written over what they are computed of, where nobody needs that any more."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import bounded
import oracles
import pytest
import random_regions
import sympy
import torch
import torch.nn.functional as F
import triton_regions
from hypothesis import HealthCheck, given, settings
from launched import BACKWARD
from torch._inductor.utils import run_and_get_code

from normpass.backend.program.in_place import overwritable
from normpass.backend.program.machine import CPU
from normpass.backend.program.plan import make_plan
from normpass.backend.program.sizes import size_classes
from normpass.backend.program.tree import Load, Loop, LoopAxis, Store, walk
from normpass.backend.run import runtime
from normpass.benchmarks.measure import peak_bytes
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from normpass.passes.region import Region


def pairs(region: Region) -> Iterator[tuple[int, int]]:
    """Outputs and inputs of a size, by their numbers."""
    for (k, output), (j, buffer) in itertools.product(
        enumerate(region.outputs), enumerate(region.inputs)
    ):
        if (buffer.dtype, buffer.axes) == (output.buffer.dtype, output.buffer.axes):
            yield k, j


def names_of(text: str, sizes: Sequence[int] = ()) -> dict[str, set[str]]:
    """The inputs that each output may be written over and lies like."""
    region = parse(text)
    allowed = overwritable(make_plan(region, CPU, size_classes(sizes)))
    found: dict[str, set[str]] = {output.buffer.name: set() for output in region.outputs}
    for k, j in pairs(region):
        name = region.outputs[k].buffer.name
        found[name] |= {region.inputs[j].name} & allowed[name]
    return found


# ---- plans


@pytest.mark.parametrize("shape", [(64, 64), (512, 1024), (64, 32768), (3, 65536), (4000, 65536)])
def test_a_layer_norms_gradient_may_be_written_over_either(shape: tuple[int, int]) -> None:
    """Whether rows go one by one, several at a time, or in blocks, in two nests. The weight's
    own may be written over the weight after the last row, if that is not looked at again.
    """
    rows, columns = shape
    text = BACKWARD.format(r=rows, c=columns, dtype="f32")
    may = names_of(text)
    assert may["y0"] == {"x", "g"}
    assert may["y1"] == may["y2"] == (set() if shape == (3, 65536) else {"w"})


@pytest.mark.parametrize("x", ["r c s", "r s c"])
def test_a_batch_norms_gradient_may_be_written_over_either(x: str) -> None:
    text = triton_regions.fill(triton_regions.BATCH_NORM_BACKWARD, c="64", r="8", x=x)
    assert names_of(text)["grad_x"] == {"x", "dy"}


LATER = """
region twice
axes    r=64 c=2048
input   x: f32[r c]
input   w: f32[c]
doubled = mul(x, 2.0)
total   = sum[c](x)
less    = sub(x, total)
scaled  = mul(less, w)
output  y0: f32[r c] = doubled
output  y1: f32[r c] = scaled
"""


def test_what_is_read_later_stays() -> None:
    """w, by the next row, and x, after the first result is there."""
    assert names_of(LATER) == {"y0": set(), "y1": {"x"}}
    region = parse(LATER)
    assert compare(region, [torch.randn(64, 2048), torch.randn(2048)], ()) == 1


ACROSS = """
region across
axes    r=64 c=64
input   x: f32[r c]
input   g: f32[c r]
sum     = add(x, g)
output  y0: f32[c r] = sum
"""


def test_only_the_same_element_is_written_over() -> None:
    """Of x and its transpose one is read where the other is written."""
    assert names_of(ACROSS) == {"y0": {"g"}}
    text = ACROSS.replace("x: f32[r c]", "x: f32[r c] (1, 64)")
    assert overwritable(make_plan(parse(text)))["y0"] == {"x", "g"}  # the same memory, in effect


def test_neither_numbers_of_another_size_nor_what_the_next_row_reads() -> None:
    text = ACROSS.replace("x: f32[r c]", "x: bf16[c r]")
    plan = make_plan(parse(text))
    assert overwritable(plan) == {"y0": {"g"}}
    (rows,) = (axis for axis in plan.axes if "r" in axis.parts)
    load, store = (
        next(n for n in walk(*plan.body) if isinstance(n, kind) and n.access.buffer.name == name)
        for kind, name in ((Load, "g"), (Store, "y0"))
    )
    again = LoopAxis("again", sympy.Integer(3), ("again",), 3, 3)
    pass_ = Loop(rows, (load,)), Loop(rows, (store,))
    assert overwritable(replace(plan, body=pass_)) == {"y0": {"g"}}
    assert overwritable(replace(plan, body=(Loop(again, pass_),))) == {"y0": set()}
    assert overwritable(replace(plan, body=pass_[::-1])) == {"y0": set()}


# ---- kernels


def compare(region: Region, inputs: Sequence[Tensor], sizes: Sequence[int]) -> int:
    """Runs a kernel with each pair in place, and with as many as there can be at once, and compares
    what comes of it with an evaluation in float64. Returns how many pairs may be.
    """
    kernel = runtime.Kernel(str(region), size_classes(sizes))
    launch = kernel.launch(tuple(sizes))
    assert launch is not None
    exact = bounded.evaluate(region, inputs, sizes)
    allowed = [pair for pair in pairs(region) if kernel.over([pair])]
    for over in (*({k: j} for k, j in allowed), kernel.over(allowed)):
        given = [x.clone(memory_format=torch.preserve_format) for x in inputs]
        if not all(a.stride() == b.stride() for a, b in zip(given, inputs, strict=True)):
            continue  # a tensor with gaps or repetitions loses them
        found = launch(given, over)
        assert all(found[k].data_ptr() == given[j].data_ptr() for k, j in over.items())
        extents = region.extents(sizes)
        for output, ours, want in zip(region.outputs, found, exact, strict=True):
            assert ours.stride() == region.strides(output.buffer, extents)
            bounded.assert_within(ours, want, f"{output.buffer.name}, {over}\n{region}")
    return len(allowed)


@pytest.fixture(params=[True, False], ids=["past caches", "through caches"])
def _many_workers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setattr(runtime, "ELEMENTS_PER_WORKER", 8)
    monkeypatch.setattr(runtime, "private_cache", lambda: 0 if request.param else 1 << 40)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.one_in(5)
@pytest.mark.usefixtures("_many_workers")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", [(1, 64), (37, 100), (33, 4096), (9, 32768), (3, 65536)])
def test_numbers_of_layer_norm(shape: tuple[int, int], dtype: str) -> None:
    rows, columns = shape
    region = parse(BACKWARD.format(r=rows, c=columns, dtype=dtype))
    torch.manual_seed(0)
    inputs = [torch.randn(region.shape(b, region.extents(()))).to(b.dtype) for b in region.inputs]
    assert compare(region, inputs, ()) == (2 if shape == (3, 65536) else 4)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("_many_workers")
@settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[*HealthCheck],
)
@given(random_regions.cases())
def test_numbers_of_random_regions(case: random_regions.Case) -> None:
    for extents in case.extents[:1]:
        compare(case.region, random_regions.tensors(case, extents), case.sizes(extents))


# ---- in Inductor's code


def compiled(f: Callable[..., Any], *inputs: Tensor) -> tuple[list[Tensor], list[str]]:
    """A function's result and gradients, compiled, and the regions' places in its code."""
    torch._dynamo.reset()
    function = torch.compile(f, backend="normpass", options={"least_bytes": 0})
    found, codes = run_and_get_code(lambda: results(function, *inputs))
    lines = itertools.chain.from_iterable(code.splitlines() for code in codes)
    return found, [line.partition("= ")[2] for line in lines if "normpass_call_site(" in line]


def results(f: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    inputs = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
    out = f(*inputs)
    out = list(out) if isinstance(out, tuple) else [out]
    sum((y * torch.arange(y.numel()).view(y.shape).cos()).sum() for y in out).backward()
    return [y.detach() for y in out] + [x.grad for x in inputs if x.grad is not None]


def agree(found: Sequence[Tensor], f: Callable[..., Any], *inputs: Tensor) -> None:
    """Whether results are as close to those in float64 as eager mode's."""
    exact = results(f, *(x.double() for x in inputs))
    for k, (ours, eager, want) in enumerate(zip(found, results(f, *inputs), exact, strict=True)):
        oracles.assert_no_less_accurate(ours, eager, want, f"result {k}")


BACKENDS = ("normpass", "inductor")
NUMBERS = torch.Generator().manual_seed(0)
X, W = (torch.randn(rows, 64, generator=NUMBERS) for rows in (256, 512))
LABELS = torch.randint(512, (256,), generator=NUMBERS)


def entropy(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.t(), LABELS)


def test_a_cross_entropys_gradient_is_written_over_its_logits() -> None:
    found, places = compiled(entropy, X, W)
    agree(found, entropy, X, W)
    assert places[0] == "normpass_call_site()"  # the backward needs the logits
    assert places[1] != places[0]
    steps = [partial(results, torch.compile(entropy, backend=name), X, W) for name in BACKENDS]
    for step in steps:
        step()
    ours, stock = (peak_bytes(step, "cpu") for step in steps)
    assert ours <= stock


def test_a_gradient_of_other_dimensions_is_written_over_its_logits() -> None:
    """The model's are of tokens of sentences, the loss's of all tokens."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        logits = x.view(8, 32, 64) @ w.t()
        return F.cross_entropy(logits.view(-1, 512), LABELS)

    found, places = compiled(f, X, W)
    agree(found, f, X, W)
    assert places[1] != "normpass_call_site()"


def test_logits_that_are_returned_stay() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logits = x @ w.t()
        return F.cross_entropy(logits, LABELS), logits

    found, places = compiled(f, X, W)
    agree(found, f, X, W)
    assert places[1] == "normpass_call_site()"


def test_arguments_stay() -> None:
    x = torch.randn(256, 512)
    given = x.clone()

    def f(x: Tensor) -> Tensor:
        return F.layer_norm(x, (512,)).mul(2.0)

    with torch.no_grad():
        function = torch.compile(f, backend="normpass", options={"least_bytes": 0})
        y, codes = run_and_get_code(lambda: function(x))
    assert "normpass_call_site()" in codes[0]
    assert torch.equal(x, given)
    torch.testing.assert_close(y, f(x))


def test_what_another_reads_later_stays() -> None:
    """A product that a norm reads, and the result again."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w.t()
        z = F.layer_norm(y, (512,)) @ w
        return z.sum(-1, keepdim=True).tanh() + y

    found, _ = compiled(f, X, W)
    agree(found, f, X, W)


def test_halves_of_one_tensor_stay() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        one, other = (x @ w.t()).chunk(2, -1)
        return F.layer_norm(one, (256,)) * other + F.softmax(other, -1)

    found, _ = compiled(f, X, W)
    agree(found, f, X, W)


def test_a_part_of_a_tensor_stays() -> None:
    """A result in its place would keep all of it."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm((x @ w.t())[:128], (512,)) @ w

    found, places = compiled(f, X, W)
    agree(found, f, X, W)
    assert places[0] == "normpass_call_site()"


def test_a_tensor_that_is_read_in_two_ways_stays() -> None:
    def f(x: Tensor) -> Tensor:
        y = x @ x.t()
        return F.softmax(y, -1) + y.as_strided((256, 256), (1, 256)).sin()

    with torch.no_grad():
        torch._dynamo.reset()
        function = torch.compile(f, backend="normpass", options={"least_bytes": 0})
        y, (code,) = run_and_get_code(lambda: function(X / 8))
    assert "= normpass_call_site()" in code
    oracles.assert_no_less_accurate(y, f(X / 8), f(X.double() / 8))


def test_memory_of_what_was_written_over_is_not_given_away() -> None:
    """Many results of one size, each with a norm's in the place of the one before."""
    weights = [torch.randn(64, 64, generator=NUMBERS) / 8 for _ in range(6)]

    def f(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = x + F.gelu(F.layer_norm(x @ w, (64,))) @ w
        return F.layer_norm(x, (64,))

    found, places = compiled(f, X, *weights)
    agree(found, f, X, *weights)
    assert sum(place != "normpass_call_site()" for place in places) > 6
    with torch.no_grad():
        steps = [partial(torch.compile(f, backend=name), X, *weights) for name in BACKENDS]
        for step in steps:
            step()
        ours, stock = (peak_bytes(step, "cpu") for step in steps)
    assert ours <= stock


def test_a_backward_that_is_called_again_has_its_tensors() -> None:
    """PyTorch refuses it where tensors are donated; where they are not, nothing is lost."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        function = torch.compile(entropy, backend="normpass", options={"least_bytes": 0})
        x, w = (t.clone().requires_grad_() for t in (X, W))
        loss = function(x, w)
        first = torch.autograd.grad(loss, [x, w], retain_graph=True)
        second = torch.autograd.grad(loss, [x, w])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def of_exponentials(x: Tensor, w: Tensor) -> Tensor:
    """Its backward writes over what the forward saved, with or without a region."""
    return (x @ w.t()).exp().sum()


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("f", [of_exponentials, entropy], ids=lambda f: f.__name__)
def test_caches_know_what_is_donated(f: Callable[..., Any]) -> None:
    """Inductor's own cache does not (torch 2.13, backend="inductor"): with code in it that writes
    over donated tensors, the second backward of the same graph without them is wrong.
    """
    x, w = X / 8, W / 8
    results(torch.compile(f, backend="normpass", options={"least_bytes": 0}), x, w)
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        function = torch.compile(f, backend="normpass", options={"least_bytes": 0})
        given = [t.clone().requires_grad_() for t in (x, w)]
        loss = function(*given)
        first = torch.autograd.grad(loss, given, retain_graph=True)
        second = torch.autograd.grad(loss, given)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax"])
def test_any_number_of_rows(name: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        norm = getattr(F, name)
        return norm(x @ w, -1 if name == "softmax" else (64,)) @ w

    torch.manual_seed(0)
    w = torch.randn(64, 64) / 8
    function = torch.compile(f, backend="normpass", dynamic=True, options={"least_bytes": 0})
    for rows in (5, 7, 300, 4096):
        x = torch.randn(rows, 64)
        agree(results(function, x, w), f, x, w)
