"""Saved tensors that someone else holds, views, or overwrites."""

import torch
import torch.nn.functional as F
from torch import nn

from .base import Scenario, flag, gradients, one_step


# what is saved is also returned: pytorch #180287, #174124
class ReturnsWhatItSaves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(56, 80), nn.Linear(80, 24)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.second(hidden), hidden, hidden.sum(dim=-1)


def returns_what_it_saves():
    return ReturnsWhatItSaves(), [torch.randn(40, 56, requires_grad=True)]


# a view of an input is saved, and the caller writes into the input before backward: pytorch #197887, #198035
class SavesViewOfInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(36, 20) / 10)

    def forward(self, x):
        return x.mT @ self.weight + x[:, :20].mean()


def saves_view_of_input():
    return SavesViewOfInput(), [torch.randn(5, 36, 28)]


def then_overwrites_the_input(call, module, inputs):
    exact, lossy = one_step(call, module, inputs)
    expected = module.weight.grad.clone()
    module.weight.grad = None
    out = call(*inputs)
    inputs[0].zero_()
    try:
        out.square().mean().backward()
        right = torch.allclose(module.weight.grad, expected, rtol=0.1, atol=1e-3)
    except RuntimeError as error:
        right = "inplace" in str(error)
    return exact | {"right gradient or an error": flag(right)}, lossy


# backward writes into a saved tensor: pytorch #172956, #174124, axolotl #3800
class ScaleInPlaceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        grad_scale = (grad * x).sum(dim=0)
        return torch.mul(grad, scale, out=x), grad_scale


class OverwritesInBackward(nn.Module):
    def __init__(self, returns_hidden=False):
        super().__init__()
        self.linear, self.scale = nn.Linear(28, 28), nn.Parameter(torch.linspace(0.5, 1.5, 28))
        self.returns_hidden = returns_hidden

    def forward(self, x):
        hidden = F.gelu(self.linear(x))
        scaled = ScaleInPlaceBackward.apply(hidden, self.scale)
        return (scaled, hidden) if self.returns_hidden else scaled


def overwrites_in_backward():
    return OverwritesInBackward(), [torch.randn(48, 28, requires_grad=True)]


# activations, residuals and slices changed in place in forward: pytorch #93363, #128035, #158643
class InPlaceForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(44, 44), nn.Linear(44, 44)

    def forward(self, x):
        hidden = F.relu_(self.a(x))
        residual = hidden * 1.0
        residual += self.b(hidden)
        residual[:, 4:12].mul_(0.5)
        return residual * residual.sigmoid()


def in_place_forward():
    return InPlaceForward(), [torch.randn(36, 44, requires_grad=True)]


# outputs are views of an input and of each other, and one tensor is passed twice: pytorch #198095, #88817, TE #2967
class ReturnsViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(18, 18)

    def forward(self, x, y):
        product = self.linear(x) * y
        return x.view(-1), product, product.t(), product[2:5]


def returns_views():
    x = torch.randn(14, 18, requires_grad=True)
    return ReturnsViews(), [x, x]


def and_asks_who_shares(call, module, inputs):
    outputs = call(*inputs)
    places = [x.untyped_storage().data_ptr() for x in (inputs[0], *outputs)]
    sum(out.square().mean() for out in outputs).backward()
    exact = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    exact |= {"first output is the input": flag(places[0] == places[1]), "the others share": flag(len({*places[2:]}) == 1)}
    return exact, gradients(module, inputs[:1])


# a square tensor and its transpose are both saved: ms-swift #10157, trl #6241
class SavesItsTranspose(nn.Module):
    def __init__(self, size=40):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(size, size) / size**0.5) for _ in "ab")

    def forward(self, x):
        hidden = torch.sin(x @ self.a)
        return hidden @ self.b / 2 + hidden.t() @ self.a + hidden @ hidden.t()


def saves_its_transpose():
    return SavesItsTranspose(), [torch.randn(40, 40, requires_grad=True)]


# cross entropy of labels shifted by one: integers and floats at a storage offset: axolotl #3833, trl #5694, pytorch #186396
class ShiftedLabels(nn.Module):
    def __init__(self, vocabulary=53, width=20):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, labels):
        logits = self.head(self.embedding(ids).tanh())
        return F.cross_entropy(logits[:, :-1].mT, labels[:, 1:])


def shifted_labels():
    ids = torch.randint(53, (5, 17))
    return ShiftedLabels(), [ids, ids.masked_fill(torch.arange(17) < 4, -100)]


SCENARIOS = [
    Scenario("returns_what_it_saves", returns_what_it_saves, one_step),
    Scenario("saves_view_of_input", saves_view_of_input, then_overwrites_the_input),
    Scenario("overwrites_in_backward", overwrites_in_backward, one_step),
    Scenario("in_place_forward", in_place_forward, one_step),
    Scenario("returns_views", returns_views, and_asks_who_shares),
    Scenario("saves_its_transpose", saves_its_transpose, one_step),
    Scenario("shifted_labels", shifted_labels, one_step),
]
