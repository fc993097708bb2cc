"""The rule that docs/developing.md adds, weight norm's backward: right, and tested in a clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from installing import clone
from pages import Page

if TYPE_CHECKING:
    from pathlib import Path

RULE = "@decomposition("

WEIGHT_NORM = """
import runpy, torch, normpass
from torch import nn

def fused():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(1024, 1024))
    report = normpass.explain(model, torch.randn(4, 1024))
    return [region.phase for region in report.regions]

assert fused() == ["forward"], fused()
normpass.rules()
runpy.run_path("weight.py")
operator = torch.ops.aten._weight_norm_interface_backward.default
(rule,) = (rule for rule in normpass.rules() if rule.op is operator)
assert rule.kind == "decomposition"
for dim, shape in ((0, (6, 1, 1)), (2, (1, 1, 5))):
    v = torch.randn(6, 4, 5, dtype=torch.float64)
    g = torch.randn(shape, dtype=torch.float64)
    gw = torch.randn_like(v)
    w, norms = torch.ops.aten._weight_norm_interface(v, g, dim)
    got = normpass.decompositions()[operator](gw, v, g, norms, dim)
    v, g = v.requires_grad_(), g.requires_grad_()
    others = [i for i in range(3) if i != dim]
    w = g * v / v.square().sum(others, keepdim=True).sqrt()
    torch.testing.assert_close(got, torch.autograd.grad(w, (v, g), gw))
torch._dynamo.reset()
assert fused() == ["forward", "backward"], fused()
"""


def test_the_rule_is_complete_and_right(tmp_path: Path) -> None:
    """Copied to a file and run, it is listed, called and used by the backend."""
    (tmp_path / "weight.py").write_text(Page("docs/developing.md").block(RULE).text)
    command = [sys.executable, "-W", "ignore", "-c", WEIGHT_NORM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.sweep
def test_the_rule_passes_the_tests_made_from_its_record(tmp_path: Path) -> None:
    """In its file in a clone, as the page says, and `-k weight_norm`."""
    root = clone(tmp_path / "clone")
    norms = root / "decomps" / "norms"
    (norms / "weight.py").write_text(Page("docs/developing.md").block(RULE).text)
    with (norms / "__init__.py").open("a") as file:
        file.write("from normpass.decomps.norms import weight\n")
    package = tmp_path / "path" / "normpass"
    package.mkdir(parents=True)
    stages = [root / name for name in ("decomps", "passes", "backend", "benchmarks")]
    for part in (*(root / "api").iterdir(), *stages):
        (package / part.name).symlink_to(part)
    tests = "tests/decomps/test_generated.py"
    command = [sys.executable, "-m", "pytest", "-q", "-k", "weight_norm", tests]
    path = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(command, cwd=root, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert passed, done.stdout
    assert int(passed[1]) >= 8
