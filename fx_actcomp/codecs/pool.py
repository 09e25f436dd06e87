"""Means over windows of space: alone for the inputs of convolutions, or with a 2-bit residual.

Pooling of saved inputs: Barley and Froening, "Less Memory Means smaller GPUs" (arXiv 2409.11902). Mean plus residual:
DIVISION (arXiv 2208.04187), section 3: 8x8 means in bf16 plus the rest in 2 bits a sample and channel.

Known limit of pooling alone: it removes what varies within a window, so the weight gradient is biased; its paper trains
longer to make up for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .base import Codec, Parts, Traits
from .bits import pack, unpack
from .layout import Layout
from .quantize import Quantize, computed_in, refusal, smallest


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


def _counted(values: Tensor, traits: Traits) -> Tensor:
    """The elements that a window's mean is over: the positive ones, where x >= 0 is proved; else all."""
    return (values > 0) | values.isnan() if traits.sign_exact else torch.ones_like(values, dtype=torch.bool)


def _pack_mask(counted: Tensor, traits: Traits) -> Parts:
    return (pack(counted.contiguous(), 1),) if traits.sign_exact else ()


def _masked(values: Tensor, mask: Parts, layout: Layout) -> Tensor:
    """Zeros where they were, positives positive; ``values`` themselves where there is no mask."""
    if mask:
        positive = unpack(mask[0], 1, layout.shape).to(torch.bool)
        values = torch.where(positive, values.clamp_min(smallest(layout.dtype)), 0.0)
    return layout.restore(values.to(layout.dtype))


@dataclass(frozen=True)
class Pool(Codec):
    """Average over non-overlapping windows of ``side`` along each dimension of space, expanded to the nearest in backward.

    Each value comes back as its window's mean, so the error is at most the window's range (``means="int8"`` adds the bound of
    ``int8`` on the means). Where x >= 0 is proved, the mean is over the positive entries and a mask of one bit an element
    keeps zeros exactly zero and positives positive.

    A pointwise convolution's weight gradient needs no expansion where there is no mask: with P the means and S the windows'
    sums, ``<expand(P x), g> = <P x, S g>``, so ``dW = (S dY)^T P(x)``, side**2 times fewer operations in two dimensions.

    Attributes:
        name: ``pool2`` or ``pool4``.
        side: Side of a window.
        means: ``"exact"`` stores the means in the type of x, ``"int8"`` in 8-bit codes.
    """

    name: str
    side: int
    means: str = "exact"

    bits: int | None = field(default=1, init=False)
    keeps_sign: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.means not in ("exact", "int8"):
            raise ValueError(f"means is {self.means!r}; there are: exact, int8")

    def fits(self, layout: Layout, traits: Traits) -> str | None:
        """Only what is read by convolutions' weight gradients alone."""
        if not traits.convolved:
            return f"codec {self.name!r} takes only what convolutions' weight gradients alone read"
        return _image(self.name, layout)

    def compress(self, x: Tensor, traits: Traits) -> Parts:
        """The means, or their codes, scales and minima; and the mask where there is one."""
        values = x.to(computed_in(x.dtype))
        counted = _counted(values, traits)
        means = _window_means(values, counted.to(values.dtype), [self.side] * (x.dim() - 2)).to(x.dtype)
        coded = (means,) if self.means == "exact" else _CODED.compress(means, Traits(spatial=True))
        return (*coded, *_pack_mask(counted, traits))

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """Each window's mean at each of its places."""
        sides = [self.side] * (len(layout.shape) - 2)
        values = _expand(self._means(parts, layout), sides, [int(n) for n in layout.shape[2:]])
        return _masked(values, parts[-1:] if traits.sign_exact else (), layout)

    def contracts(self, traits: Traits) -> bool:
        """Where every use is a pointwise convolution and no mask varies within a window."""
        return traits.pointwise and not traits.sign_exact

    def contract(self, gradient: Tensor, parts: Parts, layout: Layout) -> tuple[Tensor, Tensor, int]:
        """The windows' sums of the gradient over their size (the sums themselves may overflow), and the means of the input."""
        sides = [self.side] * (gradient.dim() - 2)
        size = math.prod(sides)
        cut, dims = _windows(gradient.to(computed_in(gradient.dtype)), sides)
        return (cut.sum(dims) / size).to(gradient.dtype), self._means(parts, layout), size

    def _means(self, parts: Parts, layout: Layout) -> Tensor:
        if self.means == "exact":
            return parts[0]
        shape = [*layout.shape[:2], *(-(-int(n) // self.side) for n in layout.shape[2:])]
        with torch.device("meta"):
            pooled = Layout.of(torch.empty(shape, dtype=layout.dtype))
        return _CODED.decompress(parts[:3], pooled, Traits(spatial=True))


_CODED = Quantize("int8", 8)


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

    bits: int | None = field(default=2, init=False)
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
        counted = _counted(values, traits)
        means = _window_means(values, counted.to(values.dtype), sides).to(torch.bfloat16)
        rest = (values - _expand(means.to(values.dtype), sides, list(x.shape[2:]))) * counted
        space = list(range(2, x.dim()))
        low, high = rest.amin(space, keepdim=True), rest.amax(space, keepdim=True)
        scale = high / 4 - low / 4
        scale = torch.where(scale.isfinite(), scale.clamp_min(torch.finfo(values.dtype).tiny), torch.nan)
        low, scale = low.to(torch.bfloat16), scale.to(torch.bfloat16)
        steps = (rest - low.to(values.dtype)) / scale.to(values.dtype)
        codes = pack(steps.floor().clamp(0, 3).contiguous(), 2)
        return (means, codes, scale, low, *_pack_mask(counted, traits))

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:  # noqa: ARG002 - a codec's signature
        """Mean plus residual."""
        space = [int(n) for n in layout.shape[2:]]
        dtype = computed_in(layout.dtype)
        means, scale, low = (part.to(dtype) for part in (parts[0], *parts[2:4]))
        rest = low + (unpack(parts[1], 2, layout.shape).to(dtype) + 0.5) * scale
        values = _expand(means, [min(self.side, n) for n in space], space) + rest
        most = torch.finfo(layout.dtype).max
        return _masked(values.clamp(-most, most), parts[4:], layout)
