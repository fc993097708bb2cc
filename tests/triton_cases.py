"""Regions with oracles for the Triton generator, and a program that runs them all.

    python tests/triton_cases.py DEVICE FAMILY

prints one JSON object: the name of every case of the family -> null, or what went wrong. A number
as the family is one of random regions.

On DEVICE cpu it needs TRITON_INTERPRET=1, which must be set before triton is imported: hence a
program. An oracle is the mathematics in PyTorch's primitives. It is evaluated in float64 for the
reference, and in the region's own working precision for the error that is allowed (oracles.py).
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import triton_oracles as mathematics
import triton_regions as regions
from compared import compare
from triton_regions import fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from normpass.backend.program.machine import Blocking, Tiling


@dataclass(frozen=True)
class Case:
    """A region, the run-time sizes to try, and what it should compute.

    oracle: takes the region's inputs by name, returns its outputs.
    special: values to overwrite the first elements of an input with.
    interpreted: the oracle for Triton's interpreter, where that is known to differ from devices.
    """

    name: str
    text: str
    sizes: tuple[tuple[int, ...], ...]
    oracle: Callable[..., tuple[Tensor, ...]]
    special: Mapping[str, Sequence[float]] = field(default_factory=dict)
    interpreted: Callable[..., tuple[Tensor, ...]] | None = None


# ---- cases

NAN, INF = math.nan, math.inf
ROWS = ((5,), (13,), (0,))


def norms() -> Iterator[Case]:
    """Row norms and softmax in every dtype."""
    families = {
        "layer_norm_backward": (regions.LAYER_NORM_BACKWARD, mathematics.layer_norm_backward),
        "rms_norm_backward": (regions.RMS_NORM_BACKWARD, mathematics.rms_norm_backward),
        "layer_norm": (regions.LAYER_NORM_FORWARD, mathematics.layer_norm),
        "softmax": (regions.SOFTMAX, mathematics.softmax),
        "softmax_backward": (regions.SOFTMAX_BACKWARD, mathematics.softmax_backward),
        "three_levels": (regions.THREE_LEVELS, mathematics.three_levels),
    }
    for name, (text, oracle) in families.items():
        for t in ("f32", "f64", "bf16", "f16"):
            yield Case(f"{name} {t}", fill(text, t=t), ROWS, oracle)
        yield Case(f"{name} bf16 with f32 weights", fill(text, t="bf16", w="f32"), ROWS, oracle)
        yield Case(f"{name} static", fill(text, c="128", r="6"), ((),), oracle)
        yield Case(f"{name} dynamic rows", fill(text, c="?"), ((3, 70), (4, 33)), oracle)
        yield Case(f"{name} one column", fill(text, c="1"), ((5,),), oracle)


def examples() -> Iterator[Case]:
    """Norms with a weight for each of some examples, which have rows."""
    oracle = mathematics.modulated_backward
    for t in ("f32", "f64", "bf16"):
        text = fill(regions.MODULATED_BACKWARD, t=t)
        yield Case(f"modulated_backward {t}", text, ROWS, oracle)
    text = fill(regions.MODULATED_BACKWARD, c="?", v="?")
    yield Case("some examples", text, ((3, 5, 70), (1, 4, 33)), oracle)
    for t in ("f32", "bf16"):
        yield Case(f"two ways {t}", fill(regions.TWO_WAYS, t=t), ROWS, mathematics.two_ways)
    text = fill(regions.TWO_WAYS, c="?", v="?")
    yield Case("two ways of run-time sizes", text, ((3, 5, 70), (1, 400, 33)), mathematics.two_ways)
    text = fill(regions.MODULATED_BACKWARD, c="33", v="300")
    yield Case("many examples", text, ((5,),), oracle)


def channels() -> Iterator[Case]:
    """Norms over channels, in both layouts."""
    group, batch = mathematics.group_norm_backward, mathematics.batch_norm_backward
    for t in ("f32", "f64", "bf16", "f16"):
        text = fill(regions.GROUP_NORM_BACKWARD, c="5", t=t, x="r (g d) s")
        yield Case(f"group_norm_backward {t}", text, ROWS, group)
        text = fill(regions.BATCH_NORM_BACKWARD, c="6", t=t, x="r c s")
        yield Case(f"batch_norm_backward {t}", text, ((5,), (13,)), batch)
        text = fill(regions.BATCH_NORM_BACKWARD, c="6", t=t, x="r s c")
        yield Case(
            f"batch_norm_backward channels last {t}",
            text,
            ((5,), (13,)),
            mathematics.channels_last(batch),
        )
    text = fill(regions.GROUP_NORM_BACKWARD, c="5", x="r s (g d)")
    yield Case("group_norm_backward channels last", text, ROWS, mathematics.channels_last(group))
    text = fill(regions.GROUP_NORM_BACKWARD, c="1", r="4", x="r (g d) s")
    yield Case("group_norm_backward one channel a group", text, ((),), group)
    # Many channels are enough pieces of work: both phases in one launch.
    text = fill(regions.BATCH_NORM_BACKWARD, c="300", x="r c s")
    yield Case("batch_norm_backward many channels", text, ((3,),), batch)


def others() -> Iterator[Case]:
    """Masks, strides, sums over everything, other axes, awkward names and values."""
    for t in ("f32", "f64", "bf16"):
        yield Case(f"masked {t}", fill(regions.MASKED, t=t), ROWS, mathematics.masked)
        yield Case(f"one hot {t}", fill(regions.ONE_HOT, t=t), ROWS, mathematics.one_hot)
        yield Case(
            f"strided {t}", fill(regions.STRIDED, t=t), ((3, 20), (4, 31)), mathematics.strided
        )
        yield Case(f"global {t}", fill(regions.GLOBAL, t=t, w="f32"), ROWS, mathematics.global_norm)
        yield Case(
            f"sums of sums {t}", fill(regions.SUMS_OF_SUMS, t=t), ROWS, mathematics.sums_of_sums
        )
    yield Case("softmax over the middle", fill(regions.SOFTMAX_MIDDLE), ROWS, mathematics.softmax)
    yield Case(
        "softmax over the first",
        fill(regions.SOFTMAX_MIDDLE, r="1"),
        ((),),
        mathematics.softmax,
    )
    yield Case("names", fill(regions.NAMES), ROWS, mathematics.names)
    yield Case("extremes", fill(regions.EXTREMES), ((5,),), mathematics.extremes)
    special = {"x": [NAN, 1.0, INF, -INF, 2.0]}
    yield Case(
        "extremes of NaN and Inf",
        fill(regions.EXTREMES, c="2"),
        ((5,),),
        mathematics.extremes,
        special,
    )
    yield Case(
        "softmax of NaN", fill(regions.SOFTMAX), ((3,),), mathematics.softmax, {"x": [1.0, NAN]}
    )
    yield Case(
        "softmax of Inf",
        fill(regions.SOFTMAX),
        ((3,),),
        mathematics.softmax,
        {"x": [-INF, 1.0, 3e38]},
    )


def blocks() -> Iterator[Case]:
    """Rows and variances that are divided among programs: few long ones, and beyond registers."""
    long = {"r": "3", "c": "65536"}
    families = {
        "layer_norm_backward": (regions.LAYER_NORM_BACKWARD, mathematics.layer_norm_backward),
        "layer_norm": (regions.LAYER_NORM_FORWARD, mathematics.layer_norm),
        "softmax": (regions.SOFTMAX, mathematics.softmax),
        "three_levels": (regions.THREE_LEVELS, mathematics.three_levels),
    }
    for name, (text, oracle) in families.items():
        for t in ("f32", "bf16"):
            yield Case(f"{name} {t}", fill(text, t=t, **long), ((),), oracle)
        sizes = fill(text, c="?", r="?")
        yield Case(f"{name} of sizes known at run time", sizes, ((3, 65536),), oracle)
    text = fill(regions.LAYER_NORM_BACKWARD, c="16640", r="17")
    yield Case("layer_norm_backward added up", text, ((),), mathematics.layer_norm_backward)
    oracles = {"r c s": mathematics.batch_norm, "r s c": mathematics.batch_norm_channels_last}
    for layout, oracle in oracles.items():
        text = fill(regions.BATCH_NORM, c="6", r="3", v="36864", x=layout)
        yield Case(f"batch_norm {layout}", text, ((),), oracle)


def functions() -> Iterator[Case]:
    """Every function of the pointwise table, of values and of literals."""
    from normpass.backend.program.pointwise import POINTWISE

    positive = {"sqrt", "rsqrt", "log", "log1p", "pow"}
    for fn, row in POINTWISE.items():
        count = row.cpp.count("{")
        for t in ("f32", "f64"):
            variants = {"": ["x", "y", "z"][:count]}
            if count > 1:
                variants[" of a literal"] = ["x", *["0.1"] * (count - 1)]
                variants[" of a literal first"] = ["0.1", *["y", "z"][: count - 1]]
            for variant, args in variants.items():
                if "0" in row.truth or "1" in row.truth:
                    args = ["m", *args[1:]]
                text = fill(UNARY, t=t).replace("%F", f"{fn}({', '.join(args)})")
                text = text.replace("%O", "b8" if "r" in row.truth else t)
                oracle = pointwise(fn, args, absolute=fn in positive)
                text = text.replace("%A", ABS[fn in positive])
                cut = cut_off if fn == "to_bfloat16" else None
                yield Case(f"{fn} {t}{variant}", text, ((7,),), oracle, EQUALS, cut)


EQUALS = {"a": [0.5, 0.0, -0.5], "y": [-0.5, 0.0, 0.5], "z": [0.0, NAN, INF]}
ABS = {True: "abs", False: "neg"}
ROUNDINGS = {
    f"to_{str(dtype).removeprefix('torch.')}": dtype
    for dtype in (
        *(torch.bfloat16, torch.float16, torch.int8, torch.uint8),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
UNARY = """
region function
axes    r=%R
input   a: %T[r]
input   y: %T[r]
input   z: %T[r]
m       = gt(a, 0.0)
x       = %A(a)
out     = %F
output  o: %O[r] = out
"""


def pointwise(fn: str, args: Sequence[str], *, absolute: bool) -> Callable[..., Any]:
    def oracle(a: Tensor, y: Tensor, z: Tensor) -> Any:
        values = {"a": a, "y": y, "z": z, "m": a > 0, "x": a.abs() if absolute else -a}
        given = [values[v] if v in values else torch.tensor(float(v), dtype=a.dtype) for v in args]
        if fn in ROUNDINGS:
            return (given[0].to(ROUNDINGS[fn]).to(a.dtype),)
        return (getattr(torch, fn)(*given),)

    return oracle


def cut_off(a: Tensor, **_: Tensor) -> tuple[Tensor]:
    """-a as Triton's interpreter (3.6, 3.9) converts it to bfloat16: without rounding."""
    return ((-a.float()).view(torch.int32).bitwise_and(~0xFFFF).view(torch.float32).to(a.dtype),)


