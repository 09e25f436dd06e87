"""What a producer proves about its values: that none is negative, and bounds on integers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from .nodes import is_cast, is_view, packet, value

_ALWAYS = {
    f"aten.{name}"
    for name in "relu sigmoid _softmax exp abs hardsigmoid sqrt rsqrt softplus rand rand_like square bernoulli"
    " linalg_vector_norm var std".split()
}
_KEEPS = {
    f"aten.{name}"
    for name in "sum mean amax amin avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d max_pool2d_with_indices"
    " max_pool3d_with_indices upsample_nearest2d upsample_bilinear2d cumsum flip roll repeat index gather index_select"
    " constant_pad_nd reflection_pad2d replication_pad2d _unsafe_index leaky_relu hardtanh topk sort max min".split()
} | {"prims._low_memory_max_pool_with_offsets"}
"""Non-negative where their first argument is (a constant pad: where the constant is, too)."""

_ALL = {f"aten.{name}" for name in "add mul div minimum cat stack where masked_fill addcmul fmin".split()}
"""Non-negative where every argument is."""


def nonnegative(node: fx.Node) -> bool:
    """Whether the forward graph proves that no element of ``node`` is negative (NaN apart)."""
    return _nonnegative(node, {})


def _nonnegative(node: object, known: dict[fx.Node, bool]) -> bool:
    if isinstance(node, (list, tuple)):
        return all(_nonnegative(item, known) for item in node)
    if not isinstance(node, fx.Node):
        return isinstance(node, (int, float)) and node >= 0
    if node not in known:
        known[node] = False  # a cycle can't be, and a depth limit isn't needed: graphs are in order
        known[node] = _prove(node, known)
    return known[node]


def _prove(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    held = value(node)
    if held is not None and held.dtype in (torch.bool, torch.uint8):
        return True
    name, args = packet(node), node.args
    if node.op != "call_function" or not args:
        return False
    if node.target is operator.getitem:
        return bool(args[1] == 0) and name in _KEEPS and _nonnegative(args[0], known)
    if name in _ALWAYS:
        return True
    if name in {"aten.clamp", "aten.hardtanh", "aten.clamp_min"} and len(args) > 1 and _at_least_zero(args[1]):
        return True
    if name == "aten.maximum":
        return any(_nonnegative(arg, known) for arg in args[:2])
    if name == "aten.mul" and args[0] is args[1]:
        return True
    if name == "aten.pow" and isinstance(args[1], int) and args[1] % 2 == 0:
        return True
    if name == "aten.full":
        return _at_least_zero(args[1])
    if name in _ALL:
        predicate = {"aten.where": 0, "aten.masked_fill": 1}.get(name)
        values = [arg for position, arg in enumerate(args) if position != predicate]
        return _at_least_zero(node.kwargs.get("alpha", 1)) and all(_nonnegative(arg, known) for arg in values)
    if is_view(node) or is_cast(node) or name in _KEEPS:
        pad = args[2] if name == "aten.constant_pad_nd" and len(args) > 2 else 0
        return _at_least_zero(pad) and _nonnegative(args[0], known)
    return False


def _at_least_zero(number: object) -> bool:
    return isinstance(number, (int, float)) and number >= 0


def upper_bound(node: fx.Node) -> int | None:
    """An inclusive bound on an integer tensor whose values are proved to lie between 0 and it; None without a proof."""
    held = value(node)
    if held is None or held.dtype.is_floating_point or held.dtype.is_complex:
        return None
    if held.dtype is torch.bool:
        return 1
    if held.dtype is torch.uint8:
        return 255
    name, args = packet(node), node.args
    if node.target is operator.getitem:
        return _index_bound(node)
    if node.op != "call_function" or not args:
        return None
    if is_view(node) or is_cast(node) or name in {"aten.gather", "aten.index", "aten.index_select", "aten.flip", "aten.repeat"}:
        return upper_bound(args[0]) if isinstance(args[0], fx.Node) else None
    if name in {"aten.argmax", "aten.argmin"}:
        dim = args[1] if len(args) > 1 else None
        return _reduced_bound(args[0], dim)
    if name == "aten.arange" or name == "prims.iota":
        return _arange_bound(node)
    if name == "aten.where":
        return _combine(max, args[1:3])
    if name == "aten.add" and "alpha" not in node.kwargs:
        return _combine(sum, args[:2])
    if name == "aten.mul":
        return _combine(math.prod, args[:2])
    if name == "aten.remainder" and isinstance(args[1], int) and args[1] > 0:
        return args[1] - 1
    if name == "aten.full":
        return _literal(args[1])
    if name in {"aten.cat", "aten.stack"} and isinstance(args[0], (list, tuple)):
        return _combine(max, args[0])
    return None


def _literal(number: object) -> int | None:
    return number if isinstance(number, int) and number >= 0 else None


def _combine(how: Callable[[list[int]], int], args: Sequence[object]) -> int | None:
    bounds = [upper_bound(arg) if isinstance(arg, fx.Node) else _literal(arg) for arg in args]
    known = [bound for bound in bounds if bound is not None]
    return how(known) if len(known) == len(bounds) else None


def _arange_bound(node: fx.Node) -> int | None:
    """``iota(length, start, step)`` and ``arange(end)`` or ``arange(start, end)`` with constant ends."""
    if packet(node) == "prims.iota":
        length, start, step = node.args[0], node.kwargs.get("start", 0), node.kwargs.get("step", 1)
        if isinstance(length, int) and isinstance(start, int) and isinstance(step, int) and start >= 0 and step > 0:
            return start + step * max(length - 1, 0)
        return None
    ends = [arg for arg in node.args if isinstance(arg, int)]
    return max(*ends, 1) - 1 if len(ends) == len(node.args) and min(ends) >= 0 else None


_ALONG_DIM = {
    "aten.max": 1,
    "aten.min": 1,
    "aten.sort": 1,
    "aten.topk": 2,
    "aten.kthvalue": 2,
    "aten.mode": 1,
    "aten.median": 1,
}
"""Operators whose second output is an index along a dimension, and the position of that dimension."""

_OVER_SPACE = {"aten.max_pool2d_with_indices": 2, "aten.max_pool3d_with_indices": 3, "aten.adaptive_max_pool2d": 2}
"""Operators whose second output is a flat index over their input's last dimensions, and how many those are."""


def _index_bound(node: fx.Node) -> int | None:
    source = node.args[0]
    if not isinstance(source, fx.Node) or node.args[1] != 1 or not source.args:
        return None
    name, indexed = packet(source), source.args[0]
    if name in _OVER_SPACE and isinstance(indexed, fx.Node) and (held := value(indexed)) is not None:
        return _static_product(held.shape[-_OVER_SPACE[name] :])
    if name in _ALONG_DIM:
        if source.target is torch.ops.aten.sort.stable:
            dim = source.kwargs.get("dim", -1)
        else:
            dim = source.args[_ALONG_DIM[name]] if len(source.args) > _ALONG_DIM[name] else -1
        return _reduced_bound(indexed, dim)
    return None


def _reduced_bound(indexed: object, dim: object) -> int | None:
    if not isinstance(indexed, fx.Node) or (held := value(indexed)) is None:
        return None
    if dim is None:
        return _static_product(held.shape)
    return _static_product([held.shape[dim]]) if isinstance(dim, int) and held.dim() else 0


def _static_product(sizes: Sequence[object]) -> int | None:
    """The last flat index over ``sizes``; None where one is symbolic."""
    numbers = [size for size in sizes if isinstance(size, int)]
    return max(math.prod(numbers) - 1, 0) if len(numbers) == len(sizes) else None
