"""What an inverse is: the function's input, or its derivative there, from its output and at most one bit an element."""

from __future__ import annotations

import abc
from typing import ClassVar

from torch import Tensor


class Inverse(abc.ABC):
    """Restores the input of a pointwise function from its output.

    Attributes:
        differentiates: Whether it has a :meth:`derivative`.

    Comparisons that the derivative makes of the input are decisions, and cross beside it: what is restored isn't compared.
    """

    differentiates: ClassVar[bool] = False

    @abc.abstractmethod
    def function(self, x: Tensor) -> Tensor:
        """The function itself, as a mathematician writes it; for matching and tests, in float64."""

    def branch(self, x: Tensor) -> Tensor | None:  # noqa: ARG002 - the signature of those that have one
        """On which side of the minimum x lies: a decision, taken in forward. None where the function is one-to-one."""
        return None

    @abc.abstractmethod
    def restore(self, y: Tensor, left: Tensor | None) -> Tensor:
        """The input, from an output in fp32 or fp64 and what ``branch`` said. Finite where y is, and NaN where y is."""

    def derivative(self, y: Tensor, left: Tensor | None) -> Tensor:
        """The derivative at the input, from the same; only where it ``differentiates``."""
        raise NotImplementedError(f"{type(self).__name__} has no derivative that costs less than restoring the input")
