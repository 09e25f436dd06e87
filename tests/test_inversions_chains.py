import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inversion_cases import FUNCTIONS, UNMOVED, compiled, distance, error, explained, restored, rows, weighed
from inversion_cases import Net as Layers
from torch import nn

import fx_actcomp


class Activation(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.f = UNMOVED.get(name) or FUNCTIONS[name][0]

    def forward(self, x):
        return self.f(x)


links = st.lists(st.tuples(st.sampled_from([*FUNCTIONS, *UNMOVED]), st.integers(1, 20)), min_size=1, max_size=4)


@settings(max_examples=11, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(links, st.integers(2, 40), st.integers(0, 2**16))
def test_random_chains_are_right_and_save_no_more(links, batch, seed):
    torch._dynamo.reset()
    torch.manual_seed(seed)
    layers, width = [], 6
    for name, wider in links:
        layers += [nn.Linear(width, wider), Activation(name)]
        width = wider
    net, x = nn.Sequential(*layers, nn.Linear(width, 3)), 2 * torch.randn(batch, 6)
    assert error(net, x) <= 5e-5
    assert explained(net, x)[1].bytes_after <= explained(net, x, policy="none")[1].bytes_after


def test_inductor_restores_pre_activations_too():
    net, x = Layers(), rows()
    found = []
    for policy in ("none", "invert"):
        net.zero_grad()
        call = compiled(net, policy, compiler="inductor")
        weighed(call(x)).backward()
        found.append(torch.cat([net.up.weight.grad.flatten(), net.down.weight.grad.flatten()]))
    assert 0 < distance(*found) <= 2e-5
    (row,) = [row for row in fx_actcomp.report(call).saved if row.codec == "invert"]
    assert restored(net, x) == [f"{row.module}::{row.op}"]
    assert fx_actcomp.report(call).bytes_after == explained(net, x, compiler="inductor")[1].bytes_after
