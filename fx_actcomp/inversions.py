"""Saved inputs of invertible functions whose output is saved, too; and saved products of saved tensors (SwiGLU, GEGLU)."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx

from ._torch import no_fake
from .chains import evaluate, inputs, is_pointwise
from .codecs import Layout
from .invert import recognize
from .nodes import is_cast, is_view, numel, packet, reshaped_base, stored_bytes, value, view_source
from .norms import SHRINKS, is_parameter
from .records import Image, Inversion, Kind

_LONGEST = 24
_PERMUTES = {"aten.permute", "aten.t", "aten.transpose"}

_READS_NO_OUTPUT = {
    f"aten.{name}"
    for name in "mm bmm addmm baddbmm convolution add sub mul neg cat stack sum mean embedding constant_pad_nd where".split()
}
"""Producers whose backward doesn't read what they made, so that a function of it is all that backward asks of it."""


def find_inversions(saved: Mapping[fx.Node, Kind], repeated: Collection[str]) -> tuple[Inversion, ...]:
    """Saved activations that can be restored from another saved tensor, which is an invertible function of them.

    Args:
        saved: The nodes that a forward graph saves, and what each one is.
        repeated: Names of the nodes that backward computes again.
    """
    found: dict[fx.Node, Inversion] = {}
    for y in saved:
        end, turned = _unpermuted(y)
        chain = _chain(end, saved)
        leaves = {leaf for node in chain for leaf in inputs(node) if leaf not in chain}
        if len(leaves) != 1:
            continue
        (x,) = leaves
        if x in found or saved.get(x) is not Kind.ACTIVATION or not _alike(x, y) or not _only_for(x, chain, repeated):
            continue
        if any(_rounds(node, x) for node in chain):
            continue
        if turned and not _in_order(end):
            continue
        with no_fake():
            inverse = recognize(functools.partial(_at, chain, x, end))
        if inverse is not None:
            found[x] = Inversion(x.name, y.name, inverse, permuted=bool(turned))
    return tuple(found.values())


def find_products(saved: Mapping[fx.Node, Kind], parameters: Collection[fx.Node]) -> tuple[Image, ...]:
    """Saved activations that are a pointwise function of others: gated units, norms of a sum, what follows a batch norm.

    What such a function reads beside tensors of its size (statistics, parameters, a gate) is small, and is saved exactly.
    A function of one tensor alone is left to :func:`find_inversions`.

    Args:
        saved: The nodes that a forward graph saves, and what each one is.
        parameters: Its parameters and buffers.
    """
    at_hand = {reshaped_base(node) for node in saved}
    found = []
    for h, kind in saved.items():
        end, turned = _unpermuted(h)
        chain = _chain(end, saved) if kind is Kind.ACTIVATION else []
        leaves = list(dict.fromkeys(leaf for node in chain for leaf in inputs(node) if leaf not in chain))
        large = [leaf for leaf in leaves if numel(leaf) == numel(h)]
        small = [leaf for leaf in leaves if leaf not in large]
        if len(leaves) < 2 or not large or not all(saved.get(leaf) in (Kind.ACTIVATION, Kind.INPUT) for leaf in large):
            continue
        new = [leaf for leaf in small if reshaped_base(leaf) not in at_hand and not is_parameter(leaf, parameters)]
        if all(numel(leaf) * SHRINKS <= numel(h) for leaf in small) and all(leaf.op != "placeholder" for leaf in new):
            carried = tuple(leaf.name for leaf in (*large[1:], *small))
            steps = tuple(node.name for node in (*chain, *turned))
            extra = tuple((leaf.name, stored_bytes(leaf.meta["val"])) for leaf in new)
            found.append(Image(h.name, large[0].name, steps, carried, affine=False, extra=extra))
    return tuple(found)


def _unpermuted(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What a saved transpose or permutation is one of, and these views in order."""
    turned: list[fx.Node] = []
    while packet(node) in _PERMUTES:
        turned.insert(0, node)
        node = view_source(node)
    return node, turned


def _in_order(node: fx.Node) -> bool:
    """Whether its elements lie in memory as in the logical order, without gaps."""
    held = value(node)
    layout = Layout.of(held) if held is not None else None
    return layout is not None and layout.dense and layout.order == tuple(range(len(layout.shape))) and not layout.expanded


def _chain(end: fx.Node, saved: Collection[fx.Node]) -> list[fx.Node]:
    """The pointwise nodes from saved and small ones to ``end``, in graph order; empty where something else stands between."""
    reached: set[fx.Node] = set()
    stack = [end]
    while stack:
        node = stack.pop()
        small = numel(node) > 1 and numel(node) * SHRINKS <= numel(end)
        if node in reached or (node in saved and node is not end) or node.op == "placeholder" or small:
            continue
        if not is_pointwise(node) or len(reached) == _LONGEST:
            return []
        reached.add(node)
        stack.extend(inputs(node))
    return [node for node in end.graph.nodes if node in reached]


def _alike(x: fx.Node, y: fx.Node) -> bool:
    """Whether both have as many elements of the same type."""
    first, second = value(x), value(y)
    assert first is not None
    assert second is not None
    return first.dtype is second.dtype and first.dtype.is_floating_point and str(first.numel()) == str(second.numel())


def _rounds(node: fx.Node, x: fx.Node) -> bool:
    """Whether a node of the chain is of a type with fewer digits than x, which the output can't give back."""
    made, held = value(node), value(x)
    if made is None or held is None or not made.dtype.is_floating_point:
        return False
    return torch.finfo(made.dtype).eps > torch.finfo(held.dtype).eps


def _only_for(x: fx.Node, chain: Collection[fx.Node], repeated: Collection[str]) -> bool:
    """Whether backward reads x for the derivative of the chain alone.

    Its producer mustn't read its own output, and of other readers only sums may be there, which backward has no use for:
    one that it repeats goes into another function's derivative.
    """
    producer = x
    while is_view(producer) or is_cast(producer):
        producer = view_source(producer)
    readers = [user for user in x.users if user not in chain and user.op != "output"]
    sums = all(packet(user) in {"aten.add", "aten.sub"} and user.name not in repeated for user in readers)
    return packet(producer) in _READS_NO_OUTPUT and sums


def _at(chain: Collection[fx.Node], x: fx.Node, y: fx.Node, grid: Tensor) -> Tensor:
    return evaluate(chain, {x: grid}, y)
