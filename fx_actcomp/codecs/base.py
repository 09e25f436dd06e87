"""What a codec is: three methods and a name."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .layout import Layout

Parts = tuple[Tensor, ...]
"""What is saved instead of the tensor."""


@dataclass(frozen=True)
class Traits:
    """What the planner knows of a tensor and a codec may build on.

    Attributes:
        sign_exact: Never negative, and ``x > 0`` must come back exactly as it was.
        spatial: Operand of a convolution, pooling or batch norm: its last dimensions are height and width.
        convolved: Read by convolutions' weight gradients alone (decisions apart).
        upper: Inclusive bound on an integer tensor's values, none of which is negative.
    """

    sign_exact: bool = False
    spatial: bool = False
    convolved: bool = False
    upper: int | None = None


class Codec(abc.ABC):
    """Compresses a tensor for the time between forward and backward.

    ``compress`` and ``decompress`` are plain Python functions of ATen operators; they are traced into the graphs, so that
    the compiler fuses them into the tensor's producer and consumers. They may not branch on values.

    Attributes:
        name: What users write in a policy or an override.
        bits: Bits of precision that it keeps (``records.MIN_BITS`` says what each use asks for); None where lossless.
        keeps_sign: Whether ``x > 0`` comes back exactly where ``Traits.sign_exact`` asks for it.
    """

    name: str
    bits: int | None
    keeps_sign: ClassVar[bool] = False

    @abc.abstractmethod
    def fits(self, layout: Layout, traits: Traits) -> str | None:
        """Say why it can't take such a tensor, as a phrase a person can read; None where it can."""

    @abc.abstractmethod
    def compress(self, x: Tensor, traits: Traits) -> Parts:
        """Compress ``x``, in forward."""

    @abc.abstractmethod
    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """Restore a tensor with the shape, strides and dtype of ``layout``, in backward."""
