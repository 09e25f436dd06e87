"""Stage 4: the two graphs + a plan -> rewritten graphs. It edits copies and chooses nothing.

A saved tensor becomes its compressed parts: forward compresses right after the tensor's last use and returns the parts;
backward takes the parts and decompresses right before the first use. A pinned decision is moved from backward to forward,
where the values are exact, and crosses packed.
"""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from torch import Tensor, fx

from ._torch import offload_mark, saved_without_version_check
from .choice import Choice, Pin, Plan
from .codecs import Layout, Noise, Parts, Reference, Traits, codec_named
from .codecs.inverse import Invert
from .contract import contract
from .crossing import Crossing, Slot
from .nodes import aliases, packet, step_input, value
from .records import Derivative, Inversion, Normalized
from .splice import kind_of


def apply_plan(forward: fx.GraphModule, backward: fx.GraphModule, plan: Plan, num_outputs: int) -> None:
    """Rewrite both modules; on an error neither is changed.

    Args:
        forward: The stock partitioner's forward module.
        backward: Its backward module.
        plan: What to do.
        num_outputs: How many outputs of forward are the user's.
    """
    editor = _Editor(copy.deepcopy(forward.graph), copy.deepcopy(backward.graph), num_outputs)
    for pin in plan.pins:
        editor.pin(pin)
    for unit in dict.fromkeys(choice.unit for choice in plan.choices if choice.codec):
        editor.compress([choice for choice in plan.choices if choice.unit == unit])
    for choice in plan.choices:
        if choice.image and not choice.codec:
            editor.remake(choice)
    editor.finish({choice.saved.name for choice in plan.choices if choice.dropped})
    forward.graph, backward.graph = editor.forward, editor.backward


