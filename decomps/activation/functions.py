"""autograd.Function while Dynamo traces: what it is there, put in and taken out again.

Dynamo looks into a Function. Outside of transforms it makes an operator of forward and backward,
autograd_function_apply, and that is right. Under a level of torch.func, or in forward mode, it
inlines forward alone: the class's own backward, jvp and vmap are dropped, and what forward's
operators have by themselves is computed instead, silently (pytorch 192985, 129845, 118397).

Here the Function itself goes into Dynamo's graph, as a call of `apply`: whoever runs the graph
(Dynamo for its shapes, AOTAutograd as it traces, the backend "eager") asks custom_function_call
for the level's rule, as in eager mode: ours (decomps/autograd_function) while something is traced.

So it goes where Dynamo would drop or refuse something without transforms, too:
set_materialize_grads, mark_dirty, a `vjp`, one tensor given twice, a Function that another's
methods apply. All other calls outside of transforms stay Dynamo's, and their graphs as they are.

What Dynamo does not look into, it cannot guard: numbers that a Function reads from its module or
from an enclosing function are guarded here, and a tensor found there is an error.
"""

from __future__ import annotations

import dis
import inspect
import sys
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function

from normpass.decomps.activation.levels import in_forward_mode, in_transform
from normpass.decomps.activation.torch_internals import (
    PYTHON_DISPATCHER,
    AttrSource,
    AutogradFunctionVariable,
    FakeTensorObservedException,
    FunctionMeta,
    GetAttrVariable,
    GetItemSource,
    GlobalStateSource,
    GuardBuilder,
    Missing,
    TorchRuntimeError,
    Unsupported,
    VariableTracker,
    functorch_table,
    install_guard,
    is_included,
    produce_trampoline_autograd_apply,
    proxy_args_kwargs,
    unimplemented,
    wrap_fx_proxy,
)
from normpass.decomps.autograd_function import RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WITHOUT_JVP = "_normpass_without_jvp"
_METHODS = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")
# What a context is told that Dynamo's operator does not pass on, or refuses.
_OF_CONTEXTS = frozenset({"set_materialize_grads", "mark_dirty"})
# What Dynamo raises where something cannot be run on fake tensors.
_ON_FAKES: tuple[type[Exception], ...] = tuple(
    error for error in (TorchRuntimeError, FakeTensorObservedException) if isinstance(error, type)
)
_NUMBERS = (bool, int, float, complex, str, type(None))


def _parameters(function: Any) -> Any:
    return {} if isinstance(function, Missing) else inspect.signature(function).parameters


