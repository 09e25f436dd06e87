import models
import pytest
import torch
import torch.nn.functional as F
from inversion_cases import compiled, distance, error, explained, held, pair
from scenarios import SCENARIOS
from torch import nn

import fx_actcomp

by_gate = pytest.mark.parametrize("gate", [F.silu, F.gelu], ids=["swiglu", "geglu"])


class Gated(nn.Module):
    def __init__(self, f, width=12):
        super().__init__()
        self.norm, self.f = nn.RMSNorm(width), f
        self.gate, self.up, self.down = nn.Linear(width, 20), nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x):
        n = self.norm(x)
        return x + self.down(self.f(self.gate(n)) * self.up(n))


def stack(f):
    return nn.Sequential(Gated(f), Gated(f), Gated(f))


def tokens():
    return 2 * torch.randn(4, 10, 12)


def products(net, x, **options):
    """Rows of what the last linear layers read."""
    _, report = explained(net, x, **options)
    return [row for row in report.saved if any(use.endswith("down::aten.mm") for use in row.used_by) and not row.alive_anyway]


@by_gate
def test_products_take_no_bytes(gate):
    net, x = stack(gate), tokens()
    rows = products(net, x)
    assert [(row.codec, row.bytes_before, row.bytes_after) for row in rows] == 3 * [("image", 4 * 10 * 20 * 4, 0)]
    assert error(net, x) <= 1e-6


@by_gate
def test_autograd_does_not_hold_the_product(gate):
    net, x = stack(gate), tokens()
    n = net[0].norm(x)
    product = (gate(net[0].gate(n)) * net[0].up(n)).detach()
    assert held(compiled(net, "none"), product, x)
    assert not held(compiled(net, "invert"), product, x)


@pytest.mark.parametrize("gate", [F.silu])
@pytest.mark.parametrize("factor", ["gate", "up"])
def test_no_product_is_made_from_lossy_factors(gate, factor):
    net, x = stack(gate), tokens()
    overrides = {f"2.{factor}": "int8"}
    codecs = [row.codec for row in products(net, x, overrides=overrides)]
    assert codecs == ["image", "image", "keep"]
    assert "int8" in {row.codec for row in explained(net, x, overrides=overrides)[1].saved}
    found = fx_actcomp.gradient_error(net, x, policy="invert", overrides=overrides, min_bytes=0, compiler="aot_eager")
    assert found.per_parameter["2.down.weight"].relative == 0
    assert 0 < found.relative <= 0.02


@by_gate
def test_an_override_keeps_the_product(gate):
    net, x = stack(gate), tokens()
    row = products(net, x)[1]
    assert products(net, x, overrides={f"{row.module or 're:^$'}::{row.op}": None})[1].codec == "keep"


@by_gate
def test_products_under_autocast_are_right(gate):
    net, x = stack(gate), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        exact, got = pair(net, x)
        assert "image" in {row.codec for row in products(net, x)}
    assert distance(exact, got) <= 1e-2


def test_products_of_dynamic_batches_are_right():
    net, found = stack(F.silu), {}
    for arm in ("none", "invert"):
        torch._dynamo.reset()
        net.zero_grad()
        call = torch.compile(
            net, backend="actcomp", options={"policy": arm, "min_bytes": 0, "compiler": "aot_eager", "strict": True}, dynamic=True
        )
        for batch in (4, 7):
            torch.manual_seed(batch)
            call(torch.randn(batch, 12)).square().sum().backward()
        found[arm] = torch.cat([p.grad.flatten() for p in net.parameters()])
    assert distance(found["none"], found["invert"]) <= 1e-5


def saves_no_more(module, *inputs):
    before, after = (explained(module, *inputs, policy=policy)[1].bytes_after for policy in ("none", "invert"))
    assert 0 <= after <= before


def test_a_resnet_saves_no_more():
    net, inputs = models.resnet18(width=8, batch=2)
    saves_no_more(net, *inputs)


def test_a_gpt_saves_less():
    net, inputs = models.gpt(layers=2, width=32, length=16, batch=2)
    saves_no_more(net, *inputs)
    assert explained(net, *inputs)[1].bytes_after < explained(net, *inputs, policy="none")[1].bytes_after
    assert error(net, *inputs) <= 2e-5


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
@pytest.mark.parametrize("f", [nn.GELU, nn.ELU, nn.ReLU])
def test_norms_before_functions_save_no_more(norm, f):
    net = nn.Sequential(nn.Linear(12, 16), norm(16), f(), nn.Linear(16, 16), norm(16), f(), nn.Linear(16, 4))
    x = torch.randn(24, 12)
    saves_no_more(net, x)
    assert error(net, x) <= 2e-5


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if not s.distributed], ids=lambda scenario: scenario.name)
def test_scenarios_save_no_more(scenario):
    torch._dynamo.reset()
    module, inputs = scenario.make()
    saves_no_more(module, *inputs)


@pytest.mark.parametrize("policy", ["invert", "blpa8"])
def test_a_decision_that_cannot_be_pinned_keeps_the_image(policy):
    def floored(net, x):
        h = torch.relu(net.norm(net.conv(x)))
        return net.head(h) + (h * torch.floor(h)).mean()

    class Floored(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

        def forward(self, x):
            return floored(self, x)

    model, x = Floored(), torch.randn(4, 3, 10, 10)
    report = fx_actcomp.explain(model, x, policy=policy, compiler="aot_eager", min_bytes=0)
    (relu,) = [row for row in report.saved if row.op == "aten.relu"]
    assert (relu.codec, relu.bytes_after) == ("keep", relu.bytes_before)
    assert "floor" in relu.reason
    error = fx_actcomp.gradient_error(model, x, policy=policy, compiler="aot_eager", min_bytes=0)
    assert error.relative <= (0.02 if policy == "blpa8" else 1e-6)


def by_hand(x):
    return x * torch.sigmoid(x)


@pytest.mark.parametrize(
    "bent",
    [
        lambda net, x: F.gelu(by_hand(net.up(x))),
        lambda net, x: by_hand(by_hand(net.up(x))),
        lambda net, x: by_hand(net.up(x)) * net.side(x) * by_hand(net.side(x)),
        lambda net, x: (net.up(x) * net.side(x) + net.up(x)) * net.side(x),
    ],
    ids=["gelu of silu", "silu of silu", "product of products", "sum in a product"],
)
def test_what_follows_from_what_follows_is_right(bent):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.side = nn.Linear(8, 24), nn.Linear(8, 24)
            self.mix, self.down = nn.Linear(24, 24), nn.Linear(24, 8)

        def forward(self, x):
            h = bent(self, x)
            g = self.up(x)
            a, b = by_hand(g), F.gelu(by_hand(g))
            return self.down(h) + self.down(self.mix(a) * b) + self.mix(a)[:, :8]

    model, x = Net(), torch.randn(16, 8)
    report = fx_actcomp.explain(model, x, policy="invert", compiler="aot_eager", min_bytes=0)
    assert report.failures == ()
    assert report.bytes_after <= report.bytes_before
    assert fx_actcomp.gradient_error(model, x, policy="invert", compiler="aot_eager", min_bytes=0).relative <= 2e-5
