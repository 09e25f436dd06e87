"""Where a tensor's elements lie in memory, and how to cut it into groups without moving them.

A codec works on the *memory view*: the dimensions permuted to decreasing strides, which is contiguous for every dense
tensor (channels_last, transposed, ...). ``x.reshape(-1)`` on such a tensor is a transposing copy; the memory view is free,
and a code tensor in its layout keeps every load contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._torch import Size, size_hint


@dataclass(frozen=True)
class Layout:
    """Shape, strides and dtype to restore, and the way to the memory view.

    Attributes:
        shape: Sizes to restore; symbolic ones as torch's SymInt.
        stride: Strides to restore.
        dtype: Data type to restore.
        order: Dimensions from the outermost to the innermost in memory.
        expanded: Dimensions with stride 0, of which one element is kept.
        dense: Whether the elements that are kept fill their memory without gaps or overlaps.
    """

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    expanded: tuple[int, ...]
    dense: bool

    @staticmethod
    def of(x: Tensor) -> Layout:
        """Read the layout off a (fake) tensor, adding no guard on its symbolic sizes."""
        shape, stride = tuple(x.shape), tuple(x.stride())
        sizes, steps = [size_hint(s) for s in shape], [size_hint(s) for s in stride]
        if None in sizes or None in steps:  # unbacked sizes: nothing is known, so take the logical order of a copy
            return Layout(shape, stride, x.dtype, tuple(range(len(shape))), (), dense=False)
        known_sizes, known_steps = [s or 0 for s in sizes], [s or 0 for s in steps]
        expanded = tuple(d for d, (n, s) in enumerate(zip(known_sizes, known_steps, strict=True)) if s == 0 and n > 1)
        kept = [1 if d in expanded else n for d, n in enumerate(known_sizes)]
        order = tuple(sorted(range(len(shape)), key=lambda d: (-known_steps[d] if kept[d] != 1 else -math.inf, d)))
        step, dense = 1, True
        for d in reversed(order):
            if kept[d] != 1:
                dense = dense and known_steps[d] == step
                step *= kept[d]
        if not dense:
            order = tuple(range(len(shape)))
        return Layout(shape, stride, x.dtype, order, expanded, dense=dense)

    def to_memory(self, x: Tensor) -> Tensor:
        """The contiguous memory view of ``x`` (a copy only where ``x`` isn't dense)."""
        for d in self.expanded:
            x = x.narrow(d, 0, 1)
        x = x.permute(self.order)
        return x if self.dense else x.contiguous()

    def from_memory(self, y: Tensor) -> Tensor:
        """Undo :meth:`to_memory`: exact shape, strides and dtype."""
        inverse = [0] * len(self.order)
        for position, d in enumerate(self.order):
            inverse[d] = position
        x = y.permute(inverse)
        if not self.dense:
            kept = [1 if d in self.expanded else n for d, n in enumerate(self.shape)]
            span = 1 + sum((n - 1) * s for n, s in zip(kept, self.stride, strict=True))
            x = torch.as_strided_scatter(x.new_empty((span,)), x, kept, self.stride).as_strided(kept, self.stride)
        return x.expand(self.shape) if self.expanded else x

    def restore(self, x: Tensor) -> Tensor:
        """Give a tensor of the right shape the strides, too."""
        for d in self.expanded:
            x = x.narrow(d, 0, 1)
        return self.from_memory(x.permute(self.order).contiguous())

    def groups(self, spatial: bool, least: int) -> dict[int, Size]:
        """How much of each dimension of the memory view a group takes; see :func:`group_blocks`.

        Args:
            spatial: Whether the last dimensions are height and width: then a group grows over width, height, channels, batch,
                wherever these lie in memory. Else it grows from the innermost dimension in memory.
            least: Fewest elements.
        """
        sizes = [1 if d in self.expanded else self.shape[d] for d in self.order]
        position = {d: p for p, d in enumerate(self.order)}
        inner_first = reversed(range(len(self.order)))
        return group_blocks(sizes, [position[d] for d in inner_first] if spatial else list(inner_first), least)


def group_blocks(shape: Sequence[Size], grow: Sequence[int], least: int) -> dict[int, Size]:
    """Choose how much of each dimension one group takes, so that it holds at least ``least`` elements.

    The group grows along ``grow``; from the dimension where it becomes large enough it takes the smallest divisor that
    will do, so nothing is padded. A symbolic dimension is taken whole, whatever its size: that needs no guard.

    Args:
        shape: Sizes of the memory view.
        grow: Dimensions in the order in which the group takes them.
        least: Fewest elements.

    Returns:
        ``{dimension: elements taken}`` of the dimensions that a group spans.
    """
    blocks: dict[int, Size] = {}
    held = 1
    for d in grow:
        if held >= least:
            break
        size = shape[d]
        hint = size_hint(size)
        if hint == 1 and isinstance(size, int):
            continue
        need = -(-least // held)
        if isinstance(size, int):
            blocks[d] = smallest_divisor(size, need)
            held *= max(int(blocks[d]), 1)
        else:
            blocks[d] = size
            held *= hint or 1
    return blocks


def smallest_divisor(size: int, need: int) -> int:
    """The smallest divisor of ``size`` that is at least ``need``; ``size`` itself where there is none."""
    if need >= size:
        return size
    divisors = {d for k in range(1, math.isqrt(size) + 1) if size % k == 0 for d in (k, size // k)}
    return min((d for d in divisors if d >= need), default=size)


def group_view(x: Tensor, blocks: dict[int, Size]) -> tuple[Tensor, list[int]]:
    """View ``x`` with each divided dimension split in two; return the view and the dimensions that make up a group."""
    sizes: list[Size] = []
    reduced: list[int] = []
    for d, size in enumerate(x.shape):
        block = blocks.get(d)
        if block is not None and isinstance(size, int) and isinstance(block, int) and block < size:
            sizes.append(size // block)
            sizes.append(block)
        else:
            sizes.append(size)
        if block is not None:
            reduced.append(len(sizes) - 1)
    return x.view(sizes), reduced
