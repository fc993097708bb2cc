"""normpass: right, traceable and fast derivatives of normalization layers under torch.compile.

    torch.compile(model, backend="normpass")     the whole line: rules, fusion, generated kernels
    normpass.register()                          the rules and the fusion under any other backend
    normpass.explain(model, *inputs)             what was fused in a model, what was not, and why

Importing this module imports nothing but the standard library and changes no global state: each
name below is fetched from its stage on first use.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from normpass import rule
    from normpass.backend.explain.explain import Report, explain
    from normpass.backend.fusion import fuse
    from normpass.decomps.activation import unregister
    from normpass.decomps.function_ops import as_op
    from normpass.decomps.functional import functional_call_with_buffers
    from normpass.decomps.norms.sync_batch import SyncBatchNorm
    from normpass.decomps.registry import batch_rule, decompositions, derivative, rules
    from normpass.decomps.table.binding import jvp, vjp
    from normpass.decomps.table.graphs import grad_graph, jvp_graph

__version__ = "0.1.0"

__all__ = [
    "Report",
    "SyncBatchNorm",
    "__version__",
    "as_op",
    "batch_rule",
    "decompositions",
    "derivative",
    "explain",
    "functional_call_with_buffers",
    "fuse",
    "grad_graph",
    "jvp",
    "jvp_graph",
    "register",
    "registered",
    "rule",
    "rules",
    "unregister",
    "vjp",
]

# Where each forwarded name lives. `register` and `registered` are written out below, because
# they join two stages: the rules (decomps) and the fusion pass (backend).
_HOME = {
    "Report": "normpass.backend.explain.explain",
    "SyncBatchNorm": "normpass.decomps.norms.sync_batch",
    "as_op": "normpass.decomps.function_ops",
    "batch_rule": "normpass.decomps.registry",
    "decompositions": "normpass.decomps.registry",
    "derivative": "normpass.decomps.registry",
    "explain": "normpass.backend.explain.explain",
    "functional_call_with_buffers": "normpass.decomps.functional",
    "fuse": "normpass.backend.fusion",
    "grad_graph": "normpass.decomps.table.graphs",
    "jvp": "normpass.decomps.table.binding",
    "jvp_graph": "normpass.decomps.table.graphs",
    "rules": "normpass.decomps.registry",
    "unregister": "normpass.decomps.activation",
    "vjp": "normpass.decomps.table.binding",
}


def register(eager: bool = False, running_stats: str = "error") -> None:
    """Install the rules in this process, for tracing under any backend; twice is harmless.

    Batching and autograd rules take effect while torch.compile traces: derivatives of norms are
    then right to any order and mix of forward and reverse mode, and vmap over them copies nothing.
    Stock Inductor also gets the decompositions and the fusion pass, and what this version of it
    computes wrong is mended (backend/inductor_mistakes). `unregister()` takes all of it back.

    Args:
        eager: the same rules in eager mode, for torch.func and for torch.autograd; a norm's
            forward and backward then take 5 to 10 microseconds more. Once asked for, it stays
            until `unregister()`.
        running_stats: what batch norm in training does under vmap with running statistics that
            the examples share: "error", with functorch's text, or "mean", one update with the mean
            of the examples' statistics. It holds until `unregister()`.

    Raises:
        ValueError: for a value of `running_stats` that does not exist; the message lists them.
    """
    from normpass.backend import inductor_mistakes
    from normpass.backend.entry import fusion_pass
    from normpass.decomps import activation

    activation.register(
        eager=eager,
        running_stats=running_stats,
        post_grad_pass=fusion_pass(),
        also=inductor_mistakes.mended_for_rules,
    )


@contextmanager
def registered(eager: bool = False, running_stats: str = "error") -> Iterator[None]:
    """`register()` for the length of a `with` block; what was registered before stays so."""
    from normpass.backend import inductor_mistakes
    from normpass.backend.entry import fusion_pass
    from normpass.decomps import activation

    with activation.registered(
        eager=eager,
        running_stats=running_stats,
        post_grad_pass=fusion_pass(),
        also=inductor_mistakes.mended_for_rules,
    ):
        yield


def __getattr__(name: str) -> Any:
    if name == "rule":
        return import_module("normpass.rule")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'normpass' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
