"""Checkpointing inside a compiled model and around one, all of it or some operators."""

import functools

import pytest
import torch
import torch.nn.functional as F
from mode_cases import ALL, BOTH, Block, Outcome, differing, gradients, hold, run, under
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDTH = 24


def outcome(model, x, y):
    y.square().mean().backward()
    return Outcome(model, {"output": y.detach(), "next draw": torch.rand(3)}, gradients(model, x=x))


def data():
    return torch.randn(16, WIDTH, requires_grad=True)


class Inside(nn.Module):
    """Checkpoints its second and third block, whose inputs are saved: what these decide is decided from lossy values again."""

    def __init__(self, **how):
        super().__init__()
        self.blocks, self.how = nn.ModuleList(Block() for _ in range(3)), how

    def forward(self, x):
        x = torch.tanh(self.blocks[0](x))
        for block in self.blocks[1:]:
            x = checkpoint(block, x, **self.how)
        return x


def inside(compiled):
    model, x = Inside(use_reentrant=False), data()
    return outcome(model, x, compiled(model, fullgraph=True)(x))


def inside_reentrant(compiled):
    model, x = Inside(use_reentrant=True), data()
    return outcome(model, x, compiled(model)(x))


def without_random_state(compiled):
    model, x = Inside(use_reentrant=False, preserve_rng_state=False), data()
    for block in model.blocks:
        block.dropout.p = 0.0
    return outcome(model, x, compiled(model)(x))


class Around(nn.Module):
    """Checkpoints blocks that are compiled one by one."""

    def __init__(self, compiled, use_reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.calls, self.use_reentrant = [compiled(block) for block in self.blocks], use_reentrant

    def forward(self, x):
        for call in self.calls:
            x = checkpoint(call, x, use_reentrant=self.use_reentrant)
        return x


def around(compiled):
    x, model = data(), Around(compiled, use_reentrant=False)
    return outcome(model, x, model(x))


def around_reentrant(compiled):
    x, model = data(), Around(compiled, use_reentrant=True)
    return outcome(model, x, model(x))


def around_a_part(compiled):
    """Compiled blocks and plain ones in one checkpointed function, and a compiled one before it, whose output is saved."""
    model, x = nn.ModuleList(Block() for _ in range(3)), data()
    first, second = compiled(model[0]), compiled(model[1])
    y = checkpoint(lambda h: model[2](torch.relu(second(h) @ second(h).t() @ h)), first(x), use_reentrant=False)
    return outcome(model, x, y)


def selecting(*saved):
    """Save the outputs of these operators, recompute all else."""

    def policy(ctx, op, *args, **kwargs):  # noqa: ARG001 - the policy's signature
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def selective(compiled):
    ops = (torch.ops.aten.addmm.default, torch.ops.aten.relu.default)
    model, x = Inside(use_reentrant=False, context_fn=selecting(*ops)), data()
    return outcome(model, x, compiled(model, fullgraph=True)(x))


def selective_around(compiled):
    """The context sees what is inside the compiled function as one call."""
    model, x = Block(), data()
    call = compiled(model)
    return outcome(model, x, checkpoint(call, x, use_reentrant=False, context_fn=selecting(torch.ops.aten.mm.default)))


@under(ALL, inside, around)
def test_checkpoint(program, policy):
    hold(program, policy)


@under(BOTH, inside_reentrant, without_random_state, around_reentrant, around_a_part, selective)
def test_other_checkpoints(program, policy):
    hold(program, policy)


def test_tags_decide_what_is_saved():
    rows = [row for row in hold(selective, "int8").rows(codec="int8") if row.module.startswith(("blocks.1", "blocks.2"))]
    assert "aten.addmm" in {row.op for row in rows}
    assert {row.op for row in rows} <= {"aten.addmm", "aten.relu", "aten.add"}  # the last is the second region's input


class Decides(nn.Module):
    """Its checkpointed part takes every kind of decision from a saved value."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return checkpoint(self.decide, torch.sin(self.first(x)), use_reentrant=False)

    def decide(self, x):
        hidden = torch.relu(self.second(x))
        chosen = torch.where(x > 0.3, hidden, x * 2)
        return F.dropout(chosen, 0.4) * (x.abs() > 0.2), F.leaky_relu(hidden - 0.1)


@pytest.mark.parametrize("policy", ["int8", "int8:rounding=stochastic", "int4"])
def test_what_is_decided_again_is_decided_alike(policy):
    """The bias' gradient adds up slopes, each of which hangs on decisions alone."""

    def program(compiled):
        model, x = Decides(), data()
        first, second = compiled(model)(x)
        (first.sum() + second.sum()).backward()
        return Outcome(model, {"first": first.detach(), "second": second.detach(), "slopes": model.second.bias.grad})

    expected, got = run(program, "none"), run(program, policy)
    assert differing(expected.exact, got.exact) == []
    assert {row.codec for row in got.report.saved} & {policy, "int8"}
    assert got.rows(kind="decision")
