"""Ways to run a model: twice backward, eval, frozen and tied weights, graph breaks, data parallel; and where memory goes."""

import torch
import torch.nn.functional as F
from torch import nn

from .base import Scenario, gradients, one_step


# three backward passes over one forward: RAE #74, torchdeq #11, pytorch #129496, tritonbench #40
class TwoLosses(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.trunk, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        hidden = self.last(F.gelu(self.trunk(x)))
        return hidden.square().mean(), F.softplus(hidden).mean()


def two_losses():
    return TwoLosses(), [torch.randn(22, 28)]


def and_weighs_them_by_gradient(call, module, inputs):
    first, second = call(*inputs)
    weight = module.last.weight
    of_first, of_second, again = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in (first, second, first))
    (first + of_first.norm() / (of_second.norm() + 1e-6) * second).backward()
    exact = {"losses": torch.stack([first, second]).detach(), "first gradient, twice": of_first - again}
    return exact, {"first": of_first, "second": of_second} | gradients(module)


# no_grad, training and eval in turns: pytorch #100977, #105653, #110803, #135892
class Classifier(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 4)

    def forward(self, x):
        return self.second(F.relu(self.norm(self.first(x))))


def modes_in_turns():
    return Classifier(), [torch.randn(20, 20)]


def train_eval_no_grad(call, module, inputs):
    exact = {}
    for turn in range(2):
        module.eval()
        with torch.no_grad():
            exact[f"no_grad {turn}"] = call(*inputs)
        module.train()
        out = call(*inputs)
        out.square().mean().backward()
        module.eval()
        exact |= {f"train {turn}": out.detach(), f"eval {turn}": call(*inputs).detach()}
    return exact, gradients(module)


# frozen weights with low-rank adapters: pytorch #64729, #148922, LowMemoryBP #7, axolotl #3800
class Adapted(nn.Module):
    def __init__(self, width, rank=4):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(width, rank) / 10)

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


class FrozenBase(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.q, self.v, self.frozen = Adapted(width), Adapted(width), nn.Linear(width, width).requires_grad_(False)

    def forward(self, x):
        return self.frozen(torch.tanh(self.q(x)) * self.v(x))


def frozen_base():
    return FrozenBase(), [torch.randn(28, 40)]


# embedding and head share a weight, and one module has two names: pytorch #181146, #190938, #90537
class TiedWeights(nn.Module):
    def __init__(self, vocabulary=36, width=14):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.again, self.head = self.middle, nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.again(F.gelu(self.middle(self.embedding(ids)))))


def tied_weights():
    return TiedWeights(), [torch.randint(36, (6, 8))]


# a residual crosses a graph break: pytorch #122512, #148222, #194808
class BrokenResidual(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        hidden = F.gelu(self.before(x)) + x
        torch._dynamo.graph_break()
        return F.gelu(self.after(hidden)) + hidden


def broken_residual():
    return BrokenResidual(), [torch.randn(26, 28, requires_grad=True)]


# distributed data parallel cuts the graph into buckets: pytorch #104674, #108269, #119440, #144035
class Buckets(nn.Module):
    def __init__(self, width=192):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x):
        return self.blocks(x)


def data_parallel():
    return nn.parallel.DistributedDataParallel(Buckets(), bucket_cap_mb=1), [torch.randn(16, 192)]


# the logits outweigh all that the body saves: trl #5575, torchtune #1046, pytorch #197838, Mesa #2
class WideVocabulary(nn.Module):
    def __init__(self, width=16, vocabulary=3000):
        super().__init__()
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, vocabulary)

    def forward(self, x, targets):
        return F.cross_entropy(self.head(F.gelu(self.body(x))).float(), targets)


def wide_vocabulary():
    return WideVocabulary(), [torch.randn(96, 16), torch.randint(3000, (96,))]


# a stack of equal blocks, to be unpacked one by one: pytorch #148222, #147242, #83137, #88247, lightning-thunder #1379
class DeepStack(nn.Module):
    def __init__(self, width=48, depth=6):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return x


def deep_stack():
    return DeepStack(), [torch.randn(256, 48, requires_grad=True)]


SCENARIOS = [
    Scenario("two_losses", two_losses, and_weighs_them_by_gradient),
    Scenario("modes_in_turns", modes_in_turns, train_eval_no_grad),
    Scenario("frozen_base", frozen_base, one_step),
    Scenario("tied_weights", tied_weights, one_step),
    Scenario("broken_residual", broken_residual, one_step),
    Scenario("data_parallel", data_parallel, one_step, distributed=True),
    Scenario("wide_vocabulary", wide_vocabulary, one_step),
    Scenario("deep_stack", deep_stack, one_step),
]
