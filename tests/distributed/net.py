"""The network that every case trains, the same on each rank, and what a rank writes of it."""

import torch
import torch.nn.functional as F
from scenarios.running import options
from torch import nn

import fx_actcomp

BATCH, LENGTH = 8, 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.last(F.relu(self.first(x)))


class Net(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block(width) for _ in range(depth)), Head(width)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(width=32, make=Net):
    torch.manual_seed(0)
    return make(width)


def batch(width=32, rows=BATCH):
    return torch.randn(rows, LENGTH, width, generator=torch.Generator().manual_seed(1))


def loss_of(output):
    return output.square().mean()


def gradients(module):
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def whole(x):
    """A distributed tensor in full; a collective."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def compiled(module, policy, **others):
    return torch.compile(module, backend="actcomp", options=options(policy, **others))


COLUMNS = ("graph", "name", "module", "op", "shape", "kind", "codec", "bytes_before", "bytes_after", "reason")


def told(module):
    """The report as data: what a rank decided, and what that comes to."""
    report = fx_actcomp.report(module)
    return {
        "rows": [{column: getattr(row, column) for column in COLUMNS} | {"shape": str(row.shape)} for row in report.saved],
        "graphs": report.graphs,
        "before": report.bytes_before,
        "after": report.bytes_after,
        "failures": list(report.failures),
    }
