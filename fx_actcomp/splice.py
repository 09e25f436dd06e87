"""Put a traced Python function into a graph: how compress and decompress get there, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

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


def insert(
    traced: fx.Graph, graph: fx.Graph, inputs: Sequence[fx.Node], before: fx.Node, like: fx.Node, *, again: bool = False
) -> list[fx.Node]:
    """Copy a traced graph into another one.

    Args:
        traced: What :func:`trace` made.
        graph: The graph to extend.
        inputs: Nodes of ``graph`` for the traced graph's placeholders, in order.
        before: The node before which the copies stand.
        like: The node whose module path and source line the copies take.
        again: Whether it was inserted before, for other inputs of the same kinds: then the fake values are made anew, since
            two nodes that share one would pass for views of one storage.

    Returns:
        The nodes of ``graph`` for what the traced function returned.
    """
    copies: dict[fx.Node, fx.Node] = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
    first = inputs[0].meta["val"]
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
            if again:
                copies[node].meta["val"] = _run(copies[node], fake_mode_of(first))
    raise AssertionError("a traced graph ends with its output")


def _run(node: fx.Node, mode: AbstractContextManager[object]) -> object:
    """The fake value of a node, from those of its arguments."""
    assert callable(node.target)
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)


def kind_of(node: fx.Node) -> Hashable:
    """What a trace depends on of an input; None where that isn't known before it is traced, as with symbolic sizes."""
    held = value(node)
    if held is None or not all(isinstance(number, int) for number in (*held.shape, *held.stride())):
        return None
    return (*held.shape, *held.stride(), held.dtype, held.device)


class Splicer:
    """Puts functions into graphs; equal layers share one trace, which takes most of the time."""

    def __init__(self) -> None:
        self._traces: dict[Hashable, fx.Graph] = {}

    def __call__(
        self, function: Callable[..., Any], inputs: Sequence[fx.Node], before: fx.Node, like: fx.Node, key: Hashable
    ) -> list[fx.Node]:
        """Trace a function, and insert it.

        Args:
            function: See :func:`trace`.
            inputs: Nodes for its arguments.
            before: See :func:`insert`.
            like: See :func:`insert`.
            key: What the function depends on beside the kinds of its inputs: two with one key do the same.

        Returns:
            The nodes for what it returns.
        """
        kinds = [kind_of(node) for node in inputs]
        if None in kinds:
            return insert(trace(function, inputs), before.graph, inputs, before, like)
        key = (key, *kinds)
        again = key in self._traces
        if not again:
            self._traces[key] = trace(function, inputs)
        return insert(self._traces[key], before.graph, inputs, before, like, again=again)
