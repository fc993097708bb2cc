"""The rules of the house: who may import whom, what a rule must say, what an import may cost."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import normpass
from normpass.decomps.activation import torch_internals

if TYPE_CHECKING:
    from collections.abc import Collection

ROOT = Path(__file__).parents[1]
STAGES = ("decomps", "passes", "backend")
# The stages that code in a folder may import from, besides its own.
MAY_IMPORT = {
    "decomps": set(),
    "passes": {"decomps"},
    "backend": {"decomps", "passes"},
}
LONGEST = 420


def sources(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def imported_names(source: str) -> set[str]:
    """Every dotted name that an import statement mentions, wherever it stands in a file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def trespasses(stage: str, source: str) -> set[str]:
    """The imports in a stage's source that go against the direction, or are not absolute."""
    allowed = MAY_IMPORT[stage] | {stage}
    wrong = set()
    for name in imported_names(source):
        first, _, rest = name.partition(".")
        relative = name.startswith(".")
        # `import backend` works by chance in the root of a checkout, and nowhere else.
        bare = first in STAGES
        # Without a stage it is the public face, which stands above all stages.
        upward = first == "normpass" and rest.split(".")[0] not in allowed
        if relative or bare or upward:
            wrong.add(name)
    # `from normpass.x import y` mentions normpass.x too: what is left is what was forbidden.
    return wrong


