"""Whether what a page calls by its name in Python is there, and takes the call that is shown."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any


def resolve(dotted: str) -> Any:
    """The value of torch.x.y, nn.x, F.x or normpass.x, whose modules are imported on the way."""
    first, *rest = dotted.split(".")
    homes = {"nn": "torch.nn", "F": "torch.nn.functional"}
    module = homes.get(first, first)
    found: Any = importlib.import_module(module)
    for name in rest:
        module = f"{module}.{name}"
        if not hasattr(found, name):
            importlib.import_module(module)
        found = getattr(found, name)
    return found


def called(code: str) -> str:
    """The function of a call as a user would write it; AssertionError where it takes no such call.

    A default that is shown is the one there is.
    """
    (statement,) = ast.parse(code).body
    assert isinstance(statement, ast.Expr)
    call = statement.value
    assert isinstance(call, ast.Call), code
    name = ast.unparse(call.func)
    signature = inspect.signature(resolve(name if "." in name else f"normpass.{name}"))
    keywords = {k.arg: k.value for k in call.keywords if k.arg}
    signature.bind(*(None for _ in call.args), **keywords)
    for keyword, value in keywords.items():
        default = signature.parameters[keyword].default
        if isinstance(value, ast.Constant) and name != "torch.compile":
            assert value.value == default, f"{code}: the default is {default!r}"
    return name.removeprefix("normpass.")
