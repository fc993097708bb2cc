"""register and unregister: the one place from which torch's global state is touched.

What is changed, and put back by `unregister`, in the order of its use by torch.compile:

    dispatch.py         what norms are for autograd and vmap while something is traced, for every
                        backend
    eager.py            the same in eager mode, for register(eager=True) alone
    functions.py        autograd.Function while Dynamo traces
    modules.py          torch.nn.SyncBatchNorm while Dynamo traces
    inductor_state.py   Inductor's decompositions, and our pass after those of other libraries
    kernels.py, levels.py
                        rules as the dispatcher calls them, and the levels of torch.func
    torch_internals.py  every private name of torch that the rules use: what depends on one that a
                        version of torch lacks is left out, with a warning that says so

Torch is imported only when something is registered.

Code that was compiled before stays as it is: registering concerns what is compiled from then on.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from normpass.decomps.activation.inductor_state import (
    PassPatch,
    Place,
    TablePatch,
    inductor_tables,
    without,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from normpass.decomps.activation.dispatch import TracingRules
    from normpass.decomps.activation.eager import EagerRules
    from normpass.decomps.activation.functions import Functions
    from normpass.decomps.activation.inductor_state import GraphPass
    from normpass.decomps.activation.modules import Modules

    # Changes something more of torch's, and returns what puts it back.
    Also = Callable[[], Callable[[], None]]

RUNNING_STATS = ("error", "mean")


@dataclass(eq=False)
class _Holder:
    """Somebody who wants the rules installed: a call of register, or an open with-block."""

    graph_pass: GraphPass | None
    eager: bool
    also: Also | None = None
    running_stats: str = "error"


@dataclass
class _State:
    lock: threading.RLock = field(default_factory=threading.RLock)
    explicit: _Holder | None = None
    blocks: list[_Holder] = field(default_factory=list)
    installed: _Installed | None = None

    @property
    def holders(self) -> list[_Holder]:
        """In the order in which they came."""
        return [*([self.explicit] if self.explicit else []), *self.blocks]

    @property
    def averages(self) -> bool:
        """Whether somebody wants the mean of running statistics."""
        return any(holder.running_stats == "mean" for holder in self.holders)

    @property
    def wanted_pass(self) -> GraphPass | None:
        """The pass of whoever came last and brought one."""
        return next((h.graph_pass for h in reversed(self.holders) if h.graph_pass), None)

    def sync(self) -> None:
        """Installs or uninstalls so that torch's state is what the holders want."""
        try:
            if self.holders and self.installed is None:
                self.installed = _Installed.install()
            if self.installed is not None:
                self.installed.in_eager_mode(any(holder.eager for holder in self.holders))
                self.installed.with_also(next((h.also for h in self.holders if h.also), None))
                self.installed.with_means(self.averages)
        except BaseException:
            self.explicit = None
            self.blocks.clear()
            self._uninstall()
            raise
        if not self.holders:
            self._uninstall()
        elif self.installed is not None:
            self.installed.place.graph_pass = self.wanted_pass

    def _uninstall(self) -> None:
        if self.installed is not None:
            self.installed.uninstall()
            self.installed = None


def register(
    *,
    eager: bool = False,
    running_stats: str = "error",
    post_grad_pass: GraphPass | None = None,
    also: Also | None = None,
) -> None:
    """Installs the rules in this process, for all that is compiled from then on.

    eager: eager mode gets them too: norms' derivatives of any order and mix, and batching rules.
    An eager call of a norm then goes through Python, which takes some microseconds. Another thread
    may trace while rules come and go, but it may not run norms in eager mode while eager=True comes
    or goes: torch does not guard its own tables of kernels.

    post_grad_pass is called with the fx.Graph of each forward and backward after decomposition;
    give it a `uuid()` (torch._inductor.custom_graph_pass.CustomGraphPass), or Inductor's caches
    are bypassed. Registering again is harmless: a pass that is given then replaces the first, and
    eager=True adds to what is there.

    also: called once with the rules installed, for what a later stage changes in torch; what it
    returns is called when they are taken out.

    running_stats: what batch norm in training does under vmap with running statistics that the
    examples share. "error": functorch's. "mean": one update, with the mean of their statistics.

    Raises ValueError for an unknown running_stats. Warns (RuntimeWarning) of private names that
    this torch lacks, and leaves out what depends on them.
    """
    _check(running_stats)
    with _STATE.lock:
        if _STATE.explicit is None:
            _STATE.explicit = _Holder(None, eager=False)
        _STATE.explicit.eager |= eager
        if running_stats != "error":
            _STATE.explicit.running_stats = running_stats
        if post_grad_pass is not None:
            _STATE.explicit.graph_pass = post_grad_pass
        if also is not None:
            _STATE.explicit.also = also
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
    also: Also | None = None,
) -> Iterator[None]:
    """`register` for the length of a block; what was registered around it stays.

    Blocks may overlap in several threads: the last one to end puts torch's state back.
    """
    _check(running_stats)
    block = _Holder(post_grad_pass, eager, also, running_stats)
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


