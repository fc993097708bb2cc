"""Libraries with norms of their own, each an entry in a table. To add one: an entry in PEERS.

A peer that is not installed is named with the reason; one that cannot do a case says why itself,
and that is what is recorded.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from normpass.benchmarks.gpu_cases import DTYPES
from normpass.benchmarks.machine import installed
from normpass.benchmarks.norms import EPS, GROUPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from normpass.benchmarks.gpu_cases import GpuCase

    Tensors = Mapping[str, Tensor]


class Prepared(NamedTuple):
    """y of x and of the parameters that gradients are taken at: in a peer's dtype, or a module's
    own.
    """

    forward: Callable[..., Tensor]
    parameters: tuple[Tensor, ...]


@dataclass(frozen=True)
class Peer:
    """A library.

    Attributes:
        name: what it is called in tables.
        module: what is imported.
        package: whose version is told.
        norms: by name, from the module and a case's tensors to what is called.
        phases, dtypes: those that it does.
        channels_last: the memory formats of images that it takes.
        missing: why it cannot be used although it is installed.
    """

    name: str
    module: str
    package: str
    norms: Mapping[str, Callable[[Any, Tensors], Prepared]]
    phases: tuple[str, ...] = ("forward", "backward", "both")
    dtypes: tuple[str, ...] = tuple(DTYPES)
    channels_last: tuple[bool, ...] = (False, True)
    missing: Callable[[Any], str | None] = lambda module: None

    def takes(self, case: GpuCase) -> bool:
        """Whether it is asked to do a case."""
        return (
            case.norm in self.norms
            and case.phase in self.phases
            and case.dtype in self.dtypes
            and case.channels_last in self.channels_last
        )

    def load(self) -> Any:
        """Its module.

        Raises:
            ImportError: if it is not installed, or not for this machine; with its own words.
        """
        try:
            module = importlib.import_module(self.module)
        except Exception as error:  # what a broken installation raises is of any type
            raise ImportError(f"{type(error).__name__}: {error}") from error
        if reason := self.missing(module):
            raise ImportError(reason)
        return module

    def status(self) -> dict[str, str | None]:
        """Its version, and why it is not there."""
        try:
            module = self.load()
        except ImportError as error:
            return {"version": None, "missing": str(error)}
        version = installed(self.package) or getattr(module, "__version__", "unknown")
        return {"version": str(version), "missing": None}


def _given(forward: Callable[..., Tensor], tensors: Tensors) -> Prepared:
    """A function of x and the case's own parameters."""
    names = [name for name in ("weight", "bias") if name in tensors]
    return Prepared(forward, tuple(tensors[name].detach().requires_grad_() for name in names))


def _of_module(module: torch.nn.Module, tensors: Tensors) -> Prepared:
    """A module with the numbers of the case's parameters, in their dtype."""
    module = module.to(tensors["x"].device, tensors["weight"].dtype)
    named = dict(module.named_parameters())
    parameters = tuple(named[name] for name in ("weight", "bias") if name in tensors)
    with torch.no_grad():
        for name in ("weight", "bias"):
            if name in tensors:
                named[name].copy_(tensors[name])
    return Prepared(lambda x, *_: module(x), parameters)


# ---- liger-kernel: liger_kernel/transformers/functional.py (read at 0.8.5)


def _liger_rms(liger: Any, tensors: Tensors) -> Prepared:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        # In place it would write dx over dy, which is read again.
        y: Tensor = liger.liger_rms_norm(x, weight, EPS, in_place=False)
        return y

    return _given(forward, tensors)


def _liger_layer(liger: Any, tensors: Tensors) -> Prepared:
    return _given(lambda x, w, b: liger.liger_layer_norm(x, w, b, EPS), tensors)


def _liger_group(liger: Any, tensors: Tensors) -> Prepared:
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = liger.liger_group_norm(x, weight, bias, x.shape[1], GROUPS, EPS)
        return y

    return _given(forward, tensors)


# ---- quack-kernels: quack/rmsnorm.py (read at 0.6.5); its layer norm has no autograd of its own


def _quack_rms(quack: Any, tensors: Tensors) -> Prepared:
    return _given(lambda x, weight: quack.rmsnorm(x, weight, eps=EPS), tensors)


def _quack_layer(quack: Any, tensors: Tensors) -> Prepared:
    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            y: Tensor
            y, rstd, mean = quack.layernorm_fwd(
                x, weight, bias, EPS, return_rstd=True, return_mean=True
            )
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            return quack.layernorm_bwd(*_in_order(ctx.saved_tensors, dy), has_bias=True)

    def _in_order(saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
        x, weight, rstd, mean = saved
        return x, weight, dy, rstd, mean

    # It takes float32 parameters alone.
    wide = {name: tensors[name].float() for name in ("weight", "bias")}
    return _given(LayerNorm.apply, wide)


# ---- modules of a width: apex/normalization/fused_layer_norm.py, whose functions take their
# arguments in another order in each version, and transformer_engine/pytorch/module/


def _rows(name: str) -> Callable[[Any, Tensors], Prepared]:
    def prepare(library: Any, tensors: Tensors) -> Prepared:
        return _of_module(getattr(library, name)(tensors["x"].shape[-1], eps=EPS), tensors)

    return prepare


# ---- apex/contrib/group_norm


def _apex_group(apex: Any, tensors: Tensors) -> Prepared:
    return _of_module(apex.GroupNorm(GROUPS, tensors["x"].shape[1], eps=EPS), tensors)


# ---- cuDNN, by torch's own operator: what eager mode calls where it thinks that cuDNN can do it


def _cudnn(_: Any, tensors: Tensors) -> Prepared:
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten.cudnn_batch_norm(x, weight, bias, None, None, True, 0.1, EPS)[0]
        return y

    return _given(forward, tensors)


def _no_cudnn(cudnn: Any) -> str | None:
    return None if cudnn.is_available() else "torch was built without cuDNN"


PEERS = (
    Peer(
        "liger",
        "liger_kernel.transformers.functional",
        "liger-kernel",
        {"rms_norm": _liger_rms, "layer_norm": _liger_layer, "group_norm": _liger_group},
        channels_last=(False,),
    ),
    Peer(
        "quack",
        "quack.rmsnorm",
        "quack-kernels",
        {"rms_norm": _quack_rms, "layer_norm": _quack_layer},
    ),
    Peer(
        "apex",
        "apex.normalization.fused_layer_norm",
        "apex",
        {"layer_norm": _rows("FusedLayerNorm"), "rms_norm": _rows("FusedRMSNorm")},
    ),
    Peer(
        "apex contrib",
        "apex.contrib.group_norm",
        "apex",
        {"group_norm": _apex_group},
        dtypes=("bfloat16", "float16"),
        channels_last=(True,),
    ),
    Peer(
        "transformer engine",
        "transformer_engine.pytorch",
        "transformer-engine",
        {"layer_norm": _rows("LayerNorm"), "rms_norm": _rows("RMSNorm")},
    ),
    Peer("cudnn", "torch.backends.cudnn", "torch", {"batch_norm": _cudnn}, missing=_no_cudnn),
)
