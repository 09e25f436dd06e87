"""Infinities and NaN that do no harm without compression: masked scores, rows that are masked whole."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fx_actcomp

ROWS, WIDTH = 32, 64
LOSSY = ["int8", "int4", "int2", "fp8", "blpa8", "division", "int8:rounding=stochastic", "int8:group=64"]


@torch.library.custom_op("not_finite::kernel", mutates_args=())
def kernel(x: Tensor) -> Tensor:
    """What torch's partitioner doesn't make again in backward: it saves what is on either side."""
    return x.clone()


kernel.register_fake(lambda x: x.clone())
kernel.register_autograd(lambda _, gradient: gradient)


class Masked(nn.Module):
    """Scores of which some are minus infinity, between two kernels, and what is made of them."""

    def __init__(self, made):
        super().__init__()
        self.before, self.made = nn.Linear(WIDTH, WIDTH), made
        self.register_buffer("weights", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("hidden", torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)) < 0.5)
        self.hidden[::5] = True

    def forward(self, x):
        whole = self.hidden.all(1, keepdim=True)
        made = kernel(self.made(kernel(self.before(x).masked_fill(self.hidden, -math.inf))))
        return (made.masked_fill(whole, 0.0) * self.weights).sum(1)


MADE = {
    "softmax": lambda scores: scores.softmax(1),
    "softmax by hand": lambda scores: (e := scores.exp()) / e.sum(1, keepdim=True),
    "squares": lambda scores: scores.softmax(1).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": F.relu,
    "softplus": F.softplus,
    "exp": torch.exp,
    "elu": F.elu,
    "amax": lambda scores: scores.amax(1, keepdim=True).expand(ROWS, WIDTH),
    "where": lambda scores: torch.where(scores > 0, F.gelu(scores), 0.1 * scores.sigmoid()),
}
every_program = pytest.mark.parametrize("name", MADE)


def error(name, policy):
    torch.manual_seed(0)
    model, x = Masked(MADE[name]), torch.randn(ROWS, WIDTH)
    return fx_actcomp.gradient_error(model, x, policy=policy, compiler="aot_eager", min_bytes=0)


@every_program
@pytest.mark.parametrize("policy", ["lossless", "invert"])
def test_nothing_changes_without_loss(name, policy):
    assert error(name, policy).relative <= (1e-6 if policy == "invert" else 0)


@every_program
@pytest.mark.parametrize("policy", LOSSY)
def test_gradients_stay_finite_and_near(name, policy):
    found = error(name, policy)
    assert found.loss_equal
    assert all(math.isfinite(one.relative) for one in found.per_parameter.values())
    assert found.relative <= {"int4": 0.15, "int2": 0.6, "division": 0.5, "fp8": 0.08}.get(policy, 0.02)


class Routed(nn.Module):
    """A router that keeps the largest scores, as minus infinity elsewhere (Llama 4)."""

    def __init__(self):
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        scores = self.router(x)
        kept, chosen = scores.topk(2, dim=1)
        gates = torch.full_like(scores, -math.inf).scatter(1, chosen, kept).sigmoid()
        return (gates.unsqueeze(2) * self.expert(x).unsqueeze(1)).sum(1)


@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_a_router_s_scores_of_minus_infinity_are_closed_gates(policy):
    found = fx_actcomp.gradient_error(Routed(), torch.randn(ROWS, WIDTH), policy=policy, compiler="aot_eager", min_bytes=0)
    assert found.relative <= 0.1


class Weighted(nn.Module):
    """Probabilities that weigh values with a large mean."""

    def __init__(self, mean):
        super().__init__()
        self.before, self.after, self.mean = nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH), mean

    def forward(self, x):
        p = (8 * self.before(x)).softmax(1)
        values = torch.linspace(-1, 1, 512) + self.mean
        return (p * values).sum(1, keepdim=True) + 0.1 * self.after(p)


@pytest.mark.parametrize("mean", [0.0, 10.0])
def test_a_mean_of_what_probabilities_weigh_hardly_moves_the_gradient(mean):
    """It cancels in the gradient as far as probabilities add up to 1."""
    torch.manual_seed(0)
    model, x = Weighted(mean), torch.randn(ROWS, WIDTH)
    report = fx_actcomp.explain(model, x, policy="int8", compiler="aot_eager", min_bytes=0)
    assert any(row.op == "aten._softmax" and row.codec == "int8" and len(row.used_by) > 1 for row in report.saved)
    assert fx_actcomp.gradient_error(model, x, policy="int8", compiler="aot_eager", min_bytes=0).relative <= 0.03
