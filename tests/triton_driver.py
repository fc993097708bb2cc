"""A driver that claims to have a GPU, for which Triton compiles without one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class FakeDriver:
    """As much of a driver as Triton asks for before it launches. error: what loading a kernel
    raises; without one, kernels are numbered from 1 on as they are loaded. spilled: bytes of memory
    that a thread of a binary takes for registers.
    """

    def __init__(self, error: Exception | None, spilled: Callable[[bytes], int]) -> None:
        self.error, self.spilled = error, spilled
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
        # Without a module nothing is unloaded.
        return None, len(self.loaded), 32, self.spilled(binary), 1024


@contextmanager
def fake_gpu(
    error: Exception | None = None, spilled: Callable[[bytes], int] = lambda _: 0
) -> Iterator[FakeDriver]:
    from triton.runtime.driver import driver

    before, found = driver._active, FakeDriver(error, spilled)  # its own reset asks for a GPU
    driver.set_active(found)
    try:
        yield found
    finally:
        driver._active = before
