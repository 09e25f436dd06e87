"""What backward does with each saved value: follows it through recomputed chains to its real consumers.

A node that depends on a tangent is part of a gradient, and gradients are linear in the tangents; so a value is followed
only until it meets a gradient, and what matters is how it meets it. Nodes before that point are recomputed forward values.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from . import rules
from .codecs.bits import packed_bytes
from .nodes import aliases, is_tangent, is_view, is_widening, module_path, numel, original, packet, value
from .records import Decision, Role, Use


@dataclass
class UseMap:
    """Uses by saved name, and the decisions that are taken from saved values.

    Attributes:
        uses: For each backward placeholder, by name.
        decisions: In graph order; sign tests and what has to be pinned for the other ones.
    """

    uses: dict[str, list[Use]] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)


def find_uses(graph: fx.Graph, saved: Iterable[str]) -> UseMap:
    """Classify every use of the saved tensors.

    Args:
        graph: The backward graph.
        saved: Names of the placeholders that hold saved tensors.

    Returns:
        Uses and decisions. A use that the allow-table doesn't list has role ``UNKNOWN``.
    """
    wanted = set(saved)
    gradients = _descendants(node for node in graph.nodes if is_tangent(node))
    found = UseMap({name: [] for name in wanted})
    for placeholder in graph.find_nodes(op="placeholder"):
        if placeholder.name in wanted:
            held = value(placeholder)
            if held is not None and held.dtype.is_floating_point:
                _follow(placeholder, gradients, found)
            else:
                found.uses[placeholder.name] += _direct_uses(placeholder)
    for node in graph.nodes:
        if node in gradients and (reason := _nonlinear_in_gradient(node, gradients)):
            use = Use(original(node), module_path(node), Role.EXACT, reason)
            for source in _saved_ancestors(_told_on(node, gradients)):
                if source in wanted and use not in found.uses[source]:
                    found.uses[source].append(use)
    return found


def _descendants(roots: Iterable[fx.Node]) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(node.users)
    return reached


def _saved_ancestors(node: fx.Node) -> list[str]:
    """Names of the placeholders that a node depends on, tangents apart, in graph order."""
    reached: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in reached:
            reached.add(current)
            stack.extend(current.all_input_nodes)
    return [n.name for n in node.graph.find_nodes(op="placeholder") if n in reached and not is_tangent(n)]


def _direct_uses(placeholder: fx.Node) -> list[Use]:
    """Uses of a mask or an index: decisions, all of them."""
    users = dict.fromkeys(user for alias in aliases(placeholder) for user in alias.users if not is_view(user))
    return list(dict.fromkeys(Use(original(user), module_path(user), Role.DECISION) for user in users))


def _follow(placeholder: fx.Node, gradients: set[fx.Node], found: UseMap) -> None:
    """Breadth first from one saved value to where it meets gradients, decisions or operators that forbid it."""
    uses = found.uses[placeholder.name]
    queue: list[tuple[fx.Node, bool]] = [(placeholder, False)]
    seen: set[tuple[fx.Node, bool]] = set()
    while queue:
        node, bent = queue.pop(0)
        if (node, bent) in seen:
            continue
        seen.add((node, bent))
        for user in node.users:
            use, goes_on, bends = _classify(node, user, gradients, found, placeholder)
            if use is not None:
                use = _bear_bend(use) if bent else use
                if use not in uses:
                    uses.append(use)
            if goes_on:
                queue.append((user, bent or bends))


def _bear_bend(use: Use) -> Use:
    """A value that went through a nonlinear function before its use bears no fewer bits than that function does."""
    if use.role in (Role.WEIGHT_GRAD, Role.CONV_WEIGHT_GRAD, Role.NORM):
        return Use(use.op, use.module, Role.NONLINEAR, use.reason, use.spatial)
    return use


def _classify(
    node: fx.Node, user: fx.Node, gradients: set[fx.Node], found: UseMap, placeholder: fx.Node
) -> tuple[Use | None, bool, bool]:
    """One step: the use that ``user`` makes of ``node``, whether to follow ``user``, whether it is nonlinear."""
    op, module = original(user), module_path(user)

    def use(role: Role, reason: str = "", *, spatial: bool = False) -> Use:
        return Use(op, module, role, reason, spatial)

    positions = _positions(node, user)
    if user.op == "output":
        return use(Role.PRODUCT), False, False
    if all(p in rules.SIZE_ONLY.get(packet(user), ()) for p in positions):
        return use(Role.SIZE), False, False
    if user.target is operator.getitem and not is_view(user):
        return None, True, False
    if is_decision(user):
        if user in gradients:
            return use(Role.EXACT, f"{op} decides on a gradient, which forward can't do"), False, False
        _record_decision(user, placeholder, found, gradients)
        return use(Role.DECISION), False, False
    if user in gradients:
        return _meets_gradient(node, user, positions, placeholder), False, False
    if packet(user) in rules.HIDE_DECISIONS:
        return use(Role.EXACT, f"{op} compares inside"), False, False
    if is_view(user):
        return None, True, False
    if op in rules.SATURATING or packet(user) in rules.SATURATING:
        return None, True, True
    if packet(user) == "aten.pow" and _whole_power(user):
        return None, True, bool(user.args[1] != 1)
    if _is_value_argument(user, positions):
        return None, True, False
    if (reason := rules.EXACT.get(packet(user))) is not None:
        return use(Role.EXACT, f"{op}: {reason}"), False, False
    return use(Role.UNKNOWN, f"use in {op} not known"), False, False


def _meets_gradient(node: fx.Node, user: fx.Node, positions: list[int], placeholder: fx.Node) -> Use:
    op, name, module = original(user), packet(user), module_path(user)
    spatial = len(node.meta["val"].shape) == len(placeholder.meta["val"].shape) >= 3
    if name in rules.HIDE_DECISIONS:
        return Use(op, module, Role.EXACT, f"{op} compares inside")
    if name == "aten.convolution_backward":
        role = Role.CONV_WEIGHT_GRAD if positions == [1] else Role.PRODUCT
        return Use(op, module, role, spatial=spatial, pointwise=node is placeholder and _is_pointwise(user))
    if name in rules.MATMULS:
        role = Role.WEIGHT_GRAD if _ends_as_gradient(user) else Role.PRODUCT
        return Use(op, module, role)
    if name in rules.ATTENTION_OPERANDS:
        if all(p in rules.ATTENTION_OPERANDS[name] for p in positions):
            return Use(op, module, Role.ATTENTION)
        return Use(op, module, Role.EXACT, f"{op}: statistics, masks and random state of attention")
    if op in rules.NORM or name in rules.NORM:
        if name in rules.NORM and positions not in ([1], [2]):
            return Use(op, module, Role.EXACT, f"{op}: statistics of a norm")
        return Use(op, module, Role.NORM, spatial=spatial and op in rules.SPATIAL_NORM)
    if op in rules.SATURATING or name in rules.SATURATING:
        return Use(op, module, Role.NONLINEAR)
    if is_view(user) or _is_value_argument(user, positions):
        return Use(op, module, Role.PRODUCT)
    if (reason := rules.EXACT.get(name)) is not None:
        return Use(op, module, Role.EXACT, f"{op}: {reason}")
    return Use(op, module, Role.UNKNOWN, f"use in {op} not known")


def _is_pointwise(convolution: fx.Node) -> bool:
    """Whether a convolution's backward is that of a 1x1 with stride 1, no padding and nothing else that moves its input."""
    _, _, weight, _, stride, padding, _, transposed, _, _, _ = convolution.args
    held = value(weight) if isinstance(weight, fx.Node) else None
    kernel = list(held.shape[2:]) if held is not None else []
    return kernel == [1] * len(kernel) == stride and padding == [0] * len(kernel) and not transposed


