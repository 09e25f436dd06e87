"""What a scenario is: a small program of a kind that public bug reports describe, and what it gives to compare."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scenario:
    """A model with its inputs, and how it is driven.

    ``make()`` gives the module and its inputs. ``drive(call, module, inputs)`` runs it through ``call`` and returns two
    dicts of tensors: those that the backend may not change by a bit (outputs, buffers, flags), and those that a lossy
    policy may (gradients, and what is computed from them).

    ``reference`` is what policy "none" is held against: None for eager, else one of torch's own backends.
    """

    name: str
    make: Callable
    drive: Callable
    bound: float = 0.1
    rtol: float = 1e-4
    atol: float = 1e-5
    reference: str | None = None
    distributed: bool = False


DECOMPOSED = "aot_eager_decomp_partition"
"""torch's compiler with decompositions, as Inductor has them: its dropout draws other masks than eager's, and its norms
round bf16 elsewhere."""


def one_step(call, module, inputs):
    """Forward, mean of squares over all outputs, backward."""
    returned = call(*inputs)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    sum(out.float().square().mean() for out in outputs if out.requires_grad).backward()
    return {f"output {i}": out.detach() for i, out in enumerate(outputs)}, gradients(module, inputs)


def gradients(module, inputs=()):
    """Gradients of the parameters and of the inputs that are leaves, by name."""
    leaves = dict(module.named_parameters())
    leaves |= {f"input {i}": x for i, x in enumerate(inputs) if torch.is_tensor(x) and x.is_leaf}
    return {f"gradient of {name}": leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}


def flag(truth):
    """A truth value as a tensor, to compare with the others."""
    return torch.tensor(bool(truth))
