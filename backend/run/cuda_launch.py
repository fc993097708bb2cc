"""Launching what NVIDIA's driver has loaded, whoever compiled it.

By the driver's own function: a call of its Python bindings costs several times as much.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from normpass.backend.run.prepared import Parameters

# Of CUresult, in cuda.h.
SUCCESS = 0


class DriverError(RuntimeError):
    """What the driver says of a call that failed."""


class Binary(NamedTuple):
    """Machine code, as a cubin, and the name of a kernel in it."""

    code: bytes
    kernel: str


class Loaded:
    """A kernel on a device. function: the driver's handle of it. threads: of a block. shared: bytes
    on chip that it is launched with. binary: what it was loaded from. owner: what has to live as
    long.
    """

    def __init__(
        self, function: int, threads: int, shared: int, binary: Binary, owner: object = None
    ) -> None:
        self.function, self.threads, self.shared = function, threads, shared
        self.binary, self.owner = binary, owner
        # What needs no conversion: with types declared ctypes takes three times as long.
        self._handle, self._launch = ctypes.c_void_p(function), library().cuLaunchKernel

    def __call__(self, blocks: int, parameters: Parameters, stream: ctypes.c_void_p) -> None:
        """Launches it."""
        if not hasattr(_here, "has_context"):
            enter_context()
        handle, threads, shared = self._handle, self.threads, self.shared
        status = self._launch(handle, blocks, 1, 1, threads, 1, 1, shared, stream, parameters, None)
        if status != SUCCESS:
            raise DriverError(f"CUDA driver: {said(status)}")


@cache
def library() -> Any:
    """The driver's library, which torch has loaded where there is a GPU."""
    found = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    handle = ctypes.c_void_p
    found.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
    found.cuCtxGetCurrent.argtypes = (ctypes.POINTER(handle),)
    found.cuDeviceGet.argtypes = (ctypes.POINTER(ctypes.c_int), ctypes.c_int)
    found.cuDevicePrimaryCtxRetain.argtypes = (ctypes.POINTER(handle), ctypes.c_int)
    found.cuCtxSetCurrent.argtypes = (handle,)
    return found


def said(status: int) -> str:
    """The name of a status."""
    name = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"status {status}"


_here = threading.local()


def enter_context() -> None:
    """In a thread that has called nothing of CUDA's yet the driver has no context, unlike torch,
    whose runtime enters the current device's when it needs it.

    Raises:
        DriverError: if there is none to enter.
    """
    if hasattr(_here, "has_context"):
        return
    driver, context = library(), ctypes.c_void_p()
    _checked(driver.cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        device = ctypes.c_int()
        _checked(driver.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()))
        _checked(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _checked(driver.cuCtxSetCurrent(context))
    _here.has_context = True


def _checked(status: int) -> None:
    if status != SUCCESS:
        raise DriverError(f"CUDA driver: {said(status)}")
