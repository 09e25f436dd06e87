"""Means over windows of space: alone for the inputs of convolutions, or with a 2-bit residual.

Pooling of saved inputs: Barley and Froening, "Less Memory Means smaller GPUs" (arXiv 2409.11902). Mean plus residual:
DIVISION (arXiv 2208.04187), section 3: 8x8 means in bf16 plus the rest in 2 bits a sample and channel.

Known limit of pooling alone: it removes what varies within a window, so the weight gradient is biased; its paper trains
longer to make up for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Codec, Parts, Traits
from .bits import pack, unpack
from .layout import Layout
from .quantize import computed_in, refusal, smallest


def _windows(x: Tensor, sides: Sequence[int]) -> tuple[Tensor, list[int]]:
    """View (N, C, *space), padded at the ends to whole windows, with each side cut; and the dimensions within a window."""
    pad: list[int] = []
    for size, side in zip(reversed(x.shape[2:]), reversed(sides), strict=True):
        pad += [0, -size % side]
    if any(pad):
        x = torch.constant_pad_nd(x, pad, 0)
    cut = [part for size, side in zip(x.shape[2:], sides, strict=True) for part in (size // side, side)]
    return x.reshape(*x.shape[:2], *cut), [3 + 2 * i for i in range(len(sides))]


def _expand(means: Tensor, sides: Sequence[int], space: Sequence[int]) -> Tensor:
    """Nearest expansion of (N, C, *windows) to (N, C, *space)."""
    for d, (side, size) in enumerate(zip(sides, space, strict=True), start=2):
        means = means.unsqueeze(d + 1)
        shape = list(means.shape)
        shape[d + 1] = side
        means = means.expand(shape).flatten(d, d + 1).narrow(d, 0, size)
    return means


def _window_means(x: Tensor, counted: Tensor, sides: Sequence[int]) -> Tensor:
    """Mean of each window over the elements that count (1 or 0); 0 where none does."""
    cut, dims = _windows(x * counted, sides)
    count, _ = _windows(counted, sides)
    return cut.sum(dims) / count.sum(dims).clamp_min(1)


def _image(name: str, layout: Layout) -> str | None:
    if (reason := refusal(name, layout)) is not None:
        return reason
    if not 3 <= len(layout.shape) <= 5 or layout.expanded:
        return f"codec {name!r} takes (N, C, *space) with 1 to 3 sides"
    return None if all(isinstance(n, int) for n in layout.shape) else f"codec {name!r} takes no symbolic sizes"


@dataclass(frozen=True)
class Pool(Codec):
    """Average over non-overlapping windows of ``side`` along each dimension of space, expanded to the nearest in backward.

    Each value comes back as its window's mean, so the error is at most the window's range. Where x >= 0 is proved, the mean is
    over the positive entries and a mask of one bit an element keeps zeros exactly zero and positives positive.

    Attributes:
        name: ``pool2`` or ``pool4``.
        side: Side of a window.
    """

    name: str
    side: int

    bits: int | None = 1
    keeps_sign: ClassVar[bool] = True

    def fits(self, layout: Layout, traits: Traits) -> str | None:
        """Only what is read by convolutions' weight gradients alone."""
        if not traits.convolved:
            return f"codec {self.name!r} takes only what convolutions' weight gradients alone read"
        return _image(self.name, layout)

    def compress(self, x: Tensor, traits: Traits) -> Parts:
        """The means, and the mask where there is one."""
        values = x.to(computed_in(x.dtype))
        counted = (values > 0) | values.isnan() if traits.sign_exact else torch.ones_like(values, dtype=torch.bool)
        means = _window_means(values, counted.to(values.dtype), [self.side] * (x.dim() - 2)).to(x.dtype)
        return (means, pack(counted.to(torch.uint8).contiguous(), 1)) if traits.sign_exact else (means,)

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """Each window's mean at each of its places."""
        space = [int(n) for n in layout.shape[2:]]
        values = _expand(parts[0], [self.side] * len(space), space)
        if traits.sign_exact:
            positive = unpack(parts[1], 1, layout.shape).to(torch.bool)
            values = torch.where(positive, values.clamp_min(smallest(layout.dtype)), 0.0)
        return layout.restore(values.to(layout.dtype))


@dataclass(frozen=True)
class Division(Codec):
    """Means of 8x8 windows in bf16, and the rest at 2 bits with a minimum and a scale, in bf16, a sample and channel.

    With r the rest, lo and hi its minimum and maximum, ``s = (hi - lo) / 4``: code q stands for ``lo + (q + 1/2) s``, so
    ``|x' - x| <= s / 2 + 2**-7 max |r| + 2**-8 |mean|``, the latter two from metadata in bf16. Where x >= 0 is proved, means
    and residuals are those of the positive entries, and a mask of one bit an element keeps ``x > 0`` exactly. A sample and
    channel with an infinity or a NaN comes back as NaN.

    Attributes:
        name: ``division``.
        side: Side of a window; the whole side where that is shorter.
    """

    name: str = "division"
    side: int = 8

    bits: int | None = 2
    keeps_sign: ClassVar[bool] = True

    def fits(self, layout: Layout, traits: Traits) -> str | None:
        """Only operands of convolutions and of norms over space."""
        if not traits.spatial:
            return f"codec {self.name!r} takes only operands of convolutions and of norms over space"
        return _image(self.name, layout)

    def compress(self, x: Tensor, traits: Traits) -> Parts:
        """Means, codes, scales, and the mask where there is one."""
        values = x.to(computed_in(x.dtype))
        sides = [min(self.side, int(n)) for n in x.shape[2:]]
        counted = (values > 0) | values.isnan() if traits.sign_exact else torch.ones_like(values, dtype=torch.bool)
        means = _window_means(values, counted.to(values.dtype), sides).to(torch.bfloat16)
        rest = (values - _expand(means.to(values.dtype), sides, list(x.shape[2:]))) * counted
        space = list(range(2, x.dim()))
        low, high = rest.amin(space, keepdim=True), rest.amax(space, keepdim=True)
        scale = high / 4 - low / 4
        scale = torch.where(scale.isfinite(), scale.clamp_min(torch.finfo(values.dtype).tiny), torch.nan)
        low, scale = low.to(torch.bfloat16), scale.to(torch.bfloat16)
        steps = (rest - low.to(values.dtype)) / scale.to(values.dtype)
        parts = (means, pack(steps.floor().clamp(0, 3).to(torch.uint8).contiguous(), 2), scale, low)
        return (*parts, pack(counted.to(torch.uint8).contiguous(), 1)) if traits.sign_exact else parts

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """Mean plus residual."""
        space = [int(n) for n in layout.shape[2:]]
        dtype = computed_in(layout.dtype)
        means, scale, low = (part.to(dtype) for part in (parts[0], *parts[2:4]))
        rest = low + (unpack(parts[1], 2, layout.shape).to(dtype) + 0.5) * scale
        values = _expand(means, [min(self.side, n) for n in space], space) + rest
        most = torch.finfo(layout.dtype).max
        values = values.clamp(-most, most)
        if traits.sign_exact:
            positive = unpack(parts[4], 1, layout.shape).to(torch.bool)
            values = torch.where(positive, values.clamp_min(smallest(layout.dtype)), 0.0)
        return layout.restore(values.to(layout.dtype))
