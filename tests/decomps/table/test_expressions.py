"""The C++ of derivatives.yaml, read as Python."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest

from normpass.decomps.table.expressions import NotUnderstood, translate

METHODS = {"defined", "conj", "sizes", "value_or"}


def python(text: str) -> str:
    return ast.unparse(translate(text, METHODS.__contains__))


@pytest.mark.parametrize(
    ("cpp", "expected"),
    [
        ("grad * -((-self * self + 1).rsqrt()).conj()", "grad * -conj((-self * self + 1).rsqrt())"),
        ("a ? b : c ? d : e", "b if a else d if c else e"),
        ("(a ? b : c) * d", "(b if a else c) * d"),
        ("!a || b && c", "not a or (b and c)"),
        ("grad.defined() ? f(grad) : Tensor()", "f(grad) if defined(grad) else None"),
        ("at::where((x == 0.) & (y <= -1.), x, 0)", "where((x == 0.0) & (y <= -1.0), x, 0)"),
        ("std::get<1>(f(a, {1, 2}, {{0}}))", "f(a, [1, 2], [0])[1]"),
        ("std::tuple<Tensor, Tensor>()", "None"),
        ("std::vector<c10::SymInt>(padding.size(), 0)", "[0] * padding.size()"),
        ("bias->sym_sizes()", "bias.sym_sizes()"),
        ("x.expand_symint({ x.sym_size(0), 2 })", "x.expand([x.sym_size(0), 2])"),
        ("dtype.has_value() ? *dtype : 1", "dtype if dtype.has_value() else 1"),
        ("f(grad, /*sorted=*/false, 1e-3)", "f(grad, False, 0.001)"),
        ("at::Reduction::None", "0"),
        ('not_implemented("x: y", "not \\"twice\\"")', "not_implemented('x: y', 'not \"twice\"')"),
        ("grads[0] / lambda", "grads[0] / lambda_"),
    ],
)
def test_translations(cpp: str, expected: str) -> None:
    assert python(cpp) == expected


@pytest.mark.parametrize(
    "text",
    [
        "1 + 2 * 3 - 4 / 2",
        "(1 + 2) * -3",
        "7 - 2 - 1",
        "16 / 4 / 2",
        "1 < 2 == 2 < 3",
        "1 + 1 == 2 && 3 > 2",
        "0 > 1 || 2 >= 2 && 1 != 1",
        "6 & 3 == 3",
        "1 | 6 & 4",
        "!(1 > 2)",
        "0 ? 1 : 0 ? 2 : 3",
    ],
)
def test_operators_bind_as_in_cpp(text: str) -> None:
    """What a C++ compiler makes of these, and Python, where the same text is another expression."""
    expected = {
        "1 + 2 * 3 - 4 / 2": 5,
        "(1 + 2) * -3": -9,
        "7 - 2 - 1": 4,
        "16 / 4 / 2": 2,
        "1 < 2 == 2 < 3": True,
        "1 + 1 == 2 && 3 > 2": True,
        "0 > 1 || 2 >= 2 && 1 != 1": False,
        "6 & 3 == 3": 0,
        "1 | 6 & 4": 5,
        "!(1 > 2)": True,
        "0 ? 1 : 0 ? 2 : 3": 3,
    }
    value: Any = eval(python(text))
    assert math.isclose(value, expected[text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grad *", "expected a value; found ''"),
        ("f(a b)", "expected ','; found 'b)'"),
        ("a ? b", "expected ':'; found ''"),
        ("a b", "expected the end; found 'b'"),
        ("[](int i){return -i;}", "expected a number, a name or an operator; found ';}'"),
        ("std::get<1", "expected '>'; found ''"),
        ("x.3", "expected the end; found '.3'"),
    ],
)
def test_what_is_not_understood(text: str, message: str) -> None:
    with pytest.raises(NotUnderstood) as error:
        translate(text)
    assert message in str(error.value)