def _positions(node: fx.Node, user: fx.Node) -> list[int]:
    """Positions of ``node`` among the arguments; a list counts as one argument, keyword arguments as -1."""
    found = [p for p, arg in enumerate(user.args) if node in _nodes_in(arg)]
    return found + [-1] * any(node in _nodes_in(arg) for arg in user.kwargs.values())


def _nodes_in(arg: object) -> Iterator[fx.Node]:
    if isinstance(arg, fx.Node):
        yield arg
    elif isinstance(arg, (list, tuple)):
        for inner in arg:
            yield from _nodes_in(inner)


def _is_value_argument(user: fx.Node, positions: list[int]) -> bool:
    name = packet(user)
    if name == "aten.div":
        return positions == [0] and not isinstance(user.args[1], fx.Node)
    if name not in rules.LIPSCHITZ:
        return False
    allowed = rules.VALUE_ARGUMENTS.get(name)
    return allowed is None or all(p in allowed for p in positions)


def _whole_power(user: fx.Node) -> bool:
    exponent = user.args[1]
    return isinstance(exponent, (int, float)) and exponent >= 1 and float(exponent).is_integer()


def is_step(node: fx.Node) -> bool:
    """Whether the node makes a floating-point number that is a decision, as rounding does."""
    return packet(node) in rules.STEPS or (packet(node) == "aten.div" and node.kwargs.get("rounding_mode") is not None)


