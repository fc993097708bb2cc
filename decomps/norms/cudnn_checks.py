"""What cuDNN's wrapper asks of batch norm's arguments: in its order, and with its messages.

A call that runs by the rules here is then one that runs on cuDNN. Where there is none, two things
more are allowed: tensors on the CPU, all of them, and float32 parameters of a bfloat16 input, which
the wrapper takes for half inputs alone.

Under vmap nothing is asked: functorch calls the wrapper with a weight and a bias of its own making,
and has no error for one that is missing or of another dtype. Nor are MIOpen's operators asked: what
its wrapper wants of halves and of memory formats is not the same in the versions of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from normpass.decomps.activation.levels import in_vmap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

aten = torch.ops.aten

FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


class Argument(NamedTuple):
    """An argument of the wrapper's (upstream's TensorArg); None is an undefined tensor."""

    position: int
    name: str
    value: Any

    def __str__(self) -> str:
        return f"argument #{self.position} '{self.name}'"


class Checks:
    """Upstream's checks of TensorUtils.cpp, by their names there without `check`.

    They raise RuntimeError. Sizes that a trace does not know are taken to be right.
    """

    def __init__(self, checked: str) -> None:
        self.checked = checked

    def fail(self, message: str) -> NoReturn:
        raise RuntimeError(f"{message} (while checking arguments for {self.checked})")

    def all_defined(self, *arguments: Argument) -> None:
        for t in arguments:
            if t.value is None:
                self.fail(f"Expected tensor for {t} to be non-null, but it was undefined ")

    def all_same_gpu(self, *arguments: Argument) -> None:
        for first, t in _with_first(arguments):
            on_cpu = [u for u in (first, t) if u.value.device.type == "cpu"]
            if len(on_cpu) == 1:
                self.fail(f"Tensor for {on_cpu[0]} is on CPU, but expected it to be on GPU")
            devices = [u.value.get_device() for u in (first, t)]
            if devices[0] != devices[1]:
                self.fail(
                    f"Expected tensor for {first} to have the same device as tensor for {t}; but "
                    f"device {devices[0]} does not equal {devices[1]}"
                )

    def scalar_type(self, t: Argument, dtype: torch.dtype) -> None:
        if t.value.dtype != dtype:
            self.fail(
                f"Expected tensor for {t} to have scalar type {_scalar_type(dtype)}; but got "
                f"{_type(t.value)} instead"
            )

    def all_same_type(self, *arguments: Argument) -> None:
        for first, t in _with_first(arguments):
            if first.value.dtype != t.value.dtype:
                self.fail(
                    f"Expected tensor for {first} to have the same type as tensor for {t}; but "
                    f"type {_type(first.value)} does not equal {_type(t.value)}"
                )

    def all_contiguous(self, *arguments: Argument) -> None:
        for t in arguments:
            if t.value is not None and _is_known(t.value) and not t.value.is_contiguous():
                self.fail(f"Expected contiguous tensor, but got non-contiguous tensor for {t}")

    def dim_range(self, t: Argument, start: int, end: int) -> None:
        if not start <= t.value.dim() < end:
            self.fail(
                f"Expected {start} to {end - 1} dimensions, but got {t.value.dim()}-dimensional "
                f"tensor for {t}"
            )

    def same_size(self, first: Argument, t: Argument) -> None:
        sizes = first.value.shape, t.value.shape
        if len(sizes[0]) != len(sizes[1]) or any(map(_differ, *sizes)):
            self.fail(
                f"Expected tensor for {first} to have same size as tensor for {t}; but "
                f"{list(sizes[0])} does not equal {list(sizes[1])}"
            )

    def numel(self, t: Argument, numel: int) -> None:
        if _differ(t.value.numel(), numel):
            self.fail(
                f"Expected tensor for {t} to have {numel} elements; but it actually has "
                f"{t.value.numel()} elements"
            )

    # What both of the operators ask.

    def types(self, input: Argument, weight: Argument) -> None:
        """Parameters of the input's dtype; of a half input's, and maybe a bfloat16 one's, float."""
        if input.value.dtype == torch.float16:
            self.scalar_type(weight, torch.float32)
        elif (input.value.dtype, weight.value.dtype) != (torch.bfloat16, torch.float32):
            self.all_same_type(input, weight)


