"""derivatives.yaml, read row by row."""

from __future__ import annotations

from importlib.resources import files

import pytest
import torch

from normpass.decomps.table.derivatives_yaml import Entry, entries, parse

SAMPLE = """\
# A comment before all.
- name: twice(Tensor self, Tensor other) -> (Tensor, Tensor)
  # and one within
  self, other: "grad.defined()
       ? f(grad,  self)
       : g(\\"x\\")"
  result0: auto_linear
  output_differentiability: [True, False]  # the second is a mask

- name: view(Tensor(a) self, SymInt[] size) -> Tensor(a)
  dispatch:
    Default:
      self: grad.reshape(self.sizes())  # gx
      result: auto_linear
    AutogradNestedTensor:
      self: 'h("nested", grad)'
  output_differentiability: ["!dtype || isDifferentiableType(*dtype)"]
"""


def test_rows() -> None:
    twice, view = parse(SAMPLE)
    assert twice == {
        "Default": Entry(
            "twice(Tensor self, Tensor other) -> (Tensor, Tensor)",
            {
                ("self", "other"): 'grad.defined() ? f(grad,  self) : g("x")',
                ("result0",): "auto_linear",
            },
            (True, False),
        )
    }
    assert twice["Default"].op == "twice"
    condition = ("!dtype || isDifferentiableType(*dtype)",)
    assert {key: row.fields for key, row in view.items()} == {
        "Default": {("self",): "grad.reshape(self.sizes())", ("result",): "auto_linear"},
        "AutogradNestedTensor": {("self",): 'h("nested", grad)'},
    }
    assert all(row.differentiable == condition for row in view.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  self: grad\n", "begins with a name; found self: grad"),
        ("- name: f(Tensor x) -> Tensor\nx = 1\n", "line 2 of derivatives.yaml"),
    ],
)
def test_what_is_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(parse(text))


def test_the_file_of_this_torch() -> None:
    """Every row is read, and every field is one of its operator's arguments and results."""
    text = files("torchgen").joinpath("packaged/autograd/derivatives.yaml").read_text()
    assert len(entries()) == text.count("\n- name:") > 600
    seen = 0
    for name, by_key in entries().items():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is None:
            continue
        seen += 1
        returns = op._schema.returns
        known = {argument.name for argument in op._schema.arguments}
        known |= {found.name for found in returns} | {"result"}
        known |= {f"result{k}" for k in range(len(returns))}
        for row in by_key.values():
            assert row.op == name
            assert {field for fields in row.fields for field in fields} <= known, name
            assert len(row.differentiable) in (0, len(returns))
            assert all(row.fields.values())
    assert seen > 600
