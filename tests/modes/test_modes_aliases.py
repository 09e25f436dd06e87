"""Inputs and buffers that are written to, views that come in and go out."""

import pytest
import torch
import torch.nn.functional as F
from mode_cases import BOTH, Block, Outcome, gradients, hold, under
from torch import nn

WIDTH = 24

# Dynamo asks inputs that aren't leaves for .grad
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Mutates(nn.Module):
    """Writes into an input, before and after it uses it, and into buffers."""

    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(12, WIDTH))

    def forward(self, x, state):
        state.mul_(0.5).add_(x.detach())
        hidden = self.block(x + state) + self.average
        with torch.no_grad():
            self.average.lerp_(hidden.mean(0), 0.1)
            self.calls += 1
            self.last.copy_(hidden)
        state[2:5].zero_()
        return self.head(hidden + self.last)


def mutated_inputs_and_buffers(compiled):
    model, state = Mutates(), torch.randn(12, WIDTH)
    call, exact = compiled(model), {}
    for number in range(3):
        x = torch.randn(12, WIDTH)
        y = call(x, state)
        y.square().mean().backward()
        exact |= {f"output {number}": y.detach(), f"state {number}": state.clone()}
        exact |= {f"{name} {number}": buffer.clone() for name, buffer in model.named_buffers()}
    return Outcome(model, exact, gradients(model))


class MutatesNonLeaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        x.mul_(1.5)
        y = self.block(x.clone())  # backward needs it as it was
        x.sigmoid_()
        return y + x


def mutated_input_with_a_gradient(compiled):
    model, leaf = MutatesNonLeaf(), torch.randn(12, WIDTH, requires_grad=True)
    x = leaf * 2
    y = compiled(model)(x)
    (y.square().mean() + x.cos().mean()).backward()
    return Outcome(model, {"output": y.detach(), "input": x.detach()}, gradients(model, leaf=leaf))


class TwoViews(nn.Module):
    """Two inputs that share memory, one of them written to."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, left, right):
        left.add_(1)
        return self.block(left) * right


def inputs_that_overlap(compiled):
    model, base = TwoViews(), torch.randn(14, WIDTH)
    y = compiled(model)(base[:12], base[2:])
    y.square().mean().backward()
    return Outcome(model, {"output": y.detach(), "base": base}, gradients(model))


def one_input_twice(compiled):
    model, x = TwoViews(), torch.randn(12, WIDTH)
    y = compiled(model)(x, x)
    y.square().mean().backward()
    return Outcome(model, {"output": y.detach(), "input": x}, gradients(model))


class ManyViews(nn.Module):
    """Returns views of an intermediate that is saved, a detached alias of it, and views of a parameter and of an input."""

    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = torch.relu(self.block(x))
        y = self.head(hidden)
        return y, hidden.view(-1)[::2], hidden.detach(), self.head.weight.t(), x.unflatten(0, (3, 4)), hidden.split(6, dim=1)[1]


def views_out(compiled):
    model, x = ManyViews(), torch.randn(12, WIDTH, requires_grad=True)
    outputs = compiled(model)(x)
    sum(y.square().mean() for y in outputs if y.requires_grad).backward()
    places = [y.untyped_storage().data_ptr() for y in (*outputs, x, model.head.weight)]
    same = torch.tensor([[a == b for a in places] for b in places])
    return Outcome(model, {f"{i}": y.detach() for i, y in enumerate(outputs)} | {"who shares": same}, gradients(model, x=x))


def an_output_written_to_before_backward(compiled):
    """Autograd complains where the output is saved, under each policy alike; elsewhere the gradient is the right one."""
    model, complaint = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH), nn.ReLU()), torch.tensor(False)
    y = compiled(model)(torch.randn(12, WIDTH))
    loss = y.sum()
    y.detach().add_(1)
    try:
        loss.backward()
    except RuntimeError as error:
        complaint = torch.tensor("modified by an inplace operation" in str(error))
    return Outcome(model, {"output": y.detach(), "complaint": complaint}, gradients(model) or {"none": torch.zeros(1)})


class StridedInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, gate):
        hidden = self.block(x)
        return F.silu(hidden) * gate


def strided_inputs(compiled):
    model = StridedInputs()
    x = torch.randn(WIDTH, 24).t()[::2].requires_grad_()
    gate = torch.randn(WIDTH).expand(12, WIDTH).requires_grad_()
    y = compiled(model)(x, gate)
    y.square().mean().backward()
    return Outcome(model, {"output": y.detach()}, gradients(model, x=x, gate=gate))


@under(
    BOTH, mutated_inputs_and_buffers, mutated_input_with_a_gradient, inputs_that_overlap, one_input_twice, views_out,
    an_output_written_to_before_backward, strided_inputs,
)  # fmt: skip
def test_aliases(program, policy):
    hold(program, policy)
