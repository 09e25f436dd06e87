"""Sizes that change or don't divide, and layouts that aren't plain."""

import torch
import torch.nn.functional as F
from torch import nn

from .base import Scenario, flag, gradients, one_step


def at_lengths(*lengths, shape, low=-1.0, high=1.0):
    """Drive a module over inputs whose ``None`` dimension takes each of the lengths."""

    def drive(call, module, inputs):  # noqa: ARG001 - the inputs are made here
        exact, lossy = {}, {}
        for length in lengths:
            sizes = [length if size is None else size for size in shape]
            x = torch.linspace(low, high, torch.Size(sizes).numel()).view(sizes).requires_grad_()
            out = call(x)
            out.square().mean().backward()
            exact[f"output at {length}"], lossy[f"gradient at {length}"] = out.detach(), x.grad
        return exact, lossy | gradients(module)

    return drive


# backward needs a big tensor's sizes and nothing else of it: pytorch #91012
class NeedsOnlySizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, x):
        big = (x + self.shift).expand(6, *x.shape)
        return big.mean(dim=(0, 1)) + big.sum() / x.shape[0]


def needs_only_sizes():
    return NeedsOnlySizes(), [torch.randn(29, 15, requires_grad=True)]


# another length at each step: pytorch #174704, #172822, #105279
class Feedforward(nn.Module):
    def __init__(self, width=36):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def other_lengths():
    return Feedforward(), [torch.randn(3, 19, 36)]


# a saved size is a length plus one, and nothing is saved that has the length itself: pytorch #185473, #155468
class PrependsToken(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.token, self.linear = nn.Parameter(torch.randn(1, 1, width)), nn.Linear(width, width)

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], 1, -1), x], dim=1)
        hidden = F.silu(self.linear(x))
        return (hidden * hidden.softmax(dim=1))[:, 0]


def prepends_token():
    return PrependsToken(), [torch.randn(2, 11, 28)]


# a scalar, and counts that no group and no byte divides: bitsandbytes #1884, #2042, compressed-tensors #447
class OddSizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature, self.linear = nn.Parameter(torch.tensor(0.6)), nn.Linear(11, 7)

    def forward(self, x):
        hidden = torch.tanh(self.linear(x)) / F.softplus(self.temperature)
        return hidden.exp().prod(dim=-1) + x.sin().pow(3).sum(dim=-1)


def odd_sizes():
    return OddSizes(), [torch.randn(9, 11, requires_grad=True)]


# channels last: pytorch #171622, #134644, #186396
class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.Conv2d(12, 6, 3, 2)

    def forward(self, x):
        return self.narrow(F.avg_pool2d(F.silu(self.norm(self.wide(x))), 2))


def channels_last():
    x = torch.randn(4, 3, 16, 20).to(memory_format=torch.channels_last)
    return ChannelsLast().to(memory_format=torch.channels_last), [x.requires_grad_()]


def and_asks_for_strides(call, module, inputs):
    exact, lossy = one_step(call, module, inputs)
    strided = {f"{name} is channels last": flag(x.is_contiguous(memory_format=torch.channels_last))
               for name, x in (exact | lossy).items() if name in {"output 0", "gradient of input 0"}}  # fmt: skip
    return exact | strided, lossy


# expanded, stepped and permuted tensors are saved: bitsandbytes #1342, #1690, pytorch #198307
class Strided(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.gate, self.linear = nn.Parameter(torch.randn(width)), nn.Linear(width, width)

    def forward(self, x):
        gate = self.gate.sigmoid().expand(x.shape[0], 20, -1)
        hidden = torch.tanh(self.linear(x))
        crossed = hidden.permute(0, 2, 1).reshape(x.shape[0], -1)[:, :28].unsqueeze(1)
        return (gate * hidden)[:, ::2] * hidden[:, 1::2] + crossed


def strided():
    return Strided(), [torch.randn(3, 20, 28, requires_grad=True)]


SCENARIOS = [
    Scenario("needs_only_sizes", needs_only_sizes, at_lengths(29, 13, 51, shape=(None, 15))),
    Scenario("other_lengths", other_lengths, at_lengths(19, 31, 64, 1, 50, 127, shape=(3, None, 36), low=-2, high=2)),
    Scenario("prepends_token", prepends_token, at_lengths(11, 16, 30, shape=(2, None, 28), high=3)),
    Scenario("odd_sizes", odd_sizes, one_step),
    Scenario("channels_last", channels_last, and_asks_for_strides),
    Scenario("strided", strided, one_step),
]
