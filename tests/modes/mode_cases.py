"""Runs one program under a policy and under "none", and holds the two against each other.

A program is a function of ``compiled`` (``torch.compile`` with the backend and its options already given) that builds its
model, runs it in some mode and returns an :class:`Outcome`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_actcomp

BOTH = ("lossless", "int8")
ALL = (*BOTH, "invert", "int8:rounding=stochastic")


def under(policies, *programs):
    """Parametrize a test by program and policy."""
    pairs = [pytest.param(program, policy, id=f"{program.__name__}-{policy}") for program in programs for policy in policies]
    return pytest.mark.parametrize(("program", "policy"), pairs)


@dataclass(frozen=True)
class Outcome:
    """What a program gives to compare.

    Attributes:
        module: Whose report to ask for.
        exact: Tensors that no policy may change by a bit: outputs, buffers, mutated inputs.
        lossy: Tensors that a lossy policy may change within bounds: gradients, and what is computed from them.
        graphs: How many graphs the backend was asked to compile.
    """

    module: nn.Module
    exact: dict
    lossy: dict = field(default_factory=dict)
    graphs: int = 0

    @functools.cached_property
    def report(self):
        return fx_actcomp.report(self.module)

    def rows(self, **wanted):
        """The report's rows that have the wanted fields."""
        return [row for row in self.report.saved if all(getattr(row, key) == value for key, value in wanted.items())]


def options(policy, **others):
    return {"compiler": "aot_eager", "min_bytes": 0, "strict": True, "policy": policy, **others}


def run(program, policy, **others):
    """The program under a policy, with the same draws whatever the policy."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    fx_actcomp.manual_seed(0)
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return fx_actcomp.actcomp(gm, inputs, options=options(policy, **others))

    outcome = program(functools.partial(torch.compile, backend=backend))
    return replace(outcome, graphs=len(graphs))


@functools.cache
def reference(program: Callable) -> Outcome:
    return run(program, "none")


def hold(program, policy, bound=0.1):
    """Assert that the policy changes nothing that it may not, does something, falls back nowhere and adds no graph."""
    expected, got = reference(program), run(program, policy)
    assert got.report.failures == ()
    assert {row.codec for row in got.report.saved} & CODECS.get(policy, {policy})
    assert got.graphs == expected.graphs
    assert got.lossy.keys() == expected.lossy.keys()
    assert differing(expected.exact, got.exact) == []
    if policy == "lossless":
        assert differing(expected.lossy, got.lossy) == []
    else:
        assert error(expected.lossy, got.lossy) <= bound
    return got


CODECS = {"lossless": {"bits", "narrow", "drop"}, "invert": {"invert", "image"}}
"""What a policy of another name than its codec's makes of tensors."""


def differing(expected, got):
    """Names of the tensors that aren't the same to the last bit."""
    return [name for name, x in expected.items() if not same(x, got[name])]


def same(x, y):
    return x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x.nan_to_num(), y.nan_to_num())


def error(expected, got):
    """The largest distance of a tensor, against its own norm and a hundredth of all of theirs."""
    total = torch.stack([x.float().norm() for x in expected.values()]).norm()
    return max(((got[name] - x).norm() / (x.norm() + 0.01 * total)).item() for name, x in expected.items())


def gradients(module, **leaves):
    """Gradients of the parameters and of other leaves, by name."""
    leaves = {**dict(module.named_parameters()), **leaves}
    return {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}


class Block(nn.Module):
    """Something for each policy: values, a dropout's mask, a GELU to invert, a ReLU's decision."""

    def __init__(self, width=24, dropout=0.25):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(torch.relu(self.down(F.gelu(self.up(x)))))
