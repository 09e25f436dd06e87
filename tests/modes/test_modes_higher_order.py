"""Operators that hold graphs of their own: branches, loops, scans, regions that are compiled once, attention with a function."""

import pytest
import torch
import torch.nn.functional as F
from mode_cases import BOTH, Block, Outcome, gradients, hold, run, under
from torch import nn

WIDTH = 24

# Dynamo's and cond's own
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Pred is a Python constant:UserWarning"),
]


def step(compiled, model, x, **how):
    call = compiled(model, **how)
    y = call(x)
    y.square().mean().backward()
    return Outcome(model, {"output": y.detach()}, gradients(model, x=x))


def data(*size):
    return torch.randn(*(size or (16, WIDTH)), requires_grad=True)


class Branches(nn.Module):
    """A branch by the data between blocks, with decisions in both of its arms."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.arm = Block(), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        x = torch.cond(x.sum() > 0, lambda h: torch.relu(self.arm(h)), lambda h: F.gelu(self.arm(h) * 2), (x,))
        return self.second(x)


def cond(compiled):
    return step(compiled, Branches(), data(), fullgraph=True)


class Loops(nn.Module):
    """A loop whose count the data sets; while_loop has no backward before it is written as a scan, so nothing goes through it."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        with torch.no_grad():
            count, halved = torch._higher_order_ops.while_loop(
                lambda _, h: h.abs().amax() > 1e-2,
                lambda i, h: (i + 1, h / 2),
                (torch.zeros((), dtype=torch.int64), x.detach() + 1),
            )
        return self.block(x) * halved + count


def while_loop(compiled):
    return step(compiled, Loops(), data(), fullgraph=True)


class Scans(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.mix = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        from torch._higher_order_ops.scan import scan

        def combine(carry, h):
            carry = torch.tanh(carry + h)
            return carry.clone(), carry * 2  # without the clone torch finds an alias in the decomposed backward

        hidden = self.mix(self.block(x))
        last, every = scan(combine, torch.zeros_like(hidden[0]), hidden, dim=0)
        return every + last


def scanned(compiled):
    return step(compiled, Scans(), data(6, 4, WIDTH), fullgraph=True)


class AssociativeScans(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.mix = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        from torch._higher_order_ops.associative_scan import associative_scan

        hidden = torch.sigmoid(self.mix(self.block(x)))
        return associative_scan(lambda a, b: a * b, hidden, dim=0, combine_mode="generic")


def associatively_scanned(compiled):
    return step(compiled, AssociativeScans(), data(6, 4, WIDTH), fullgraph=True)


@torch.compiler.nested_compile_region
def region(block, x):
    return block(x)


class Regions(nn.Module):
    """Equal blocks that Dynamo traces once; each has a forward and a backward graph, and a partition, of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = region(block, x)
        return torch.relu(x)


def nested_regions(compiled):
    return step(compiled, Regions(), data(), fullgraph=True)


@under(BOTH, cond, while_loop, scanned, associatively_scanned, nested_regions)
def test_higher_order_operators(program, policy):
    hold(program, policy)


def nearer(score, batch, head, i, j):  # noqa: ARG001 - what flex_attention calls
    return score + 0.1 * (i - j)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.block = nn.Linear(WIDTH, 3 * WIDTH), Block()

    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = self.qkv(self.block(x)).unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4)
        return self.block(flex_attention(q, k, v, score_mod=nearer).flatten(1, 2))


def flex(compiled):
    return step(compiled, Attends(), data(2, 16, WIDTH), fullgraph=True)


@pytest.mark.parametrize("policy", BOTH)
def test_flex_attention_works_as_under_none_or_is_refused_in_the_same_words(policy):
    words = complaint(flex, "none")
    if words:
        assert complaint(flex, policy) == words
    else:
        hold(flex, policy)


def complaint(program, policy):
    """The first two lines of what a program raises; empty where it raises nothing."""
    try:
        run(program, policy)
    except Exception as error:
        return "\n".join(str(error).splitlines()[:2])
    return ""
