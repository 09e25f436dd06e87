"""Bytes alive during a compiled backward pass, counted from the storages that it takes and makes; works on a CPU."""

import weakref
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages from when they are first seen until they are freed; those of ``leaves`` aren't counted."""

    def __init__(self, leaves):
        super().__init__()
        self.now, self.peak = 0, 0
        self.seen = {x.untyped_storage()._cdata: 0 for x in leaves}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
                self.count(x)
        return made

    def count(self, x):
        storage = x.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.freed, storage._cdata)
        return x

    def freed(self, key):
        self.now -= self.seen.pop(key)


@dataclass(frozen=True)
class Course:
    """Bytes after forward, at the peak of backward and after it: parameters, inputs and, at the end, gradients apart."""

    saved: int
    peak: int
    left: int


def course_of_a_step(call, module, inputs):
    """Follow the memory of one step."""
    leaves = [*module.parameters(), *inputs]
    call(*inputs).sum().backward()  # compiles both passes
    for leaf in leaves:
        leaf.grad = None
    live = LiveBytes(leaves)
    with torch.autograd.graph.saved_tensors_hooks(live.count, lambda x: x):
        loss = call(*inputs).sum()
    saved = live.now
    with live:
        loss.backward()
    del loss
    return Course(saved, live.peak, live.now - sum(leaf.grad.nbytes for leaf in leaves))