FAMILIES = {
    "norms": norms,
    "examples": examples,
    "channels": channels,
    "others": others,
    "blocks": blocks,
    "functions": functions,
}


# ---- running them


IN_PIECES, SUMS_HELD = ", in pieces", ", sums held"


def tilings() -> dict[str, Tiling | None]:
    """As on a GPU, with blocks so small that everything streams, with several blocks for each row,
    and with such for the sums along a row alone.
    """
    from normpass.backend.program.machine import Tiling

    return {
        "": None,
        ", streamed": Tiling(resident=1, chunk=64, tile=64, kept=4),
        IN_PIECES: Tiling(piece=8, tile=256),
        SUMS_HELD: Tiling(resident=1, long_piece=16, tile=256),
    }


def check(case: Case, tiling: Tiling | None, device: str) -> None:
    """Raises AssertionError if a region's outputs are further from the oracle than they may be."""
    from normpass.backend.program.machine import GPU
    from normpass.backend.program.sizes import size_classes
    from normpass.backend.run.launch_triton import TritonKernel
    from normpass.passes.region_text import parse

    region = parse(case.text)
    machine = replace(GPU, tiling=tiling) if tiling else GPU
    # Streaming takes many small steps, which the interpreter is slow at.
    for sizes in case.sizes if tiling is None or "f32" in case.name else case.sizes[:1]:
        kernel = TritonKernel(region, machine, size_classes(sizes))
        oracle = (device == "cpu" and case.interpreted) or case.oracle
        compare(case, kernel, sizes, device, oracle)


