import math

import pytest
import torch
import torch.nn.functional as F
from inverse_cases import SELU
from torch import nn

from fx_actcomp.invert import recognize
from fx_actcomp.invert.monotone import ELU, LogSigmoid, Softplus, Softsign
from fx_actcomp.invert.piecewise import Hardswish, Hardtanh, LeakyReLU
from fx_actcomp.invert.smooth import Smooth

VARIANTS = {
    "gelu": (F.gelu, Smooth("gelu")),
    "gelu module": (nn.GELU(), Smooth("gelu")),
    "gelu by hand": (lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), Smooth("gelu")),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), Smooth("gelu_tanh")),
    "gelu_new": (lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3)))), Smooth("gelu_tanh")),
    "gelu_fast": (lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))), Smooth("gelu_tanh")),
    "quick_gelu": (lambda x: x * torch.sigmoid(1.702 * x), Smooth("silu", 1.702)),
    "swish of 0.5": (lambda x: x * torch.sigmoid(0.5 * x), Smooth("silu", 0.5)),
    "silu": (F.silu, Smooth("silu")),
    "silu by hand": (lambda x: x * torch.sigmoid(x), Smooth("silu")),
    "silu as a quotient": (lambda x: x / (1 + torch.exp(-x)), Smooth("silu")),
    "mish": (F.mish, Smooth("mish")),
    "mish by hand": (lambda x: x * torch.tanh(F.softplus(x)), Smooth("mish")),
    "hardswish": (F.hardswish, Hardswish()),
    "hardswish by hand": (lambda x: x * F.relu6(x + 3) / 6, Hardswish()),
    "softplus": (F.softplus, Softplus(1.0)),
    "softplus 3": (lambda x: F.softplus(x, 3.0), Softplus(3.0)),
    "elu": (F.elu, ELU(1.0, 1.0, 1.0)),
    "elu 0.3": (lambda x: F.elu(x, 0.3), ELU(1.0, 0.3, 1.0)),
    "selu": (F.selu, ELU(SELU[0], SELU[0] * SELU[1], 1.0)),
    "celu 1.3": (lambda x: F.celu(x, 1.3), ELU(1.0, 1.3, 1 / 1.3)),
    "leaky relu": (F.leaky_relu, LeakyReLU(0.01)),
    "leaky relu 0.2": (lambda x: F.leaky_relu(x, 0.2), LeakyReLU(0.2)),
    "leaky relu by hand": (lambda x: torch.maximum(x, 0.1 * x), LeakyReLU(0.1)),
    "log sigmoid": (F.logsigmoid, LogSigmoid()),
    "log of a sigmoid": (lambda x: -F.softplus(-x, threshold=50), LogSigmoid()),
    "hardtanh": (F.hardtanh, Hardtanh(-1.0, 1.0)),
    "relu6": (F.relu6, Hardtanh(0.0, 6.0)),
    "clamp": (lambda x: x.clamp(-0.5, 2), Hardtanh(-0.5, 2.0)),
    "softsign": (F.softsign, Softsign()),
    "softsign by hand": (lambda x: x / (1 + x.abs()), Softsign()),
}

STRANGERS = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
    "twice": lambda x: 2 * x,
    "negative": lambda x: -x,
    "abs": torch.abs,
    "square": lambda x: x * x,
    "squared relu": lambda x: F.relu(x).square(),
    "clipped gelu": lambda x: F.gelu(x).clamp(-10, 10),
    "moved gelu": lambda x: F.gelu(x) + 1e-3,
    "twice gelu": lambda x: 2 * F.gelu(x),
    "gelu of twice": lambda x: F.gelu(2 * x),
    "minus silu": lambda x: -F.silu(x),
    "silu of minus x": lambda x: x * torch.sigmoid(-x),
    "constant": torch.ones_like,
    "zero": torch.zeros_like,
    "log": torch.log,
    "exp": torch.exp,
    "reciprocal": lambda x: 1 / x,
    "sine": torch.sin,
    "hardsigmoid": F.hardsigmoid,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "leaky relu 0": lambda x: F.leaky_relu(x, 0.0),
    "leaky relu 1": lambda x: F.leaky_relu(x, 1.0),
    "leaky relu -0.1": lambda x: F.leaky_relu(x, -0.1),
    "two slopes": lambda x: torch.where(x > 0, 2 * x, 0.1 * x),
    "kinked elsewhere": lambda x: F.leaky_relu(x - 1e-3) + 1e-3,
    "a step": lambda x: (x > 0).double(),
    "sum": torch.sum,
    "pairs": lambda x: torch.stack([x, x]),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_each_way_to_write_a_function_names_its_inverse(name):
    function, wanted = VARIANTS[name]
    found = recognize(function)
    assert type(found) is type(wanted)
    for parameter, value in vars(wanted).items():
        assert getattr(found, parameter) == (value if isinstance(value, str) else pytest.approx(value, rel=1e-6))


@pytest.mark.parametrize("name", STRANGERS)
def test_functions_without_an_inverse_here_have_none(name):
    assert recognize(STRANGERS[name]) is None


@pytest.mark.parametrize("slope", [1e-3, 0.05, 0.5, 0.99])
def test_slopes_are_read_off(slope):
    assert recognize(lambda x: F.leaky_relu(x, slope)).slope == pytest.approx(slope, rel=1e-9)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 2.0, 10.0])
def test_parameters_of_elu_and_celu_are_read_off(alpha):
    elu, celu = recognize(lambda x: F.elu(x, alpha)), recognize(lambda x: F.celu(x, alpha))
    assert (elu.positive, elu.negative, elu.inner) == pytest.approx((1, alpha, 1), rel=1e-6)
    assert (celu.positive, celu.negative, celu.inner) == pytest.approx((1, alpha, 1 / alpha), rel=1e-6)


@pytest.mark.parametrize("beta", [0.2, 1.5, 8.0])
def test_sharpness_of_softplus_is_read_off(beta):
    assert recognize(lambda x: F.softplus(x, beta, threshold=40)).beta == pytest.approx(beta, rel=1e-6)
