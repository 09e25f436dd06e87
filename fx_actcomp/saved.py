"""Stage 2: the two graphs of the stock partitioner -> what is saved between them, and which decisions hang on it."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import fx

from .annotate import annotation
from .derivatives import find_derivative
from .inversions import find_inversions, find_products
from .nodes import (
    is_cast,
    is_tangent,
    is_view,
    module_path,
    nbytes,
    numel,
    original,
    outputs,
    packet,
    source_line,
    storage_base,
    value,
    view_source,
)
from .norms import find_images, find_norms
from .ranges import nonnegative_nodes, share_nodes, upper_bounds
from .records import Decision, Image, Inversion, Kind, Normalized, SavedActivation
from .uses import find_uses, is_step

_STATISTICS = {
    "aten.native_layer_norm": (1, 2),
    "aten.native_group_norm": (1, 2),
    "aten.native_batch_norm": (1, 2),
    "aten.var_mean": (0, 1),
    "aten._scaled_dot_product_flash_attention_for_cpu": (1,),
    "aten._scaled_dot_product_flash_attention": (1,),
    "aten._scaled_dot_product_efficient_attention": (1,),
    "aten._scaled_dot_product_cudnn_attention": (1,),
    "aten._fused_rms_norm": (1,),
}
"""Outputs, by position, that are statistics."""

_REDUCTIONS = {f"aten.{name}" for name in "mean sum amax amin var std logsumexp linalg_vector_norm max min prod".split()}
_POINTWISE = {f"aten.{name}" for name in "add sub mul div rsqrt sqrt log exp neg reciprocal pow clamp_min clamp maximum".split()}
_SHRINKS = 16
"""A reduction at least this strong makes a statistic; a weaker one (a sum over a few experts) makes an activation."""


@dataclass(frozen=True)
class Boundary:
    """What crosses from forward to backward.

    Attributes:
        saved: The saved tensors, in the order in which forward returns them.
        decisions: What backward decides from them.
        norms: Which of them are inputs of batch norms.
        images: Which of them can be made again from others.
        inversions: Which of them are inputs of invertible functions whose outputs are saved, too.
    """

    saved: tuple[SavedActivation, ...]
    decisions: tuple[Decision, ...]
    norms: tuple[Normalized, ...] = ()
    images: tuple[Image, ...] = ()
    inversions: tuple[Inversion, ...] = ()


def saved_nodes(forward: fx.Graph, num_outputs: int) -> list[fx.Node]:
    """The forward nodes that are saved, tensors and symbols, in order.

    Args:
        forward: The forward graph.
        num_outputs: How many of its outputs are the user's.
    """
    return [node for node in outputs(forward)[num_outputs:] if isinstance(node, fx.Node)]


def pair_saved(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> list[tuple[fx.Node, fx.Node]]:
    """Pair what forward saves with what backward takes: by name, and the random states, which are renamed, by order.

    Raises:
        ValueError: The two don't match.
    """
    saved = saved_nodes(forward, num_outputs)
    taken = {node.name: node for node in backward.find_nodes(op="placeholder") if not is_tangent(node)}
    names = {node.name for node in saved}
    renamed = [node for node in taken.values() if node.name not in names and "rng_state" in node.name]
    unpaired = [node for node in saved if node.name not in taken]
    if len(unpaired) != len(renamed):
        raise ValueError(f"forward saves {[n.name for n in unpaired]}, for which backward takes {[n.name for n in renamed]}")
    others = dict(zip(unpaired, renamed, strict=True))
    return [(node, taken.get(node.name) or others[node]) for node in saved]


def find_saved(forward: fx.Graph, backward: fx.Graph, *, num_outputs: int, static_inputs: Collection[int] = ()) -> Boundary:
    """List the saved activations and the decisions that depend on them.

    Args:
        forward: The forward graph that the stock partitioner made.
        backward: Its backward graph.
        num_outputs: How many outputs of forward are the user's.
        static_inputs: Positions of the parameters and buffers among the inputs.

    Returns:
        The boundary; neither graph is changed.
    """
    saved = [(n, taken) for n, taken in pair_saved(forward, backward, num_outputs) if value(n) is not None]
    found = find_uses(backward, [taken.name for _, taken in saved])
    inputs = {node: i for i, node in enumerate(forward.find_nodes(op="placeholder"))}
    theirs = {storage_base(n) for n in outputs(forward)[:num_outputs] if isinstance(n, fx.Node)}
    positive, bounds = nonnegative_nodes(forward), upper_bounds(forward)
    shares = share_nodes(forward, positive)
    records: list[SavedActivation] = []
    counted: set[fx.Node] = set()
    for number, (node, taken) in enumerate(saved):
        base = storage_base(node)
        held = value(node)
        assert held is not None
        records.append(
            SavedActivation(
                number=number,
                name=node.name,
                module=module_path(node),
                op=original(node),
                source=source_line(node),
                shape=tuple(s if isinstance(s, int) else str(s) for s in held.shape),
                dtype=str(held.dtype).removeprefix("torch."),
                nbytes=0 if base in counted else max(nbytes(base), nbytes(node)),
                kind=Kind.RANDOM if taken.name != node.name else _kind(node, base, inputs, static_inputs, theirs),
                base=base.name,
                uses=tuple(found.uses[taken.name]),
                sign_exact=held.dtype.is_floating_point and node in positive,
                shares=node in shares,
                upper=bounds.get(node),
                symbolic=any(not isinstance(s, int) for s in held.shape),
                annotation=annotation(node),
            )
        )
        counted.add(base)
    nodes = [node for node, _ in saved]
    kinds = {node: record.kind for node, record in zip(nodes, records, strict=True)}
    parameters = {node for node, position in inputs.items() if position in static_inputs}
    images = find_images(kinds, parameters)
    inversions = find_inversions(kinds, {node.name for node in backward.nodes if node.op == "call_function"})
    placeholders = {node.name: taken for node, taken in saved}
    affine = {image.name for image in images}
    return Boundary(
        saved=tuple(records),
        decisions=tuple(found.decisions.values()),
        norms=find_norms(forward, nodes, parameters),
        images=(*images, *(image for image in find_products(kinds, parameters) if image.name not in affine)),
        inversions=tuple(_with_derivative(inversion, placeholders[inversion.name]) for inversion in inversions),
    )


def _with_derivative(inversion: Inversion, x: fx.Node) -> Inversion:
    return replace(inversion, derivative=find_derivative(x, inversion.inverse)) if inversion.inverse.differentiates else inversion


def _kind(node: fx.Node, base: fx.Node, inputs: dict[fx.Node, int], static_inputs: Collection[int], theirs: set[fx.Node]) -> Kind:
    origin = base
    while origin not in inputs and (is_view(origin) or is_cast(origin)):
        origin = view_source(origin)
    if origin in inputs:
        return Kind.PARAMETER if inputs[origin] in static_inputs else Kind.INPUT
    if base in theirs:
        return Kind.OUTPUT
    held = value(node)
    assert held is not None
    if held.dtype is torch.bool:
        return Kind.MASK
    if held.dtype.is_complex:
        return Kind.OTHER
    if not held.dtype.is_floating_point:
        return Kind.INDEX
    if is_step(origin):
        return Kind.STEP
    return Kind.STATISTIC if _is_statistic(base) else Kind.ACTIVATION


def _is_statistic(node: fx.Node) -> bool:
    """Whether the node is a strong reduction, or pointwise arithmetic on one."""
    size = max(numel(node), 1)
    while True:
        if node.target is operator.getitem:
            return node.args[1] in _STATISTICS.get(packet(node), ())
        source = next((n for n in node.all_input_nodes if numel(n)), None)
        if source is None:
            return False
        if packet(node) in _REDUCTIONS:
            return numel(source) >= _SHRINKS * size
        if not (packet(node) in _POINTWISE or is_view(node) or is_cast(node)) or numel(source) > size:
            return False
        node = source
