"""What a producer proves about its values: that none is negative, that they are shares of a whole, and bounds on integers.

Each proof goes once through the forward graph in its order, so a node is judged by what is known of its arguments. What an
operator isn't known for, it doesn't prove.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from .nodes import is_cast, is_view, packet, value


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


_SIGNED_ZERO, _NO_SIGN = 1, 2
"""What is proved: no element is below zero; and moreover none is a negative zero, by which dividing is safe."""

_MAKES = {
    **dict.fromkeys(_aten("relu hardsigmoid sqrt linalg_vector_norm var std"), _SIGNED_ZERO),
    **dict.fromkeys(_aten("abs exp sigmoid _softmax softplus rand rand_like square bernoulli"), _NO_SIGN),
}
"""What an operator proves whatever its arguments."""

_WHERE_FIRST_IS = _aten(
    "sum mean amax amin avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest2d upsample_bilinear2d cumsum"
    " flip roll repeat index gather index_select reflection_pad2d replication_pad2d _unsafe_index leaky_relu clamp_max"
)
"""They prove of their output what is proved of their first argument (and of their bound or slope, where they have one)."""

_FIRST_OUTPUT_IS = _aten("max_pool2d_with_indices max_pool3d_with_indices topk sort max min kthvalue median") | {
    "prims._low_memory_max_pool_with_offsets"
}
"""Operators with several outputs, of the first of which they prove what is proved of their first argument."""


def nonnegative(node: fx.Node) -> bool:
    """Whether the graph proves that no element of ``node`` is negative (NaN apart); see :func:`nonnegative_nodes`."""
    return node in nonnegative_nodes(node.graph)


def nonnegative_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a forward graph, floating-point, bool or byte, none of whose elements is negative (NaN apart)."""
    known: dict[fx.Node, int] = {}
    for node in graph.nodes:
        held = value(node)
        if held is None or _reinterprets(node):
            continue
        if held.dtype in (torch.bool, torch.uint8):
            known[node] = _NO_SIGN
        elif held.dtype.is_floating_point and node.op == "call_function":  # integers wrap, complex numbers have no sign
            known[node] = _proved(node, known)
    return {node for node, proved in known.items() if proved}


def _proved(node: fx.Node, known: Mapping[fx.Node, int]) -> int:
    """What is proved of a node's sign: 0, ``_SIGNED_ZERO`` or ``_NO_SIGN``."""
    name, args = packet(node), node.args

    def sign(arg: object) -> int:
        if isinstance(arg, (list, tuple)):
            return min((sign(item) for item in arg), default=0)
        if isinstance(arg, fx.Node):
            return known.get(arg, 0)
        return _NO_SIGN if _at_least_zero(arg) else 0

    if name in _MAKES:
        complex_source = args and isinstance(args[0], fx.Node) and _is_complex(args[0]) and name != "aten.abs"
        return 0 if complex_source else _MAKES[name]
    if name in {"aten.full", "aten.scalar_tensor"}:
        return sign(args[-1])
    if not args:
        return 0
    first = args[0]
    if node.target is operator.getitem and isinstance(first, fx.Node):
        passes = is_view(node) or (args[1] == 0 and name in _FIRST_OUTPUT_IS)
        return sign(first.args[0]) if passes else 0
    if name in {"aten.clamp", "aten.hardtanh", "aten.clamp_min"}:
        return _clamped(node, sign(first))
    if name == "aten.maximum":
        return _SIGNED_ZERO if any(sign(arg) for arg in args[:2]) else 0
    if name == "aten.pow":
        return _NO_SIGN if isinstance(args[1], int) and args[1] % 2 == 0 else 0
    if name == "aten.rsqrt":
        return _NO_SIGN if sign(first) == _NO_SIGN else 0
    if name == "aten.mul":
        return _NO_SIGN if first is args[1] else sign(args[:2])
    if name == "aten.div":
        return sign(first) if sign(args[1]) == _NO_SIGN and args[1] != 0 else 0
    if name == "aten.add":
        both = sign(args[:2]) and _at_least_zero(node.kwargs.get("alpha", 1))
        return max(sign(args[0]), sign(args[1])) if both else 0
    if name == "aten.addcmul":
        return sign(args[:3]) if _at_least_zero(node.kwargs.get("value", 1)) else 0
    if name in {"aten.minimum", "aten.fmin", "aten.cat", "aten.stack"}:
        return sign(args if name in {"aten.minimum", "aten.fmin"} else first)
    if name in {"aten.where", "aten.masked_fill"}:
        return sign([arg for i, arg in enumerate(args) if i != (0 if name == "aten.where" else 1)])
    if name == "aten.constant_pad_nd":
        return sign([first, *args[2:3]])
    if name == "aten.avg_pool2d":
        divisor = args[6] if len(args) > 6 else None
        return sign(first) if divisor is None or _at_least_zero(divisor) else 0
    if name in _WHERE_FIRST_IS:
        return sign([first, *args[1:2]]) if name in {"aten.clamp_max", "aten.leaky_relu"} else sign(first)
    return sign(first) if is_view(node) or is_cast(node) else 0