@dataclass(eq=False)
class Functions:
    """What is changed in torch, with what was there before."""

    eager: bool = False
    call_apply: Any = None
    call_obj_hasattr: Any = None
    before: dict[Any, Any] = field(default_factory=dict)
    ours: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def apply(cls) -> Functions:
        """Puts it in."""
        changed = cls(
            call_apply=AutogradFunctionVariable.call_apply,
            call_obj_hasattr=GetAttrVariable.call_obj_hasattr,
        )
        changed._enter()
        return changed

    def _enter(self) -> None:
        stock = self.call_apply

        def call_apply(variable: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
            return _Call(variable, tx, args, kwargs).traced_with(stock)

        self.ours["call_apply"] = AutogradFunctionVariable.call_apply = call_apply
        self._enter_names()
        table = functorch_table()
        for level, rule in RULES.items():
            self.before[level] = table[level]
            self.ours[level] = table[level] = self._while_tracing(rule, table[level])

    def _enter_names(self) -> None:
        """vmap asks what it maps for a name: with vmap(Function.apply) Dynamo would give up."""
        stock = self.call_obj_hasattr

        def call_obj_hasattr(variable: Any, tx: Any, name: str) -> Any:
            if isinstance(variable.obj, AutogradFunctionVariable) and variable.name == "apply":
                return VariableTracker.build(tx, hasattr(Function.apply, name))
            return stock(variable, tx, name)

        self.ours["hasattr"] = GetAttrVariable.call_obj_hasattr = call_obj_hasattr

    def _while_tracing(self, rule: Callable[..., Any], stock: Callable[..., Any]) -> Any:
        """Our rule where something is traced, or eager mode is to have it too; else torch's."""

        def call(*args: Any, **kwargs: Any) -> Any:
            ours = self.eager or is_included(PYTHON_DISPATCHER)
            return (rule if ours else stock)(*args, **kwargs)

        # A frame that Dynamo has given up on may call it with Dynamo still looking.
        return torch.compiler.disable(call)

    def revert(self) -> None:
        """Puts back what was there; what somebody else put there since is theirs."""
        if AutogradFunctionVariable.call_apply is self.ours["call_apply"]:
            AutogradFunctionVariable.call_apply = self.call_apply
        if GetAttrVariable.call_obj_hasattr is self.ours["hasattr"]:
            GetAttrVariable.call_obj_hasattr = self.call_obj_hasattr
        table = functorch_table()
        for level, before in self.before.items():
            if table[level] is self.ours[level]:
                table[level] = before


@dataclass
class _Call:
    """One call of apply that Dynamo has met."""

    variable: Any
    tx: Any
    args: list[Any]
    kwargs: dict[str, Any]

    def traced_with(self, stock: Callable[..., Any]) -> Any:
        """What Dynamo is to know of the result; stock: its own way."""
        # The number of dual_level blocks is no guard otherwise, and none is in the inputs' either.
        install_guard(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))
        if in_transform() or in_forward_mode() or (self._is_refused() and self._can_be_given()):
            return self._in_graph()
        variable, cls = self.variable, self.variable.fn_cls
        if cls.jvp is not Function.jvp:  # nobody asks for it here
            variable = type(variable)(_without_jvp(cls), source=variable.source)
        return stock(variable, self.tx, self._with_defaults(), self.kwargs)

    def _is_refused(self) -> bool:
        cls = self.variable.fn_cls
        if cls.vjp is not Function.vjp:
            return True
        read = _Read.by(cls)
        given = [arg.as_proxy() for arg in self.args if arg.is_tensor()]
        if len(set(given)) < len(given):
            return True
        # Dynamo traces backward without a tape: a Function that it applies would lose its own.
        return bool(read.names & _OF_CONTEXTS or read.functions - {cls} or read.of_classes)

    def _can_be_given(self) -> bool:
        try:
            proxy_args_kwargs(self.args, self.kwargs)
        except Unsupported:
            return False
        return not _Read.by(self.variable.fn_cls).tensors

    def _in_graph(self) -> Any:
        cls = self.variable.fn_cls
        self._guard(cls)
        try:
            args, kwargs = proxy_args_kwargs(self.args, self.kwargs)
        except Unsupported as error:
            self._fail(
                "an argument cannot be part of a graph",
                f"Expected tensors, numbers, strings and tuples of them as arguments of "
                f"{cls.__name__}.apply, found one that cannot be part of a graph: {error}",
                "Pass the tensors and numbers that it holds",
            )
        target = produce_trampoline_autograd_apply(cls)
        proxy = self.tx.output.create_proxy("call_function", target, args, kwargs)
        try:
            return wrap_fx_proxy(tx=self.tx, proxy=proxy)
        except _ON_FAKES as error:
            self._fail(
                "fake tensors cannot go through it",
                f"Expected the methods of {cls.__name__} to compute with torch alone, which fake "
                f"tensors can go through; found that they cannot: {_reason(error)}",
                f"If it computes in NumPy or by C code of its own, make an operator of it: "
                f"normpass.as_op({cls.__name__}, fake=...)",
            )

    def _guard(self, cls: type[Function]) -> None:
        read = _Read.by(cls)
        for name in read.tensors:
            self._fail(
                "a tensor that is not an argument",
                f"Expected every tensor that {cls.__name__} computes with to be an argument of "
                f"apply, found {name}.",
                f"Pass {name} to {cls.__name__}.apply",
            )
        for module, name in read.of_modules:
            source = AttrSource(self.tx.import_source(module), name)
            install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
        for function, name in read.of_classes:
            if source := self._source(function):
                install_guard(AttrSource(source, name).make_guard(GuardBuilder.CONSTANT_MATCH))
        for method, index in read.enclosed if self.variable.source else ():
            cells = AttrSource(AttrSource(self.variable.source, method), "__closure__")
            source = AttrSource(GetItemSource(cells, index), "cell_contents")
            install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))

    def _source(self, function: type[Function]) -> Any:
        """Where a Function is to be found; None where Dynamo cannot say."""
        if function is self.variable.fn_cls:
            return self.variable.source
        module, name = function.__module__, function.__qualname__
        if getattr(sys.modules.get(module), name, None) is not function:
            return None
        return AttrSource(self.tx.import_source(module), name)

    def _fail(self, what: str, found: str, todo: str) -> None:
        unimplemented(
            gb_type=f"autograd.Function under a transform: {what}",
            context=f"{self.variable.fn_cls.__qualname__}.apply",
            explanation=found,
            hints=[f"{todo}.", "Or compile without fullgraph=True: eager mode runs it then."],
            **_SKIPPED,
        )

    def _with_defaults(self) -> list[Any]:
        """The arguments with the values of those that were left out, as `apply` completes them."""
        cls = self.variable.fn_cls
        if self.kwargs or cls.setup_context is Function.setup_context:
            return self.args
        rest = list(inspect.signature(cls.forward).parameters.values())[len(self.args) :]
        defaults = [p.default for p in rest if p.kind is p.POSITIONAL_OR_KEYWORD]
        if inspect.Parameter.empty in defaults:
            return self.args
        return [*self.args, *(VariableTracker.build(self.tx, value) for value in defaults)]


