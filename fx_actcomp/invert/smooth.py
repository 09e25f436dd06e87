"""Functions with one minimum: GELU, SiLU with any slope (quick-GELU), Mish.

Saving the output and one bit that says on which side of the minimum the input lay: Novikov and Oseledets, "Inverted
Activations" (arXiv 2407.15545), section 3. They approximate the derivative as a function of y; it has an infinite slope at the
minimum, but not as a function of ``t = sqrt(y - ym)``, taken from the exact difference: there a rational function gives it to
1e-6, at less cost than the error function or the exponential that torch computes it with. Where backward asks for something
else than the derivative the input itself is restored: on the left from ``u = sqrt(log(ym / y))``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Inverse
from .tables import TABLES, Piece, Ratio


@dataclass(frozen=True)
class Smooth(Inverse):
    """``y = f(scale x) / scale``, f one of GELU (``gelu``, ``gelu_tanh``), ``silu``, ``mish``.

    In fp32 the derivative, and the one at the restored input, is within 1e-5 of the exact one where ``|scale x - xm| >= 0.01``,
    xm the place of the minimum; nearer to it within 1.2 times of what the inverse of the same fp32 y gives in float64 (1.3e-4
    for GELU). In bf16 and fp16 within 1.2 times of that, too. Beyond the last y of the table the input is y on the right; on the
    left it stays where the derivative has fallen below 1e-7.

    Attributes:
        name: Key of the table.
        scale: Slope of the argument: 1, or 1.702 for quick-GELU.
    """

    name: str
    scale: float = 1.0

    differentiates: ClassVar[bool] = True

    def function(self, x: Tensor) -> Tensor:
        """f(scale x) / scale."""
        z = self.scale * x
        if self.name == "mish":
            return torch.nn.functional.mish(z) / self.scale
        if self.name == "silu":
            return torch.nn.functional.silu(z) / self.scale
        how = "tanh" if self.name == "gelu_tanh" else "none"
        return torch.nn.functional.gelu(z, approximate=how) / self.scale

    def branch(self, x: Tensor) -> Tensor:
        """Whether x lies left of the minimum."""
        return x < TABLES[self.name].x / self.scale

    def restore(self, y: Tensor, left: Tensor | None) -> Tensor:
        """The input of f."""
        assert left is not None
        table = TABLES[self.name]
        z = y * self.scale if self.scale != 1 else y
        above = _above(z, table.y)
        t = above.sqrt()
        near, far = _polynomial(table.near, t) * t, _polynomial(table.far, t.clamp_max(table.far.high)) * t
        right = torch.where(t < table.far.low, near, far) + table.x
        right = torch.where(t < table.far.high, right, z.clamp_max(_LARGE))
        ratio = above / (-z).clamp_min(torch.finfo(z.dtype).tiny)  # ym / y - 1, also where y is zero
        u = torch.log1p(ratio).sqrt().clamp_max(table.left.high)
        x = torch.where(left, _polynomial(table.left, u) * u + table.x, right)
        x = x / self.scale if self.scale != 1 else x
        return torch.where(y.isnan(), y, x)

    def derivative(self, y: Tensor, left: Tensor | None) -> Tensor:
        """Slope of f at the input."""
        assert left is not None
        table = TABLES[self.name]
        z = y * self.scale if self.scale != 1 else y
        t = _above(z, table.y).sqrt().clamp_max(table.rise.middle + table.rise.half)
        return t * torch.where(left, _ratio(table.fall, t) * (z * (1 / table.y)), _ratio(table.rise, t))


def _above(z: Tensor, lowest: float) -> Tensor:
    """Height above the minimum, which is no number of z's type: subtracted in two parts, the first of which is exact near it."""
    (high,) = struct.unpack("f", struct.pack("f", lowest))
    above: Tensor = (z - high) - (lowest - high)
    return above.clamp_min(0)


_LARGE = 1e4
"""All these functions are the identity to the last bit from here on, and their derivatives' inner powers don't overflow."""


def _polynomial(piece: Piece, v: Tensor) -> Tensor:
    """Horner's scheme in ``(v - middle) / half``."""
    half = (piece.high - piece.low) / 2
    return _horner(piece.powers, v * (1 / half) - (piece.low + piece.high) / 2 / half)


def _ratio(ratio: Ratio, t: Tensor) -> Tensor:
    v = t * (1 / ratio.half) - ratio.middle / ratio.half
    return _horner(ratio.above, v) / _horner(ratio.below, v)


def _horner(powers: Sequence[float], z: Tensor) -> Tensor:
    total = z * powers[-1] + powers[-2]
    for power in reversed(powers[:-2]):
        total = total * z + power
    return total
