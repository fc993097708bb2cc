"""What one process compiled, the next one finds: graphs in Inductor's cache, kernels beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

TRAIN = """
import json, logging, sys, torch
from torch._dynamo.utils import counters
logging.basicConfig()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.LayerNorm(24), torch.nn.RMSNorm(24))
compiled = torch.compile(model, backend="normpass", options={"least_bytes": 0})
for n in (16, 5, 9):
    x = torch.randn(n, 24)
    y = compiled(x)
    y.sin().sum().backward()
from normpass.backend.run import toolchain
print(json.dumps({
    "compiled": toolchain.compiled,
    "hit": counters["inductor"]["fxgraph_cache_hit"],
    "miss": counters["inductor"]["fxgraph_cache_miss"],
    "bypass": counters["inductor"]["fxgraph_cache_bypass"],
    "sum": float(model[0].weight.grad.double().sum()),
    "imported": [name for name in sys.modules if name.startswith("normpass.")],
}))
"""
# What plans and prints kernels, and the rules that no ordinary model needs.
COMPILING = (
    "passes.pipeline",
    "backend.program.plan",
    "backend.codegen.cpp",
    "decomps.derivatives",
)
BUILD = """
import sys, torch
from normpass.backend.run import runtime
text = sys.argv[1]
sys.stdin.readline()  # until everybody is ready
x = torch.randn(5, 29)
(y,) = runtime.launch([x], [5], text)
torch.testing.assert_close(y, x - x.sum(1, keepdim=True))
print("right")
"""
TEXT = """\
region shared
axes    r=? c=29
input   x: f32[r c]
sum     = sum[c](x)
sub     = sub(x, sum)
output  y: f32[r c] = sub"""


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}


def train(cache: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], env=environment(cache), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "damaged" not in done.stderr
    return json.loads(done.stdout)


def test_a_second_process_compiles_nothing(fresh_cache: Path) -> None:
    first, second = train(fresh_cache), train(fresh_cache)
    assert first["compiled"] > 0
    assert first["miss"] > 0
    assert first["bypass"] == second["bypass"] == 0
    assert second["compiled"] == 0
    assert second["miss"] == 0
    assert second["hit"] == first["miss"] + first["hit"]
    assert second["sum"] == first["sum"]
    names = {f"normpass.{name}" for name in COMPILING}
    assert names & {*first["imported"]}
    assert not names & {*second["imported"]}


def test_processes_that_compile_one_kernel_at_once(fresh_cache: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD, TEXT],
            env=environment(fresh_cache),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        out, errors = child.communicate(timeout=200)
        assert out == "right\n", errors
        assert "damaged" not in errors
    kept = {file.suffix for file in (fresh_cache / "normpass").iterdir()}
    assert kept == {".so", ".sum", ".cpp", ".json"}


OWN_RULE = """
import json, torch
from torch._dynamo.utils import counters
from normpass.decomps.registry import register_rule

op = torch.ops.aten.softplus.default
@register_rule("decomposition", op, source="mine", shapes="x: *n -> *n")
def softplus(x, beta=1, threshold=20):
    return x * FACTOR
"""
USE_OWN_RULE = """
import sys
sys.path.insert(0, sys.argv[1])
import own_rule, json, torch
from own_rule import counters
compiled = torch.compile(torch.nn.functional.softplus, backend="normpass")
value = compiled(torch.ones(8)).tolist()[0]
print(json.dumps([value, counters["inductor"]["fxgraph_cache_hit"]]))
"""


@pytest.mark.sweep
def test_a_rule_of_a_users_own_that_changed_is_compiled_again(
    fresh_cache: Path, tmp_path: Path
) -> None:
    def softplus_of_one(factor: int) -> list[Any]:
        (tmp_path / "own_rule.py").write_text(OWN_RULE.replace("FACTOR", str(factor)))
        done = subprocess.run(
            [sys.executable, "-B", "-c", USE_OWN_RULE, str(tmp_path)],
            env=environment(fresh_cache),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert softplus_of_one(3) == [3.0, 0]
    assert softplus_of_one(3) == [3.0, 1]
    assert softplus_of_one(5) == [5.0, 0]
