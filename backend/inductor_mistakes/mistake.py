"""What a known mistake of Inductor's is, and how a function of torch's is wrapped and put back."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch.torch_version import TorchVersion

from normpass.passes import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping
    from types import ModuleType

    Undo = Callable[[], None]

_ABSENT: Any = object()
P = ParamSpec("P")
Decided = TypeVar("Decided")

OLDEST = "2.11"  # the oldest version of torch that is supported


@dataclass(frozen=True)
class Mistake:
    """A mistake of Inductor's that gives wrong numbers, or none, and what mends it.

    issue, fix: numbers at github.com/pytorch/pytorch; fix is the pull request, if one is known.
    wrong: what goes wrong and why. since: the first version of torch that has it, of those
    supported. fixed: the first that does not; None while there is none. mend: changes what is
    wrong in torch and returns what puts it back; raises whatever comes where torch is not as it
    expects.
    """

    name: str
    issue: int
    fix: int | None
    wrong: str
    mend: Callable[[], Undo]
    since: str = OLDEST
    fixed: str | None = None

    def concerns(self, version: str) -> bool:
        """Whether a version of torch has it. Builds of one version, as 2.13.0+cpu, are alike."""
        public = TorchVersion(str(version).partition("+")[0])
        return public >= self.since and (self.fixed is None or public < self.fixed)


def decision(
    issue: int, otherwise: Any, *, right: bool = True
) -> Callable[[Callable[P, Decided]], Callable[P, Decided]]:
    """For a function that a mend asks: what it answers where it fails.

    right: whether that is the safe answer, which costs some speed, or leaves the mistake in.
    """
    stage = f"the mend of pytorch issue {issue}"
    instead = "The safe way is taken" if right else "Inductor compiles it as it is"

    def decorate(ask: Callable[P, Decided]) -> Callable[P, Decided]:
        @functools.wraps(ask)
        def asked(*args: P.args, **kwargs: P.kwargs) -> Decided:
            try:
                return ask(*args, **kwargs)
            except Exception as error:
                faults.report(stage, "a graph", error, instead, right=right)
                return otherwise

        return asked

    return decorate


def replace(table: MutableMapping[Any, Any], key: Any, value: Any) -> Undo:
    """Puts an entry into one of torch's tables; returns what puts back what was there.

    An entry that somebody replaced after us is theirs, and stays.
    """
    before = table.get(key, _ABSENT)
    table[key] = value

    def undo() -> None:
        if table.get(key) is not value:
            return
        if before is _ABSENT:
            del table[key]
        else:
            table[key] = before

    return undo


def together(changes: Callable[P, Iterator[Undo]]) -> Callable[P, Undo]:
    """Several changes as one, made as a generator yields what undoes each; undone the last first.

    All of them or none: where one raises, those before it are put back.
    """

    @functools.wraps(changes)
    def change(*args: P.args, **kwargs: P.kwargs) -> Undo:
        undo: list[Undo] = []

        def put_all_back() -> None:
            while undo:
                undo.pop()()

        try:
            for put_back in changes(*args, **kwargs):
                undo.append(put_back)
        except Exception:
            put_all_back()
            raise
        return put_all_back

    return change


def wrap(owner: type | ModuleType, name: str, around: Callable[[Callable[..., Any]], Any]) -> Undo:
    """Puts `around(original)` in place of a class's own method, or of a module's function; returns
    what puts it back.

    One that somebody replaced after us is theirs, and stays.

    Raises:
        AttributeError: if the class itself, or the module, has no such name.
    """
    original = vars(owner).get(name)
    if original is None:
        raise AttributeError(f"{owner.__name__} defines no {name}")
    replacement = functools.wraps(original)(around(original))
    setattr(owner, name, replacement)

    def undo() -> None:
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)

    return undo
