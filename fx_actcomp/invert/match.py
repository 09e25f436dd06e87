"""Which invertible function a piece of a graph computes: asked of its values, so that the way it is written doesn't matter.

``aten.gelu``, its decomposition in any version of torch, a formula written by hand and the activation classes of other
libraries all give the same numbers on a grid. A candidate's parameters are read off a few values, and the whole grid decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .base import Inverse
from .monotone import ELU, LogSigmoid, Softplus, Softsign, inner_slope
from .piecewise import Hardswish, Hardtanh, LeakyReLU
from .smooth import Smooth

Function = Callable[[Tensor], Tensor]


def recognize(function: Function) -> Inverse | None:
    """The inverse of a pointwise function; None where it is none of those that have one.

    Args:
        function: Takes and gives float64 tensors of one dimension.
    """
    grid = _grid()
    values = function(grid)
    if values.shape != grid.shape or not values.isfinite().all():
        return None
    for candidate in _candidates(lambda x: float(function(torch.tensor([x], dtype=torch.float64))[0])):
        if torch.allclose(candidate.function(grid), values, rtol=1e-6, atol=1e-9):
            return candidate
    return None


def _grid() -> Tensor:
    """Dense around zero and the minima, and far out on both sides."""
    dense, far = torch.linspace(-8, 8, 321, dtype=torch.float64), torch.logspace(1, 3, 40, dtype=torch.float64)
    return torch.cat([dense, far, -far])


def _candidates(at: Callable[[float], float]) -> Iterator[Inverse]:
    """Every family, with the parameters that its members would need to have these values."""
    yield from (Smooth("gelu"), Smooth("gelu_tanh"), Smooth("silu"), Smooth("mish"), Hardswish(), LogSigmoid(), Softsign())
    one, left, far_left, far_right = at(1.0), at(-1.0), at(-1000.0), at(1000.0)
    if 0.5 < one < 1:
        yield Smooth("silu", math.log(one / (1 - one)))  # x sigmoid(a x) at 1
    if 0 < -left < 1 and far_left < 999 * left:
        yield LeakyReLU(-left)
    if far_left < far_right and abs(far_left) < 100 and abs(far_right) < 100:
        yield Hardtanh(far_left, far_right)
    if far_left < 0 and far_left < left < 0 < one:
        yield ELU(far_right / 1000, -far_left, inner_slope(far_left, left))
    if at(0.0) > 0:
        yield Softplus(math.log(2) / at(0.0))