def refresh() -> None:
    """Installs anew what is installed: the rules are others now."""
    with _STATE.lock:
        if _STATE.installed is not None:
            _STATE._uninstall()
            _STATE.sync()


def is_registered() -> bool:
    """Whether the rules are installed in this process."""
    with _STATE.lock:
        return _STATE.installed is not None


def averages_running_statistics() -> bool:
    """Whether `running_stats="mean"` is asked for."""
    with _STATE.lock:
        return _STATE.averages


def without_ours(passes: Any) -> Any:
    """A value of Inductor's post_grad_custom_pre_pass without the pass that `register` put there:
    for who brings one of its own.
    """
    with _STATE.lock:
        return passes if _STATE.installed is None else without(passes, _STATE.installed.place)


def _check(running_stats: str) -> None:
    if running_stats not in RUNNING_STATS:
        raise ValueError(
            f"running_stats: expected one of {', '.join(map(repr, RUNNING_STATS))}; "
            f"found {running_stats!r}"
        )


@dataclass
class _Installed:
    """What is installed, with all that is needed to take it out again."""

    left_out: frozenset[str]
    place: Place
    tables: list[TablePatch]
    passes: PassPatch | None
    rules: TracingRules | None
    eager: EagerRules | None = None
    functions: Functions | None = None
    modules: Modules | None = None
    undo_also: Callable[[], None] | None = None

    @classmethod
    def install(cls) -> _Installed:
        from normpass.decomps.activation import torch_internals as internals

        lacking = internals.missing()
        if lacking:
            warnings.warn(internals.warning_of(lacking), RuntimeWarning, stacklevel=5)
        left_out = internals.left_out(lacking)
        installed = cls(left_out, Place(), [], None, None)
        try:
            installed._put_in()
        except BaseException:
            installed.uninstall()
            raise
        return installed

    def _put_in(self) -> None:
        from normpass.decomps.activation import torch_internals as internals

        if internals.TRACES not in self.left_out:
            from normpass.decomps.activation.dispatch import TracingRules

            self.rules = TracingRules.apply(self.left_out)
        if internals.FUNCTIONS not in self.left_out:
            from normpass.decomps.activation.functions import Functions

            self.functions = Functions.apply()
        if internals.SYNC not in self.left_out:
            from normpass.decomps.activation.modules import Modules

            self.modules = Modules.apply()
        if internals.PASS not in self.left_out:
            self.passes = PassPatch.apply(self.place)
        if internals.TABLE not in self.left_out:
            from normpass.decomps.registry import decompositions

            ours = decompositions()
            self.tables += [TablePatch.apply(table, ours) for table in inductor_tables()]

    def in_eager_mode(self, wanted: bool) -> None:
        """Puts the rules of eager mode in, or takes them out."""
        from normpass.decomps.activation import torch_internals as internals

        if wanted and self.eager is None and internals.EAGER not in self.left_out:
            from normpass.decomps.activation.eager import EagerRules

            self.eager = EagerRules.apply(self.left_out)
        elif self.eager is not None and not wanted:
            self.eager.revert()
            self.eager = None
        if self.functions is not None:
            self.functions.eager = self.eager is not None
        if self.modules is not None:
            self.modules.eager = wanted

    def with_also(self, also: Also | None) -> None:
        """Does what a later stage wants, or takes it back."""
        if also is not None and self.undo_also is None:
            self.undo_also = also()
        elif also is None and self.undo_also is not None:
            self.undo_also()
            self.undo_also = None

    def with_means(self, wanted: bool) -> None:
        """Whether running statistics that examples share are updated with a mean."""
        from normpass.decomps.buffers import RunningStatistics

        RunningStatistics.are_averaged = wanted

    def uninstall(self) -> None:
        self.with_also(None)
        self.with_means(False)
        self.in_eager_mode(False)
        if self.rules is not None:
            self.rules.revert()
        if self.functions is not None:
            self.functions.revert()
        if self.modules is not None:
            self.modules.revert()
        self.place.active = False
        if self.passes is not None:
            self.passes.revert()
        # A copy that Inductor cached in the meantime holds what its original held.
        known = {id(patch.table): patch for patch in self.tables}
        for table in inductor_tables() if self.tables else ():
            patch = known.get(id(table), self.tables[0])
            patch.revert(table)


_STATE = _State()
