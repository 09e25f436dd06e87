"""Part of stage 4: the two graphs under edit, and what crosses from one to the other."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ._torch import offload_mark, saved_output_descriptor, saved_without_version_check
from .nodes import is_symbol, numel, outputs, packet, reshaped_base, storage_base, value
from .saved import pair_saved
from .splice import Splicer


@dataclass(frozen=True)
class Slot:
    """One saved value: the forward node that is returned, and the backward placeholder that takes it."""

    forward: fx.Node
    backward: fx.Node


def hand_over(
    forward: fx.GraphModule, backward: fx.GraphModule, redrawn: Sequence[str], overwritten: Sequence[str], num_outputs: int
) -> None:
    """Save forward's own numbers where the stock partitioner's backward would find others.

    Args:
        forward: The stock partitioner's forward module.
        backward: Its backward module.
        redrawn: Names of tensors that are nodes of both, each computing them for itself.
        overwritten: Names of saved tensors that forward writes into.
        num_outputs: How many outputs of forward are the user's.
    """
    editor = Crossing(copy.deepcopy(forward.graph), copy.deepcopy(backward.graph), num_outputs)
    for name in overwritten:
        editor.save_copy(name)
    for name in redrawn:
        editor.hand_over(name)
    editor.finish(())
    forward.graph, backward.graph = editor.forward, editor.backward


class Crossing:
    """The two graphs, and the saved values between them.

    Attributes:
        forward: The forward graph.
        backward: The backward graph.
        placeholders: Of each value that was saved, by its name, backward's placeholder.
        slots: What is saved now, by what it was saved for.
        splice: Puts functions into either graph.
    """

    def __init__(self, forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> None:
        self.forward, self.backward, self.num_outputs = forward, backward, num_outputs
        pairs = pair_saved(forward, backward, num_outputs)
        self.placeholders = {node.name: taken for node, taken in pairs}
        self.taken = set(self.placeholders.values())
        # Both graphs come from one joint graph, in which a name is one node; nodes that are inserted later may share names.
        self.names: dict[str, fx.Node] = {node.name: node for node in forward.nodes}
        self.slots = {node.name: [Slot(node, taken)] for node, taken in pairs}
        self.splice = Splicer()

    def node(self, name: str) -> fx.Node:
        """A node of forward, as it was named before anything was inserted."""
        return self.names[name]

    def hand_over(self, name: str) -> None:
        """Save a forward node and drop its repetition from backward."""
        node, repeated = self.node(name), next(n for n in self.backward.nodes if n.name == name)
        self.slots[name] = [self._take(node, repeated)]
        sources = repeated.all_input_nodes
        self.backward.erase_node(repeated)  # random operators have effects, as graphs see it: nothing else would remove them
        for source in sources:
            if not source.users and source.op == "call_function":
                self.backward.erase_node(source)

    def save_copy(self, name: str) -> None:
        """Save a copy of a saved tensor, taken before forward writes into anything."""
        node, taken = self.node(name), self.placeholders[name]
        first = next(n for n in self.forward.nodes if packet(n) == "aten.copy_")
        (copied,) = self.splice(torch.clone, [node], first, node, "copy")
        self.slots[name] = [self._take(copied, taken)]

    def _take(self, node: fx.Node, instead_of: fx.Node) -> Slot:
        """Have backward take a forward node in the stead of one of its own."""
        placeholder = self.placeholder(node, node.name)
        instead_of.replace_all_uses_with(placeholder)
        placeholder.name = node.name  # by which the two are paired from here on
        return Slot(node, placeholder)

    def placeholder(self, node: fx.Node, name: str) -> fx.Node:
        """A new input of backward for a forward node."""
        with self.backward.inserting_before(next(iter(self.backward.nodes))):
            placeholder: fx.Node = self.backward.placeholder(self._unused(name))
        placeholder.meta.update({key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta})
        return placeholder

    def _shared_name(self, name: str) -> str:
        """A name that no node of either graph has."""
        names = {node.name for graph in (self.forward, self.backward) for node in graph.nodes}
        return next(free for i in itertools.count() if (free := f"{name}_{i}") not in names)

    def _unused(self, name: str) -> str:
        """A target that no placeholder has: a graph's signature is made of them, and a second one would shadow the first."""
        taken = {str(n.target) for n in self.backward.find_nodes(op="placeholder")} | {n.name for n in self.backward.nodes}
        while name in taken:
            name += "_"
        return name

    def carry(self, node: fx.Node, before: fx.Node | None = None) -> fx.Node:
        """The backward node of a statistic or parameter; its storage is saved where it isn't yet.

        Args:
            node: The forward node.
            before: Where to make a view of the storage again; None takes any view of all its elements.
        """
        base = storage_base(node)
        held = [slot for group in self.slots.values() for slot in group if storage_base(slot.forward) is base]
        if before is None:
            return next((slot.backward for slot in held if numel(slot.forward) == numel(node)), None) or self._carry_new(base)
        for slot in held:
            if slot.forward is node:
                return slot.backward
            if reshaped_base(slot.forward) is reshaped_base(node):
                return self._reshape(slot.backward, node, before)
        return self.replay(node, base, self._carry_new(base), before)

    def _reshape(self, held: fx.Node, like: fx.Node, before: fx.Node) -> fx.Node:
        """The same elements in the shape of a forward node."""
        shape = like.meta["val"].shape
        inputs = [held, *self.symbols(like)]
        return self.splice(lambda x, *_: x.reshape(shape), inputs, before, like, tuple(shape))[0]

    def replay(self, node: fx.Node, unit: fx.Node, restored: fx.Node, before: fx.Node) -> fx.Node:
        """Make a view of the compressed base again in backward."""
        if node is unit:
            return restored
        source = self.replay(_first_arg(node), unit, restored, before)
        with self.backward.inserting_before(before):
            made: fx.Node = self.backward.node_copy(node, lambda n: source if n is node.args[0] else self.placeholders[n.name])
        made.meta["autograd_backward"] = True
        return made

    def _carry_new(self, node: fx.Node) -> fx.Node:
        slot = Slot(node, self.placeholder(node, f"{node.name}_carried"))
        self.slots[f"carried {node.name}"] = [slot]
        return slot.backward

    def symbols(self, node: fx.Node) -> list[fx.Node]:
        """Backward's symbolic sizes, for a forward node of which sizes or strides are symbolic.

        What is no product of symbols (a power, a quotient) torch can't compute again from these: forward hands it over.
        """
        held = value(node)
        assert held is not None
        if all(isinstance(number, int) for number in (*held.shape, *held.stride())):
            return []
        known = [slot.backward for group in self.slots.values() for slot in group if is_symbol(slot.forward)]
        said = {str(symbol.meta["val"]) for symbol in known}
        for read, numbers in ((torch.ops.aten.sym_size.int, held.shape), (torch.ops.aten.sym_stride.int, held.stride())):
            for d, number in enumerate(numbers):
                if not re.fullmatch(r"\w+(\*\w+)*", str(number)) and str(number) not in said:
                    with self.forward.inserting_after(node):
                        made = self.forward.call_function(read, (node, d))
                    made.meta["val"] = number
                    slot = Slot(made, self.placeholder(made, f"{node.name}_size"))
                    self.slots[f"size {number}"] = [slot]
                    known.append(slot.backward)
                    said.add(str(number))
        return known

    def finish(self, dropped: Iterable[str]) -> None:
        """Write the saved values into both signatures, in the order that the runtime counts on, and clean up."""
        for name in dropped:
            self.slots[name] = []
        self.backward.eliminate_dead_code()
        slots = [slot for group in self.slots.values() for slot in group]
        tensors = [s for s in slots if value(s.forward) is not None]
        ordered = [s for s in tensors if not saved_without_version_check(s.forward)]
        ordered += [s for s in tensors if saved_without_version_check(s.forward)]
        ordered += [s for s in slots if value(s.forward) is None and not is_symbol(s.forward)]
        symbols = [s for s in slots if is_symbol(s.forward)]
        for slot in ordered:
            if offload_mark(slot.forward) and slot.forward.name != slot.backward.name:
                slot.forward.name = slot.backward.name = self._shared_name(slot.backward.name)  # torch pairs them by name
        self._set_outputs([slot.forward for slot in ordered + symbols])
        self._set_placeholders([slot.backward for slot in symbols + ordered])
        self.forward.eliminate_dead_code()
        for graph in (self.forward, self.backward):
            graph.lint()

    def _set_outputs(self, saved: list[fx.Node]) -> None:
        (output,) = self.forward.find_nodes(op="output")
        theirs = outputs(self.forward)[: self.num_outputs]
        output.args = ((*theirs, *saved),)
        if "desc" in output.meta:
            mine = [saved_output_descriptor(i, bool(saved_without_version_check(n))) for i, n in enumerate(saved)]
            output.meta["desc"] = [*list(output.meta["desc"])[: self.num_outputs], *mine]

    def _set_placeholders(self, saved: list[fx.Node]) -> None:
        old = self.backward.find_nodes(op="placeholder")
        kept = set(saved)
        others = [n for n in old if n not in kept and n not in self.taken]
        first = next(iter(self.backward.nodes))
        for node in reversed([*saved, *others]):
            if node is not first:
                first.prepend(node)
                first = node
        for node in old:
            if node not in kept and node in self.taken:
                self.backward.erase_node(node)


def _first_arg(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source
