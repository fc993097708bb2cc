"""Random arguments for any rule, made from its record: shapes, schema, and what `sample` adds.

Each axis has a small size of its own, so that a mistaken axis shows, and there are two sets of
sizes, so that a graph traced at one can be run at the other. Tensors are random, positive where
their names say variance; numbers follow from their names: `normalized_shape` is what the axes *d
are. What follows neither from a name nor from a shape is said by the record (`Rule.sample`).
"""

from __future__ import annotations

import inspect
import itertools
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from row_samples import arguments, operator_of
from sample_numbers import MASKS, NUMBERS, OF_SIZES, Place
from torch._ops import OpOverload
from torch.testing import make_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from normpass.decomps.norms.cudnn_checks import CHECKS
from normpass.decomps.registry import rules
from normpass.decomps.shapes import Shapes, bind, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from normpass.decomps.registry import Rule

# Two sizes of each axis, no two alike where they meet; k groups divide c channels, and stay: their
# number is no symbol. r is cuDNN's reserve.
SIZES = (
    {"n": 3, "c": 4, "d": 5, "m": 7, "b": 6, "s": 9, "k": 2, "r": 0},
    {"n": 5, "c": 6, "d": 7, "m": 4, "b": 3, "s": 8, "k": 2, "r": 0},
)
SECOND_AXIS = 11  # of "*n", where it stands for two

POSITIVE = re.compile(r"(var|rstd|invstd)(_t|_p)?$")
# What FunctionsManual.cpp calls an operator's argument, where it calls it otherwise.
OTHERWISE = {"self": ("input", "x")}
# Tensors that an operator takes or not; other optional tensors are there where they are needed.
PARAMETERS = ("weight", "bias", "gamma", "weight_p", "weight_t", "bias_p", "bias_t", "pos_weight")


def parameters(rule: Rule) -> dict[str, Any]:
    """The parameters of a rule with their types in the schema; an elementwise rule takes one more,
    the gradient or tangent, before those of its operator.
    """
    assert rule.op is not None
    found = {a.name: a.type for a in rule.op._schema.arguments}
    first = rule.linear if elementwise(rule) else ()
    return {**dict.fromkeys(first, torch.TensorType.get()), **found}


def elementwise(rule: Rule) -> bool:
    """Whether this is a derivative of its operator, and not an operator itself."""
    return rule.kind in ("vjp", "jvp") and rule.op is not None and rule.op.namespace != "normpass"


def optional(rule: Rule) -> frozenset[str]:
    """The tensors that may be None: of cuDNN's batch norm its wrapper wants the bias, and its
    backward the statistics, which the schema does not.
    """
    types = {name: str(type) for name, type in parameters(rule).items()}
    wanted = {"bias", "save_mean", "save_var"} if rule.op in CHECKS else set()
    found = (name for name, type in types.items() if type == "Optional[Tensor]")
    return frozenset(name for name in found if name not in wanted)


def is_tensor(type: Any) -> bool:
    return "Tensor" in str(type)


def shared(rule: Rule) -> bool:
    """Whether its function is that of several operators, whose own names its shapes then have."""
    of = inspect.unwrap(rule.function)
    return any(
        other.kind == rule.kind and other.op != rule.op and inspect.unwrap(other.function) is of
        for other in rules()
    )


def tensor_names(rule: Rule) -> list[str]:
    """The tensors that a rule takes, in its order and by the names that its shapes have for them:
    those of the operator where the function is shared, else those of its parameters.
    """
    assert rule.op is not None
    types = parameters(rule)
    names = list(types)
    if not shared(rule) and not takes_the_rest(rule):
        names = list(inspect.signature(inspect.unwrap(rule.function)).parameters)
        # A batching rule takes info and in_dims first, a backward's derivative the gradients.
        names = names[2:] if rule.kind == "batching" else names[int(of_backward(rule)) :]
    return [name for name, type in zip(names, types.values(), strict=False) if is_tensor(type)]


