"""Stage 6: a Dynamo graph + settings -> a callable, through Inductor or AOTAutograd alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ._torch import boxed_nop, compile_aot, compile_inductor
from .options import Settings
from .partition import ActcompPartitioner
from .steps import add_step_input

Compiled = Callable[..., Any]


def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, partitioner: ActcompPartitioner) -> Compiled:
    """Compile with the compiler that the settings name."""
    if not partitioner.stochastic:
        return _compile(gm, inputs, settings, partitioner, None)
    stepped, more, step = add_step_input(gm, inputs)
    compiled = _compile(stepped, more, settings, partitioner, None)
    return lambda *args: compiled(*args, step())


def trace_graph(gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, partitioner: ActcompPartitioner) -> None:
    """Go all the way to the partitioner, on fake tensors, and generate no code."""
    if partitioner.stochastic:
        gm, inputs, _ = add_step_input(gm, inputs)
    _compile(gm, inputs, settings, partitioner, lambda graph, example, **_: boxed_nop(graph, example))


def _compile(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, partitioner: ActcompPartitioner, inner: Compiled | None
) -> Compiled:
    if settings.compiler == "aot_eager":
        return compile_aot(gm, inputs, partitioner, boxed_nop)
    return compile_inductor(gm, inputs, {**settings.inductor, "custom_partitioner_fn": partitioner}, inner)
