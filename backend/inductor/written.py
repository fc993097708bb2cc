"""What Inductor is about to write: Python, C++ or a graph."""

from __future__ import annotations


def is_cpp() -> bool:
    """Whether the code that is being compiled will be C++."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    return bool(V.aot_compilation or config.cpp_wrapper)


def is_python() -> bool:
    """Whether it will be Python, and no graph either."""
    from torch._inductor import config

    return not (is_cpp() or config.fx_wrapper)