def takes_the_rest(rule: Rule) -> bool:
    """Whether its parameters end in *args: of an elementwise operator, of a view."""
    kinds = [p.kind for p in inspect.signature(inspect.unwrap(rule.function)).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds


def of_backward(rule: Rule) -> bool:
    """Whether this is the derivative of one of ATen's backward operators, f(grads, *args)."""
    return rule.kind == "double_backward" and rule.op is not None and rule.op.namespace == "aten"


def written(rule: Rule) -> frozenset[str]:
    """The tensors that the operator writes to."""
    assert rule.op is not None
    return frozenset(
        a.name for a in rule.op._schema.arguments if a.alias_info and a.alias_info.is_write
    )


def fixed(rule: Rule) -> frozenset[str]:
    """The tensors in which it cannot be differentiated: it writes to them, or compares them."""
    return written(rule) | {*rule.compared}


def in_evaluation(given: Sample) -> bool:
    """Whether a norm is evaluated, and not in training."""
    assert given.rule.op is not None
    never = ("aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_no_update")
    return given.given.get("training") is False or given.rule.op.name() in never


def shapes_of(rule: Rule) -> Shapes:
    """The shapes by the names of the schema, in whose order they are; without the axis of vmap."""
    found = parse(rule.shapes)
    names = [name for name, type in parameters(rule).items() if is_tensor(type)]
    if len(names) != len(found.arguments):
        raise ValueError(f"{rule.name} takes the tensors {names}, its shapes are {rule.shapes}")
    drop = 1 if rule.kind == "batching" else 0
    arguments = {n: a[drop:] for n, a in zip(names, found.arguments.values(), strict=True)}
    # A batching rule's results that are constants have no v.
    results = {n: a[drop if a[0:1] == ("v",) else 0 :] for n, a in found.results.items()}
    return Shapes(arguments, results)


@dataclass(frozen=True)
class Sample:
    """Arguments of one call of a rule, by the schema's names.

    ranks  how many axes each "*n" is
    extra  what `Rule.of` takes besides, of the sizes of its gradient
    told   the numbers that `Rule.sample` tells
    operands  the arguments of the operator, where `Rule.of` is one
    """

    rule: Rule
    label: str
    given: dict[str, Any]
    ranks: dict[str, int]
    extra: dict[str, Any] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    operands: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *numbers: Tensor) -> Any:
        """The rule of these arguments, or of others for `numbers`."""
        return self.rule(*(self.on(numbers) if numbers else self.given).values())

    def changed(self, **given: Any) -> Sample:
        return replace(self, given={**self.given, **given})

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, those in lists and the extra ones too."""
        return [v for v in tree_leaves((self.given, self.extra)) if isinstance(v, torch.Tensor)]

    @property
    def numbers(self) -> list[Tensor]:
        """The arguments that can be differentiated: none that the operator writes to."""
        kept = [v for name, v in self.given.items() if name not in fixed(self.rule)]
        return [v for v in tree_leaves(kept) if is_number(v)]

    def on(self, numbers: Sequence[Tensor]) -> dict[str, Any]:
        """The arguments, with these for `numbers`."""
        left, kept = iter(numbers), fixed(self.rule)

        def put(v: Tensor) -> Tensor:
            return next(left) if is_number(v) else v

        return {
            name: v if name in kept else tree_map_only(torch.Tensor, put, v)
            for name, v in self.given.items()
        }

    def resized(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The arguments, with these for `tensors`, and with what numbers then say of sizes, which
        in a trace are symbols.
        """
        left = iter(tensors)
        given, extra = tree_map_only(torch.Tensor, lambda v: next(left), (self.given, self.extra))
        shapes, sizes = shapes_of(self.rule), dict[str, Any]()
        gradients = {name: extra.get(name[1:]) for name in shapes.results}
        for name, axes in {**shapes.results, **shapes.arguments}.items():
            value = {**gradients, **given}.get(name)
            if isinstance(value, torch.Tensor):
                sizes.update(bind(axes, value.shape, self.ranks))
        place = Place({**_sizes(0, self.ranks), **sizes}, shapes, optional(self.rule))
        if not elementwise(self.rule):  # whose n is an order
            given.update({name: NUMBERS[name](place)[0] for name in OF_SIZES if name in given})
        if self.told:
            # Told again, of these tensors: only of numbers, for tensors may ask for sizes.
            told = named(self.rule.sample, {**extra, **given})  # type: ignore[arg-type]
            given.update({name: told[name] for name in self.told})
        return given


def is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def tensors_in(value: Any) -> list[Tensor]:
    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor)]


