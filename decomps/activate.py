"""register and unregister: the one place that touches torch's global state.

What is changed, and put back by `unregister`, in the order of its use by torch.compile:

    torch._inductor.decomposition.decompositions        our decompositions replace or join its own
    torch._inductor.decomposition.fast_random_decomps   its cached copy, if there is one yet
    torch._inductor.config.post_grad_custom_pre_pass    our pass after those of other libraries

Both are private. Tried on torch 2.13.0; 2.11 and 2.15 have the same names (read, not run), and 2.11
takes one pass where 2.13 takes a sequence. Torch is imported only when something is registered.

Code that was compiled before stays as it is: registering concerns what is compiled from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping

    GraphPass = Callable[[Any], object]
    Table = MutableMapping[Any, Callable[..., Any]]

RUNNING_STATS = ("error",)


@dataclass(eq=False)
class _Place:
    """What every slot of one installation shares: whether it is in force, and the pass."""

    active: bool = True
    graph_pass: GraphPass | None = None


@dataclass(eq=False)
class _Holder:
    """Somebody who wants the rules installed: a call of register, or an open with-block."""

    graph_pass: GraphPass | None


@dataclass
class _State:
    lock: threading.RLock = field(default_factory=threading.RLock)
    explicit: _Holder | None = None
    blocks: list[_Holder] = field(default_factory=list)
    installed: _Installed | None = None

    @property
    def wanted_pass(self) -> GraphPass | None:
        """The pass of whoever came last and brought one."""
        holders = [*([self.explicit] if self.explicit else []), *self.blocks]
        return next((h.graph_pass for h in reversed(holders) if h.graph_pass), None)

    def sync(self) -> None:
        """Installs or uninstalls so that torch's state is what the holders want."""
        wanted = self.explicit is not None or bool(self.blocks)
        if wanted and self.installed is None:
            try:
                self.installed = _Installed.install()
            except BaseException:
                self.explicit = None
                self.blocks.clear()
                raise
        if self.installed is not None:
            self.installed.place.graph_pass = self.wanted_pass
        if not wanted and self.installed is not None:
            self.installed.uninstall()
            self.installed = None


def register(
    *,
    eager: bool = False,
    running_stats: str = "error",
    post_grad_pass: GraphPass | None = None,
) -> None:
    """Installs the rules in this process, for torch.compile(backend="inductor").

    post_grad_pass is called with the fx.Graph of each forward and backward after decomposition;
    give it a `uuid()` (torch._inductor.custom_graph_pass.CustomGraphPass), or Inductor's caches
    are bypassed. Registering again is harmless; a pass that is given then replaces the first.

    Raises NotImplementedError for eager=True, and ValueError for an unknown running_stats.
    """
    _check(eager, running_stats)
    with _STATE.lock:
        if _STATE.explicit is None:
            _STATE.explicit = _Holder(post_grad_pass)
        elif post_grad_pass is not None:
            _STATE.explicit.graph_pass = post_grad_pass
        _STATE.sync()


def unregister() -> None:
    """Puts torch's state back, inside a `registered` block too. Harmless if nothing is there."""
    with _STATE.lock:
        _STATE.explicit = None
        _STATE.blocks.clear()
        _STATE.sync()


@contextlib.contextmanager
def registered(
    *,
    eager: bool = False,
    running_stats: str = "error",
    post_grad_pass: GraphPass | None = None,
) -> Iterator[None]:
    """`register` for the length of a block; what was registered around it stays.

    Blocks may overlap in several threads: the last one to end puts torch's state back.
    """
    _check(eager, running_stats)
    block = _Holder(post_grad_pass)
    with _STATE.lock:
        _STATE.blocks.append(block)
        _STATE.sync()
    try:
        yield
    finally:
        with _STATE.lock:
            if block in _STATE.blocks:
                _STATE.blocks.remove(block)
            _STATE.sync()


def is_registered() -> bool:
    """Whether the rules are installed in this process."""
    with _STATE.lock:
        return _STATE.installed is not None


def _check(eager: bool, running_stats: str) -> None:
    if eager:
        raise NotImplementedError(
            "register(eager=True) is not there yet: decompositions and the fusion pass for "
            "torch.compile are, the autograd and batching kernels for eager mode are not"
        )
    if running_stats not in RUNNING_STATS:
        raise ValueError(
            f"running_stats: expected one of {', '.join(map(repr, RUNNING_STATS))}; "
            f"found {running_stats!r}"
        )