# A frame that breaks in a transform is left to eager mode: Dynamo cannot go on with a tensor that
# a level of grad wraps and records. Older versions of torch cannot be told so.
_SKIPPED = {"skip_frame": True} if "skip_frame" in _parameters(unimplemented) else {}


def _reason(error: Exception) -> str:
    """What was raised, without the call that Dynamo prints before it."""
    line = next((line for line in str(error).splitlines() if "got " in line), str(error))
    return line.rpartition("): got ")[2].strip()


def _without_jvp(cls: type[Function]) -> type[Function]:
    """The same Function for Dynamo, which refuses one that has a jvp. It is kept where it is gone
    with its class: it holds that, as what inherits it.
    """
    found: type[Function] | None = cls.__dict__.get(_WITHOUT_JVP)
    if found is None:
        same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        found = type(cls.__name__, (cls,), {**same, "jvp": staticmethod(Function.jvp)})
        setattr(cls, _WITHOUT_JVP, found)
    return found


@dataclass
class _Read:
    """What the methods of a Function read beside their arguments.

    names       attributes and methods by name
    of_modules  numbers and strings of modules: module, name
    enclosed    those of the function around the class: method, place in its closure
    tensors     tensors of either, as messages name them
    functions   autograd.Functions: itself, and those of either
    """

    names: set[str] = field(default_factory=set)
    of_modules: set[tuple[str, str]] = field(default_factory=set)
    enclosed: set[tuple[str, int]] = field(default_factory=set)
    tensors: list[str] = field(default_factory=list)
    functions: set[type[Function]] = field(default_factory=set)
    seen: set[FunctionType] = field(default_factory=set)

    @property
    def of_classes(self) -> list[tuple[type[Function], str]]:
        """Numbers and strings of the Functions' classes, of which Dynamo knows methods alone."""
        return [
            (function, name)
            for function in self.functions
            for name in sorted(self.names)
            if _is_number(inspect.getattr_static(function, name, self))
        ]

    @classmethod
    def by(cls, function: type[Function]) -> _Read:
        read = cls()
        read._add_class(function, own=True)
        return read

    def _add_class(self, function: type[Function], own: bool = False) -> None:
        if function in self.functions:
            return
        self.functions.add(function)
        for name in _METHODS:
            method = inspect.unwrap(getattr(function, name))
            if isinstance(method, FunctionType) and method.__module__ != Function.__module__:
                self._add(method, name if own else None)

    def _add(self, function: FunctionType, method: str | None) -> None:
        """A function of the user's, and those that it calls by their names."""
        if function in self.seen or function.__module__.partition(".")[0] == "torch":
            return
        self.seen.add(function)
        for index, cell in enumerate(function.__closure__ or ()):
            name = function.__code__.co_freevars[index]
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if self._add_value(value, f"{name}, of the function around it") and method:
                self.enclosed.add((method, index))
        module = function.__module__
        known = vars(sys.modules.get(module, object)) is function.__globals__
        for code in _codes(function.__code__):
            self.names.update(code.co_names)
            for name in _globals_of(code) & function.__globals__.keys():
                value = function.__globals__[name]
                if self._add_value(value, f"{name}, of {module}") and known:
                    self.of_modules.add((module, name))

    def _add_value(self, value: Any, told: str) -> bool:
        """Whether it is a number or the like, which is guarded."""
        if isinstance(value, torch.Tensor | torch.nn.Module):
            self.tensors.append(told)
        elif isinstance(value, FunctionMeta):
            self._add_class(value)
        elif isinstance(value, FunctionType):
            self._add(value, None)
        return _is_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return type(value) in _NUMBERS


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and those of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _globals_of(code: CodeType) -> set[str]:
    return {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
