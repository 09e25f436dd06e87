"""Functions of pieces that are straight or square: LeakyReLU, Hardtanh and ReLU6, Hardswish."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Inverse


@dataclass(frozen=True)
class LeakyReLU(Inverse):
    """``y = x`` for x > 0, else ``slope x`` with slope > 0. The derivative takes no more of x than its sign.

    Attributes:
        slope: The slope on the left.
    """

    slope: float

    def function(self, x: Tensor) -> Tensor:
        """As in the class."""
        return torch.where(x > 0, x, self.slope * x)

    def restore(self, y: Tensor, left: Tensor | None) -> Tensor:  # noqa: ARG002 - the base's signature
        """y, divided by the slope on the left."""
        most = torch.finfo(y.dtype).max
        return torch.where(y > 0, y, (y / self.slope).clamp(-most, most))


@dataclass(frozen=True)
class Hardtanh(Inverse):
    """``y = min(max(x, low), high)``: the derivative only compares x with the ends.

    Attributes:
        low: The lower end.
        high: The upper end.
    """

    low: float
    high: float

    def function(self, x: Tensor) -> Tensor:
        """As in the class."""
        return x.clamp(self.low, self.high)

    def restore(self, y: Tensor, left: Tensor | None) -> Tensor:  # noqa: ARG002 - the base's signature
        """Y itself."""
        return y


@dataclass(frozen=True)
class Hardswish(Inverse):
    """``y = x min(max(x + 3, 0), 6) / 6``: a square between -3 and 3, whose minimum is at -3/2.

    The derivative's comparisons with -3 and 3 are pinned beside the branch bit. In between ``x = -3/2 +- sqrt(9/4 + 6 y)``,
    and the derivative x / 3 + 1/2 is that root over 3: within 1.2 times of what float64 makes of the same y.
    """

    def function(self, x: Tensor) -> Tensor:
        """As in the class."""
        return x * (x + 3).clamp(0, 6) / 6

    def branch(self, x: Tensor) -> Tensor:
        """Whether x lies left of the minimum."""
        return x < -1.5

    def restore(self, y: Tensor, left: Tensor | None) -> Tensor:
        """The root on the side of the branch; y itself from 3 on."""
        assert left is not None
        root = ((y + 0.375) * 6).clamp_min(0).sqrt()
        return torch.where(y >= 3, y, torch.where(left, -root, root) - 1.5)
