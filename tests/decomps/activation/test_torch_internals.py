"""What a version of torch lacks is named, and costs what depends on it and nothing else."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C import DispatchKey
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._inductor import config, decomposition

from normpass.decomps.activation import is_registered, register, registered, unregister
from normpass.decomps.activation import torch_internals as internals
from normpass.decomps.registry import decompositions

if TYPE_CHECKING:
    from collections.abc import Iterator

aten = torch.ops.aten
NEEDED = [name for name, each in internals.INTERNALS.items() if not each.optional]
PARTS = (
    internals.RULES,
    internals.LEVELS,
    internals.TRACES,
    internals.BATCHING,
    internals.NODES,
    internals.ZEROS,
    internals.FUNCTIONS,
    internals.FUNCTION_OPS,
    internals.EAGER,
    internals.TABLE,
    internals.PASS,
)


@pytest.fixture(autouse=True, scope="module")
def _all_imported() -> None:
    """What a module imports while a name is hidden it would lack for good."""
    with registered(eager=True):
        pass


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    unregister()


def hide(monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    """Lets register() find a torch without these."""
    stock = internals.find

    def find(path: str) -> Any:
        if path in paths:
            raise AttributeError(path)
        return stock(path)

    monkeypatch.setattr(internals, "find", find)


HERE = "decomps/activation"


def dumped(op: Any) -> list[str]:
    return torch._C._dispatch_dump(op.name()).splitlines()


def _rules_of_levels() -> list[Any]:
    table = torch._functorch.autograd_function.custom_function_call.functorch_table
    return list(table.values())


def installed() -> set[str]:
    """The parts whose changes are there."""
    batch_norm = aten.native_batch_norm.default
    changed = {
        internals.TRACES: DispatchKey.AutogradCUDA in aten.native_layer_norm.default.py_kernels,
        internals.BATCHING: DispatchKey.FuncTorchBatched in batch_norm.py_kernels
        or any("FuncTorchBatched" in line and HERE in line for line in dumped(batch_norm)),
        internals.NODES: DispatchKey.AutogradCUDA in aten.cumprod.default.py_kernels,
        internals.ZEROS: DispatchKey.ZeroTensor in aten.mul.Tensor.py_kernels,
        internals.FUNCTIONS: HERE in AutogradFunctionVariable.call_apply.__code__.co_filename
        and all(HERE in inspect.unwrap(rule).__code__.co_filename for rule in _rules_of_levels()),
        internals.EAGER: any(HERE in line for line in dumped(aten.native_layer_norm.default)),
        internals.TABLE: decomposition.decompositions[aten.native_layer_norm_backward.default]
        is decompositions()[aten.native_layer_norm_backward.default],
        internals.PASS: bool(config.post_grad_custom_pre_pass),
    }
    return {part for part, there in changed.items() if there}


# What register() changes: operators of Functions are made by as_op.
ALL = {*PARTS[2:]} - {internals.FUNCTION_OPS}


def test_this_torch_lacks_nothing() -> None:
    assert internals.missing() == []
    for name in NEEDED:
        assert not isinstance(getattr(internals, name), internals.Missing), name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register(eager=True)
    assert installed() == ALL


def test_every_name_says_what_it_is() -> None:
    for name, each in internals.INTERNALS.items():
        assert each.what, name
        assert each.part in (*PARTS, internals.SYNC), name


@pytest.mark.parametrize("name", NEEDED)
def test_without_a_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the name, torch's version and what is left out; the rest is there."""
    each = internals.INTERNALS[name]
    hide(monkeypatch, each.path)
    assert internals.missing() == [each]
    with pytest.warns(RuntimeWarning, match="lacks private names") as caught:
        register(eager=True)
    (warning,) = caught
    for part in (each.path, each.part, f"torch {torch.__version__}"):
        assert part in str(warning.message)
    assert is_registered()
    assert installed() == ALL - internals.left_out([each])
    unregister()
    assert installed() == set()


def test_one_warning_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [internals.INTERNALS[name].path for name in ("track_tensor", "CustomGraphPass")]
    hide(monkeypatch, *paths)
    with pytest.warns(RuntimeWarning, match="lacks private names") as caught, registered():
        assert installed() == ALL - {internals.ZEROS, internals.PASS, internals.EAGER}
    assert len(caught) == 1
    assert all(path in str(caught[0].message) for path in paths)


def test_a_name_that_is_used_all_the_same() -> None:
    path = internals.INTERNALS["track_tensor"].path
    gone = internals.Missing(internals.INTERNALS["track_tensor"])
    for use in (lambda: gone(1), lambda: gone.attribute, lambda: isinstance(1, gone)):  # type: ignore[arg-type]
        with pytest.raises(internals.MissingInternal, match=path):
            use()


# In a process of its own: nothing was imported before the names went.
CHILD = """
import json, sys, warnings
import torch
from normpass.decomps.activation import torch_internals as internals

part, paths, stock = sys.argv[1], set(json.loads(sys.argv[2])), internals.find

def find(path):
    if path in paths:
        raise AttributeError(path)
    return stock(path)

internals.find = find
from normpass.decomps.activation import register, unregister

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    register(eager=True)
said = [str(w.message) for w in caught if "private names" in str(w.message)]
assert len(said) == 1 and all(path in said[0] for path in paths), said

torch.manual_seed(0)
norm, x = torch.nn.LayerNorm(5).double(), torch.randn(4, 5).double()

def bare(v):
    variance = v.var(-1, keepdim=True, correction=0)
    return (v - v.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt()

V, C = torch.randn(4, 5).double(), torch.randn(4, 5).double()

def third(f):
    value = (f(leaf := x.clone().requires_grad_()) * C).sum()
    for _ in range(3):
        (g,) = torch.autograd.grad(value, leaf, create_graph=True)
        value = (g * V).sum()
    return g.detach()

def compiled(f):
    torch._dynamo.reset()
    return torch.compile(f, backend="aot_eager", fullgraph=True)

close, works = torch.allclose, {}
works["eager"] = close(third(norm), third(bare))
batch = lambda v: torch.nn.functional.batch_norm(v, None, None, training=True)
y = torch.randn(3, 4, 5).double()
works["vmap"] = close(torch.func.vmap(batch)(y), torch.stack([batch(v) for v in y]))

leaf = x.clone().requires_grad_()
compiled(torch.nn.BatchNorm1d(5).double())(leaf).square().sum().backward()
works["a step"] = leaf.grad is not None

# Last: what stock torch fails at leaves it in a state in which later traces fail.
tangent = lambda f: lambda v: torch.func.jvp(f, (v,), (V,))[1]
for name, function, right in (
    ("traces", tangent(norm), tangent(bare)(x)),
    ("zeros", tangent(tangent(lambda v: (v.sum() * C).sum())), torch.zeros(()).double()),
):
    try:
        works[name] = close(compiled(function)(x), right)
    except Exception as error:
        works[name] = False
        print(name, str(error)[:3000], file=sys.stderr)
unregister()
print(json.dumps(works))
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("part", PARTS[:-2])
def test_the_rest_works(part: str) -> None:
    """All names of a part are gone, from the first import on."""
    gone = [internals.INTERNALS[n] for n in NEEDED if internals.INTERNALS[n].part == part]
    paths = [each.path for each in gone]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, part, json.dumps(paths)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    works = json.loads(done.stdout.splitlines()[-1])
    without = internals.left_out(gone)
    assert works["vmap"]
    assert works["a step"]
    for name in ("eager", "traces", "zeros"):
        assert works[name] or getattr(internals, name.upper()) in without, name
