"""Which inputs of a graph are written to.

AOTAutograd makes a graph functional and writes to its inputs afterwards: by copies in the graph
itself, or, where a gradient goes through, outside of it. Then the graph returns the new value, and
the output's description says whose it is.

Private: the descriptions in meta["desc"] (torch._functorch._aot_autograd.descriptors), checked on
torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normpass.passes.regions import mutates

if TYPE_CHECKING:
    from torch.fx import Graph, Node


def constant_inputs(joint: Graph) -> set[Node]:
    """The inputs of a joint graph that nothing writes to; none if that cannot be told."""
    (output,) = joint.find_nodes(op="output")
    inputs: dict[Any, Node] = {n.meta.get("desc"): n for n in joint.find_nodes(op="placeholder")}
    results: Any = output.meta.get("desc")
    if results is None or None in inputs:
        return set()
    written = [what for desc in results if (what := getattr(desc, "mutated_input", None))]
    if not inputs.keys() >= set(written):
        return set()
    constant = set(inputs.values()) - {inputs[what] for what in written}
    return constant - {arg for node in joint.nodes if mutates(node) for arg in node.all_input_nodes}
