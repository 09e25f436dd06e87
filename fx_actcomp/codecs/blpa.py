"""Codes of a batch norm's input on the norm's own scale, which serve for the ReLU after it, too.

BLPA: Chakrabarti and Moseley, "Backprop with Approximate Activations for Memory-efficient Network Training" (arXiv
1901.07988), section 3: one code of the normalized activation serves x-hat in the norm's backward, the ReLU's mask, and the
input of the next convolution. The range comes from the norm's statistics, so there is no pass for a minimum and maximum and
nothing is stored but codes. What differs from the original: a negative weight turns the axis; the range is re-anchored where
zero lies at or beyond one of its ends (where the original masks off every positive value); the sign is forward's own and not
compared again; and with 8 bits the range is 4.25 standard deviations, since clipping at 3 dominates their error. With 4 bits
the wide bins do, and 3 is near the best range for a normal distribution.

Known limits: values beyond the range are clipped to it; of a normal distribution these are 2 in 100,000 (3 in 1,000 at 3).
And backward reads the norm's bias, so that torch refuses a bias that is changed in place between forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Codec, Parts, Reference, Traits
from .bits import memory_shape, pack, unpack
from .layout import Layout
from .quantize import computed_in, refusal, smallest


@dataclass(frozen=True)
class Blpa(Codec):
    """``bits``-bit codes of ``z = sign(weight) x-hat``, with N = 2**bits bins in ``[-R, R]``, R being ``sigmas``.

    The norm's output is ``|weight| z + bias``, positive where z is above ``z0 = -bias / |weight|``, clipped to the range. The
    bins lie on either side of z0: s of them below, ``s = round(N (z0 + R) / (2 R))`` but at least 1 and at most N - 1,
    the others above; a value comes back as the middle of its bin. So ``|z' - z| <= 3/2 R / N`` within the range, and the
    distance to the range more beyond it. The ReLU comes back as ``max(|weight| z' + bias, tiny)`` exactly where forward's was
    positive, and zero elsewhere. Without a ReLU to serve, z0 is 0. A channel with an infinity or a NaN comes back as NaN.

    Attributes:
        name: ``blpa8`` or ``blpa4``.
        bits: Bits a code.
        sigmas: Half the range R, in standard deviations: 4.25 for ``blpa8``, 3 for ``blpa4``.
    """

    name: str
    bits: int
    sigmas: float = 4.25

    keeps_sign: ClassVar[bool] = True
    referenced: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.sigmas > 0:
            raise ValueError(f"sigmas is {self.sigmas}; expected some standard deviations, such as 4.25")

    def fits(self, layout: Layout, traits: Traits) -> str | None:
        """Only the input of a batch norm in training."""
        if not traits.normed:
            return f"codec {self.name!r} takes only the input of a batch norm in training"
        if layout.expanded:
            return f"codec {self.name!r} takes no expanded tensors"
        return refusal(self.name, layout)

    def compress(self, x: Tensor, traits: Traits) -> Parts:
        """Codes in the layout of ``x``."""
        layout, reference = Layout.of(x), _reference(traits)
        scale = self._scale(reference, layout, traits)
        z = (layout.to_memory(x).to(scale.mean.dtype) - scale.mean) * (scale.rstd * scale.sign)
        above = z > 0 if reference.rectified is None else reference.rectified.permute(layout.order) > 0
        tiny = torch.finfo(z.dtype).tiny
        up = ((z - scale.zero) / scale.above.clamp_min(tiny)).floor().clamp_min(0) + scale.count
        down = ((z + self.sigmas) / scale.below.clamp_min(tiny)).floor().clamp_min(0)
        codes = torch.where(above, up.clamp_max(2**self.bits - 1), torch.minimum(down, scale.count - 1))
        return (pack(codes.contiguous(), self.bits),)

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """The norm's input."""
        scale = self._scale(_reference(traits), layout, traits)
        z, _ = self._decode(parts, layout, scale)
        most = torch.finfo(layout.dtype).max
        return layout.from_memory((scale.mean + z * (scale.sign / scale.rstd)).clamp(-most, most).to(layout.dtype))

    def rectify(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """The ReLU of the norm's output."""
        scale = self._scale(_reference(traits), layout, traits)
        z, above = self._decode(parts, layout, scale)
        rest = torch.where(scale.bias.isnan(), torch.nan, 0.0)
        positive = (scale.weight * z + scale.bias).clamp(smallest(layout.dtype), torch.finfo(layout.dtype).max)
        values = torch.where(above, positive, rest)
        return layout.from_memory(values.to(layout.dtype))

    def _decode(self, parts: Parts, layout: Layout, scale: _Scale) -> tuple[Tensor, Tensor]:
        """z, and whether it stands for a value above zero."""
        codes = unpack(parts[0], self.bits, memory_shape(layout)).to(scale.mean.dtype)
        above = codes >= scale.count
        up = scale.zero + (codes - scale.count + 0.5) * scale.above
        return torch.where(above, up, (codes + 0.5) * scale.below - self.sigmas), above

    def _scale(self, reference: Reference, layout: Layout, traits: Traits) -> _Scale:
        dtype, levels = computed_in(layout.dtype), 2**self.bits
        shape = [1] * len(layout.order)
        shape[layout.order.index(1)] = -1
        mean, rstd = (x.to(dtype).reshape(shape) for x in (reference.mean, reference.rstd))
        weight = torch.ones_like(mean) if reference.weight is None else reference.weight.to(dtype).reshape(shape)
        bias = torch.zeros_like(mean) if reference.bias is None else reference.bias.to(dtype).reshape(shape)
        size = weight.abs()
        zero = torch.zeros_like(mean)
        if traits.rectified:  # a channel of weight 0 is positive everywhere or nowhere
            zero = torch.where(size > 0, -bias / size, torch.where(bias > 0, -torch.inf, torch.inf))
        zero = zero.clamp(-self.sigmas, self.sigmas)
        count = ((zero + self.sigmas) * (levels / (2 * self.sigmas))).round().clamp(1, levels - 1)
        return _Scale(
            mean=mean, rstd=rstd, sign=torch.where(weight < 0, -1.0, 1.0), weight=size,
            bias=torch.where(mean.isfinite(), bias, torch.nan), zero=zero, count=count,
            below=(zero + self.sigmas) / count, above=(self.sigmas - zero) / (levels - count),
        )  # fmt: skip


@dataclass(frozen=True)
class _Scale:
    """One number a channel each, in the order of memory: where the bins of z lie.

    Attributes:
        mean: The norm's mean; NaN or infinite where the channel isn't finite.
        rstd: One over the standard deviation.
        sign: -1 where the weight is negative, else 1.
        weight: Its absolute value.
        bias: The norm's bias; NaN where the channel isn't finite.
        zero: Where the norm's output crosses zero.
        count: Bins below that.
        below: Their width.
        above: The width of those above.
    """

    mean: Tensor
    rstd: Tensor
    sign: Tensor
    weight: Tensor
    bias: Tensor
    zero: Tensor
    count: Tensor
    below: Tensor
    above: Tensor


def _reference(traits: Traits) -> Reference:
    if traits.reference is None:
        raise ValueError("a batch-norm referenced codec was given no Traits.reference")
    return traits.reference
