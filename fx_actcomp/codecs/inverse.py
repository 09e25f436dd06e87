"""Nothing but a branch bit: the input of an activation function, restored from its output.

Novikov and Oseledets, "Inverted Activations" (arXiv 2407.15545); for the functions and their bounds see ``fx_actcomp.invert``.

Known limit: the output must be saved exactly. From an output in 8 bits the derivative of GELU, SiLU, Mish and Hardswish has 3
to 4 times the error that it has from an input in 8 bits (``python benchmarks/inverses.py``): the planner never does that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..invert import Inverse
from .base import Codec, Parts, Traits
from .bits import memory_shape, pack, unpack
from .layout import Layout
from .quantize import computed_in, refusal


@dataclass(frozen=True)
class Invert(Codec):
    """The branch of the input, one bit an element where the function has a minimum, else nothing.

    Attributes:
        name: ``invert``.
    """

    name: str = "invert"

    bits = 24  # of precision: what is restored is as exact as the output's own rounding allows

    def fits(self, layout: Layout, traits: Traits) -> str | None:
        """Only the input of an invertible function whose output is saved exactly."""
        if traits.inverse is None:
            return f"codec {self.name!r} takes only the input of an invertible function whose output is saved exactly"
        return refusal(self.name, layout)

    def compress(self, x: Tensor, traits: Traits) -> Parts:
        """The branch, where there is one."""
        left = _inverse(traits).branch(x)
        return () if left is None else (pack(Layout.of(x).to_memory(left), 1),)

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """The input, from ``traits.output``."""
        y, left = self._held(parts, layout, traits)
        most = torch.finfo(layout.dtype).max
        return layout.restore(_inverse(traits).restore(y, left).clamp(-most, most).to(layout.dtype))

    def derivative(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """The derivative at the input, from ``traits.output``; in at least fp32."""
        return _inverse(traits).derivative(*self._held(parts, layout, traits))

    def _held(self, parts: Parts, layout: Layout, traits: Traits) -> tuple[Tensor, Tensor | None]:
        """The output, in the type to compute in, and the branch."""
        if traits.output is None:
            raise ValueError(f"codec {self.name!r} was given no Traits.output to restore the input from")
        left = layout.from_memory(unpack(parts[0], 1, memory_shape(layout)).to(torch.bool)) if parts else None
        return traits.output.reshape(layout.shape).to(computed_in(layout.dtype)), left


def _inverse(traits: Traits) -> Inverse:
    assert traits.inverse is not None
    return traits.inverse
