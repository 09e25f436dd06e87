"""Pointwise pieces of a graph: what may stand in one, and what it computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx

from .nodes import RESHAPES, is_cast, numel, packet, value


def inputs(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node reads."""
    return [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), Tensor)]


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element comes from the elements at its place: casts, reshapes and constants count, random numbers don't."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if packet(node) in RESHAPES:
        return True
    constant = packet(node) in {"aten.full", "aten.scalar_tensor"} and numel(node) == 1
    plain = len(inputs(node)) == len(node.all_input_nodes)  # no symbols among the arguments
    return plain and (torch.Tag.pointwise in target.tags or (is_cast(node) and not _truncates(node)) or constant)


def _truncates(cast: fx.Node) -> bool:
    """Whether a cast from floats makes whole numbers or bools, which is more than rounding."""
    source, made = value(inputs(cast)[0]), value(cast)
    return source is None or made is None or (source.dtype.is_floating_point and not made.dtype.is_floating_point)


def evaluate(chain: Collection[fx.Node], given: Mapping[fx.Node, Tensor], end: fx.Node) -> Tensor:
    """The chain on other numbers, in float64: casts and views change neither.

    Args:
        chain: Pointwise nodes in graph order.
        given: Numbers for what they read.
        end: The one to return.
    """
    values = dict(given)
    device = next(iter(given.values())).device
    for node in chain:
        if is_cast(node) or packet(node) in RESHAPES:
            values[node] = values[inputs(node)[0]]
        else:
            assert callable(node.target)
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs).to(device)
    return values[end]
