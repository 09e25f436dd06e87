"""Where backward multiplies a gradient by the derivative of an invertible function, and needs its input for nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ._torch import no_fake
from .chains import evaluate, inputs, is_pointwise
from .invert import Inverse
from .nodes import numel, value
from .records import Derivative

_FACTORS = (1.0, -2.5)
"""Gradients to try: one alone doesn't show that the result is proportional to it."""


def find_derivative(x: fx.Node, inverse: Inverse) -> Derivative | None:
    """The nodes that make ``gradient * f'(x)``, where nothing else reads x or what is made of it on the way.

    As in :func:`fx_actcomp.invert.recognize`, values decide and not the way it is written.

    Args:
        x: The backward placeholder.
        inverse: What it is the input of.
    """
    inside: set[fx.Node] = {x}
    chain: list[fx.Node] = []
    leaves: dict[fx.Node, None] = {}
    constants: list[fx.Node] = []
    for node in x.graph.nodes:
        read = inputs(node)
        if not read and is_pointwise(node):
            constants.append(node)
        if inside.isdisjoint(read):
            continue
        if not is_pointwise(node) or numel(node) != numel(x):
            return None
        inside.add(node)
        chain.append(node)
        leaves.update(dict.fromkeys(arg for arg in read if arg not in inside and arg not in constants))
        if len(leaves) > 1:
            return None
        if leaves and all(user in inside for one in inside if one is not node for user in one.users):
            (gradient,) = leaves
            return _proven([*constants, *chain], x, gradient, inverse)
    return None


def _proven(chain: Sequence[fx.Node], x: fx.Node, gradient: fx.Node, inverse: Inverse) -> Derivative | None:
    made = chain[-1]
    held = value(made)
    if numel(gradient) != numel(x) or held is None or not held.dtype.is_floating_point:
        return None
    with no_fake(), torch.enable_grad():
        grid = torch.linspace(-8, 8, 321, dtype=torch.float64).requires_grad_()
        (slope,) = torch.autograd.grad(inverse.function(grid).sum(), grid)
    with no_fake(), torch.no_grad():
        tried = [evaluate(chain, {x: grid, gradient: torch.full_like(grid, factor)}, made) for factor in _FACTORS]
        same = all(torch.allclose(f, slope * factor, rtol=1e-6, atol=1e-9) for f, factor in zip(tried, _FACTORS, strict=True))
    return Derivative(made.name, gradient.name, frozenset(node.name for node in chain)) if same else None
