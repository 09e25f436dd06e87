"""Put a traced Python function into a graph: how compress and decompress get there, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ._torch import fake_mode_of, make_fx
from .nodes import value

_PROVENANCE = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "custom")


def trace(function: Callable[..., Any], inputs: Sequence[fx.Node]) -> fx.Graph:
    """Trace ``function`` on the fake values of ``inputs``, to operators that every compiler of ours lowers.

    Args:
        function: A function of ATen operators that doesn't branch on values.
        inputs: Nodes with a fake tensor or a symbol; the first one is a tensor.

    Returns:
        The traced graph, with a fake value on each node.
    """
    first = value(inputs[0])
    assert first is not None
    tracer = make_fx(function)
    with fake_mode_of(first), torch.no_grad():
        return tracer(*[node.meta["val"] for node in inputs]).graph


def insert(traced: fx.Graph, graph: fx.Graph, inputs: Sequence[fx.Node], before: fx.Node, like: fx.Node) -> list[fx.Node]:
    """Copy a traced graph into another one.

    Args:
        traced: What :func:`trace` made.
        graph: The graph to extend.
        inputs: Nodes of ``graph`` for the traced graph's placeholders, in order.
        before: The node before which the copies stand.
        like: The node whose module path and source line the copies take.

    Returns:
        The nodes of ``graph`` for what the traced function returned.
    """
    copies: dict[fx.Node, fx.Node] = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
    provenance = {key: like.meta[key] for key in _PROVENANCE if key in like.meta}
    with graph.inserting_before(before):
        for node in traced.nodes:
            if node.op == "output":
                returned = node.args[0]
                return [copies[n] for n in (returned if isinstance(returned, (tuple, list)) else (returned,))]
            if node.op == "placeholder":
                continue
            if node.op != "call_function":
                raise ValueError(f"a codec's {node.op} {node.target} is no operator; don't make tensors of Python numbers in it")
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta.update(provenance)
    raise AssertionError("a traced graph ends with its output")