def named(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """A function of those of these arguments that it names, or an operator of those it has."""
    return function(**{name: given[ours] for name, ours in wanted(function, given).items()})


def wanted(function: Any, known: Collection[str]) -> dict[str, str]:
    """The arguments of a function; of an operator those without a default and those known, each
    with what a formula calls it.
    """
    if not isinstance(function, OpOverload):
        return {name: name for name in inspect.signature(function).parameters}
    found = {}
    for argument in function._schema.arguments:
        names = (argument.name, f"{argument.name}_p", *OTHERWISE.get(argument.name, ()))
        ours = next((name for name in names if name in known), None)
        if ours or not argument.has_default_value():
            found[argument.name] = ours or argument.name
    return found


def samples(rule: Rule, dtype: torch.dtype = torch.float64, which: int = 0) -> Iterator[Sample]:
    """The arguments that a record implies, at one of the two sets of sizes: first the plainest;
    then two axes for each *n, each other value of a number, none of the parameters.
    """
    plain = sample(rule, dtype, which)
    yield plain
    if plain.ranks:
        yield sample(rule, dtype, which, "two axes", rank=2)
    types = {**operand_types(rule), **parameters(rule)}
    for name, type in types.items():
        for value in _choices(rule, name, type)[1:]:
            yield sample(rule, dtype, which, f"{name}={value}", fixed={name: value})
    absent: dict[str, Any] = dict.fromkeys(optional(rule).intersection(PARAMETERS))
    if absent:
        masks = {name: _choices(rule, name, t)[1] for name, t in types.items() if _is_mask(t)}
        yield sample(rule, dtype, which, "without parameters", fixed={**absent, **masks})


def sample(
    rule: Rule,
    dtype: torch.dtype = torch.float64,
    which: int = 0,
    label: str = "plain",
    rank: int = 1,
    fixed: Mapping[str, Any] | None = None,
) -> Sample:
    """Arguments at one set of sizes, where "*n" is `rank` axes; `fixed` are as they are said."""
    shapes = shapes_of(rule)
    terms = {*itertools.chain(*shapes.arguments.values(), *shapes.results.values())}
    ranks = {term: rank for term in sorted(terms) if term.startswith("*")}
    if "1" in terms:
        # The one axis that a statistic keeps stands for all of *d.
        ranks = {term: 1 if term == "*d" else rank for term in ranks}
    place = Place(_sizes(which, ranks), shapes, optional(rule))
    if types := operand_types(rule):
        return _in_row(rule, types, Sample(rule, label, {}, ranks), place, dtype, fixed or {})
    given = {
        name: fixed[name] if fixed and name in fixed else _argument(name, type, place, dtype)
        for name, type in parameters(rule).items()
    }
    if given.get("training"):
        given.update(dict.fromkeys({"running_mean", "running_var"} & given.keys()))
    asked = wanted(rule.of, given).values() if callable(rule.of) else ()
    known = {**shapes.arguments, **shapes.results}
    extra = {
        name: random(place.shape(_like(name, known) or f"g{name}"), dtype)
        for name in asked
        if name not in given
    }
    told = named(rule.sample, {**given, **extra}) if rule.sample else {}
    given, extra = ({k: told.get(k, v) for k, v in some.items()} for some in (given, extra))
    if unknown := [name for name, value in given.items() if value is ...]:
        raise ValueError(
            f"nothing says what {', '.join(unknown)} of {rule.name} may be: neither NUMBERS nor "
            "the record's `sample`"
        )
    numbers = tuple(k for k, v in told.items() if k in given and not tensors_in(v))
    return Sample(rule, label, given, ranks, extra, numbers)


def operand_types(rule: Rule) -> dict[str, Any]:
    """The arguments of the operator that a formula is of, with their types; else nothing."""
    op = operator_of(rule)
    return {a.name: a.type for a in op._schema.arguments} if op is not None else {}


def _in_row(
    rule: Rule,
    types: Mapping[str, Any],
    empty: Sample,
    place: Place,
    dtype: torch.dtype,
    fixed: Mapping[str, Any],
) -> Sample:
    """Arguments as the row of an operator gives them, of random ones of the operator's."""
    op = operator_of(rule)
    assert op is not None
    operands: dict[str, Any] = {
        a.name: a.default_value for a in op._schema.arguments if a.has_default_value()
    }
    for name, type in types.items():
        if name in fixed:
            operands[name] = fixed[name]
        elif (found := _operand(name, type, place, dtype, _alone(rule, types))) is not ...:
            operands[name] = found
    told = named(rule.sample, {**dict.fromkeys(types, ...), **operands}) if rule.sample else {}
    operands = {name: {**operands, **told}.get(name, ...) for name in types}
    if unknown := [name for name, value in operands.items() if value is ...]:
        raise ValueError(
            f"nothing says what {', '.join(unknown)} of {rule.of} may be: neither the shapes of "
            f"{rule.name}, nor NUMBERS, nor the record's `sample`"
        )
    given = arguments(rule, operands)
    given |= {name: value for name, value in fixed.items() if name in given and name not in types}
    extra = {n: v for n, v in operands.items() if n not in given and is_number(v)}
    return replace(empty, given=given, extra=extra, operands=operands)


def _alone(rule: Rule, types: Mapping[str, Any]) -> list[str]:
    """What a formula calls the gradient or tangent of the only tensor that an operator needs."""
    found = rule.linear if rule.kind == "jvp" else tuple(shapes_of(rule).results)
    needed = [type for type in types.values() if str(type) in ("Tensor", "List[Tensor]")]
    return list(found) if len(found) == len(needed) == 1 else []


def _operand(
    name: str, type: Any, place: Place, dtype: torch.dtype, alone: Sequence[str] = ()
) -> Any:
    """An argument of an operator; `...` where it follows neither from name nor shape."""
    known = {**place.shapes.arguments, **place.shapes.results}
    like = _like(name, known, alone if str(type) == "Tensor" else ())
    if is_tensor(type) and like is None:
        return None if "Optional" in str(type) else ...
    if not is_tensor(type) or like is None:
        return _argument(name, type, place, dtype)
    count, positive = 2 if "List" in str(type) else 1, POSITIVE.search(name) is not None
    made = [random(place.shape(like), dtype, positive) for _ in range(count)]
    return made if count > 1 else made[0]


def _like(name: str, known: Collection[str], alone: Sequence[str] = ()) -> str | None:
    """Whose shape a tensor has: its gradient's, its own, or its tangent's."""
    names = (f"d{name}", f"g{name}", name, f"{name}_p", f"{name}_t")
    names = (*names, *OTHERWISE.get(name, ()), *alone)
    return next((other for other in names if other in known), None)


def _sizes(which: int, ranks: Mapping[str, int]) -> dict[str, Any]:
    sizes: dict[str, Any] = dict(SIZES[which])
    for term, rank in ranks.items():
        size = SIZES[which][term[1:]]
        sizes[term] = (size, SECOND_AXIS + which)[:rank]
    return sizes


def _argument(name: str, type: Any, place: Place, dtype: torch.dtype) -> Any:
    """A tensor, a list of two, or a number; `...` where it follows neither from name nor shape."""
    if is_tensor(type):
        count, positive = 2 if "List" in str(type) else 1, POSITIVE.search(name) is not None
        made = [random(place.shape(name), dtype, positive) for _ in range(count)]
        return made if count > 1 else made[0]
    if _is_mask(type):
        return [True] * len(place.shapes.results)
    if name in ("dim", "dim_opt", "dims", "opt_dim", "opt_dims"):
        axes = place.reduced()
        return axes if "List" in str(type) else axes[0]
    return NUMBERS[name](place)[0] if name in NUMBERS else ...


def _choices(rule: Rule, name: str, type: Any) -> Sequence[Any]:
    """The values of a number; it has at least one."""
    place = Place(_sizes(0, {}), shapes_of(rule), optional(rule))
    if _is_mask(type):
        return MASKS[len(place.shapes.results)]
    several = name in NUMBERS and name not in OF_SIZES and not is_tensor(type)
    return NUMBERS[name](place) if several else [None]


def _is_mask(type: Any) -> bool:
    return str(type) == "List[bool]"


def random(shape: Sequence[int], dtype: torch.dtype, positive: bool = False) -> Tensor:
    """Between -2 and 2, or between 0.5 and 1.5 where positive."""
    if positive:
        return (torch.rand(tuple(shape), dtype=torch.float64) + 0.5).to(dtype)
    return make_tensor(tuple(shape), dtype=dtype, device="cpu", low=-2, high=2)
