"""Inductor's compilations in child processes: there are none while anything of ours is in force.

With TORCHINDUCTOR_FX_COMPILE_MODE=subprocess a child compiles with the parent's configuration less
all custom passes, and with torch as it is: its code would lack the fusion and what is mended, and
the parent would cache it as if it had both.

Checked on torch 2.11, 2.13 and 2.15: _SerializedFxCompile.serialize_compile, None of which means
that this process compiles.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from normpass.backend.inductor_mistakes.mistake import wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from normpass.backend.inductor_mistakes.mistake import Undo

log = logging.getLogger(__name__)


def keep_out() -> Undo:
    from torch._inductor.compile_fx_ext import _SerializedFxCompile

    def around(_: Callable[..., Any]) -> Callable[..., None]:
        def serialize_compile(*_args: Any, **_kwargs: Any) -> None:
            log.info("compiled in this process: a child has neither normpass's passes nor mends")

        return serialize_compile

    return wrap(_SerializedFxCompile, "serialize_compile", around)