@dataclass
class _Installed:
    """What is installed, with all that is needed to take it out again."""

    tables: list[_TablePatch]
    place: _Place
    passes: _PassPatch

    @classmethod
    def install(cls) -> _Installed:
        from normpass.decomps.registry import decompositions

        ours = decompositions()
        place = _Place()
        # The configuration first: it is what another version of torch may not have.
        passes = _PassPatch.apply(place)
        tables = [_TablePatch.apply(table, ours) for table in _inductor_tables()]
        return cls(tables, place, passes)

    def uninstall(self) -> None:
        self.place.active = False
        self.passes.revert()
        # A copy that Inductor cached in the meantime holds what its original held.
        known = {id(patch.table): patch for patch in self.tables}
        for table in _inductor_tables():
            patch = known.get(id(table), self.tables[0])
            patch.revert(table)


# --- decompositions -----------------------------------------------------------------------------


def _inductor_tables() -> list[Table]:
    """Inductor's table, and the copy that select_decomp_table keeps of it, if it has one.

    Both are changed in place: clearing the cache of the copy would lose what other libraries put
    into it, and making it now would freeze it before they register.
    """
    from torch._inductor import decomposition

    tables: list[Table] = [decomposition.decompositions]
    cached = getattr(decomposition, "fast_random_decomps", None)
    if cached is not None and cached.cache_info().currsize:
        tables.append(cached())
    return tables


_ABSENT: Any = object()


@dataclass
class _TablePatch:
    table: Table
    ours: dict[Any, Callable[..., Any]]
    before: dict[Any, Any]

    @classmethod
    def apply(cls, table: Table, ours: dict[Any, Callable[..., Any]]) -> _TablePatch:
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


def _sources_digest() -> str:
    """A hash of the sources of all rules."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _slot(place: _Place, first: Any = None) -> Any:
    """A pass for Inductor's configuration that runs `first`, then what is in our place.

    It is there even while no pass of ours is: AOTAutograd's cache is keyed by the graph before
    decomposition and by the custom passes, not by the table of decompositions. Without the uuid of
    the slot it would hand out graphs that were made by other decompositions.
    """
    # The base class is made at the first call: importing it takes a second.
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Slot(CustomGraphPass):
        def __init__(self) -> None:
            self.place = place
            self.first = first
            self.digest = _sources_digest()

        def __deepcopy__(self, memo: object) -> Any:
            # The configuration copies values that it hands out; there is one slot all the same.
            return self

        def __call__(self, graph: Any) -> None:
            for graph_pass in self._passes():
                if graph_pass is not None:
                    graph_pass(graph)

        def uuid(self) -> Any | None:
            """None, which bypasses the caches, when a pass in the slot has no uuid."""
            parts: list[Any] = ["normpass", self.digest if self.place.active else "off"]
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
    from torch._inductor import custom_graph_pass

    return hasattr(custom_graph_pass, "get_custom_graph_passes")


def _is_ours(value: Any, place: _Place) -> bool:
    return getattr(value, "place", None) is place


def _with(value: Any, place: _Place) -> Any:
    """A configured value with a slot of ours at its end."""
    if not _takes_several():
        return _slot(place, first=value)
    # A tuple, unless the user has a list: the configuration copies mutable defaults.
    if isinstance(value, list):
        return [*value, _slot(place)]
    return (*_as_tuple(value), _slot(place))


def _without(value: Any, place: _Place) -> Any:
    """A configured value without slots of ours; the same object if there are none in it."""
    if _is_ours(value, place):
        return value.first
    if isinstance(value, list | tuple) and any(_is_ours(each, place) for each in value):
        return type(value)(each for each in value if not _is_ours(each, place))
    return value


@dataclass
class _PassPatch:
    """Our slots in the configuration: in the default, which all threads see, and in the value that
    this thread set for itself, if it did (2.13: a user's setting is local to its thread).
    """

    place: _Place
    entry: Any
    default: Any
    own: Any

    @classmethod
    def apply(cls, place: _Place) -> _PassPatch:
        from torch._inductor import config

        entries: Any = config._config  # type: ignore[attr-defined]
        entry = entries[_NAME]
        default, before = entry.default, getattr(config, _NAME)
        entry.default = _with(default, place)
        own = _ABSENT
        if not any(_is_ours(each, place) for each in _as_tuple(getattr(config, _NAME))):
            own = before
            setattr(config, _NAME, _with(before, place))
        return cls(place, entry, default, own)

    def revert(self) -> None:
        from torch._inductor import config

        # The default first: what is read then is this thread's own setting, if it has one.
        rest = _without(self.entry.default, self.place)
        if rest is not self.entry.default:
            self.entry.default = _as_before(rest, self.default)
        value = getattr(config, _NAME)
        rest = _without(value, self.place)
        if rest is not value:
            setattr(config, _NAME, _as_before(rest, self.own))


def _as_before(rest: Any, before: Any) -> Any:
    """The very object that was there before, if what is left now says the same."""
    if before is _ABSENT:
        return rest or None
    same = [*map(id, _as_tuple(before))] == [*map(id, _as_tuple(rest))]
    return before if same else rest


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


_STATE = _State()
