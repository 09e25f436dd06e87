"""Part of stage 5: which random numbers of forward's the stock partitioner would have backward draw anew, and which repeat.

With ``activation_memory_budget`` below 1 it recomputes random operators like any other (pytorch #190758): a dropout's mask in
backward is then another one than in forward, and the gradient is wrong by as much as it is long. What was drawn is a decision:
it is handed over. Operators that checkpointing recomputes aren't meant: for these torch saves the generator's state.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ._torch import random_by_kernel
from .nodes import packet, value


def find_redrawn(forward: fx.Graph, backward: fx.Graph) -> list[str]:
    """Names of the tensors that both graphs draw, each for itself.

    Args:
        forward: The stock partitioner's forward graph.
        backward: Its backward graph.

    Returns:
        The tensors to save; where an operator has several, those that backward reads.
    """
    drawn = {node.name for node in forward.nodes if is_draw(node)}
    again = [node for node in backward.nodes if node.name in drawn and is_draw(node)]
    return [name for node in again for name in _tensors(node)]


def find_repeating(forward: fx.Graph) -> list[str]:
    """Names of the random tensors in which Inductor's kernels may repeat numbers, as they do in plain torch.compile."""
    return [n.name for n in forward.nodes if packet(n) == "prims.inductor_random" and random_by_kernel(n.meta["val"].device)]


def is_draw(node: fx.Node) -> bool:
    """Whether the node's numbers are others the next time it runs, or in another kernel."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return packet(node) == "prims.inductor_random" and random_by_kernel(node.meta["val"].device)
    arguments = {argument.name: given for argument, given in zip(target._schema.arguments, node.args, strict=False)}
    return {**arguments, **node.kwargs}.get("dropout_p", _default(target, "dropout_p")) != 0.0


def _default(target: torch._ops.OpOverload, name: str) -> object:
    return next((argument.default_value for argument in target._schema.arguments if argument.name == name), None)


def _tensors(node: fx.Node) -> list[str]:
    if value(node) is not None:
        return [node.name]
    return [user.name for user in node.users if user.target is operator.getitem]
