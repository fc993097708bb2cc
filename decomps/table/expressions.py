"""The C++ of derivatives.yaml as Python: one expression, no statements.

    self.is_complex() ? grad * (self + 1).rsqrt().conj() : grad

becomes `grad * conj(rsqrt(self + 1)) if self.is_complex() else grad`. Operators, calls and methods
mean in Python what they mean there; names lose their namespaces and `_symint`. What C++ alone has
(`std::get<1>(x)`, `{1, 2}`, `x->y`, `*x` of an optional) is written out here; what a method that
Python's tensors lack means is vocabulary.py's.
"""

from __future__ import annotations

import ast
import keyword
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_TOKEN = re.compile(
    r"""(?P<space>\s+|/\*.*?\*/)
      | (?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)f?
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<name>(?:::)?[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*)
      | (?P<symbol>&&|\|\||[<>=!]=|->|[-+*/%<>!&|?:.,()\[\]{}])""",
    re.VERBOSE | re.DOTALL,
)
# From loose to tight.
_BINARY: tuple[dict[str, type[ast.AST]], ...] = (
    {"||": ast.Or},
    {"&&": ast.And},
    {"|": ast.BitOr},
    {"&": ast.BitAnd},
    {"==": ast.Eq, "!=": ast.NotEq},
    {"<": ast.Lt, ">": ast.Gt, "<=": ast.LtE, ">=": ast.GtE},
    {"+": ast.Add, "-": ast.Sub},
    {"*": ast.Mult, "/": ast.Div, "%": ast.Mod},
)
_NAMESPACES = re.compile(r"^(?:::)?(?:at::|std::|c10::)*")
_TEMPLATES = {"get", "tuple", "array", "vector", "optional", "static_cast", "OptionalArrayRef"}
_CONSTANTS = {
    "true": True,
    "false": False,
    "nullopt": None,
    "Reduction::None": 0,
    "Reduction::Mean": 1,
    "Reduction::Sum": 2,
}


class NotUnderstood(ValueError):
    """An expression that is no part of this C++; the message shows where."""


def translate(text: str, methods: Callable[[str], bool] = lambda name: False) -> ast.expr:
    """The Python of a C++ expression. A method for whose name `methods` is true becomes a call of
    the function of that name: x.defined() -> defined(x). Raises NotUnderstood.
    """
    parser = _Parser(text, methods)
    found = parser.expression()
    parser.expect("")
    return found


def identifier(name: str) -> str:
    """A name of C++ as one of Python's."""
    return f"{name}_" if keyword.iskeyword(name) else name


