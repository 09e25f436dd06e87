"""Facts about one node of an FX graph: its value, bytes, module path, source line, operator, views, storage."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from ._torch import size_guess

_HEAD = re.compile(r"^L\['[^']+'\]\.?|^L__self___?|^(?:self\.)")
_WRAPPER = re.compile(r"(^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
OWN_FILE = "<fx_actcomp>"
"""File name of code that we make around a user's model."""
_INDEX = re.compile(r"\['?([^'\]]+)'?\]")


def value(node: fx.Node) -> Tensor | None:
    """The node's fake tensor; None where it isn't a tensor."""
    held = node.meta.get("val")
    return held if isinstance(held, Tensor) else None


def is_symbol(node: fx.Node) -> bool:
    """Whether the node is a symbolic size or number."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def numel(node: fx.Node) -> int:
    """Elements, symbolic sizes as seen at compile time; 0 for what isn't a tensor."""
    held = value(node)
    if held is None:
        return 0
    count = 1
    for size in held.shape:
        count *= size_guess(size)
    return count


def nbytes(node: fx.Node) -> int:
    """Bytes of the elements, an expanded dimension counted once."""
    held = value(node)
    return 0 if held is None else stored_bytes(held)


def stored_bytes(x: Tensor) -> int:
    """Bytes of the distinct elements of ``x``, symbolic sizes as seen at compile time."""
    count = 1
    for size, step in zip(x.shape, x.stride(), strict=True):
        hint = size_guess(size)
        count *= 1 if size_guess(step) == 0 and hint > 1 else hint
    return count * x.dtype.itemsize


def packet(node: fx.Node) -> str:
    """The operator without its overload, as in ``aten.mm``; for ``getitem`` that of its source."""
    target = node.target
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        return packet(node.args[0])
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    return getattr(target, "__name__", str(target))


def original(node: fx.Node) -> str:
    """The operator that the user's program called, before decomposition; the node's own where that isn't known."""
    source = node.meta.get("original_aten")
    if isinstance(source, torch._ops.OpOverload):
        return f"{source.namespace}.{source._opname}"
    return packet(node)


def module_path(node: fx.Node) -> str:
    """Path of the innermost module, as ``named_modules`` spells it; empty at top level."""
    stack = node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = _INDEX.sub(r".\1", _HEAD.sub("", path))
    path = _WRAPPER.sub("", path).replace("..", ".")
    return path.removeprefix("_modules.").replace("._modules.", ".").strip(".")


def source_line(node: fx.Node) -> str:
    """``file:line`` of the innermost frame of the user's code; empty where unknown."""
    trace = node.meta.get("stack_trace")
    found = [frame for frame in re.findall(r'File "([^"]+)", line (\d+)', trace or "") if frame[0] != OWN_FILE]
    return f"{found[-1][0]}:{found[-1][1]}" if found else ""


def is_view(node: fx.Node) -> bool:
    """Whether the node's output shares the storage of its first argument."""
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if not isinstance(target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if target is torch.ops.aten._unsafe_view.default:
        return True
    returns = target._schema.returns
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write and not target._schema.is_mutable


def is_cast(node: fx.Node) -> bool:
    """Whether the node is a cast between types or a copy: the same numbers, perhaps rounded."""
    casts = {"prims.convert_element_type", "aten._to_copy", "aten.clone", "aten.lift_fresh_copy"}
    return packet(node) in casts and node.target is not operator.getitem


def is_widening(node: fx.Node) -> bool:
    """Whether the node is a copy or a cast that loses nothing, so its result can be made again from its input."""
    source, made = node.args[0] if node.args else None, value(node)
    if not is_cast(node) or not isinstance(source, fx.Node) or made is None or (held := value(source)) is None:
        return False
    if made.dtype.is_floating_point and not held.dtype.is_floating_point and not held.dtype.is_complex:
        exact = round(1 / torch.finfo(made.dtype).eps)  # every whole number up to it has a float of this type
        return held.dtype is torch.bool or torch.iinfo(held.dtype).max <= exact
    return torch.promote_types(held.dtype, made.dtype) is made.dtype


def view_source(node: fx.Node) -> fx.Node:
    """The node whose storage a view shares, looking through a getitem on a multi-output view."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if node.target is operator.getitem:
        return view_source(source)
    return source


def storage_base(node: fx.Node) -> fx.Node:
    """The node that owns the storage that ``node`` shares; itself where it owns it."""
    while is_view(node):
        node = view_source(node)
    return node


RESHAPES = frozenset(f"aten.{name}" for name in "view _unsafe_view reshape squeeze unsqueeze alias detach".split())
"""Views that keep the elements in their order."""


def reshaped_base(node: fx.Node) -> fx.Node:
    """The node of which this one is a reshape: the same elements in the same order."""
    while packet(node) in RESHAPES and is_view(node):
        node = view_source(node)
    return node


def aliases(base: fx.Node) -> Iterator[fx.Node]:
    """``base`` and every view of its storage."""
    yield base
    for user in base.users:
        if is_view(user) and user.args[0] is base:
            yield from aliases(user)


def is_tangent(node: fx.Node) -> bool:
    """Whether a backward placeholder is a gradient that comes in."""
    return node.op == "placeholder" and node.name.startswith("tangents")


def step_input(graph: fx.Graph) -> fx.Node:
    """The step counter among a forward graph's inputs: the last one that the Dynamo graph had.

    Raises:
        ValueError: That isn't a whole number.
    """
    given: list[fx.Node] = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("primals")]
    held = value(given[-1]) if given else None
    if held is None or held.dtype is not torch.int64 or held.dim():
        raise ValueError("stochastic rounding found no step counter among the graph's inputs")
    return given[-1]


def outputs(graph: fx.Graph) -> tuple[object, ...]:
    """What a graph returns."""
    (node,) = graph.find_nodes(op="output")
    returned = node.args[0]
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
