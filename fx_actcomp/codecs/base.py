"""What a codec is: three methods and a name."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..invert import Inverse
from ..records import Role
from .layout import Layout
from .noise import Noise

Parts = tuple[Tensor, ...]
"""What is saved instead of the tensor."""


@dataclass(frozen=True)
class Reference:
    """What a batch norm knows of its input: one number a channel each, of any shape with so many elements.

    Attributes:
        mean: The mean.
        rstd: One over the standard deviation.
        weight: The norm's weight; None for ones.
        bias: The norm's bias; None for zeros.
        rectified: In forward, the ReLU of the norm's output, where the codes are to serve for it too.
    """

    mean: Tensor
    rstd: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    rectified: Tensor | None = None


@dataclass(frozen=True)
class Traits:
    """What the planner knows of a tensor and a codec may build on.

    Attributes:
        sign_exact: Never negative, and ``x > 0`` must come back exactly as it was.
        spatial: Operand of a convolution, pooling or batch norm: its last dimensions are height and width.
        roles: What backward does with the values (decisions and sizes apart).
        pointwise: Whether these convolutions are 1x1 with stride 1 and no padding.
        shares: Never negative, and shares of a whole: probabilities, of which most are far smaller than the largest.
        upper: Inclusive bound on an integer tensor's values, none of which is negative.
        normed: Whether it is a batch norm's input, in training.
        rectified: Whether the codes are to serve for the ReLU of that norm's output, too.
        inverse: How to restore it from a function of it that is saved exactly.
        noise: Random numbers, for a codec that is ``stochastic``; there while it compresses.
        reference: The norm's statistics and parameters, for a codec that is ``referenced``; there on both sides.
        output: The output of the function that ``inverse`` inverts; there in backward.
    """

    sign_exact: bool = False
    spatial: bool = False
    roles: frozenset[Role] = frozenset()
    pointwise: bool = False
    shares: bool = False
    upper: int | None = None
    normed: bool = False
    rectified: bool = False
    inverse: Inverse | None = None
    noise: Noise | None = field(default=None, compare=False, repr=False)
    reference: Reference | None = field(default=None, compare=False, repr=False)
    output: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def convolved(self) -> bool:
        """Whether convolutions' weight gradients alone read it."""
        return self.spatial and self.roles == {Role.CONV_WEIGHT_GRAD}


class Codec(abc.ABC):
    """Compresses a tensor for the time between forward and backward.

    ``compress`` and ``decompress`` are plain Python functions of ATen operators; they are traced into the graphs, so that
    the compiler fuses them into the tensor's producer and consumers. They may not branch on values.

    A codec that is a dataclass has parameters: its fields that have a default, ``name`` and ``bits`` apart.

    Attributes:
        name: What users write in a policy or an override.
        bits: Bits of precision that it keeps (``records.MIN_BITS`` says what each use asks for); None where lossless.
        keeps_sign: Whether ``x > 0`` comes back exactly where ``Traits.sign_exact`` asks for it.
        referenced: Whether it builds on ``Traits.reference``, and then serves for the norm's ReLU by :meth:`rectify`.
    """

    name: str
    bits: int | None
    keeps_sign: ClassVar[bool] = False
    referenced: ClassVar[bool] = False

    @property
    def stochastic(self) -> bool:
        """Whether ``compress`` draws from ``Traits.noise``."""
        return False

    @abc.abstractmethod
    def fits(self, layout: Layout, traits: Traits) -> str | None:
        """Say why it can't take such a tensor, as a phrase a person can read; None where it can."""

    @abc.abstractmethod
    def compress(self, x: Tensor, traits: Traits) -> Parts:
        """Compress ``x``, in forward."""

    def contracts(self, traits: Traits) -> bool:  # noqa: ARG002 - a codec's signature
        """Whether weight gradients of pointwise convolutions are taken from small tensors: see :meth:`contract`."""
        return False

    def contract(self, gradient: Tensor, parts: Parts, layout: Layout) -> tuple[Tensor, Tensor, int]:
        """Shrink a convolution's output gradient and its compressed input to the small pair with the same weight gradient.

        Args:
            gradient: The gradient of the pointwise convolution's output, (N, C_out, *space).
            parts: What ``compress`` made of its input.
            layout: The input's layout.

        Returns:
            A gradient and an input, and the number by which their weight gradient is to be multiplied.
        """
        raise NotImplementedError(f"codec {self.name!r} contracts nothing")

    def rectify(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """Restore the ReLU of the batch norm's output from the codes of its input, in backward."""
        raise NotImplementedError(f"codec {self.name!r} knows no norm")

    @abc.abstractmethod
    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """Restore a tensor with the shape, strides and dtype of ``layout``, in backward."""
