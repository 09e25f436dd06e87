"""One-to-one functions whose inverse is a formula: ELU, SELU, CELU, Softplus, LogSigmoid, Softsign."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Inverse

_FAR = 104.0
"""exp(-104) is zero in fp32."""


@dataclass(frozen=True)
class ELU(Inverse):
    """``y = positive x`` for x > 0, else ``negative (exp(inner x) - 1)``: ELU, SELU (positive 1.05) and CELU (inner 1 / alpha).

    The derivative on the left is ``inner (y + negative)``, so an error of y in its last place stays one of the derivative:
    within 1e-6 times ``negative inner`` in fp32.

    Attributes:
        positive: Slope on the right.
        negative: What the left side tends to, times -1.
        inner: Slope inside the exponential.
    """

    positive: float
    negative: float
    inner: float

    def function(self, x: Tensor) -> Tensor:
        """As in the class."""
        return torch.where(x > 0, self.positive * x, self.negative * torch.expm1(self.inner * x))

    def restore(self, y: Tensor, left: Tensor | None) -> Tensor:  # noqa: ARG002 - the base's signature
        """Logarithm on the left."""
        ratio = (y / self.negative).clamp_min(-1)
        return torch.where(y > 0, y / self.positive, torch.log1p(ratio).clamp_min(-_FAR) / self.inner)


@dataclass(frozen=True)
class Softplus(Inverse):
    """``y = log(1 + exp(beta x)) / beta``: ``x = y + log(1 - exp(-beta y)) / beta``; derivative ``1 - exp(-beta y)``.

    Within 1e-6 in fp32. Where torch replaces the function by x, beyond its threshold, the two differ by less than that.

    Attributes:
        beta: Sharpness.
    """

    beta: float

    def function(self, x: Tensor) -> Tensor:
        """As in the class."""
        return torch.nn.functional.softplus(x, self.beta, threshold=50.0)

    def restore(self, y: Tensor, left: Tensor | None) -> Tensor:  # noqa: ARG002 - the base's signature
        """As in the class."""
        bent = torch.log(-torch.expm1(-self.beta * y)).clamp_min(-_FAR) / self.beta
        return torch.where(y.isnan(), y, y.clamp_max(torch.finfo(y.dtype).max) + bent)


@dataclass(frozen=True)
class LogSigmoid(Inverse):
    """``y = -log(1 + exp(-x))``: ``x = y - log(1 - exp(y))``; derivative ``1 - exp(y)``, within 1e-6 in fp32."""

    def function(self, x: Tensor) -> Tensor:
        """As in the class."""
        return torch.nn.functional.logsigmoid(x)

    def restore(self, y: Tensor, left: Tensor | None) -> Tensor:  # noqa: ARG002 - the base's signature
        """As in the class."""
        low = y.clamp_min(-torch.finfo(y.dtype).max)
        return torch.where(y.isnan(), y, low - torch.log(-torch.expm1(low)).clamp_min(-_FAR))


@dataclass(frozen=True)
class Softsign(Inverse):
    """``y = x / (1 + |x|)``: ``x = y / (1 - |y|)``, derivative ``(1 - |y|)**2``, within 1e-6 in fp32."""

    def function(self, x: Tensor) -> Tensor:
        """As in the class."""
        return x / (1 + x.abs())

    def restore(self, y: Tensor, left: Tensor | None) -> Tensor:  # noqa: ARG002 - the base's signature
        """As in the class; the largest input at the ends, where y rounds to 1."""
        return y / (1 - y.abs()).clamp_min(torch.finfo(y.dtype).eps / 4)


def inner_slope(low: float, half: float) -> float:
    """The ``inner`` of an ELU from its limit (negative) and its value at -1."""
    return -math.log1p(-half / low)
