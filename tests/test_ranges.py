import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from ranges_cases import assert_true_on, by_table, image, property_test, result, trace

from fx_actcomp.ranges import nonnegative, nonnegative_nodes, share_nodes

PROVED = {
    "relu": F.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "softplus": F.softplus,
    "softmax": lambda x: x.softmax(-1),
    "exp": torch.exp,
    "abs": torch.abs,
    "square": lambda x: x * x,
    "power of 2": lambda x: x**2,
    "root": lambda x: x.sqrt(),
    "variance": lambda x: x.var(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "clamp": lambda x: x.clamp(min=0),
    "clamp both": lambda x: x.clamp(0, 6),
    "maximum with relu": lambda x: torch.maximum(x, x.relu()),
    "minimum of relus": lambda x: torch.minimum(x.relu(), x.abs()),
    "relu + relu": lambda x: x.relu() + (-x).relu(),
    "relu + 1": lambda x: x.relu() + 1,
    "relu * sigmoid": lambda x: x.relu() * x.sigmoid(),
    "relu * 2": lambda x: x.relu() * 2.0,
    "relu / (abs + 1)": lambda x: x.relu() / (x.abs() + 1),
    "max_pool of relu": lambda x: F.max_pool2d(x.relu(), 2),
    "max_pool of relu, padded": lambda x: F.max_pool2d(x.relu(), 3, 2, 1),
    "avg_pool of relu": lambda x: F.avg_pool2d(x.relu(), 2),
    "adaptive_avg_pool of relu": lambda x: F.adaptive_avg_pool2d(x.relu(), 1),
    "mean of relu": lambda x: x.relu().mean((2, 3)),
    "sum of relu": lambda x: x.relu().sum(1),
    "amax of relu": lambda x: x.relu().amax(1),
    "max of relu": lambda x: x.relu().max(1).values,
    "largest of relu": lambda x: x.relu().topk(2).values,
    "sorted relu": lambda x: x.relu().sort().values,
    "view of relu": lambda x: x.relu().view(2, -1),
    "transposed relu": lambda x: x.relu().transpose(1, 2),
    "slice of relu": lambda x: x.relu()[:, 1:, ::2],
    "flattened, permuted relu": lambda x: x.relu().permute(0, 2, 3, 1).reshape(-1, 3),
    "chunk of relu": lambda x: x.relu().chunk(2, 2)[1],
    "expanded relu": lambda x: x.relu()[:, :1].expand(2, 3, 8, 8),
    "cast relu": lambda x: x.relu().to(torch.bfloat16).float(),
    "cloned relu": lambda x: x.relu().clone(),
    "relu padded with 0": lambda x: F.pad(x.relu(), (1, 1)),
    "relu padded with 1": lambda x: F.pad(x.relu(), (1, 1), value=1.0),
    "cat of relus": lambda x: torch.cat([x.relu(), x.abs()]),
    "stack of relus": lambda x: torch.stack([x.relu(), x.abs()]),
    "where of relus": lambda x: torch.where(x > 0.5, x.relu(), x.sigmoid()),
    "where relu or 0": lambda x: torch.where(x > 0.5, x.relu(), 0.0),
    "masked relu": lambda x: x.relu().masked_fill(x > 1, 0.0),
    "upsampled relu": lambda x: F.interpolate(x.relu(), scale_factor=2),
    "gathered relu": lambda x: x.relu()[:, [0, 2]],
    "cumulated relu": lambda x: x.relu().cumsum(1),
    "leaky_relu of relu": lambda x: F.leaky_relu(x.relu()),
    "dropout of relu": lambda x: torch.native_dropout(x.relu(), 0.5, True)[0],
    "mask as numbers": lambda x: (x > 0).float(),
    "ones": torch.ones_like,
}  # fmt: skip


ONLY_WHOLE = {"softplus", "power of 2", "variance", "norm", "hardsigmoid"}


"""Proved of the whole operator; what the decompositions leave of it may be beyond proof."""


ONLY_DECOMPOSED = {"dropout of relu", "ones"}


"""No graph of ours has the whole operator."""


UNPROVED = {
    "x": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "relu - relu": lambda x: x.relu() - (-x).relu(),
    "relu - 1": lambda x: x.relu() - 1,
    "relu + (-1)": lambda x: x.relu() + (-1),
    "relu + x": lambda x: x.relu() + x,
    "-relu": lambda x: -x.relu(),
    "relu * x": lambda x: x.relu() * x,
    "relu * (-2)": lambda x: x.relu() * (-2.0),
    "relu / (-2)": lambda x: x.relu() / (-2.0),
    "relu / x": lambda x: x.relu() / x,
    "relu added a negative number of times": lambda x: torch.add(x.relu(), x.abs(), alpha=-1),
    "x * (x + 0)": lambda x: x * (x + 0),
    "cube": lambda x: x**3,
    "leaky_relu": F.leaky_relu,
    "leaky_relu with a negative slope": lambda x: F.leaky_relu(x, -0.1) - 1,
    "elu": F.elu,
    "hardtanh": F.hardtanh,
    "clamp from below 0": lambda x: x.clamp(min=-1),
    "clamp from above": lambda x: x.clamp(max=6),
    "minimum with relu": lambda x: torch.minimum(x, x.relu()),
    "maximum": lambda x: torch.maximum(x, -x - 1),
    "max_pool of x": lambda x: F.max_pool2d(x, 2),
    "mean of x": lambda x: x.mean(1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "log": lambda x: x.relu().log(),
    "padded with a negative number": lambda x: F.pad(x.relu(), (1, 1), value=-1.0),
    "cat with x": lambda x: torch.cat([x.relu(), x]),
    "where relu or x": lambda x: torch.where(x > 0.5, x.relu(), x),
    "where relu or -1": lambda x: torch.where(x > 0.5, x.relu(), -1.0),
    "filled with a negative number": lambda x: x.relu().masked_fill(x > 1, -1.0),
    "layer_norm of relu": lambda x: F.layer_norm(x.relu(), (8,)),
    "convolution of relu": lambda x: F.conv2d(x.relu(), x[:, :, :3, :3]),
    "matmul of relus": lambda x: x.relu() @ -x.relu().transpose(-1, -2),
    "bicubic of relu": lambda x: F.interpolate(x.relu(), scale_factor=2, mode="bicubic"),
    "dropout of x": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "logarithm of variance": lambda x: x.var(1).log(),
    "sign": torch.sign,
    "normal noise": torch.randn_like,
}


@pytest.mark.parametrize("name", [name for name in PROVED if name not in ONLY_DECOMPOSED])
def test_proved_nonnegative(name):
    traced = trace(PROVED[name], image())
    assert nonnegative(result(traced))
    assert_true_on(traced, image())


@pytest.mark.parametrize("name", [name for name in PROVED if name not in ONLY_WHOLE])
def test_proved_nonnegative_after_inductors_decompositions(name):
    traced = trace(PROVED[name], image(), table="inductor")
    assert nonnegative(result(traced))
    assert_true_on(traced, image())


@by_table
@pytest.mark.parametrize("name", UNPROVED)
def test_not_claimed_nonnegative(name, table):
    traced = trace(UNPROVED[name], image(), table=table)
    assert not nonnegative(result(traced))
    assert_true_on(traced, image())


ODD = {
    "leaky_relu with a negative slope": lambda x: F.leaky_relu(x.relu() - 1, -0.5),
    "softplus with a negative beta": lambda x: F.softplus(x, beta=-1.0),
    "clamp whose ends cross": lambda x: x.clamp(0.0, -1.0),
    "hardtanh below 0": lambda x: torch.ops.aten.hardtanh(x.relu(), -2.0, -1.0),
    "addcmul with a negative value": lambda x: torch.addcmul(x.relu(), x.abs(), x.abs(), value=-3),
    "avg_pool with a negative divisor": lambda x: F.avg_pool2d(x.relu(), 2, divisor_override=-4),
    "a cast that wraps": lambda x: (x.relu() * 1000).to(torch.int32).to(torch.int8).float(),
    "an integer product that wraps": lambda x: ((x * 100).to(torch.int8) * (x * 100).to(torch.int8)).float(),
    "a square of integers that wraps": lambda x: [i := (x * 100).to(torch.int8), (i * i).float()][1],
    "bytes read as numbers": lambda x: x.view(torch.uint8).clone().view(torch.float32),
    "the negative view": lambda x: torch._neg_view(x.relu()),
    "the real part of a square": lambda x: [z := torch.complex(x, 2 * x), (z * z).real][1],
    "the real part of exp": lambda x: torch.complex(x, 4 * x).exp().real,
    "the smaller of two": lambda x: torch.min(x.relu(), x),
    "power of a negative number": lambda x: x.relu() ** 3 * -1,
    "reinterpreted signs": lambda x: (-x.abs()).view(torch.int32),
    "the reciprocal root of negative zero": lambda x: (x.relu() * -0.0).rsqrt(),
    "division by negative zero": lambda x: x.abs() / (x.relu() * -0.0),
    "division rounded down": lambda x: torch.div(x.relu(), x.abs() + 1, rounding_mode="floor") - 1,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_cases_are_not_claimed_wrongly(name):
    x = 3 * image()
    assert_true_on(trace(ODD[name], x, table="inductor"), x)


def test_a_claim_sees_through_a_long_chain():
    def function(x):
        x = x.relu()
        for _ in range(300):
            x = x.view(-1).view(8, 4) * 0.9 + 0.1
        return x

    assert nonnegative(result(trace(function, torch.randn(8, 4))))


def test_inputs_prove_nothing():
    (x,) = trace(lambda x: x + 1, image()).graph.find_nodes(op="placeholder")
    assert not nonnegative(x)


def test_bytes_and_masks_are_never_negative():
    for dtype in (torch.uint8, torch.bool):
        (x,) = trace(lambda x: x.clone(), torch.ones(3, dtype=dtype)).graph.find_nodes(op="placeholder")
        assert nonnegative(x)


UNARY = [
    torch.relu, torch.sigmoid, torch.tanh, torch.abs, torch.exp, torch.neg, F.leaky_relu, F.gelu, F.silu, F.softplus,
    torch.square, torch.floor, torch.sign, lambda x: x - 1, lambda x: x + 1, lambda x: x * -0.5, lambda x: x * 2,
    lambda x: x**2, lambda x: x**3, lambda x: x.clamp(min=0), lambda x: x.clamp(max=0.5), lambda x: x.clamp(-1, 1),
    lambda x: x * x, lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: x.transpose(0, 1).contiguous(),
    lambda x: F.pad(x, (1, -1), value=-0.5), lambda x: F.pad(x, (1, -1)), lambda x: x.flip(0), lambda x: x.roll(1, 0),
    lambda x: x.cumsum(0), lambda x: x.mean(0, keepdim=True).expand(6, 6), lambda x: x.amin(1, keepdim=True) + x,
    lambda x: x.sort(0).values, lambda x: torch.native_dropout(x, 0.5, True)[0], torch.log,
    lambda x: x.to(torch.bfloat16).float(), lambda x: 1 / x,
    lambda x: x.masked_fill(x > 1, -1.0), lambda x: F.layer_norm(x, (6,)), torch.sqrt, torch.round,
    lambda x: F.hardtanh(x, -0.5, 2), F.relu6, F.hardsigmoid, lambda x: x.var(0, keepdim=True) - x, F.elu,
]  # fmt: skip


BINARY = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.fmin, torch.max, torch.min,
    lambda a, b: torch.add(a, b, alpha=-2), lambda a, b: torch.where(a > b, a, b), lambda a, b: torch.where(a > b, b, 0.0),
    lambda a, b: torch.addcmul(a, b, b, value=0.5), lambda a, b: torch.cat([a, b])[3:9], operator.matmul,
    lambda a, b: torch.stack([a, b]).amax(0), lambda a, b: torch.lerp(a, b, 0.3), torch.atan2, torch.fmod, torch.remainder,
]  # fmt: skip


@by_table
@property_test
@given(steps=st.lists(st.one_of(st.sampled_from(UNARY), st.tuples(st.sampled_from(BINARY), st.integers(0, 9))), max_size=7))
def test_whatever_is_claimed_nonnegative_really_is(table, steps):
    def function(x):
        made = [x, x.relu()]
        for step in steps:
            if isinstance(step, tuple):
                made.append(step[0](made[-1], made[step[1] % len(made)]))
            else:
                made.append(step(made[-1]))
        return made[-1]

    x = 2 * torch.randn(6, 6)
    assert_true_on(trace(function, x, table=table), x)


SHARES = {
    "softmax": lambda x: x.softmax(-1),
    "softmin": lambda x: F.softmin(x, 1),
    "softmax in another type": lambda x: x.softmax(1, dtype=torch.float32).bfloat16(),
    "by hand": lambda x: (e := x.exp()) / e.sum(1, keepdim=True),
    "of anything that isn't negative": lambda x: (size := x.abs()) / size.sum((1, 2), keepdim=True),
    "masked": lambda x: x.softmax(-1).masked_fill(x > 1, 0.0),
    "where": lambda x: torch.where(x > 0, x.softmax(-1), 0.0),
    "times a mask": lambda x: x.softmax(-1) * (x > 0),
    "times a mask in floats": lambda x: (x > 0).float() * x.softmax(-1),
    "a view": lambda x: x.softmax(-1).transpose(1, 2).reshape(2, -1),
}
NO_SHARES = {
    "scaled": lambda x: x.softmax(-1) * 2,
    "dropped out": lambda x: F.dropout(x.softmax(-1), 0.5),
    "weighted": lambda x: x.softmax(-1) * x.sigmoid(),
    "of a sum of something else": lambda x: x.exp() / x.abs().sum(1, keepdim=True),
    "of a sum in which terms may cancel": lambda x: x / x.sum(1, keepdim=True),
    "over the mean": lambda x: (e := x.exp()) / e.mean(1, keepdim=True),
    "masked with ones": lambda x: x.softmax(-1).masked_fill(x > 1, 1.0),
    "sigmoid": torch.sigmoid,
}


@by_table
@pytest.mark.parametrize("name", SHARES)
def test_shares_of_a_whole(name, table):
    traced = trace(SHARES[name], image(), table=table)
    assert result(traced) in share_nodes(traced.graph, nonnegative_nodes(traced.graph))
    held = SHARES[name](image())
    assert held.min() >= 0
    assert held.max() <= 1


@by_table
@pytest.mark.parametrize("name", NO_SHARES)
def test_no_shares_of_a_whole(name, table):
    traced = trace(NO_SHARES[name], image(), table=table)
    assert result(traced) not in share_nodes(traced.graph, nonnegative_nodes(traced.graph))
