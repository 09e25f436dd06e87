"""8-bit floats with a scale a row: small values keep their precision beside large ones.

Scaled fp8 activations: COAT (arXiv 2410.19313), section 4; torch's own fp8 pass scales rows likewise, but unscales in
backward only where an option says so. Here decompress divides by nothing that compress didn't multiply by: the scale is a
part, and the two are one class.

Known limits: 3 (e4m3fn) or 2 (e5m2) bits of mantissa, so in the upper half of a row's range ``int8`` is more exact; and
Inductor's Triton code for e4m3fn needs compute capability 8.9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Codec, Parts, Traits
from .bits import memory_shape
from .layout import Layout, group_view
from .quantize import computed_in, refusal, smallest


@dataclass(frozen=True)
class _Format:
    """An 8-bit float: its type, the largest code for finite values, what stands for infinity, and its smallest codes."""

    dtype: torch.dtype
    largest: float
    infinity: float
    smallest: float


_FORMATS = {
    # e4m3fn has no infinity: its largest number, 448, stands for it, and finite values end at the number below
    "e4m3fn": _Format(torch.float8_e4m3fn, 416.0, 448.0, 2.0**-9),
    "e5m2": _Format(torch.float8_e5m2, 57344.0, float("inf"), 2.0**-16),
}


@dataclass(frozen=True)
class Float8(Codec):
    """An 8-bit float times one fp32 scale a row: ``s = max |x| / L`` over its finite values, ``x' = s fp8(x / s)``.

    L is 416 for e4m3fn and 57344 for e5m2. ``|x' - x|`` is at most ``2**-4 |x|`` or ``2**-10 s`` (e4m3fn), ``2**-3 |x|`` or
    ``2**-17 s`` (e5m2), whichever is larger; for a range below the smallest normal number at most that number. An infinity
    comes back as itself and a NaN as NaN, and neither harms its row. Where x >= 0 is proved, a positive value comes back as
    at least the smallest code times s, so ``x > 0`` stays exact; then the second bound is twice as large.

    Attributes:
        name: ``fp8``.
        format: ``"e4m3fn"`` or ``"e5m2"``.
        group: Fewest elements of a row; see :func:`~fx_actcomp.codecs.layout.group_blocks`.
    """

    name: str = "fp8"
    format: str = "e4m3fn"
    group: int = 256

    keeps_sign: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ValueError(f"format is {self.format!r}; there are: {', '.join(_FORMATS)}")
        if self.group < 1:
            raise ValueError(f"group is {self.group}; expected 1 or more elements (at least 128 pay)")

    @property
    def bits(self) -> int:  # type: ignore[override] # it follows from the format
        """Bits of precision: the mantissa's and the one that isn't stored."""
        return 4 if self.format == "e4m3fn" else 3

    def fits(self, layout: Layout, traits: Traits) -> str | None:  # noqa: ARG002 - a codec's signature
        """Only floating-point tensors with elements."""
        return refusal(self.name, layout)

    def compress(self, x: Tensor, traits: Traits) -> Parts:
        """8-bit floats in the layout of ``x``, then each row's scale."""
        layout, kind = Layout.of(x), _FORMATS[self.format]
        memory = layout.to_memory(x)
        values, dims = group_view(memory.to(computed_in(x.dtype)), layout.groups(traits.spatial, self.group))
        finite = values.isfinite()
        amax = torch.where(finite, values.abs(), 0.0).amax(dims, keepdim=True)
        scale = (amax / kind.largest).clamp_min(torch.finfo(values.dtype).tiny)
        codes = (values / scale).clamp(-kind.largest, kind.largest)
        if traits.sign_exact:
            codes = torch.where(values > 0, codes.clamp_min(kind.smallest), codes)
        codes = torch.where(finite, codes, torch.where(values.isnan(), torch.nan, values.sign() * kind.infinity))
        return codes.to(torch.float32).to(kind.dtype).view(memory.shape), scale

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """Codes times scales."""
        kind, shape = _FORMATS[self.format], memory_shape(layout)
        codes, _ = group_view(parts[0].to(parts[1].dtype), layout.groups(traits.spatial, self.group))
        values = codes * parts[1]
        if traits.sign_exact:
            values = torch.where(codes > 0, values.clamp_min(smallest(layout.dtype)), values)
        most = torch.finfo(layout.dtype).max
        values = torch.where(codes.abs() < kind.infinity, values.clamp(-most, most), codes * torch.inf)
        return layout.from_memory(values.to(layout.dtype).view(shape))
