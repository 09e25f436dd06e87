"""Values that a careless code turns into NaN, or a careless inverse into nonsense."""

import torch
import torch.nn.functional as F
from torch import nn

from .base import Scenario, one_step


# rows of zeros, of a constant, and next to the smallest number: ao #4713, #4762, #3356, kernels-community #681
class ZeroAndConstantRows(nn.Module):
    def __init__(self, width=56):
        super().__init__()
        self.linear, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, 6)

    def forward(self, x):
        return self.out(F.relu(self.linear(x)).square())


def zero_and_constant_rows():
    x = torch.randn(30, 56)
    x[10:22], x[:, 3], x[0] = 0.0, -1.5, 1e-38
    return ZeroAndConstantRows(), [x.requires_grad_()]


# scores of minus infinity are themselves saved: pytorch #106780, compressed-tensors #523, brevitas #1591
class MaskedScores(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, hidden):
        scores = (self.q(x) @ self.k(x).mT).masked_fill(hidden, -torch.inf)
        return scores.logsumexp(dim=-1), scores.softmax(dim=-1)


def masked_scores():
    return MaskedScores(), [torch.randn(2, 14, 24, requires_grad=True), torch.ones(14, 14).triu(1).bool()]


# derivatives that could be had from the output, by a norm with weights 0 and below: inplace_abn #15, #172, #4, #92,
# #199, pytorch #41034, apex #1715
def activated_eight_ways(x):
    return (
        F.leaky_relu(x, 0.01), F.leaky_relu(x, 0.0), F.relu(x), F.silu(x), F.gelu(x),
        torch.tanh(15 * x), torch.sigmoid(-15 * x), F.elu(x, 0.2),
    )  # fmt: skip


class SignedNorm(nn.LayerNorm):
    def __init__(self, width):
        super().__init__(width)
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1.2, 1.2, width)).index_fill_(0, torch.tensor([5]), 0.0)
            self.bias.index_fill_(0, torch.tensor([5]), 0.25)


class OutputsOfActivations(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.norm = SignedNorm(width)

    def forward(self, x):
        return activated_eight_ways(self.norm(x))


def outputs_of_activations():
    return OutputsOfActivations(), [(3 * torch.randn(18, 28)).requires_grad_()]


# the same inside a model, where nobody else holds the outputs
class ActivationsInside(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.linear, self.norm, self.out = nn.Linear(width, width), SignedNorm(width), nn.Linear(8 * width, 4)

    def forward(self, x):
        return self.out(torch.cat(activated_eight_ways(self.norm(self.linear(x))), dim=-1))


def activations_inside():
    return ActivationsInside(), [(3 * torch.randn(18, 28)).requires_grad_()]


# thirty optimizer steps: actnn #34, Primus-Turbo #365, ao #3404, oneDNN #2903, bitsandbytes #565
class Regressor(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        middle = [nn.Linear(width, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 96), nn.ReLU()]
        self.layers = nn.Sequential(*middle, nn.Linear(96, 1))

    def forward(self, x):
        return self.layers(x)


def thirty_steps():
    return Regressor(), [torch.randn(192, 24)]


def and_follows_the_loss(call, module, inputs):
    (x,) = inputs
    target = torch.sin(x[:, :3].sum(dim=1, keepdim=True)) + x[:, 3:4] * x[:, 4:5] / 4
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.mse_loss(call(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"first loss": losses[0]}, {"losses": torch.stack(losses)}


SCENARIOS = [
    Scenario("zero_and_constant_rows", zero_and_constant_rows, one_step),
    Scenario("masked_scores", masked_scores, one_step),
    Scenario("outputs_of_activations", outputs_of_activations, one_step),
    Scenario("activations_inside", activations_inside, one_step),
    Scenario("thirty_steps", thirty_steps, and_follows_the_loss),
]
