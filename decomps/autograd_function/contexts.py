"""Contexts of one example, where the true one is that of a whole batch."""

from __future__ import annotations

from typing import Any

from normpass.decomps.activation.torch_internals import unwrap_batched

_RESERVED = ("_pt_reserved_attrs", "_pt_inner_ctx")


class WrappedCtx:
    """A context that is another one, except for some attributes of its own."""

    _pt_reserved_attrs: tuple[str, ...] = _RESERVED

    def __init__(self, ctx: Any) -> None:
        reserved = self._pt_reserved_attrs
        if not isinstance(ctx, WrappedCtx) and any(hasattr(ctx, name) for name in reserved):
            raise RuntimeError(
                f"PyTorch reserves the {reserved} field on ctx. Please name your fields on ctx "
                "something else to avoid name collision."
            )
        self._pt_inner_ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pt_inner_ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._pt_reserved_attrs:
            self.__dict__[name] = value
        else:
            setattr(self._pt_inner_ctx, name, value)


class CtxWithSavedTensors(WrappedCtx):
    """For backward and jvp of one example: what was saved has no batch axis."""

    _pt_reserved_attrs = ("_pt_new_saved_tensors", *_RESERVED)

    def __init__(self, ctx: Any, new_saved_tensors: Any) -> None:
        super().__init__(ctx)
        self._pt_new_saved_tensors = new_saved_tensors

    @property
    def saved_tensors(self) -> Any:
        """Those of the example."""
        return self._pt_new_saved_tensors


class CtxCustomSave(WrappedCtx):
    """For setup_context of one example: the other context gets whole batches."""

    _pt_reserved_attrs = (
        "_pt_current_level",
        "dims_for_backward",
        "dims_for_forward",
        *_RESERVED,
    )

    def __init__(self, ctx: Any, current_level: int) -> None:
        super().__init__(ctx)
        self._pt_current_level = current_level
        self.dims_for_backward: Any = ()
        self.dims_for_forward: Any = ()

    def _whole(self, tensors: tuple[Any, ...]) -> tuple[Any, Any]:
        return unwrap_batched(tensors, self._pt_current_level)

    def save_for_backward(self, *tensors: Any) -> None:
        """As of any context; the batch dimensions are kept here."""
        whole, self.dims_for_backward = self._whole(tensors)
        self._pt_inner_ctx.save_for_backward(*whole)

    def save_for_forward(self, *tensors: Any) -> None:
        """The same."""
        whole, self.dims_for_forward = self._whole(tensors)
        self._pt_inner_ctx.save_for_forward(*whole)

    def mark_dirty(self, *tensors: Any) -> None:
        """As of any context, which knows its tensors by identity."""
        self._pt_inner_ctx.mark_dirty(*self._whole(tensors)[0])

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """The same."""
        self._pt_inner_ctx.mark_non_differentiable(*self._whole(tensors)[0])