@pytest.mark.parametrize("stage", STAGES)
def test_imports_go_one_way(stage: str) -> None:
    files = sources(stage)
    assert files
    found = {
        str(file.relative_to(ROOT)): wrong
        for file in files
        if (wrong := trespasses(stage, file.read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    ("stage", "statement"),
    [
        ("decomps", "from normpass.passes import region"),
        ("decomps", "import normpass.backend.entry"),
        ("passes", "from normpass.backend.entry import normpass"),
        ("passes", "import normpass"),
        ("backend", "from normpass import explain"),
        ("backend", "from normpass.benchmarks import demo"),
        ("backend", "from .plan import Plan"),
        ("backend", "from backend.plan import Plan"),
        ("decomps", "def f():\n    from normpass.passes import region"),
    ],
)
def test_a_wrong_import_is_found(stage: str, statement: str) -> None:
    assert trespasses(stage, statement)


def test_a_right_import_is_not_found() -> None:
    source = "import torch\nfrom normpass.decomps.registry import rules\nimport normpass.passes.x"
    assert not trespasses("backend", source)


# The rooms of backend that a room may import from, besides itself; what is not here may from all.
ROOMS = {
    "program": set(),
    "codegen": {"program"},
    "run": {"program", "codegen"},
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_program_is_printed_and_a_kernel_is_run(room: str) -> None:
    """And none of them knows of what comes after it."""
    allowed = {f"normpass.backend.{each}" for each in (room, *ROOMS[room])}
    files = sources(f"backend/{room}")
    assert len(files) > 1
    for file in files:
        names = {n for n in imported_names(file.read_text()) if n.startswith("normpass.backend.")}
        assert {".".join(name.split(".")[:3]) for name in names} <= allowed, file


def test_no_module_needs_itself() -> None:
    """No circles of imports in backend, those for annotations aside."""
    modules = {module_name(file): file for file in sources("backend")}
    needs = {name: needed_modules(file, modules.keys()) for name, file in modules.items()}
    # What imports nothing that is left, over and over: a circle is what remains.
    while free := {name for name, needed in needs.items() if not needed & needs.keys()}:
        needs = {name: needed for name, needed in needs.items() if name not in free}
    assert not needs


def needed_modules(file: Path, modules: Collection[str]) -> set[str]:
    """The modules that a module imports, not for annotations alone, without their packages."""
    code = ast.unparse(without_annotations(ast.parse(file.read_text())))
    found = imported_names(code) & set(modules)
    return {name for name in found if not any(each.startswith(f"{name}.") for each in found)}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("normpass", *(part for part in parts if part != "__init__")))


def without_annotations(tree: ast.Module) -> ast.Module:
    """A module without what it imports for annotations alone."""
    return ast.Module(
        [
            node
            for node in tree.body
            if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ],
        [],
    )


# The one module of decomps that may name what is private in torch.
INTERNALS = "decomps/activation/torch_internals.py"
# Attributes that begin with an underscore, are not ours and need no look at the version.
KNOWN_ATTRIBUTES = {
    "_schema": "an operator's schema: there since operators are objects, and all of torch reads it",
    "_overloadname": "the overload's name beside it",
    "_is_zerotensor": "an operator of ATen, as a method",
    "_nested_tensor_size": "another",
    "_ragged_idx": "of torch.nested's tensors: derivatives/nested.py alone",
    "_rename": "of fx.Node, as fx's own documentation of transformations has it",
}


def private_names_of_torch(source: str) -> set[str]:
    """The private names of torch that run in a file: imports, attributes of torch, and attributes
    of anything else that begin with an underscore and are not defined by us.
    """
    tree = ast.parse(source)
    unrun = {  # what is imported for annotations alone
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in unrun:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {name for name in imported_names(ast.unparse(node)) if is_private(name)}
        elif isinstance(node, ast.Attribute) and is_private_attribute(node):
            found.add(ast.unparse(node))
    return found


def is_private(name: str) -> bool:
    """Whether a dotted name of torch's goes through something private, or is in the table."""
    parts = name.split(".")
    listed = {each.path for each in torch_internals.INTERNALS.values()}
    return parts[0] == "torch" and (name in listed or any(p.startswith("_") for p in parts))


def is_private_attribute(node: ast.Attribute) -> bool:
    name, owner = node.attr, ast.unparse(node.value)
    attributes = {"py_kernels", "python_key_table"}
    if name in attributes:
        return True
    if not name.startswith("_") or name.startswith("__") or name in KNOWN_ATTRIBUTES:
        return False
    if owner in ("self", "cls") or name in OUR_PRIVATE_NAMES:
        return False
    # Operators of ATen whose names begin so: torch._efficientzerotensor, aten._to_copy.
    operators = owner in ("torch", "aten", "torch.ops.aten")
    return not (operators and (hasattr(torch.ops.aten, name) or name == "_VF"))


OUR_PRIVATE_NAMES = {
    name
    for file in sources("decomps")
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and (name := node.name).startswith("_")
}


def test_private_names_of_torch_are_in_one_module() -> None:
    found = {
        name: private
        for file in sources("decomps")
        if (name := str(file.relative_to(ROOT))) != INTERNALS
        if (private := private_names_of_torch(file.read_text()))
    }
    assert not found, f"private names of torch belong into {INTERNALS}: {found}"


@pytest.mark.parametrize(
    "statement",
    [
        "from torch._C import DispatchKey",
        "import torch._inductor.decomposition",
        "def f():\n    from torch._inductor import config",
        "from torch.fx.experimental.proxy_tensor import track_tensor",
        "torch._C._functorch.get_unwrapped(x)",
        "torch.autograd.forward_ad._current_level",
        "op._dispatch_cache.clear()",
        "op.py_kernels[key] = f",
        "library._destroy()",
    ],
)
def test_a_private_name_is_found(statement: str) -> None:
    assert private_names_of_torch(statement)


def test_what_is_not_private_is_not_found() -> None:
    source = """
        from torch.fx.experimental.proxy_tensor import make_fx
        if TYPE_CHECKING:
            from torch._ops import OpOverload
        aten._to_copy(torch._efficientzerotensor(self._shape)), op._schema, torch.__version__
        """
    assert not private_names_of_torch(textwrap.dedent(source))


def test_no_file_is_long() -> None:
    folders = (*STAGES, "api", "benchmarks", "tests")
    long = {
        str(file.relative_to(ROOT)): lines
        for file in sources(*folders)
        if (lines := len(file.read_text().splitlines())) > LONGEST
    }
    assert not long, f"longer than {LONGEST} lines, to be split by what they are about: {long}"


def test_every_rule_has_source_and_shapes() -> None:
    rules = normpass.rules()
    assert rules
    for rule in rules:
        assert rule.kind
        assert rule.name
        assert rule.source.strip(), f"{rule.name} names no source"
        before, arrow, after = rule.shapes.partition("->")
        assert arrow, f"{rule.name}: {rule.shapes}"
        assert before.strip(), f"{rule.name}: {rule.shapes}"
        assert after.strip(), f"{rule.name}: {rule.shapes}"
        assert callable(rule.function)


def test_every_public_name_is_there_and_documented() -> None:
    for name in normpass.__all__:
        value = getattr(normpass, name)
        assert name == "__version__" or (value.__doc__ or "").strip(), name
        assert name in dir(normpass)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'normpass' has no attribute 'rulse'"):
        _ = normpass.rulse  # type: ignore[attr-defined]


def test_the_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("normpass") == normpass.__version__


def in_fresh_python(code: str) -> object:
    """What a program prints as JSON in a process of its own, without our test's environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCH")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_pool_where_nothing_has_imported_inductor_before() -> None:
    """A decomposition of Inductor's takes more of it for imported than it imports."""
    shape = in_fresh_python(
        """
        import json, torch
        pool = torch.nn.MaxPool2d(2)
        compiled = torch.compile(pool, backend="normpass", options={"inner": "eager"})
        print(json.dumps(compiled(torch.randn(1, 1, 4, 6, requires_grad=True)).shape))
        """
    )
    assert shape == [1, 1, 2, 3]


def test_the_import_is_cheap_and_changes_nothing() -> None:
    seen = in_fresh_python(
        """
        import json, logging, sys, time, warnings
        import torch

        def state():
            from torch._C import _dispatch_dump
            return [
                _dispatch_dump("aten::native_layer_norm"),
                sorted(map(str, torch.ops.aten.native_batch_norm.default.py_kernels)),
                torch.get_default_dtype() == torch.float32,
                torch.is_grad_enabled(),
                sorted(logging.root.manager.loggerDict),
                len(warnings.filters),
            ]

        before, modules = state(), set(sys.modules)
        start = time.perf_counter()
        import normpass
        seconds = time.perf_counter() - start
        print(json.dumps({
            "same": state() == before,
            "seconds": seconds,
            "torch": [name for name in set(sys.modules) - modules if name.startswith("torch")],
            "cuda": torch.cuda.is_initialized(),
            "inductor": "torch._inductor.compile_fx" in sys.modules,
        }))
        """
    )
    assert isinstance(seen, dict)
    assert seen["same"]
    assert seen["torch"] == []
    assert not seen["cuda"]
    assert not seen["inductor"]
    # Usually 2 ms; a busy machine may take longer, a stray import of torch._inductor takes seconds.
    assert seen["seconds"] < 0.25


def test_the_import_alone_does_not_import_torch() -> None:
    code = "import json, sys, normpass; print(json.dumps('torch' in sys.modules))"
    assert in_fresh_python(code) is False


def test_torch_finds_the_backend_by_its_name() -> None:
    import torch._dynamo

    assert "normpass" in torch._dynamo.list_backends()
    from normpass.backend.entry import normpass as entry

    assert torch._dynamo.lookup_backend("normpass") is entry


def test_nothing_of_ours_takes_a_global_name() -> None:
    # From a folder that is not the checkout: its root is on the path of programs started there.
    code = """
        import json, importlib.util, os, sys
        sys.path = [p for p in sys.path if p and not os.path.exists(os.path.join(p, "setup.py"))]
        names = ["backend", "passes", "decomps", "benchmarks"]
        found = [spec for spec in map(importlib.util.find_spec, names) if spec]
        # Other packages may have such a name: opacus installs one called benchmarks.
        folders = {spec.name: spec.submodule_search_locations[0] for spec in found}
        print(json.dumps([x for x, at in folders.items() if os.path.exists(f"{at}/../setup.py")]))
        """
    assert in_fresh_python(code) == []