def is_decision(node: fx.Node) -> bool:
    """Whether the node makes a bool, an integer or a piecewise-constant value of a floating-point one."""
    made = value(node)
    if made is None:
        return packet(node) in rules.PIECEWISE_CONSTANT
    if packet(node) in rules.PIECEWISE_CONSTANT or is_step(node):
        return True
    return not (made.dtype.is_floating_point or made.dtype.is_complex)


def _record_decision(node: fx.Node, placeholder: fx.Node, found: UseMap, gradients: set[fx.Node]) -> None:
    sign_of = placeholder.name if _is_sign_test(node, placeholder) else None
    for last in [node] if sign_of else _frontier(node, gradients):
        if last.name not in found.decisions or sign_of:
            bits, obstacle = _pinned_bits(last)
            held = value(last)
            shape = () if held is None else tuple(s if isinstance(s, int) else str(s) for s in held.shape)
            packed = 0 if bits is None or held is None else packed_bytes(held, bits)
            found.decisions[last.name] = Decision(
                name=last.name,
                op=original(last),
                module=module_path(last),
                sources=tuple(_saved_ancestors(last)),
                shape=shape,
                bits=bits,
                nbytes=packed,
                obstacle=obstacle,
                sign_of=sign_of,
            )


def _frontier(node: fx.Node, gradients: set[fx.Node]) -> list[fx.Node]:
    """The last bools that are computed from this one alone: one mask for ``(x > 0) & (x < 6)``, not two."""
    held = value(node)
    users = list(node.users)

    def combines(user: fx.Node) -> bool:
        made = value(user)
        return user not in gradients and made is not None and made.dtype is torch.bool and numel(user) == numel(node)

    if held is not None and held.dtype is torch.bool and users and all(combines(user) for user in users):
        return list(dict.fromkeys(last for user in users for last in _frontier(user, gradients)))
    return [node]


def _is_sign_test(node: fx.Node, placeholder: fx.Node) -> bool:
    if packet(node) not in rules.SIGN_TESTS:
        return False
    if len(node.args) > 1 and not (isinstance(node.args[1], (int, float)) and node.args[1] == 0):
        return False
    tested = node.args[0]
    while isinstance(tested, fx.Node) and (is_view(tested) or is_widening(tested)):
        tested = tested.args[0]
    return tested is placeholder


def _pinned_bits(node: fx.Node) -> tuple[int | None, str]:
    """Bits an element with which forward can hand the decision over, or why it can't."""
    if (obstacle := _not_repeatable(node)) is not None:
        return None, f"it depends on {packet(obstacle)}, which forward can't be made to do again"
    held = value(node)
    if held is None or not held.shape:
        return None, "it isn't one tensor with a dimension"
    if held.dtype is torch.bool:
        return 1, ""
    if packet(node) == "aten.sign":
        return 2, ""
    return None, f"{packet(node)} takes as many bits as the value"


def _not_repeatable(node: fx.Node) -> fx.Node | None:
    """What a decision depends on beside saved values and plain operators: random draws, nested graphs, attributes."""
    reached: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in reached or current.op == "placeholder":
            continue
        reached.add(current)
        plain = isinstance(current.target, torch._ops.OpOverload) or getattr(current.target, "__module__", "") == "_operator"
        if not plain or torch.Tag.nondeterministic_seeded in getattr(current.target, "tags", ()):
            return current
        stack.extend(current.all_input_nodes)
    return None


def _nonlinear_in_gradient(node: fx.Node, gradients: set[fx.Node]) -> str:
    """Why a node that takes a gradient isn't linear in it; empty where it is."""
    taken = [n for n in node.all_input_nodes if n in gradients]
    if not taken or node.op == "output":
        return ""
    if is_decision(node):
        return f"{original(node)} decides on a gradient, which forward can't do"
    if original(node) in rules.SATURATING:  # its pieces divide, too (softplus: by 1 + exp(x)), but its slope has a bound
        return ""
    reason = rules.EXACT.get(packet(node))
    if reason is None or any(_is_value_argument(node, _positions(n, node)) for n in taken):
        return ""
    return f"{original(node)} of a gradient: {reason}"


def _told_on(node: fx.Node, gradients: set[fx.Node]) -> fx.Node:
    """Whose ancestors an operator that isn't linear in a gradient keeps exact: of a quotient, the dividend's alone."""
    dividend = node.args[0] if node.args else None
    divides = packet(node) == "aten.div" and node.args[1] not in gradients
    return dividend if divides and isinstance(dividend, fx.Node) else node


def _ends_as_gradient(node: fx.Node) -> bool:
    """Whether a matrix product goes to the graph's output through nothing but views, casts and sums."""
    for user in node.users:
        if user.op != "output" and not ((is_view(user) or packet(user) in rules.GRADIENT_PASSING) and _ends_as_gradient(user)):
            return False
    return bool(node.users)
