"""Low-bit codes packed into bytes by parts of a dimension, and the lossless codecs that need no more than that."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch import Size, size_guess
from .base import Codec, Parts, Traits
from .layout import Layout

_WASTE = 1.25


def packing_dim(shape: Sequence[Size], parts: int) -> int:
    """Choose the dimension to cut into ``parts``: the outermost one that divides evenly, else the one that wastes least.

    Cutting an outer dimension keeps the inner ones whole, so the byte's parts are loaded from contiguous runs. A symbolic
    size is padded, never asked whether it divides, and taken only where every other dimension would waste too much.
    """
    if not shape:
        return 0
    for d, size in enumerate(shape):
        if isinstance(size, int) and size and size % parts == 0:
            return d

    def waste(d: int) -> float:
        size = max(size_guess(shape[d]), 1)
        return -(-size // parts) * parts / size

    static = [d for d, size in enumerate(shape) if isinstance(size, int) and waste(d) <= _WASTE]
    return min(static or range(len(shape)), key=lambda d: (waste(d), d))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack whole numbers below ``2**bits`` into bytes.

    Args:
        codes: Of any real type (bool, integers, floats), contiguous, any shape but 0-d.
        bits: 1, 2, 4 or 8.

    Returns:
        uint8; the dimension :func:`packing_dim` is ``ceil(n / (8 / bits))`` long.
    """
    parts = 8 // bits
    if parts == 1:
        return codes.to(torch.uint8)
    d = packing_dim(codes.shape, parts)
    size = codes.shape[d]
    each = (size + parts - 1) // parts
    if not (isinstance(size, int) and size % parts == 0):
        pad = [0, 0] * (codes.dim() - 1 - d) + [0, each * parts - size]
        codes = torch.constant_pad_nd(codes, pad, 0)
    pieces = codes.view(*codes.shape[:d], parts, each, *codes.shape[d + 1 :])
    # Shifted in int32: CPUs have no vector instruction that shifts bytes, and Inductor's turn a mask into bytes through memory.
    packed: Tensor = pieces.select(d, 0).to(torch.int32)
    for k in range(1, parts):
        packed = packed | (pieces.select(d, k).to(torch.int32) << (bits * k))
    return packed.to(torch.uint8)


def unpack(packed: Tensor, bits: int, shape: Sequence[Size]) -> Tensor:
    """Undo :func:`pack` for codes of ``shape``; of an integer type."""
    parts = 8 // bits
    if parts == 1:
        return packed
    d = packing_dim(shape, parts)
    steps = torch.arange(0, 8, bits, dtype=torch.int32, device=packed.device)
    steps = steps.view(*[1] * d, parts, *[1] * (packed.dim() - d))
    codes: Tensor = (packed.to(torch.int32).unsqueeze(d) >> steps) & (2**bits - 1)
    each = packed.shape[d]
    codes = codes.reshape(*packed.shape[:d], parts * each, *packed.shape[d + 1 :])
    size = shape[d]
    if isinstance(size, int) and size % parts == 0:
        return codes
    # a copy: whether a slice is contiguous depends on whether anything was padded, which is not to be asked
    return codes.narrow(d, 0, size).clone(memory_format=torch.contiguous_format)


def packed_bytes(x: Tensor, bits: int) -> int:
    """Bytes of :func:`pack` on a tensor like ``x``, symbolic sizes as seen at compile time."""
    sizes = memory_shape(Layout.of(x))
    parts = 8 // bits
    d = packing_dim(sizes, parts)
    hints = [size_guess(size) for size in sizes]
    return math.prod(hints[:d]) * -(-hints[d] // parts) * math.prod(hints[d + 1 :])


class Bits(Codec):
    """A bool tensor at one bit an element; lossless.

    One-bit dropout masks: ONNX Runtime #11534. torch itself saves a byte an element.
    """

    name = "bits"
    bits = None

    def fits(self, layout: Layout, traits: Traits) -> str | None:  # noqa: ARG002 - a codec's signature
        """Only bool tensors with a dimension to pack along."""
        if layout.dtype is not torch.bool:
            return f"codec 'bits' packs bool tensors, not {str(layout.dtype).removeprefix('torch.')}"
        return None if layout.shape else "a single element"

    def compress(self, x: Tensor, traits: Traits) -> Parts:  # noqa: ARG002 - a codec's signature
        """Pack eight elements into a byte."""
        return (pack(Layout.of(x).to_memory(x), 1),)

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:  # noqa: ARG002 - a codec's signature
        """Unpack to bool."""
        return layout.from_memory(unpack(parts[0], 1, memory_shape(layout)).to(torch.bool))


class Ternary(Codec):
    """The result of ``torch.sign`` (-1, 0 or 1; it makes 0 of NaN) at two bits an element; lossless."""

    name = "ternary"
    bits = None

    def fits(self, layout: Layout, traits: Traits) -> str | None:  # noqa: ARG002 - a codec's signature
        """Only what has a dimension; the planner asks for it only where the values are signs."""
        return None if layout.shape else "a single element"

    def compress(self, x: Tensor, traits: Traits) -> Parts:  # noqa: ARG002 - a codec's signature
        """Pack four elements into a byte."""
        return (pack(Layout.of(x).to_memory(x) + 1, 2),)

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:  # noqa: ARG002 - a codec's signature
        """Unpack to signs."""
        return layout.from_memory(unpack(parts[0], 2, memory_shape(layout)).to(layout.dtype) - 1)


class Narrow(Codec):
    """An integer tensor in the fewest bits that provably hold it: 1, 2 or 4 packed into bytes, else 8, 16 or 32; lossless."""

    name = "narrow"
    bits = None

    def fits(self, layout: Layout, traits: Traits) -> str | None:
        """Only integers with a proved bound that fewer bits hold."""
        if layout.dtype.is_floating_point or layout.dtype.is_complex or layout.dtype is torch.bool:
            return f"codec 'narrow' narrows integers, not {str(layout.dtype).removeprefix('torch.')}"
        if traits.upper is None:
            return "no bound on its values is proved"
        if not layout.shape:
            return "a single element"
        if narrowest(traits.upper) >= layout.dtype.itemsize * 8:
            return f"values up to {traits.upper} need all of {str(layout.dtype).removeprefix('torch.')}"
        return None

    def compress(self, x: Tensor, traits: Traits) -> Parts:
        """Cast to the narrowest type, and pack what takes less than a byte."""
        bits = narrowest(traits.upper or 0)
        memory = Layout.of(x).to_memory(x)
        return (pack(memory, bits),) if bits < 8 else (memory.to(_TYPES[bits]),)

    def decompress(self, parts: Parts, layout: Layout, traits: Traits) -> Tensor:
        """Unpack and cast back."""
        bits = narrowest(traits.upper or 0)
        codes = unpack(parts[0], bits, memory_shape(layout)) if bits < 8 else parts[0]
        return layout.from_memory(codes.to(layout.dtype))


_TYPES = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def narrowest(upper: int) -> int:
    """Fewest bits, of those that are stored, that hold 0 to ``upper``."""
    holds = {1: 1, 2: 3, 4: 15, 8: 255, 16: 2**15 - 1, 32: 2**31 - 1}
    return next((bits for bits, most in holds.items() if upper <= most), 64)


def memory_shape(layout: Layout) -> tuple[Size, ...]:
    """Sizes of the memory view."""
    return tuple(1 if d in layout.expanded else layout.shape[d] for d in layout.order)
