"""The functions that have inverses, as torch computes them; derivatives by autograd and inverses by bisection, in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from fx_actcomp.invert.base import Inverse
from fx_actcomp.invert.monotone import ELU, LogSigmoid, Softplus, Softsign
from fx_actcomp.invert.piecewise import Hardswish, Hardtanh, LeakyReLU
from fx_actcomp.invert.smooth import Smooth

SELU = (1.0507009873554804934193349852946, 1.6732632423543772848170429916717)


@dataclass(frozen=True)
class Case:
    """A function and its inverse.

    ``minimum`` is None where it is one-to-one, and ``bound`` is of the derivative's error in fp32, 0.01 and more off it.
    ``left_end`` is where bisection starts: what lies beyond has the same output.
    """

    name: str
    function: Callable
    inverse: Inverse
    bound: float
    minimum: float | None = None


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


CASES = [
    Case("gelu", F.gelu, Smooth("gelu"), 1e-5, -0.7517915246935644575),
    Case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), Smooth("gelu_tanh"), 1e-5, -0.7524614220710162585),
    Case("silu", F.silu, Smooth("silu"), 1e-5, -1.278464542761073795),
    Case("quick_gelu", quick_gelu, Smooth("silu", 1.702), 1e-5, -1.278464542761073795 / 1.702),
    Case("mish", F.mish, Smooth("mish"), 1e-5, -1.192431214515495212),
    Case("hardswish", F.hardswish, Hardswish(), 1e-5, -1.5),
    Case("softplus", F.softplus, Softplus(1.0), 1e-6),
    Case("softplus_3", lambda x: F.softplus(x, 3.0), Softplus(3.0), 1e-6),
    Case("elu", F.elu, ELU(1.0, 1.0, 1.0), 1e-6),
    Case("elu_0.3", lambda x: F.elu(x, 0.3), ELU(1.0, 0.3, 1.0), 0.3e-6),
    Case("selu", F.selu, ELU(SELU[0], SELU[0] * SELU[1], 1.0), 1e-6 * SELU[0] * SELU[1]),
    Case("celu_1.3", lambda x: F.celu(x, 1.3), ELU(1.0, 1.3, 1 / 1.3), 1e-6),
    Case("leaky_relu", F.leaky_relu, LeakyReLU(0.01), 0),
    Case("leaky_relu_0.2", lambda x: F.leaky_relu(x, 0.2), LeakyReLU(0.2), 0),
    Case("log_sigmoid", F.logsigmoid, LogSigmoid(), 1e-6),
    Case("hardtanh", F.hardtanh, Hardtanh(-1.0, 1.0), 0),
    Case("relu6", F.relu6, Hardtanh(0.0, 6.0), 0),
    Case("softsign", F.softsign, Softsign(), 1e-6),
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BENT = [case for case in CASES if case.minimum is not None]
by_bent = pytest.mark.parametrize("case", BENT, ids=lambda case: case.name)
HALVES = [torch.bfloat16, torch.float16]


def every_value(dtype, most=torch.inf):
    """All finite numbers of a 16-bit type below a size."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return x[x.isfinite() & (x.float().abs() < most)]


def restored(case, x, y=None):
    """What comes back from the output, which is rounded to the type of x, in fp32."""
    y = case.function(x) if y is None else y
    return case.inverse.restore(y.float(), case.inverse.branch(x))


def derivative(case, x, decided=None):
    """In float64, by autograd; the comparisons of Hardswish, which are pinned, are those of ``decided``."""
    x = x.double()
    if case.name == "hardswish":
        decided = x if decided is None else decided.double()
        return torch.where(decided <= -3, 0.0, torch.where(decided < 3, x / 3 + 0.5, 1.0))
    leaf = x.clone().requires_grad_()
    case.function(leaf).sum().backward()
    return leaf.grad


def bisected(case, x, y):
    """The input that has exactly the output y, in float64, on the side of the minimum where x lies."""
    low, high = torch.full_like(x, -2e4, dtype=torch.float64), torch.full_like(x, 2e4, dtype=torch.float64)
    left = torch.zeros_like(x, dtype=torch.bool)
    if case.minimum is not None:
        left = x.double() < case.minimum
        low, high = torch.where(left, low, case.minimum), torch.where(left, case.minimum, high)
    for _ in range(70):
        middle = (low + high) / 2
        up = (case.function(middle) < y.double()) != left
        low, high = torch.where(up, middle, low), torch.where(up, high, middle)
    return (low + high) / 2


def off(case, x, back):
    """Error of the derivative at what came back."""
    return (derivative(case, back, x) - derivative(case, x)).abs()


def differentiated(case, x, y=None):
    """Both ways to the derivative from an output that is rounded to the type of x: through the input, and without it."""
    y = case.function(x) if y is None else y
    ways = [derivative(case, restored(case, x, y), x)]
    if case.inverse.differentiates:
        ways.append(case.inverse.derivative(y.float(), case.inverse.branch(x)).double())
    return ways


def worst(case, x, within=None):
    """The largest error of each way."""
    exact = derivative(case, x)
    return [(found - exact).abs()[slice(None) if within is None else within].max() for found in differentiated(case, x)]
