"""Models around activation functions, and what is found of their pre-activations."""

import math

import torch
import torch.nn.functional as F
from share_cases import OPTIONS, compiled, weighed
from torch import nn

import fx_actcomp

FUNCTIONS = {
    "gelu": (F.gelu, 1, 0),
    "gelu_tanh": (nn.GELU("tanh"), 1, 0),
    "silu": (F.silu, 1, 0),
    "silu by hand": (lambda x: x * torch.sigmoid(x), 1, 0),
    "quick_gelu": (lambda x: x * torch.sigmoid(1.702 * x), 1, 0),
    "gelu_new": (lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3)))), 1, 0),
    "mish": (nn.Mish(), 1, 0),
    "hardswish": (nn.Hardswish(), 1, 2),
    "softplus": (F.softplus, 0, 1),
    "softplus 3": (nn.Softplus(3.0), 0, 1),
    "elu": (nn.ELU(), 0, 1),
    "elu 0.3": (lambda x: F.elu(x, 0.3), 0, 1),
    "selu": (nn.SELU(), 0, 1),
    "celu 1.3": (nn.CELU(1.3), 0, 1),
    "log sigmoid": (nn.LogSigmoid(), 0, 1),
    "softsign": (nn.Softsign(), 0, 1),
}
"""With the bits of a branch, and the decisions of a bit that are pinned beside it."""

UNMOVED = {
    "leaky relu": nn.LeakyReLU(0.2), "hardtanh": F.hardtanh, "relu6": nn.ReLU6(), "relu": F.relu, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "clamp": lambda x: x.clamp(-0.5, 0.5),
}  # fmt: skip
ROWS, WIDTH = 32, 24


class Net(nn.Module):
    """Linear, function, linear; ``forward`` may be given instead."""

    def __init__(self, f=F.gelu, forward=None):
        super().__init__()
        self.up, self.down, self.side = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, WIDTH)
        self.f, self.run = f, forward or (lambda net, x: net.down(net.f(net.up(x))))

    def forward(self, x):
        return self.run(self, x)


def rows(n=ROWS):
    return 2 * torch.randn(n, 8)


def explained(model, *inputs, policy="invert", **options):
    """Saved rows by what an override names, and the report."""
    report = fx_actcomp.explain(model, *inputs, policy=policy, **{**OPTIONS, **options})
    assert not report.failures
    return {f"{row.module}::{row.op}": row for row in report.saved if not row.alive_anyway}, report


def restored(model, *inputs, **options):
    """Targets of the tensors that are restored from their function's output."""
    return [name for name, row in explained(model, *inputs, **options)[0].items() if row.codec == "invert"]


def error(model, *inputs, policy="invert", **options):
    """Of the gradient, relative; forward is asserted to be unchanged."""
    found = fx_actcomp.gradient_error(model, *inputs, policy=policy, **{**OPTIONS, **options})
    assert found.loss_equal
    return found.relative


def held(call, values, *inputs):
    """Whether autograd holds a tensor with such values after the compiled forward."""
    out = call(*inputs)
    tensors = (out[0] if isinstance(out, tuple) else out).grad_fn.saved_tensors
    return any(t.numel() == values.numel() and torch.allclose(t.flatten(), values.flatten(), 1e-5, 1e-6) for t in tensors)


def saved_bytes(call, model, *inputs):
    """Bytes of the storages that autograd holds, apart from parameters, inputs and outputs."""
    out = call(*inputs)
    alive = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *inputs, out)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in out.grad_fn.saved_tensors}
    return sum(size for pointer, size in storages.items() if pointer not in alive)


def pair(model, *inputs, policy="invert", **options):
    """Gradients of parameters in one vector, under "none" and under a policy."""
    found = []
    for arm in ("none", policy):
        model.zero_grad()
        torch.manual_seed(1)
        weighed(compiled(model, arm, **(options if arm == policy else {}))(*inputs)).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return found


def distance(exact, got):
    return ((got - exact).norm() / exact.norm()).item()
