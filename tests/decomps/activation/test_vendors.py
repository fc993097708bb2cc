"""register(eager=True): operators of cuDNN and MIOpen where there is no such library.

What they compute is in norms/test_cudnn_batch_norm.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normpass.decomps.activation import register, registered, unregister

aten = torch.ops.aten

VENDORS = [
    getattr(aten, f"{library}_batch_norm{rest}").default
    for library in ("cudnn", "miopen")
    for rest in ("", "_backward")
]


def kernels(key: str) -> list[Any]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [op for op in VENDORS if has(op.name(), key)]


def batch_norm() -> Any:
    c = torch.ones(3)
    return aten.cudnn_batch_norm(torch.randn(4, 3), c, c, None, None, True, 0.3, 0.25)


@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_they_run_where_they_are_asked_for(key: str) -> None:
    """With register(eager=True), and until it is taken back."""
    if kernels(key):
        pytest.skip(f"this torch has kernels for {key}")
    with pytest.raises(NotImplementedError):
        batch_norm()
    with registered():
        assert not kernels(key)
    register(eager=True)
    try:
        assert kernels(key) == VENDORS
    finally:
        unregister()
    assert not kernels(key)
    with pytest.raises(NotImplementedError):
        batch_norm()


@pytest.mark.parametrize("library", ["cudnn", "miopen"])
def test_a_cuda_build_with_the_library_keeps_its_kernels(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hip, cuda = ("6.4", None) if library == "miopen" else (None, "13.0")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    if kernels("CUDA"):
        pytest.skip("this torch has kernels for CUDA")
    with registered(eager=True):
        assert kernels("CUDA") == [op for op in VENDORS if library not in op.name()]
