"""A region that Inductor compiles after all: its operators in its stead, where its kernels turn out
not to be built only when Inductor lowers the graph.

Uses of torch._inductor (lowering.process_subgraph_nodes, decomposition.select_decomp_table,
ir.ExternKernel.require_exact_strides) were checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from normpass.backend.run.reference import out_of_place
from normpass.passes.region_text import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node


def lowered(node: Node, inputs: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """The results of a region's node, as Inductor lowers its operators.

    inputs, sizes: the region's, as Inductor has them.
    """
    from torch._inductor import ir
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import process_subgraph_nodes

    examples: Any = map_arg(node.args, lambda argument: argument.meta["val"])
    tensors, numbers, text = examples
    region = parse(text)

    def operators(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        return [*out_of_place(region, tensors, sizes)]

    with tensors[0].fake_mode:
        module = make_fx(operators, select_decomp_table())(tensors, numbers)
    found = process_subgraph_nodes(module, [*inputs, *sizes])
    planned = ([sympy.sympify(step) for step in result.stride()] for result in node.meta["val"])
    return [*map(ir.ExternKernel.require_exact_strides, found, planned)]