def _clamped(node: fx.Node, proved: int) -> int:
    low = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
    high = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    if high is not None and not _at_least_zero(high):
        return 0
    if isinstance(low, (int, float)) and low > 0:
        return _NO_SIGN
    return max(proved, _SIGNED_ZERO) if _at_least_zero(low) else proved if low is None else 0


def _reinterprets(node: fx.Node) -> bool:
    """Whether a view reads the bits of its source as other numbers: another type, negated, conjugated."""
    if not is_view(node):
        return False
    source, held = node.args[0], value(node)
    other = isinstance(source, fx.Node) and (before := value(source)) is not None and held is not None
    if other and before is not None and held is not None and before.dtype is not held.dtype:
        return True
    return packet(node) in {"aten._neg_view", "aten._conj", "aten.view_as_real", "aten.view_as_complex"}


def _is_complex(node: fx.Node) -> bool:
    held = value(node)
    return held is not None and held.dtype.is_complex


def _at_least_zero(number: object) -> bool:
    """At least zero, and no negative zero: dividing by that makes a negative infinity."""
    return isinstance(number, (int, float)) and number >= 0 and math.copysign(1, number) > 0


def share_nodes(graph: fx.Graph, positive: set[fx.Node]) -> set[fx.Node]:
    """The nodes of a forward graph that hold shares of a whole, ``x / sum(x)`` of what is never negative: probabilities.

    Some may have been set to zero since, by a dropout or a mask. ``positive`` is what :func:`nonnegative_nodes` found.
    """
    known = set[fx.Node]()
    for node in graph.nodes:
        if node in positive and _are_shares(node, positive, known):
            known.add(node)
    return known


def _are_shares(node: fx.Node, positive: set[fx.Node], known: set[fx.Node]) -> bool:
    name, args = packet(node), node.args
    if name == "aten._softmax":
        return True
    if name == "aten.div":
        whole = args[1]
        while isinstance(whole, fx.Node) and (is_view(whole) or is_cast(whole)):
            whole = whole.args[0]
        if isinstance(whole, fx.Node) and packet(whole) == "aten.sum" and args[0] in positive:
            return whole.args[0] is args[0]
    if name == "aten.mul":
        return any(share in known and _is_mask(mask) for share, mask in (args, args[::-1]))
    if name in {"aten.where", "aten.masked_fill"}:
        kept = [arg for i, arg in enumerate(args) if i != (0 if name == "aten.where" else 1)]
        return any(arg in known for arg in kept) and all(arg in known or _is_zero(arg) for arg in kept)
    return args[0] in known if is_view(node) or is_cast(node) else False


def _is_mask(arg: object) -> bool:
    """Whether all its elements are 0 or 1: a bool, or a number made of one."""
    while isinstance(arg, fx.Node):
        held = value(arg)
        if held is not None and held.dtype is torch.bool:
            return True
        arg = arg.args[0] if is_view(arg) or is_cast(arg) else None
    return False


def _is_zero(arg: object) -> bool:
    if isinstance(arg, fx.Node):
        return packet(arg) in {"aten.full", "aten.scalar_tensor"} and _is_zero(arg.args[-1])
    return isinstance(arg, (int, float)) and arg == 0


def upper_bound(node: fx.Node) -> int | None:
    """The bound of :func:`upper_bounds`; None without a proof."""
    return upper_bounds(node.graph).get(node)


