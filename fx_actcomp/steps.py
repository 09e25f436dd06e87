"""The step counter of stochastic rounding: an input of the graph's own, fed with another number at each call.

Nothing else brings a step number into a compiled graph: a Python number would be burnt in, a generator is the user's, and a
buffer would be state that the user's checkpoints know nothing of. An input is safe with compiler caches and CUDA graphs.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ._torch import add_input, copy_dynamo_graph

_lock = threading.Lock()
_first = 0
_counter = itertools.count()


def manual_seed(seed: int) -> None:
    """Start the random numbers of stochastic rounding anew.

    They are apart from torch's: rounding never moves the user's random stream, nor the other way round. A process starts with
    seed 0. Give a resumed run another seed (its step, say), so that it doesn't repeat the first run's draws, and each rank of
    a distributed run its own.

    Args:
        seed: Any whole number.
    """
    global _first, _counter
    with _lock:
        digest = hashlib.sha256(str(int(seed)).encode()).digest()  # all of its bits count, and near seeds lie far apart
        _first, _counter = int.from_bytes(digest[:4], "little"), itertools.count()


def _next() -> int:
    with _lock:
        return (_first + next(_counter)) % 2**31


def add_step_input(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any], Callable[[], Tensor]]:
    """A copy of a Dynamo graph with one more input, the step.

    Args:
        gm: The graph.
        inputs: Its inputs.

    Returns:
        The copy (Dynamo goes on reading the original), its inputs, and what makes the step of a call.
    """
    device = next((x.device for x in inputs if isinstance(x, Tensor)), torch.device("cpu"))

    def step() -> Tensor:
        return torch.full((), _next(), dtype=torch.int64, device=device)  # a fill on the device: no copy, no wait

    copied = copy_dynamo_graph(gm)
    add_input(copied, "actcomp_step")
    return copied, [*inputs, torch.zeros((), dtype=torch.int64, device=device)], step
