"""What `register` changes in Inductor, and how it is put back.

    torch._inductor.decomposition.decompositions        our decompositions replace or join its own
    torch._inductor.decomposition.fast_random_decomps   its cached copy, if there is one yet
    torch._inductor.config.post_grad_custom_pre_pass    our pass after those of other libraries

torch 2.11 takes one pass where later ones take a sequence. torch_internals is imported late: it
imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normpass.decomps import digest

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    GraphPass = Callable[[Any], object]
    Table = MutableMapping[Any, Callable[..., Any]]


@dataclass(eq=False)
class Place:
    """What every slot of one installation shares: whether it is in force, and the pass."""

    active: bool = True
    graph_pass: GraphPass | None = None


# --- decompositions -----------------------------------------------------------------------------


def inductor_tables() -> list[Table]:
    """Inductor's table, and the copy that select_decomp_table keeps of it, if it has one.

    Both are changed in place: clearing the cache of the copy would lose what other libraries put
    into it, and making it now would freeze it before they register. Inductor's lowerings refuse to
    be imported while an operator that they leave to ATen has a decomposition: they come first.
    """
    from normpass.decomps.activation.torch_internals import (
        fast_random_decomps,
        find,
        inductor_decompositions,
    )

    find("torch._inductor.lowering")
    tables: list[Table] = [inductor_decompositions]
    if fast_random_decomps is not None and fast_random_decomps.cache_info().currsize:
        tables.append(fast_random_decomps())
    return tables


_ABSENT: Any = object()


@dataclass
class TablePatch:
    table: Table
    ours: dict[Any, Callable[..., Any]]
    before: dict[Any, Any]

    @classmethod
    def apply(cls, table: Table, ours: dict[Any, Callable[..., Any]]) -> TablePatch:
        before = {op: table.get(op, _ABSENT) for op in ours}
        table.update(ours)
        return cls(table, ours, before)

    def revert(self, table: Table) -> None:
        """Puts back what ours replaced; an entry that somebody changed after us is theirs."""
        for op, function in self.ours.items():
            if table.get(op) is not function:
                continue
            if self.before[op] is _ABSENT:
                del table[op]
            else:
                table[op] = self.before[op]


# --- the pass -----------------------------------------------------------------------------------

_NAME = "post_grad_custom_pre_pass"


def _slot(place: Place, first: Any = None) -> Any:
    """A pass for Inductor's configuration that runs `first`, then what is in our place.

    It is there even while no pass of ours is: AOTAutograd's cache is keyed by the graph before
    decomposition and by the custom passes, not by the table of decompositions. Without the uuid of
    the slot it would hand out graphs that were made by other decompositions.
    """
    # The base class is made at the first call: importing it takes a second.
    from normpass.decomps.activation.torch_internals import CustomGraphPass

    class Slot(CustomGraphPass):  # type: ignore[misc]
        def __init__(self) -> None:
            self.place = place
            self.first = first

        def __deepcopy__(self, memo: object) -> Any:
            # The configuration copies values that it hands out; there is one slot all the same.
            return self

        def __call__(self, graph: Any) -> None:
            for graph_pass in filter(None, self._passes()):
                graph_pass(graph)

        def uuid(self) -> Any | None:
            """None, which bypasses the caches, when a pass in the slot has no uuid."""
            parts: list[Any] = ["normpass", digest.of_rules() if self.place.active else "off"]
            for graph_pass in self._passes():
                part = "none" if graph_pass is None else _uuid(graph_pass)
                if part is None:
                    return None
                parts.append(part)
            return tuple(parts)

        def _passes(self) -> tuple[Any, Any]:
            return self.first, self.place.graph_pass if self.place.active else None

    return Slot()


def _uuid(graph_pass: Any) -> Any | None:
    return graph_pass.uuid() if hasattr(graph_pass, "uuid") else None


def _takes_several() -> bool:
    """Whether post_grad_custom_pre_pass takes a sequence of passes (2.13) or one (2.11)."""
    from normpass.decomps.activation.torch_internals import get_custom_graph_passes

    return get_custom_graph_passes is not None


def _is_ours(value: Any, place: Place) -> bool:
    return getattr(value, "place", None) is place


def _with(value: Any, place: Place) -> Any:
    """A configured value with a slot of ours at its end."""
    if not _takes_several():
        return _slot(place, first=value)
    # A tuple, unless the user has a list: the configuration copies mutable defaults.
    if isinstance(value, list):
        return [*value, _slot(place)]
    return (*as_tuple(value), _slot(place))


def without(value: Any, place: Place) -> Any:
    """A configured value without slots of ours; the same object if there are none in it."""
    if _is_ours(value, place):
        return value.first
    if isinstance(value, list | tuple) and any(_is_ours(each, place) for each in value):
        return type(value)(each for each in value if not _is_ours(each, place))
    return value


@dataclass
class PassPatch:
    """Our slots in the configuration: in the default, which all threads see, and in the value that
    this thread set for itself, if it did (2.13: a user's setting is local to its thread).
    """

    place: Place
    entry: Any
    default: Any
    own: Any

    @classmethod
    def apply(cls, place: Place) -> PassPatch:
        from normpass.decomps.activation.torch_internals import inductor_config, inductor_settings

        entry = inductor_settings[_NAME]
        default, before = entry.default, getattr(inductor_config, _NAME)
        entry.default = _with(default, place)
        own = _ABSENT
        if not any(_is_ours(each, place) for each in as_tuple(getattr(inductor_config, _NAME))):
            own = before
            setattr(inductor_config, _NAME, _with(before, place))
        return cls(place, entry, default, own)

    def revert(self) -> None:
        from normpass.decomps.activation.torch_internals import inductor_config

        # The default first: what is read then is this thread's own setting, if it has one.
        rest = without(self.entry.default, self.place)
        if rest is not self.entry.default:
            self.entry.default = _as_before(rest, self.default)
        value = getattr(inductor_config, _NAME)
        rest = without(value, self.place)
        if rest is not value:
            setattr(inductor_config, _NAME, _as_before(rest, self.own))


def _as_before(rest: Any, before: Any) -> Any:
    """The very object that was there before, if what is left now says the same."""
    if before is _ABSENT:
        return rest or None
    same = [*map(id, as_tuple(before))] == [*map(id, as_tuple(rest))]
    return before if same else rest


def as_tuple(value: Any) -> tuple[Any, ...]:
    """The passes in a value of Inductor's configuration: none, one, or (from 2.13) several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)
