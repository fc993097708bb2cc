"""Names of a region's values and axes that mean nothing else in a kernel's text."""

from __future__ import annotations

import keyword
import re
from typing import TYPE_CHECKING

from normpass.backend.codegen.text import extent_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from normpass.backend.program.tree import Plan


class Names:
    """What axes and values are called: as in the region, unless the name is needed otherwise.

    reserved: what else a dialect's text speaks of.
    """

    def __init__(self, plan: Plan, reserved: Iterable[str]) -> None:
        region = plan.region
        values = [*(b.name for b in region.inputs), *(op.name for op in region.ops)]
        axes = [axis.name for axis in plan.axes]
        taken = set(reserved)
        taken |= {f"{prefix}_{v}" for v in values for prefix in ("p", "acc", "parts", "kept")}
        taken |= {f"p_{output.buffer.name}" for output in region.outputs}
        taken |= {f"n_{name}" for name in (*axes, *region.runtime_sizes)}
        taken |= {extent_name(axis, region) for axis in plan.axes}
        taken |= {f"mask_{axis}" for axis in axes} | {f"{axis}_0" for axis in axes}
        self.axis = {axis: self._free(axis, taken) for axis in axes}
        self.value = {value: self._free(value, taken) for value in values}

    def _free(self, name: str, taken: set[str]) -> str:
        text = re.sub(r"\W", "_", name)
        text = f"v{text}" if text[:1].isdigit() else text
        while text in taken or keyword.iskeyword(text):
            text += "_"
        taken.add(text)
        return text
