"""Compiled autograd: backward is traced as well, the decompression with it."""

import pytest
import torch
from mode_cases import BOTH, Block, Outcome, gradients, hold, under
from torch import nn

WIDTH = 24


def enabled(compiled):
    model, x = nn.Sequential(Block(), Block()), torch.randn(16, WIDTH, requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        y = compiled(model)(x)
        y.register_hook(lambda grad: grad * 2)
        y.square().mean().backward()
    return Outcome(model, {"output": y.detach()}, gradients(model, x=x))


def configured(compiled):
    """By the configuration: backward inside of a compiled function takes the function's own backend."""
    model = nn.Sequential(Block(), Block())

    def train(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    x = torch.randn(16, WIDTH, requires_grad=True)
    with torch._dynamo.config.patch(compiled_autograd=True):
        loss = compiled(train)(x)
    return Outcome(model, {"loss": loss.detach()}, gradients(model, x=x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@under(BOTH, enabled, configured)
def test_compiled_autograd(program, policy):
    hold(program, policy)
