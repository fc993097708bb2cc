"""A driver that claims to have a GPU, for which Triton compiles without one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeDriver:
    """As much of a driver as Triton asks for before it launches. error: what loading a kernel
    raises; without one, kernels are numbered from 1 on as they are loaded, and spill nothing.
    """

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.utils = self
        self.loaded: list[str] = []

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def launcher_cls(self, source: object, metadata: object) -> None:
        return None

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[None, int, int, int, int]:
        if self.error:
            raise self.error
        self.loaded.append(name)
        return None, len(self.loaded), 32, 0, 1024  # without a module nothing is unloaded


@contextmanager
def fake_gpu(error: Exception | None = None) -> Iterator[FakeDriver]:
    from triton.runtime.driver import driver

    before, found = driver._active, FakeDriver(error)  # its own reset asks for a GPU
    driver.set_active(found)
    try:
        yield found
    finally:
        driver._active = before