def _with_first(arguments: Sequence[Argument]) -> Iterator[tuple[Argument, Argument]]:
    """The first argument that is there with each of the others."""
    there = [t for t in arguments if t.value is not None]
    return ((there[0], t) for t in there[1:])


def _differ(one: int, other: int) -> bool:
    """Whether two sizes do, where that is known."""
    if isinstance(one, int) and isinstance(other, int):
        return one != other
    # Imported late: where no size is symbolic, nobody needs it.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(one != other)


def _is_known(value: Tensor) -> bool:
    """Whether a trace knows where the elements lie."""
    if all(isinstance(number, int) for number in (*value.shape, *value.stride())):
        return True
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    return not has_free_unbacked_symbols(value)


def _scalar_type(dtype: torch.dtype) -> str:
    """What C++ calls a dtype: Float."""
    return torch.empty(0, dtype=dtype, device="meta").type().split(".")[-1].removesuffix("Tensor")


# torch translates the names of these types, and of no others, in the messages of C++.
_TRANSLATED = ("Byte", "Char", "Double", "Float", "Int", "Long", "Short", "Half")


def _type(value: Tensor) -> str:
    """A tensor's type as messages of C++ have it in Python: torch.cuda.FloatTensor, CPUBoolType."""
    scalar, device = _scalar_type(value.dtype), value.device.type
    if device in ("cpu", "cuda") and scalar in _TRANSLATED:
        return f"torch.{'cuda.' if device == 'cuda' else ''}{scalar}Tensor"
    return f"{device.capitalize() if device == 'meta' else device.upper()}{scalar}Type"


def _check_memory_format(input: Tensor) -> None:
    # A tensor that is contiguous in any format is so in the one that it suggests.
    if _is_known(input) and not any(input.is_contiguous(memory_format=each) for each in FORMATS):
        raise RuntimeError(
            "Expected input->is_contiguous(input->suggest_memory_format()) to be true, but got "
            "false.  (Could this error message be improved?  If so, please report an enhancement "
            "request to PyTorch.)"
        )


# --- the operators ------------------------------------------------------------------------------


def cudnn_batch_norm(*args: Any) -> None:
    """Raises RuntimeError where cuDNN's wrapper would, given the operator's arguments."""
    if in_vmap():
        return
    names = ("input", "weight", "bias", "running_mean", "running_var")
    input, *parameters = (Argument(n, name, args[n - 1]) for n, name in enumerate(names, 1))
    weight, bias, *running = parameters
    check, training = Checks("cudnn_batch_norm"), args[5]
    check.all_defined(input, weight, bias)
    if not training:
        check.all_defined(*running)
    check.all_same_gpu(input, *parameters)
    check.types(input, weight)
    check.all_same_type(*parameters)
    check.all_contiguous(*parameters)
    _check_memory_format(input.value)
    check.dim_range(input, 2, 6)
    for t in parameters:
        if t.value is not None:
            check.numel(t, input.value.shape[1])


def cudnn_batch_norm_backward(*args: Any) -> None:
    """As `cudnn_batch_norm`. The wrapper makes grad_output contiguous itself, and looks neither at
    the running statistics nor at the reserve.
    """
    if in_vmap():
        return
    given = {"input": 0, "grad_output": 1, "weight": 2, "save_mean": 5, "save_var": 6}
    input, grad_output, weight, *saved = (
        Argument(n, name, args[place]) for n, (name, place) in enumerate(given.items(), 1)
    )
    check = Checks("cudnn_batch_norm_backward")
    check.all_defined(input, grad_output, weight, *saved)
    check.all_same_gpu(input, grad_output, weight, *saved)
    check.types(input, weight)
    check.all_same_type(input, grad_output)
    check.all_same_type(weight, *saved)
    check.all_contiguous(*saved)
    _check_memory_format(input.value)
    check.dim_range(input, 2, 6)
    check.same_size(input, grad_output)
    for t in (weight, *saved):
        check.numel(t, input.value.shape[1])


# Operator -> what raises where its arguments are wrong.
CHECKS: dict[Any, Callable[..., None]] = {
    aten.cudnn_batch_norm.default: cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: cudnn_batch_norm_backward,
}
