"""Part of stage 5: torch's activation offloading, put off until what is marked for it is compressed: codes travel, not values.

A joint pass of the user's (or of a framework) marks tensors with ``meta["should_offload"]``, and torch's partitioner would move
them to host memory before the compression sees them. It is kept from that; a mark goes on to the parts that are saved in the
tensor's stead, and torch moves these.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ._torch import enable_offloading, offloads, saved_without_version_check
from .nodes import nbytes, outputs
from .saved import saved_nodes


def offload_saved(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, static_inputs: Sequence[int]) -> int:
    """Have torch move what is marked among the saved tensors, where its offloading is on.

    Args:
        forward: The forward module, compressed.
        backward: The backward module.
        num_outputs: How many outputs of forward are the user's.
        static_inputs: Positions of the parameters and buffers among the inputs.

    Returns:
        Bytes that it moves.
    """
    if not offloads():
        return 0
    saved = set(saved_nodes(forward.graph, num_outputs))
    inputs = forward.graph.find_nodes(op="placeholder")
    marks = [saved_without_version_check(node) if isinstance(node, fx.Node) else {} for node in outputs(forward.graph)]
    enable_offloading(forward, backward, num_outputs, {inputs[position] for position in static_inputs})
    for module in (forward, backward):
        module.recompile()
    for node, mark in zip(outputs(forward.graph), marks, strict=True):
        if isinstance(node, fx.Node):
            node.meta.update(mark)
    return sum(nbytes(node) for node in saved_nodes(forward.graph, num_outputs) if node not in saved)
