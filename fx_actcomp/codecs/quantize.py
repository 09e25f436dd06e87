"""Quantization by groups: minimum and scale of each group, codes of 1 to 8 bits, exact signs where x >= 0.

Per-group asymmetric codes: ActNN (arXiv 2104.14129), section 3; GACT (arXiv 2206.11357). The sign-exact code is the
zero-aligned bin of BLPA (arXiv 1901.07988), section 3, on the data's own range.

Known limit: one outlier sets the scale of its group, and the group's small values are lost in its first code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._torch import size_hint
from .base import Codec, Parts, Traits
from .bits import memory_shape, pack, packing_dim, unpack
from .layout import Layout, group_view

ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Quantize(Codec):
    """``bits``-bit codes with two fp32 numbers (one, where sign-exact) a group.

    With lo and hi the minimum and maximum of a group's finite values, 8 bits have codes that stand on the ends of the range,
    and the largest three codes for negative infinity (not where sign-exact), infinity and NaN:

    * asymmetric: ``s = (hi - lo) / (2**bits - 4)``, ``x' = lo + q s``, ``q = round((x - lo) / s)``; ``|x' - x| <= s / 2``;
    * sign-exact, where x >= 0 is proved: ``s = hi / (2**bits - 4)``, code 0 is exactly 0, ``q = 1 + round(x / s)`` of a
      positive x, ``x' = (q - 1) s``, code 1 the smallest positive number; ``|x' - x| <= s / 2`` and ``(x' > 0) == (x > 0)``.
    * shares of a whole (a softmax's probabilities, sign-exact): the codes of ``u = sqrt(x)``, above 1/2 of
      ``u = sqrt(2) - sqrt(1 - x)``, with ``s`` that of u; ``|x' - x| <= s sqrt(min(x, 1 - x)) + s**2 / 4``. A root makes the
      variance of a share about the same everywhere, so the errors of n shares add up to that of one, whatever n, and both ends
      are as fine as a softmax's derivative ``x (1 - x)`` needs them. Equal steps would make all shares below half a step zero,
      which may be a tenth of the whole. Rounded at random they would come back with a bias: there they aren't taken.

    So what a saturating function piles up there comes back without error: probabilities near 0, sigmoids near 0 and 1. From
    the middle of a bin all of them would be off by half a step to the same side, which in sums over many is no small error.

    Fewer bits have no codes to spare (ActNN spends two), and such values in no use that asks for 8 bits. There a code stands
    for the middle of its bin:

    * asymmetric: ``s = (hi - lo) / 2**bits``, ``q = floor((x - lo) / s)``, ``x' = lo + (q + 1/2) s``; ``|x' - x| <= s / 2``;
    * sign-exact: ``s = hi / (2**bits - 1)``, code 0 is exactly 0, ``q = ceil(x / s)``, ``x' = (q - 1/2) s``;
      ``|x' - x| <= s / 2`` and ``(x' > 0) == (x > 0)``.

    Stochastic rounding needs two codes around every value, so its codes stand on the ends of the range whatever the bits;
    a value's code is the one below or the one above, the latter as often as the fraction says: ``|x' - x| <= s`` and
    ``E[x'] = x``, up to the smallest positive number where sign-exact. One bit has no codes for that.

    For a range below the smallest normal number the bound is that number; a constant comes back as it was.

    Of 8 bits what isn't finite comes back as itself and harms nothing beside it: a negative infinity masks a score, a row that is
    masked whole has NaN probabilities, and neither does harm where its gradient is zero. Of fewer bits the whole group comes
    back as NaN (sign-exact: all but the zeros, as the infinity or NaN), so an overflow stays visible to a ``GradScaler``; these
    are operands of weight gradients, in which it would be everywhere anyway.

    Metadata is fp32 and not bf16, since Inductor removes a bf16 round trip inside one graph and would then quantize with
    another scale than it stores; ``group`` 256 makes that a quarter of a bit an element.

    Attributes:
        name: ``int8``, ``int4``, ...
        bits: Bits a code: 1, 2, 4 or 8.
        group: Fewest elements of a group; see :func:`~fx_actcomp.codecs.layout.group_blocks`.
        rounding: ``"nearest"`` or ``"stochastic"``. The former has half the error and a bias, the latter none.
    """

    name: str
    bits: int
    group: int = 256
    rounding: str = "nearest"

    keeps_sign: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"group is {self.group}; expected 1 or more elements (at least 128 pay)")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding is {self.rounding!r}; there are: {', '.join(ROUNDINGS)}")

    @property
    def stochastic(self) -> bool:
        """Whether it draws random numbers."""
        return self.rounding == "stochastic"

    def fits(self, layout: Layout, traits: Traits) -> str | None:
        """Only floating-point tensors with elements; below 4 bits, with a known size to cut into a byte's parts."""
        if self.bits == 1 and self.stochastic and traits.sign_exact:
            return f"codec {self.name!r} has one code for positive values: none to round to at random"
        sizes = memory_shape(layout)
        if self.bits < 4 and sizes and not isinstance(sizes[packing_dim(sizes, 8 // self.bits)], int):
            return f"codec {self.name!r} needs a dimension of known size that {8 // self.bits} parts waste little of"
        return refusal(self.name, layout)

    @property
    def on_ends(self) -> bool:
        """Whether codes stand on the ends of the range, not for the middle of a bin."""
        return self.stochastic or self.bits == 8

    def takes_roots(self, traits: Traits) -> bool:
        """Whether codes are those of roots."""
        return traits.shares and traits.sign_exact and self.on_ends and not self.stochastic

    def compress(self, x: Tensor, traits: Traits) -> Parts:
        """Codes in the layout of ``x``, then the scale and (asymmetric) the minimum of each group."""
        layout = Layout.of(x)
        memory = layout.to_memory(x)
        given, dims = self._groups(memory.to(computed_in(x.dtype)), layout, traits)
        values = _root_of_share(given) if self.takes_roots(traits) else given
        encode = self._encode_sign_exact if traits.sign_exact else self._encode
        steps, *metadata = encode(values, dims, self._divisions(traits))
        if self.on_ends:
            codes = self._rounded(steps, traits) + (1 if traits.sign_exact else 0)
        else:
            codes = steps.ceil() if traits.sign_exact else steps.floor()
        codes = codes.clamp(1 if traits.sign_exact else 0, self._largest(traits))
        if traits.sign_exact:  # NaN steps, of an infinity or a NaN: the largest code
            codes = torch.where(values <= 0, 0.0, torch.where(steps.isnan(), self._largest(traits), codes))
        if self.bits == 8:
            marks = torch.where(given > 0, 254.0, torch.where(given < 0, 253.0, 255.0))
            codes = torch.where(is_finite(given), codes, marks)
        return (pack(codes.view(memory.shape), self.bits), *metadata)

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """Values from codes; see the class for the bound."""
        shape = memory_shape(layout)
        codes, _ = self._groups(unpack(parts[0], self.bits, shape).to(parts[1].dtype), layout, traits)
        if traits.sign_exact:
            least = torch.finfo(parts[1].dtype).tiny  # above zero, so that infinite steps make infinity and not NaN
            steps = (codes - 1).clamp_min(least) if self.on_ends else codes - 0.5
            positive = steps * parts[1]
            if self.takes_roots(traits):
                positive = _share_of_root(positive)
            values = torch.where(codes == 0, 0.0, positive.clamp_min(smallest(layout.dtype)))
        else:
            most = torch.finfo(layout.dtype).max / 2  # halves, since high - low may be twice the largest number
            middle = 0.0 if self.on_ends else 0.5
            values = (parts[2] / 2 + (codes + middle) * (parts[1] / 2)).clamp(-most, most) * 2
        if self.bits == 8:
            infinite = torch.where(codes == 253, -torch.inf, torch.inf)
            values = torch.where(codes > self._largest(traits), torch.where(codes == 255, torch.nan, infinite), values)
        return layout.from_memory(values.to(layout.dtype).view(shape))

    def _groups(self, memory: Tensor, layout: Layout, traits: Traits) -> tuple[Tensor, list[int]]:
        return group_view(memory, layout.groups(traits.spatial, self.group))

    def _largest(self, traits: Traits) -> int:
        """The largest code of a finite value."""
        return int(2**self.bits - 1) if self.bits < 8 else 253 if traits.sign_exact else 252

    def _divisions(self, traits: Traits) -> int:
        """Steps between the ends of a group's range."""
        bins = self._largest(traits) + (0 if traits.sign_exact else 1)
        return bins - 1 if self.on_ends else bins

    def _encode(self, x: Tensor, dims: list[int], divisions: int) -> tuple[Tensor, Tensor, Tensor]:
        """Steps from the minimum, the step, the minimum."""
        low, high = self._finite(x, math.inf).amin(dims, keepdim=True), self._finite(x, -math.inf).amax(dims, keepdim=True)
        scale = high / divisions - low / divisions  # in this order, and below by halves: high - low may overflow
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        return (x / 2 - low / 2) / scale.clamp_min(torch.finfo(x.dtype).tiny) * 2, scale, low

    def _encode_sign_exact(self, x: Tensor, dims: list[int], divisions: int) -> tuple[Tensor, Tensor]:
        """Steps from zero, the step."""
        info = torch.finfo(x.dtype)
        largest = self._finite(x, 0.0).amax(dims, keepdim=True) * (1 - info.eps)  # so that its steps, rounded, don't overflow
        scale = (largest / divisions).clamp_min(info.tiny)
        return x / scale, scale

    def _finite(self, x: Tensor, other: float) -> Tensor:
        """The values of which 8-bit codes span the range, with another number where one isn't finite; fewer bits span all."""
        most = torch.finfo(x.dtype).max
        return torch.where(is_finite(x), x, max(-most, min(other, most))) if self.bits == 8 else x

    def _rounded(self, steps: Tensor, traits: Traits) -> Tensor:
        """To the nearest, or up as often as the fraction says."""
        if not self.stochastic:
            return steps.round()
        if traits.noise is None:
            raise ValueError(f"codec {self.name!r} rounds at random and was given no Traits.noise to draw from")
        below = steps.floor()
        up = traits.noise.uniform(steps) < steps - below
        return below + up


def refusal(name: str, layout: Layout) -> str | None:
    """Why a codec for values can't take a tensor: no floats, no elements, or a number of them that may be none."""
    if layout.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return f"codec {name!r} takes floating-point tensors, not {str(layout.dtype).removeprefix('torch.')}"
    if not layout.shape or any(isinstance(size, int) and size == 0 for size in layout.shape):  # never ask a symbol
        return "a single element, or none"
    if any(size_hint(size) is None for size in layout.shape):
        return "a size that is only known at run time may be 0"
    return None


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which codes are computed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def is_finite(x: Tensor) -> Tensor:
    """``x.isfinite()`` as a comparison, for which CPUs have vector instructions."""
    return x.abs() <= torch.finfo(x.dtype).max


def _root_of_share(x: Tensor) -> Tensor:
    root = torch.minimum(x, 1 - x).sqrt()
    return torch.where(x <= 0.5, root, 2**0.5 - root)


def _share_of_root(u: Tensor) -> Tensor:
    lower = u <= 0.5**0.5
    share = torch.where(lower, u, 2**0.5 - u).square()
    return torch.where(lower, share, 1 - share)


def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number that survives a cast to ``dtype``, also where subnormals of fp32 are flushed."""
    info = torch.finfo(dtype)
    return info.smallest_normal if dtype is not torch.float16 else 2.0**-24
