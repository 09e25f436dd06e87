"""One operator between two linear layers: decisions stay exact, values stay near, and what must be exact is kept."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_actcomp

BATCH, WIDTH = 48, 64


def rounded_straight_through(x):
    return x + (x.round() - x).detach()


def attention_with_float_mask(x, scale):
    q = x.view(BATCH, 4, 16)
    mask = (torch.arange(4) - torch.arange(4).unsqueeze(1)).tril().float()
    return F.scaled_dot_product_attention(q * scale[:16], q, q, attn_mask=mask).flatten(1)


def pooled(x, scale):
    return F.max_pool2d((x * scale).view(BATCH, 1, 8, 8), 2).flatten(1).repeat(1, 4) * x


# ``scale`` is a parameter: its gradient reads the values, and the first layer's gradient reads the derivative.
OPERATORS = {
    # decisions
    "relu": lambda x, scale: F.relu(x * scale),
    "relu6": lambda x, scale: F.relu6(3 * x * scale),
    "leaky_relu": lambda x, scale: F.leaky_relu(x * scale, 0.1),
    "hardshrink": lambda x, scale: F.hardshrink(x * scale, 0.7),
    "threshold": lambda x, scale: F.threshold(x * scale, 0.3, -1.0),
    "abs": lambda x, scale: (x * scale).abs(),
    "sign": lambda x, scale: x.sign() * x * scale,
    "clamp": lambda x, scale: x.clamp(-1, 1.5) * scale,
    "clamp_by_tensor": lambda x, scale: x.clamp(-scale, scale),
    "where": lambda x, scale: torch.where(x > scale, x * scale, x * x),
    "where_of_range": lambda x, scale: torch.where((x > 0) & (x < scale), x * x, x * scale),
    "amax": lambda x, scale: x * scale + x.amax(dim=1, keepdim=True),
    "sort": lambda x, scale: x.sort(dim=1).values * scale,
    "max_pool2d": pooled,
    "straight_through": lambda x, scale: rounded_straight_through(x * scale) * scale,
    "dropout": lambda x, scale: F.dropout(x * scale, 0.3),
    # values that must be exact
    "fmod": lambda x, scale: torch.fmod(x * scale, 0.7) * scale,
    "fmod_by_tensor": lambda x, scale: torch.fmod(x, scale),
    "reciprocal": lambda x, scale: 1 / (x * scale),
    "ratio": lambda x, scale: (x * scale) / (F.relu(x) + 1e-3),
    "log": lambda x, scale: torch.log(x * x) * scale,
    "sqrt": lambda x, scale: torch.sqrt(F.relu(x * scale)),
    "root": lambda x, scale: F.relu(x * scale) ** 0.3,
    "copysign": lambda x, scale: torch.copysign(x * scale, x),
    "cumprod": lambda x, scale: (x * scale).view(BATCH, 16, 4).cumprod(dim=2).flatten(1),
    "norm_of_each": lambda x, scale: (x * scale).unsqueeze(2).norm(dim=2),
    # nonlinear derivatives
    "gelu": lambda x, scale: F.gelu(x * scale),
    "gelu_tanh": lambda x, scale: F.gelu(x * scale, approximate="tanh"),
    "silu": lambda x, scale: F.silu(x * scale),
    "tanh": lambda x, scale: torch.tanh(x * scale),
    "softplus": lambda x, scale: F.softplus(x * scale, beta=2, threshold=3),
    "elu": lambda x, scale: F.elu(x * scale),
    "hardswish": lambda x, scale: F.hardswish(x * scale),
    "mish": lambda x, scale: F.mish(x * scale),
    "prelu": lambda x, scale: F.prelu(x, scale / 4),
    "glu": lambda x, scale: F.glu(torch.cat([x * scale, x], dim=1)),
    # norms and attention
    "layer_norm": lambda x, scale: F.layer_norm(x, (WIDTH,), scale),
    "group_norm": lambda x, scale: F.group_norm(x.view(BATCH, WIDTH, 1), 8, scale).flatten(1),
    "attention": attention_with_float_mask,
}  # fmt: skip
DECIDING = [
    "relu6", "leaky_relu", "hardshrink", "threshold", "abs", "sign", "clamp", "clamp_by_tensor", "where", "where_of_range",
    "elu", "hardswish", "prelu",
]  # fmt: skip


class Between(nn.Module):
    """A linear layer, the operator, a linear layer."""

    def __init__(self, operator):
        super().__init__()
        self.before, self.operator, self.after = nn.Linear(32, WIDTH), operator, nn.Linear(WIDTH, 16)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        return self.after(self.operator(3 * self.before(x), self.scale))


def made(name):
    torch.manual_seed(0)
    return Between(OPERATORS[name]), torch.randn(BATCH, 32)


@functools.cache
def error(name, policy):
    return fx_actcomp.gradient_error(*made(name), policy=policy, min_bytes=0, compiler="aot_eager")


@functools.cache
def explained(name, policy="int8"):
    return fx_actcomp.explain(*made(name), policy=policy, min_bytes=0, compiler="aot_eager")


every_operator = pytest.mark.parametrize("name", OPERATORS)


@every_operator
def test_int8_moves_the_gradient_by_two_percent_at_most(name):
    assert error(name, "int8").relative <= 0.02


@every_operator
def test_int8_gradients_of_all_parameters_are_finite(name):
    assert all(math.isfinite(one.relative) for one in error(name, "int8").per_parameter.values())


@every_operator
@pytest.mark.parametrize("policy", ["lossless", "int8"])
def test_forward_is_exact(name, policy):
    assert error(name, policy).loss_equal


@every_operator
def test_lossless_leaves_the_gradient_as_it_is(name):
    assert error(name, "lossless").relative == 0


@every_operator
def test_no_graph_fell_back(name):
    assert explained(name).failures == ()


@every_operator
def test_what_is_left_alone_has_a_reason(name):
    assert [row.name for row in explained(name).saved if row.codec == "keep" and not row.reason] == []


DIVIDED_LATER = {"ratio", "copysign", "cumprod", "norm_of_each"}
"""Their backward divides by a tensor what it read: all that they save is a dividend or a divisor, and stays exact."""


@every_operator
def test_something_is_compressed_unless_all_is_divided(name):
    if name in DIVIDED_LATER:
        assert explained(name).bytes_after == explained(name).bytes_before
        return
    assert explained(name).bytes_after < explained(name).bytes_before


@pytest.mark.parametrize("name", DECIDING)
def test_a_decision_is_packed_or_its_values_are_kept(name):
    rows = explained(name).saved
    packed = [row for row in rows if row.kind in {"decision", "mask"} and row.codec in {"bits", "ternary"}]
    read = [row for row in rows if row.kind == "activation" and not all("aten.mm" in use for use in row.used_by)]
    assert packed or all(row.codec == "keep" and row.reason for row in read)


@pytest.mark.parametrize("name", ["abs", "sign"])
def test_a_sign_takes_two_bits_an_element(name):
    (row,) = [row for row in explained(name).saved if row.kind == "decision"]
    assert (row.codec, row.bytes_after) == ("ternary", BATCH * WIDTH // 4)


@pytest.mark.parametrize("name", ["relu6", "leaky_relu", "clamp", "where", "where_of_range", "dropout"])
def test_a_mask_takes_one_bit_an_element(name):
    rows = [row for row in explained(name).saved if row.kind in {"decision", "mask"}]
    assert rows
    assert {(row.codec, row.bytes_after) for row in rows} == {("bits", BATCH * WIDTH // 8)}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("straight_through", "aten.round"),
        ("fmod", "remainder"),
        ("fmod_by_tensor", "can't be pinned"),
        ("reciprocal", "reciprocal"),
        ("ratio", "denominator"),
        ("sqrt", "denominator"),
    ],
)
def test_what_must_be_exact_is_kept_with_its_reason(name, reason):
    kept = [row for row in explained(name).saved if row.kind == "activation" and row.codec == "keep"]
    assert any(reason in row.reason for row in kept)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_softplus_keeps_nothing_exact_that_its_gradient_comes_through(compiler):
    model = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    report = fx_actcomp.explain(model, torch.randn(64, 64), policy="int8", compiler=compiler, min_bytes=0)
    values = [row for row in report.saved if row.kind == "activation"]
    assert [row.codec for row in values] == ["int8"] * 4


def test_the_gradient_through_a_softplus_is_near():
    model = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(64, 64)
    assert fx_actcomp.gradient_error(model, x, policy="int8", compiler="aot_eager", min_bytes=0).relative < 0.01
