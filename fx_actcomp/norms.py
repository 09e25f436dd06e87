"""What can be made again from a norm's input: its affine image, and the ReLU after a batch norm.

torch saves both the input of a norm (or x-hat) and the norm's output, which the next layer's weight gradient reads. The
second is a cheap function of the first, its statistics and its parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping

from torch import fx

from .nodes import is_cast, is_view, numel, packet, storage_base, stored_bytes, value
from .records import Image, Kind, Normalized

_AFFINE = frozenset({"aten.mul", "aten.add", "aten.sub"})
KEPT = (Kind.STATISTIC, Kind.PARAMETER)
"""Kinds that are saved as they are, whatever the policy."""
SHRINKS = 16
"""How many times fewer elements a statistic, a parameter or a gate has than the tensor that it scales."""


def find_norms(forward: fx.Graph, saved: Collection[fx.Node], parameters: Collection[fx.Node]) -> tuple[Normalized, ...]:
    """Saved inputs of batch norms in training, with the saved ReLU of each one's output where there is one.

    Args:
        forward: The forward graph.
        saved: The nodes that it saves.
        parameters: Its parameters and buffers.
    """
    found = [_normalized(node, saved, parameters) for node in forward.nodes if packet(node) == "aten.var_mean"]
    return tuple(norm for norm in found if norm is not None)


def _normalized(moments: fx.Node, saved: Collection[fx.Node], parameters: Collection[fx.Node]) -> Normalized | None:
    """Read ``relu((x - mean) * rstd * weight + bias)`` off a graph, from its ``var_mean`` on."""
    x = _uncast(moments.args[0])
    held = None if x is None else value(x)
    if x is None or held is None or x not in saved or not _over_all_but_channels(moments, held.dim()):
        return None
    variance, mean = (_one_user(moments, operator.getitem, i) for i in (0, 1))
    shifted = None if variance is None else _user(variance, "aten.add")
    rstd = None if shifted is None else _user(shifted, "aten.rsqrt")
    centered = None if mean is None else _user(mean, "aten.sub")
    if mean is None or rstd is None or centered is None or _uncast(centered.args[0]) is not x or centered.args[1] is not mean:
        return None
    end = _user(centered, "aten.mul")
    if end is None or set(end.all_input_nodes) != {centered, rstd} or centered.kwargs:
        return None
    end, weight = _per_channel(end, "aten.mul", parameters)
    end, bias = _per_channel(end, "aten.add", parameters)
    relus = [user for user in _through_casts(end) if packet(user) == "aten.relu" and user in saved]
    rectified = next((relu for relu in relus if _laid_out(relu) == _laid_out(x)), None)  # codes lie as x does
    references = [node for node in (mean, rstd, weight, bias) if node is not None]
    bases = {storage_base(node) for node in saved}
    carried = sum(stored_bytes(node.meta["val"]) for node in references if not _at_hand(node, bases))
    return Normalized(x.name, mean.name, rstd.name, _name(weight), _name(bias), _name(rectified), carried)


def _over_all_but_channels(moments: fx.Node, rank: int) -> bool:
    dims = moments.args[1] if len(moments.args) > 1 else None
    kept = moments.kwargs.get("keepdim", False)
    return isinstance(dims, (list, tuple)) and kept is True and rank >= 2 and sorted(dims) == [0, *range(2, rank)]


def _at_hand(node: fx.Node, bases: Collection[fx.Node]) -> bool:
    """Whether saving the node costs nothing: its storage is saved already, or is a parameter's."""
    return storage_base(node) in bases or storage_base(node).op == "placeholder"


def _name(node: fx.Node | None) -> str | None:
    return None if node is None else node.name


def _uncast(arg: object) -> fx.Node | None:
    while isinstance(arg, fx.Node) and is_cast(arg):
        arg = arg.args[0]
    return arg if isinstance(arg, fx.Node) else None


def _user(node: fx.Node, name: str) -> fx.Node | None:
    return next((user for user in node.users if packet(user) == name), None)


def _one_user(node: fx.Node, target: object, position: int) -> fx.Node | None:
    return next((user for user in node.users if user.target is target and user.args[1] == position), None)


def _through_casts(node: fx.Node) -> list[fx.Node]:
    """The users of a node, casts of it looked through."""
    return [last for user in node.users for last in (_through_casts(user) if is_cast(user) else [user])]


def _laid_out(node: fx.Node) -> list[str]:
    held = value(node)
    return [] if held is None else [str(number) for number in (*held.shape, *held.stride())]


def _per_channel(node: fx.Node, name: str, parameters: Collection[fx.Node]) -> tuple[fx.Node, fx.Node | None]:
    """The next step of a norm's output where it combines with a parameter of one number a channel; the step, and that one."""
    held = value(node)
    for user in node.users:
        others = [arg for arg in user.args if arg is not node]
        other = others[0] if len(others) == 1 else None
        if packet(user) == name and not user.kwargs and isinstance(other, fx.Node) and held is not None:
            sizes = [*[1] * held.dim(), *other.meta["val"].shape][-held.dim() :]
            if sizes == [1, held.shape[1], *[1] * (held.dim() - 2)] and is_parameter(other, parameters):
                return user, other
    return node, None


def find_images(saved: Mapping[fx.Node, Kind], parameters: Collection[fx.Node]) -> tuple[Image, ...]:
    """Saved tensors that are an affine function of one other saved tensor, parameters and saved statistics.

    Args:
        saved: The nodes that a forward graph saves, and what each one is.
        parameters: Its parameters and buffers.
    """
    found = [_image(node, saved, parameters) for node, kind in saved.items() if kind is Kind.ACTIVATION]
    return tuple(image for image in found if image is not None)


def _image(node: fx.Node, saved: Mapping[fx.Node, Kind], parameters: Collection[fx.Node]) -> Image | None:
    chain: list[fx.Node] = []
    carried: list[fx.Node] = []
    current = node
    while current is node or saved.get(current) is not Kind.ACTIVATION:
        if not (is_view(current) or is_cast(current) or packet(current) in _AFFINE) or current.kwargs:
            return None
        inputs = [arg for arg in current.args if isinstance(arg, fx.Node)]  # the square of a tensor has it twice
        large = [arg for arg in inputs if numel(arg) * SHRINKS > numel(node)]
        small = [arg for arg in inputs if arg not in large]
        if len(large) != 1 or not all(saved.get(arg) in KEPT or is_parameter(arg, parameters) for arg in small):
            return None
        chain.insert(0, current)
        carried += [arg for arg in small if arg not in carried]
        current = large[0]
    affine = any(packet(step) in _AFFINE for step in chain)
    return Image(node.name, current.name, tuple(n.name for n in chain), tuple(n.name for n in carried)) if affine else None


def is_parameter(node: fx.Node, parameters: Collection[fx.Node]) -> bool:
    """Whether the node is a parameter, or a view of one of known sizes."""
    held = value(node)
    known = held is not None and all(isinstance(size, int) for size in held.shape)
    return known and storage_base(node) in parameters