def check_random(examples: int) -> None:
    """Raises AssertionError for a region of random_regions.py that a kernel computes otherwise."""
    import bounded
    import random_regions
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    from numpy_dialect import SMALL_BLOCKS

    from normpass.backend.program.machine import GPU, Tiling
    from normpass.backend.program.sizes import size_classes
    from normpass.backend.run.launch_triton import TritonKernel
    from normpass.passes.region import product

    sizes_of_blocks = st.sampled_from(
        [
            Tiling(),
            Tiling(resident=64, tile=64),
            Tiling(resident=1, chunk=4, tile=32, kept=1),
            Tiling(resident=1, chunk=8, tile=8, kept=2, narrow=4, lanes=4),
            Tiling(piece=2, tile=32),
            Tiling(resident=1, chunk=4, tile=32, kept=1, long_piece=2),
        ]
    )

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        random_regions.cases() | random_regions.grouped_cases() | random_regions.chained_cases(),
        sizes_of_blocks,
        st.sampled_from([GPU.blocking, replace(SMALL_BLOCKS, narrow=sys.maxsize)]),
        st.booleans(),
    )
    def agree(case: random_regions.Case, tiling: Tiling, blocking: Blocking, known: bool) -> None:
        machine = replace(GPU, tiling=tiling, blocking=blocking)
        for extents in case.extents:
            at_a_time = 2 if blocking != GPU.blocking else min(tiling.chunk, tiling.tile)
            if product(extents.values()) > 1000 * at_a_time:
                continue  # too many small steps for the interpreter
            sizes = case.sizes(extents)
            classes = size_classes(sizes) if known else ()
            kernel = TritonKernel(case.region, machine, classes)
            inputs = random_regions.tensors(case, extents)
            expected = bounded.evaluate(case.region, inputs, sizes)
            found = kernel(inputs, sizes)
            assert not kernel._failed, f"the kernel could not be built:\n{case.region}"
            for output, ours, want in zip(case.region.outputs, found, expected, strict=True):
                what = f"{output.buffer.name}, sizes {extents}, {machine}\n{case.region}\n"
                bounded.assert_within(ours, want, what)

    agree()


def main(device: str, family: str) -> None:
    results: dict[str, str | None] = {}
    if family.isdigit():
        try:
            check_random(int(family))
            results["random"] = None
        except Exception:
            results["random"] = traceback.format_exc()
        json.dump(results, sys.stdout)
        return
    for case in FAMILIES[family]():
        # A few long rows take too many small steps for the interpreter.
        for variant, tiling in [("", None)] if family == "blocks" else tilings().items():
            if variant in (IN_PIECES, SUMS_HELD) and "f32" not in case.name:
                continue
            try:
                check(case, tiling, device)
                results[case.name + variant] = None
            except Exception:
                results[case.name + variant] = traceback.format_exc()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