def upper_bounds(graph: fx.Graph) -> dict[fx.Node, int]:
    """Integer nodes of a forward graph whose values are proved to lie between 0 and an inclusive bound, with the bound."""
    known: dict[fx.Node, int] = {}
    for node in graph.nodes:
        held = value(node)
        if held is None or held.dtype.is_floating_point or held.dtype.is_complex:
            continue
        bound = _bound(node, held.dtype, known)
        if bound is None and held.dtype is torch.uint8:
            bound = 255
        largest = 1 if held.dtype is torch.bool else torch.iinfo(held.dtype).max
        if bound is not None and bound <= largest:  # beyond it, the values would have wrapped
            known[node] = bound
    return known


def _bound(node: fx.Node, dtype: torch.dtype, known: Mapping[fx.Node, int]) -> int | None:
    name, args = packet(node), node.args
    if dtype is torch.bool:
        return 1
    if node.op != "call_function":
        return None
    if name in {"aten.full", "aten.scalar_tensor"} and args:
        return _literal(args[-1])
    if not args or _reinterprets(node):
        return None
    source = args[0]
    if node.target is operator.getitem and not is_view(node):
        return _index_bound(node)
    if node.target is operator.getitem and isinstance(source, fx.Node):
        return _lookup(source.args[0], known)
    if is_view(node) or is_cast(node) or name in _aten("gather index index_select flip repeat"):
        return _lookup(source, known)
    if name in {"aten.argmax", "aten.argmin"}:
        return _reduced_bound(source, args[1] if len(args) > 1 else None)
    if name in {"aten.arange", "prims.iota"}:
        return _arange_bound(node)
    if name == "aten.where":
        return _combine(max, args[1:3], known)
    if name == "aten.add" and "alpha" not in node.kwargs:
        return _combine(sum, args[:2], known)
    if name == "aten.mul":
        return _combine(math.prod, args[:2], known)
    if name == "aten.remainder" and isinstance(args[1], int) and args[1] > 0:
        return args[1] - 1
    if name in {"aten.cat", "aten.stack"} and isinstance(source, (list, tuple)):
        return _combine(max, source, known)
    return None


def _literal(number: object) -> int | None:
    return number if isinstance(number, int) and number >= 0 else None


def _lookup(arg: object, known: Mapping[fx.Node, int]) -> int | None:
    return known.get(arg) if isinstance(arg, fx.Node) else _literal(arg)


def _combine(how: Callable[[list[int]], int], args: Sequence[object], known: Mapping[fx.Node, int]) -> int | None:
    bounds = [_lookup(arg, known) for arg in args]
    found = [bound for bound in bounds if bound is not None]
    return how(found) if len(found) == len(bounds) else None


def _arange_bound(node: fx.Node) -> int | None:
    """``iota(length, start, step)`` and ``arange(end)`` or ``arange(start, end)`` with constant ends."""
    if packet(node) == "prims.iota":
        length, start, step = node.args[0], node.kwargs.get("start", 0), node.kwargs.get("step", 1)
        if isinstance(length, int) and isinstance(start, int) and isinstance(step, int) and start >= 0 and step > 0:
            return start + step * max(length - 1, 0)
        return None
    ends = [arg for arg in node.args if isinstance(arg, int)]
    return max(*ends, 1) - 1 if len(ends) == len(node.args) and min(ends) >= 0 else None


_ALONG_DIM = {f"aten.{name}": 1 for name in "max min sort kthvalue mode median".split()} | {"aten.topk": 2}
"""Operators whose second output is an index along a dimension, and the position of that dimension among the arguments."""

_OVER_SPACE = {"aten.max_pool2d_with_indices": 2, "aten.max_pool3d_with_indices": 3, "aten.adaptive_max_pool2d": 2}
"""Operators whose second output is a flat index over their input's last dimensions, and how many those are."""


def _index_bound(node: fx.Node) -> int | None:
    source = node.args[0]
    if not isinstance(source, fx.Node) or node.args[1] != 1 or not source.args:
        return None
    name, indexed = packet(source), source.args[0]
    if name == "prims._low_memory_max_pool_with_offsets" and isinstance(kernel := source.args[1], (list, tuple)):
        return _static_product(kernel)
    if name in _OVER_SPACE and isinstance(indexed, fx.Node) and (held := value(indexed)) is not None:
        return _static_product(held.shape[-_OVER_SPACE[name] :])
    if name in _ALONG_DIM:
        if source.target is torch.ops.aten.sort.stable:
            dim = source.kwargs.get("dim", -1)
        else:
            at = _ALONG_DIM[name] + (name == "aten.kthvalue")
            dim = source.args[at] if len(source.args) > at else -1
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
