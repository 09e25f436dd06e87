"""Quantization by groups: minimum and scale of each group, codes of 1 to 8 bits, exact signs where x >= 0.

Per-group asymmetric codes: ActNN (arXiv 2104.14129), section 3; GACT (arXiv 2206.11357). The sign-exact code is the
zero-aligned bin of BLPA (arXiv 1901.07988), section 3, on the data's own range.

Known limit: one outlier sets the scale of its group, and the group's small values are lost in its first code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._torch import size_hint
from .base import Codec, Parts, Traits
from .bits import memory_shape, pack, packing_dim, unpack
from .layout import Layout, group_view


@dataclass(frozen=True)
class Quantize(Codec):
    """``bits``-bit codes with two fp32 numbers (one, where sign-exact) a group.

    With lo and hi the group's minimum and maximum:

    * asymmetric: ``s = (hi - lo) / 2**bits``, ``q = floor((x - lo) / s)``, ``x' = lo + (q + 1/2) s``; ``|x' - x| <= s / 2``.
      A code stands for the middle of its bin, so no code is spent on the very ends of the range (ActNN spends two);
    * sign-exact, where x >= 0 is proved: ``s = hi / (2**bits - 1)``, code 0 is exactly 0, ``q = ceil(x / s)``,
      ``x' = (q - 1/2) s``; ``|x' - x| <= s / 2`` and ``(x' > 0) == (x > 0)``.

    For a range below the smallest normal number the bound is that number; a constant comes back as it was. A group with an
    infinity or a NaN comes back as NaN (sign-exact: its zeros as 0, all else as the infinity or NaN), so an overflow stays
    visible to a ``GradScaler``; other groups are unharmed.

    Metadata is fp32 and not bf16, since Inductor removes a bf16 round trip inside one graph and would then quantize with
    another scale than it stores; ``group`` 256 makes that a quarter of a bit an element.

    Attributes:
        name: ``int8``, ``int4``, ...
        bits: Bits a code: 1, 2, 4 or 8.
        group: Fewest elements of a group; see :func:`~fx_actcomp.codecs.layout.group_blocks`.
    """

    name: str
    bits: int
    group: int = 256

    keeps_sign: ClassVar[bool] = True

    def fits(self, layout: Layout, traits: Traits) -> str | None:  # noqa: ARG002 - a codec's signature
        """Only floating-point tensors with elements; below 4 bits, with a known size to cut into a byte's parts."""
        sizes = memory_shape(layout)
        if self.bits < 4 and sizes and not isinstance(sizes[packing_dim(sizes, 8 // self.bits)], int):
            return f"codec {self.name!r} needs a dimension of known size that {8 // self.bits} parts waste little of"
        return refusal(self.name, layout)

    @property
    def levels(self) -> int:
        """The largest code."""
        return int(2**self.bits - 1)

    def compress(self, x: Tensor, traits: Traits) -> Parts:
        """Codes in the layout of ``x``, then the scale and (asymmetric) the minimum of each group."""
        layout = Layout.of(x)
        memory = layout.to_memory(x)
        values, dims = self._groups(memory.to(computed_in(x.dtype)), layout, traits)
        encode = self._encode_sign_exact if traits.sign_exact else self._encode
        codes, *metadata = encode(values, dims)
        return (pack(codes.to(torch.uint8).view(memory.shape), self.bits), *metadata)

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """Values from codes; see the class for the bound."""
        shape = memory_shape(layout)
        codes = unpack(parts[0], self.bits, shape).to(parts[1].dtype)
        grouped, _ = self._groups(codes, layout, traits)
        if traits.sign_exact:
            positive = ((grouped - 0.5) * parts[1]).clamp_min(smallest(layout.dtype))
            grouped = torch.where(grouped == 0, 0.0, positive)
        else:
            most = torch.finfo(layout.dtype).max / 2  # halves, since high - low may be twice the largest number
            grouped = (parts[2] / 2 + (grouped + 0.5) * (parts[1] / 2)).clamp(-most, most) * 2
        return layout.from_memory(grouped.to(layout.dtype).view(shape))

    def _groups(self, memory: Tensor, layout: Layout, traits: Traits) -> tuple[Tensor, list[int]]:
        return group_view(memory, layout.groups(traits.spatial, self.group))

    def _encode(self, x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
        bins = self.levels + 1
        scale = high / bins - low / bins  # in this order, and below by halves: high - low may overflow
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        steps = (x / 2 - low / 2) / scale.clamp_min(torch.finfo(x.dtype).tiny) * 2
        return steps.floor().clamp(0, self.levels), scale, low

    def _encode_sign_exact(self, x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
        scale = (x.amax(dims, keepdim=True) / self.levels).clamp_min(torch.finfo(x.dtype).tiny)
        steps = x / scale
        codes = torch.where(steps < self.levels, steps.ceil().clamp_min(1), self.levels)  # NaN steps: the largest code
        return torch.where(x <= 0, 0.0, codes), scale


def refusal(name: str, layout: Layout) -> str | None:
    """Why a codec for values can't take a tensor: no floats, no elements, or a number of them that may be none."""
    if layout.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return f"codec {name!r} takes floating-point tensors, not {str(layout.dtype).removeprefix('torch.')}"
    if not layout.shape or 0 in layout.shape:
        return "a single element, or none"
    if any(size_hint(size) is None for size in layout.shape):
        return "a size that is only known at run time may be 0"
    return None


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which codes are computed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number that survives a cast to ``dtype``, also where subnormals of fp32 are flushed."""
    info = torch.finfo(dtype)
    return info.smallest_normal if dtype is not torch.float16 else 2.0**-24