class _Parser:
    def __init__(self, text: str, methods: Callable[[str], bool]) -> None:
        self.text, self.methods = text, methods
        self.tokens: list[tuple[str, str, int]] = []
        end = 0
        while end < len(text):
            found = _TOKEN.match(text, end)
            if not found:
                raise self.fault(end, "a number, a name or an operator")
            kind = str(found.lastgroup)
            if kind != "space":
                self.tokens.append((kind, found[kind], end))
            end = found.end()
        self.tokens.append(("symbol", "", end))
        self.at = 0

    def fault(self, place: int, expected: str) -> NotUnderstood:
        return NotUnderstood(f"expected {expected}; found {self.text[place:]!r} in {self.text!r}")

    @property
    def next(self) -> str:
        kind, token, _ = self.tokens[self.at]
        return token if kind == "symbol" else ""

    def take(self, *symbols: str) -> str:
        """The next token, if it is one of these symbols; else nothing."""
        found = self.next
        if found and found in symbols:
            self.at += 1
            return found
        return ""

    def expect(self, symbol: str) -> None:
        kind, token, place = self.tokens[self.at]
        if (kind, token) != ("symbol", symbol):
            raise self.fault(place, repr(symbol) if symbol else "the end")
        self.at += 1

    def expression(self) -> ast.expr:
        found = self.binary(0)
        if self.take("?"):
            then = self.expression()
            self.expect(":")
            return ast.IfExp(test=found, body=then, orelse=self.expression())
        return found

    def binary(self, level: int) -> ast.expr:
        if level == len(_BINARY):
            return self.unary()
        left = self.binary(level + 1)
        while symbol := self.take(*_BINARY[level]):
            operator, right = _BINARY[level][symbol](), self.binary(level + 1)
            if isinstance(operator, ast.boolop):
                left = ast.BoolOp(op=operator, values=[left, right])
            elif isinstance(operator, ast.cmpop):
                left = ast.Compare(left=left, ops=[operator], comparators=[right])
            else:
                assert isinstance(operator, ast.operator)
                left = ast.BinOp(left=left, op=operator, right=right)
        return left

    def unary(self) -> ast.expr:
        if self.take("-"):
            return ast.UnaryOp(op=ast.USub(), operand=self.unary())
        if self.take("!"):
            return ast.UnaryOp(op=ast.Not(), operand=self.unary())
        if self.take("*"):  # what an optional holds
            return self.unary()
        return self.postfix(self.primary())

    def postfix(self, value: ast.expr) -> ast.expr:
        while True:
            if self.take(".", "->"):
                value = self.method(value, _plain(self.name()))
            elif self.take("["):
                value = ast.Subscript(value=value, slice=self.expression(), ctx=ast.Load())
                self.expect("]")
            else:
                return value

    def method(self, value: ast.expr, name: str) -> ast.expr:
        self.template()
        self.expect("(")
        arguments = self.list(")")
        if self.methods(name):
            return _call(name, value, *arguments)
        return ast.Call(ast.Attribute(value, name, ast.Load()), arguments, [])

    def primary(self) -> ast.expr:
        kind, token, place = self.tokens[self.at]
        if kind == "number":
            self.at += 1
            return ast.Constant(float(token) if set(token) & set(".eE") else int(token))
        if kind == "string":
            self.at += 1
            return ast.Constant(ast.literal_eval(token))
        if kind == "name":
            return self.named()
        if self.take("("):
            value = self.expression()
            self.expect(")")
            return value
        if self.take("{"):
            values = self.list("}")
            # {{0, 0}} makes a list from a list
            inner = values[0] if len(values) == 1 else None
            return inner if isinstance(inner, ast.List) else ast.List(values, ast.Load())
        raise self.fault(place, "a value")

    def named(self) -> ast.expr:
        place = self.tokens[self.at][2]
        name = _NAMESPACES.sub("", self.name())
        template = self.template() if name in _TEMPLATES else ""
        if name in _CONSTANTS:
            return ast.Constant(_CONSTANTS[name])
        if not self.take("("):
            return ast.Name(identifier(name.replace("::", "_")), ast.Load())
        arguments = self.list(")")
        if name == "get":
            return ast.Subscript(arguments[0], ast.Constant(int(template)), ast.Load())
        if name in ("tuple", "Tensor", "optional") and not arguments:
            return ast.Constant(None)
        if name in ("optional", "OptionalArrayRef", "TensorGeometry"):
            return arguments[0]
        if name == "vector":  # so many of one value
            if len(arguments) != 2:
                raise self.fault(place, "the length and the value of a vector")
            size, value = arguments
            return ast.BinOp(ast.List([value], ast.Load()), ast.Mult(), size)
        return _call(_plain(name.replace("::", "_")), *arguments)

    def name(self) -> str:
        kind, token, place = self.tokens[self.at]
        if kind != "name":
            raise self.fault(place, "a name")
        self.at += 1
        return token

    def template(self) -> str:
        """What stands between < and >, if they follow."""
        if not self.take("<"):
            return ""
        depth, inside = 1, ""
        while depth:
            _, token, place = self.tokens[self.at]
            if place == len(self.text):
                raise self.fault(place, "'>'")
            self.at += 1
            depth += (token == "<") - (token == ">")
            inside += token if depth else ""
        return inside

    def list(self, end: str) -> list[ast.expr]:
        values: list[ast.expr] = []
        while not self.take(end):
            if values:
                self.expect(",")
            values.append(self.expression())
        return values


def _plain(name: str) -> str:
    return name.removesuffix("_symint")


def _call(function: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(identifier(function), ast.Load()), list(arguments), [])
