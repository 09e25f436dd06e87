"""A convolution, a norm, a ReLU and what reads it; how they are run, and what is found of them."""

import torch
import torch.nn.functional as F
from torch import nn

import fx_actcomp
from fx_actcomp import partition

OPTIONS = {"compiler": "aot_eager", "min_bytes": 0}
CHANNELS = 8


class Net(nn.Module):
    """``forward`` is given, since how the pieces hang together is what the tests are about."""

    def __init__(self, forward=None, norm=None):
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(CHANNELS) if norm is None else norm
        self.relu = nn.ReLU()
        self.head, self.other = nn.Conv2d(CHANNELS, 8, 3, padding=1), nn.Conv2d(CHANNELS, 4, 3, padding=1)
        self.scale, self.shift = (nn.Parameter(torch.randn(CHANNELS)) for _ in range(2))
        self.run = forward or (lambda net, x: net.head(net.relu(net.norm(net.conv(x)))))

    def forward(self, x):
        return self.run(self, x)


def plain(**attributes):
    """Convolution, norm, ReLU, convolution; parameters of the norm set by name."""
    net = Net()
    with torch.no_grad():
        for name, numbers in attributes.items():
            getattr(net.norm, name).copy_(torch.tensor(numbers).expand(CHANNELS))
    return net


def image(batch=4, side=16, channels=3):
    return torch.randn(batch, channels, side, side)


def plan(model, *inputs, policy="blpa4", **options):
    """Rows of the report by module and operator; parameters and inputs left out."""
    report = fx_actcomp.explain(model, *inputs, policy=policy, **{**OPTIONS, **options})
    assert not report.failures
    return {f"{row.module}::{row.op.removeprefix('aten.')}": row for row in report.saved if not row.alive_anyway}, report


def error(model, *inputs, policy="blpa4", **options):
    """Of the gradient, relative; forward is asserted to be unchanged."""
    found = fx_actcomp.gradient_error(model, *inputs, policy=policy, **{**OPTIONS, **options})
    assert found.loss_equal
    return found.relative


def compiled(model, policy, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="actcomp", options={**OPTIONS, "strict": True, "policy": policy, **options})


def weighed(returned):
    """A scalar in which no gradient vanishes by symmetry."""
    outputs = returned if isinstance(returned, tuple) else (returned,)
    draw = torch.Generator().manual_seed(0)
    return sum((out.float() * torch.randn(out.shape, generator=draw)).sum() for out in outputs)


def gradients(model, x, policy, **options):
    """By name, of the parameters and the input."""
    model.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    weighed(compiled(model, policy, **options)(leaf)).backward()
    return {name: p.grad.clone() for name, p in [*model.named_parameters(), ("input", leaf)] if p.grad is not None}


def assert_same_mask(model, x, policy, bias="norm.bias", **options):
    """A bias before the ReLU has the sum of what the mask lets through as its gradient, and no lossy value in it."""
    exact, lossy = (gradients(model, x, arm, **options)[bias] for arm in ("none", policy))
    assert exact.any()
    assert torch.equal(exact, lossy)


def watch(monkeypatch):
    """Boundaries and rewritten backward graphs of what is compiled from here on."""
    boundaries, backwards = [], []
    find, compress = partition.find_saved, partition.compress_boundary

    def finding(*args, **kwargs):
        boundaries.append(find(*args, **kwargs))
        return boundaries[-1]

    def compressing(forward, backward, *args, **kwargs):
        made = compress(forward, backward, *args, **kwargs)
        backwards.append(backward.graph)
        return made

    monkeypatch.setattr(partition, "find_saved", finding)
    monkeypatch.setattr(partition, "compress_boundary", compressing)
    return boundaries, backwards


class PreNorm(nn.Module):
    """A layer of a transformer without attention: norm, linear, GELU, linear, around a skip."""

    def __init__(self, norm, width):
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def prenorm(norm, layers=3, width=32):
    net = nn.Sequential(*[PreNorm(norm, width) for _ in range(layers)])
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "norm" in name:
                p.add_(torch.randn_like(p) / 3)
    return net
