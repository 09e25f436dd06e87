"""Part of stage 5: which saved tensors forward itself overwrites before backward reads them.

A model updates a buffer and backward needs what was in it before. Where the model read it through a copy, torch's partitioner
saves the buffer and has backward copy it, after the update: Inductor's gradients are then silently those of the updated buffer.
"""

from __future__ import annotations

from torch import fx

from .nodes import packet, storage_base, value
from .saved import saved_nodes


def find_overwritten(forward: fx.Graph, num_outputs: int) -> list[str]:
    """Names of the saved inputs, and views of inputs, into which the graph writes.

    Args:
        forward: The stock partitioner's forward graph.
        num_outputs: How many of its outputs are the user's.
    """
    targets = [node.args[0] for node in forward.nodes if packet(node) == "aten.copy_"]
    written = {storage_base(node) for node in targets if isinstance(node, fx.Node)}
    return [node.name for node in saved_nodes(forward, num_outputs) if value(node) is not None and storage_base(node) in written]
