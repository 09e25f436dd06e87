"""What codecs are traced to is traced once for all tensors of a kind, and each place gets its own values."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_actcomp
import fx_actcomp.partition as partition
import fx_actcomp.splice as splice
from fx_actcomp.nodes import is_view, value


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Unlike(nn.Module):
    """Tensors of one shape in other strides, types, roles and signs; the second convolution's input lies transposed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.plain, self.linear = nn.BatchNorm2d(16), nn.BatchNorm2d(16, affine=False), nn.Linear(16, 16)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.plain(self.second(x.transpose(2, 3))))
        x = F.silu(self.linear(torch.tanh(x)))
        return self.linear(F.gelu(x.to(torch.bfloat16).float()).transpose(1, 3)).relu()


def equal_layers(count=2):
    return nn.Sequential(*(Layer(32) for _ in range(count))), torch.randn(8, 16, 32)


def unlike_tensors():
    return Unlike(), torch.randn(4, 16, 16, 16)


def gradients(model, x, policy):
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"policy": policy, "compiler": "aot_eager", "min_bytes": 0, "strict": True}
    torch.compile(model, backend="actcomp", options=options)(x).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.fixture
def traces(monkeypatch):
    """Every trace that is made."""
    made, trace = [], splice.trace
    monkeypatch.setattr(splice, "trace", lambda *given: made.append(given) or trace(*given))
    return made


def test_more_layers_like_the_others_are_no_more_traces(traces):
    counts = []
    for layers in (3, 5):
        traces.clear()
        gradients(*equal_layers(layers), "int8")
        counts.append(len(traces))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("policy", ["lossless", "int4", "int8:rounding=stochastic", "blpa8", "invert"])
@pytest.mark.parametrize("build", [equal_layers, unlike_tensors])
def test_a_shared_trace_does_what_one_of_its_own_does(monkeypatch, build, policy):
    model, x = build()
    fx_actcomp.manual_seed(0)
    shared = gradients(model, x, policy)
    monkeypatch.setattr(splice, "kind_of", lambda _: None)
    fx_actcomp.manual_seed(0)
    own = gradients(model, x, policy)
    assert all(torch.equal(a, b) for a, b in zip(shared, own, strict=True))


@pytest.mark.parametrize("policy", ["lossless", "int8", "blpa8"])
def test_no_two_nodes_share_a_storage_but_views(monkeypatch, policy):
    graphs, stock = [], partition.compress_boundary

    def keeping(forward, backward, *given):
        plan = stock(forward, backward, *given)
        graphs.extend((forward.graph, backward.graph))
        return plan

    monkeypatch.setattr(partition, "compress_boundary", keeping)
    gradients(*equal_layers(), policy)
    for graph in graphs:
        own = [node for node in graph.nodes if node.op == "call_function" and value(node) is not None and not is_view(node)]
        assert own
        assert len({value(node).untyped_storage()._cdata for node in own}) == len(own)
