import pytest
import torch
from torch import nn

import fx_actcomp

POLICIES = ["none", "lossless", "int8"]


class Averaged(nn.Module):
    """Multiplies by a buffer, read through a copy, and moves the buffer towards the mean of the product."""

    def __init__(self, read):
        super().__init__()
        self.linear, self.read = nn.Linear(24, 24), read
        self.register_buffer("scale", torch.rand(24) + 0.5)

    def forward(self, x):
        h = self.linear(x) * self.read(self.scale)
        with torch.no_grad():
            self.scale.lerp_(h.mean(0), 0.1)
        return h


READ = {
    "copied": lambda scale: scale.clone(),
    "scaled": lambda scale: scale * 2,
    "viewed and copied": lambda scale: scale.view(4, 6).clone().view(24),
}


def gradient(backend, read, **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Averaged(read), torch.randn(12, 24)
    torch.compile(model, backend=backend, **options)(x).square().sum().backward()
    return model, model.linear.weight.grad


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_reads_what_a_buffer_held_before_forward_overwrote_it(policy):
    _, exact = gradient("eager", READ["copied"])
    model, got = gradient("actcomp", READ["copied"], options={"policy": policy, "min_bytes": 0})
    assert torch.allclose(got, exact, rtol=0.02 if policy == "int8" else 1e-5, atol=0.05 if policy == "int8" else 1e-5)
    assert fx_actcomp.report(model).copies
    assert "forward overwrites it" in str(fx_actcomp.report(model))


@pytest.mark.parametrize("name", ["scaled", "viewed and copied"])
def test_other_ways_to_read_the_buffer_are_right_too(name):
    _, exact = gradient("eager", READ[name])
    _, got = gradient("actcomp", READ[name], options={"policy": "lossless", "min_bytes": 0})
    assert torch.allclose(got, exact, rtol=1e-5, atol=1e-5)


def test_torch_reads_it_afterwards():
    """Where this fails, torch is mended, and ``overwrites.py`` has nothing left to do."""
    _, exact = gradient("eager", READ["copied"])
    _, got = gradient("inductor", READ["copied"])
    assert not torch.allclose(got, exact, rtol=1e-2, atol=1e-2)


def test_without_inductor_torch_says_so_itself():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient("actcomp", READ["copied"], options={"policy": "none", "compiler": "aot_eager"})


def test_a_buffer_that_is_only_updated_is_not_copied():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    call = torch.compile(model, backend="actcomp", options={"compiler": "aot_eager"})
    call(torch.randn(2, 3, 8, 8)).sum().backward()
    assert fx_actcomp.report(model).copies == ()