class _Editor(Crossing):
    """Carries out the choices of a plan."""

    def __init__(self, forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> None:
        super().__init__(forward, backward, num_outputs)
        self.twins: dict[fx.Node, fx.Node] = {node: self.names[node.name] for node in backward.nodes if node.name in self.names}
        self.twins.update({slot.backward: slot.forward for group in self.slots.values() for slot in group})

    def compress(self, members: list[Choice]) -> None:
        """Compress one storage; restore its views and what is made again from it."""
        saved = [member for member in members if not (member.rectified or member.image)]
        choice = saved[0]
        unit, codec = self.node(choice.unit), codec_named(choice.codec or "")
        parts = self._save(unit, choice.codec or "", choice.traits, self._after_last_use(unit, choice.norm), choice.norm)
        if codec.contracts(choice.traits):
            self._contract(choice, unit, parts)
            return
        if choice.inversion is not None and choice.inversion.derivative is not None:
            self._differentiate(choice, choice.inversion, choice.inversion.derivative, parts)
            return
        for member in members:
            if member.image:
                self._remake(member, lambda before: self._restore(parts, unit, choice, before))
            elif member.rectified:
                self._rectify(member, parts)
        placeholders = [self.placeholders[member.saved.name] for member in saved]
        first = _first_user(placeholders)
        restored = self._restore(parts, unit, choice, first)
        for member, placeholder in zip(saved, placeholders, strict=True):
            viewed = self.replay(self.node(member.saved.name), unit, restored, first)
            placeholder.replace_all_uses_with(viewed)
            self.slots[member.saved.name] = parts if member is choice else []

    def remake(self, choice: Choice) -> None:
        """Make an image of a tensor that is saved as it is."""
        assert choice.image is not None
        source = self.placeholders[choice.image.source]
        self._remake(choice, lambda _: source)

    def _remake(self, choice: Choice, source: Callable[[fx.Node], fx.Node]) -> None:
        """Repeat the chain from a source to its image in backward, before the image's first use."""
        assert choice.image is not None
        placeholder = self.placeholders[choice.saved.name]
        before = _first_user([placeholder])
        made = {self.node(choice.image.source): source(before)}
        for name in choice.image.carried:
            made[self.node(name)] = self.carry(self.node(name), before)
        for name in choice.image.chain:
            node = self.node(name)
            with self.backward.inserting_before(before):
                made[node] = self.backward.node_copy(node, lambda n: made[n] if n in made else self.placeholders[n.name])
            made[node].meta["autograd_backward"] = True
        placeholder.replace_all_uses_with(made[node])
        self.slots[choice.saved.name] = []

    def _rectify(self, choice: Choice, parts: list[Slot]) -> None:
        """Restore the ReLU of a batch norm's output from the codes of its input."""
        placeholder = self.placeholders[choice.saved.name]
        restored = self._restore(parts, self.node(choice.saved.name), choice, _first_user([placeholder]))
        placeholder.replace_all_uses_with(restored)
        self.slots[choice.saved.name] = []

    def _after_last_use(self, unit: fx.Node, norm: Normalized | None) -> fx.Node:
        """The node before which to compress: right after the last use of the storage, so that it can be freed there."""
        order = {node: i for i, node in enumerate(self.forward.nodes)}
        readers = {reader for alias in aliases(unit) for reader in (alias, *alias.users) if reader.op != "output"}
        if norm is not None:
            readers.update(self.node(name) for name in (*norm.references, *filter(None, [norm.rectified])))
        last: fx.Node = max(readers, key=order.__getitem__)
        return last.next

    def _contract(self, choice: Choice, unit: fx.Node, parts: list[Slot]) -> None:
        """Take the weight gradients from the parts themselves; nothing is restored."""
        held = value(unit)
        assert held is not None
        for user in list(self.placeholders[choice.saved.name].users):  # the others are decisions, which are pinned by now
            if packet(user) == "aten.convolution_backward":
                contract(user, [slot.backward for slot in parts], codec_named(choice.codec or ""), Layout.of(held))
        self.slots[choice.saved.name] = parts

    def _differentiate(self, choice: Choice, inversion: Inversion, derivative: Derivative, parts: list[Slot]) -> None:
        """Multiply by the derivative of a function at its input, which isn't restored."""
        names = {node.name: node for node in self.backward.nodes}
        made, gradient = names[derivative.made], names[derivative.gradient]
        held, result, codec = value(self.node(choice.saved.name)), value(made), codec_named(choice.codec or "")
        assert held is not None
        assert result is not None
        assert isinstance(codec, Invert)
        layout, target = Layout.of(held), Layout.of(result)
        inputs = [gradient, *(slot.backward for slot in parts), self.carry(self.node(inversion.source), made)]
        inputs += self.symbols(self.node(choice.saved.name))

        def multiply(g: Tensor, *given: Tensor) -> Tensor:
            known = replace(choice.traits, output=_in_order(given[len(parts)], inversion))
            slope = codec.derivative(given[: len(parts)], layout, known)
            return target.restore((g.reshape(target.shape) * slope.reshape(target.shape)).to(target.dtype))

        key = ("derivative", choice.traits, inversion.permuted, kind_of(self.node(choice.saved.name)), kind_of(made))
        made.replace_all_uses_with(self.splice(multiply, inputs, made, made, key)[0])
        self.slots[choice.saved.name] = parts

    def pin(self, pin: Pin) -> None:
        """Move a decision to forward."""
        taken = next(node for node in self.backward.nodes if node.name == pin.decision.name)
        in_forward = self._copy_to_forward(taken)
        parts = self._save(in_forward, pin.codec, Traits(), in_forward.next, None)
        decompress = codec_named(pin.codec).decompress
        restored = self._decompress(parts, [], in_forward, decompress, Traits(), _first_user([taken]), pin.codec)
        taken.replace_all_uses_with(restored)
        self.twins[restored] = in_forward
        self.slots[f"decision {taken.name}"] = parts

    def _save(self, node: fx.Node, codec: str, traits: Traits, before: fx.Node, norm: Normalized | None) -> list[Slot]:
        """Compress a forward node; make the backward placeholders of its parts."""
        steps = [step_input(self.forward)] if codec_named(codec).stochastic else []
        names = (*norm.references, *([norm.rectified] if traits.rectified and norm.rectified else [])) if norm else ()
        inputs = [node, *steps, *map(self.node, names)]
        salt = zlib.crc32(node.name.encode())

        def compress(x: Tensor, *beside: Tensor) -> Parts:
            noise = Noise(beside[0], salt) if steps else None
            reference = _reference(norm, beside[len(steps) :]) if norm else None
            return codec_named(codec).compress(x, replace(traits, noise=noise, reference=reference))

        made = self.splice(compress, inputs, before, node, (codec, traits, _form(norm), salt if steps else None))
        slots = []
        for i, part in enumerate(made):
            placeholder = self.placeholder(part, f"{node.name}_{re.sub(r'[^0-9A-Za-z]', '_', codec)}_{i}")
            part.meta.update({**saved_without_version_check(node), **offload_mark(node)})
            slots.append(Slot(part, placeholder))
        return slots

    def _restore(self, parts: list[Slot], node: fx.Node, choice: Choice, before: fx.Node) -> fx.Node:
        """Decompress a choice's tensor in backward, as the layout of ``node``."""
        codec = codec_named(choice.codec or "")
        traits, norm, inversion = choice.traits, choice.norm, choice.inversion
        references = [self.carry(self.node(name)) for name in norm.references] if norm else []
        if inversion is not None:
            references = [self.carry(self.node(inversion.source), before)]

        def decompress(held: Parts, layout: Layout, _: Traits, *beside: Tensor) -> Tensor:
            known = replace(traits, reference=_reference(norm, beside)) if norm else traits
            if inversion is not None:
                known = replace(traits, output=_in_order(beside[0], inversion))
            return codec.rectify(held, layout, known) if choice.rectified else codec.decompress(held, layout, known)

        how = (choice.codec, choice.rectified, _form(norm), inversion is not None and inversion.permuted)
        return self._decompress(parts, references, node, decompress, traits, before, how)

    def _decompress(
        self, parts: list[Slot], beside: list[fx.Node], node: fx.Node, decompress: Callable[..., Tensor], traits: Traits,
        before: fx.Node, how: Hashable,
    ) -> fx.Node:  # fmt: skip
        """Insert what makes a tensor like ``node`` of its parts; ``how`` tells one ``decompress`` from another."""
        held = value(node)
        assert held is not None
        layout = Layout.of(held)
        inputs = [*(slot.backward for slot in parts), *beside, *self.symbols(node)]
        first, second = len(parts), len(parts) + len(beside)

        def restore(*args: Tensor) -> Tensor:
            return decompress(args[:first], layout, traits, *args[first:second])

        key = (how, traits, kind_of(node), len(beside))
        (restored,) = self.splice(restore, inputs, before, node, key)
        for made in self.backward.nodes:
            if made.op == "call_function":
                made.meta.setdefault("autograd_backward", True)
        return restored

    def _copy_to_forward(self, node: fx.Node) -> fx.Node:
        """The forward node that computes what a backward node does, copied from backward where forward has none."""

        def copied(n: fx.Node) -> fx.Node:
            if n not in self.twins:
                last = max((copied(arg) for arg in n.all_input_nodes), default=self.forward.find_nodes(op="placeholder")[-1])
                with self.forward.inserting_after(last):
                    self.twins[n] = self.forward.node_copy(n, self.twins.__getitem__)
                self.twins[n].meta.pop("autograd_backward", None)
            return self.twins[n]

        return copied(node)


def _in_order(output: Tensor, inversion: Inversion) -> Tensor:
    """The saved output, with its elements in the order of the input's."""
    return Layout.of(output).to_memory(output) if inversion.permuted else output


def _reference(norm: Normalized, given: Sequence[Tensor]) -> Reference:
    """The norm's statistics and parameters from the tensors of ``norm.references``, and the ReLU where it comes after these."""
    left = list(given)
    mean, rstd = left.pop(0), left.pop(0)
    weight = left.pop(0) if norm.weight else None
    bias = left.pop(0) if norm.bias else None
    return Reference(mean, rstd, weight, bias, left.pop(0) if left else None)


def _form(norm: Normalized | None) -> Hashable:
    """What of a norm a trace depends on: which of its tensors there are."""
    return norm and (norm.weight is None, norm.bias is None, norm.rectified is None)


def _first_user(nodes: list[fx.Node]) -> fx.Node:
    order = {node: i for i, node in enumerate(nodes[0].graph.nodes)}
    return min((user for node in nodes for user in node.users), key=order.__getitem__)
