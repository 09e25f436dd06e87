import fit_inverses
import mpmath
import pytest
import torch
from inverse_cases import CASES, HALVES, bisected, by_bent, by_case, derivative, differentiated, every_value, off, restored, worst

from fx_actcomp.invert import tables
from fx_actcomp.invert.smooth import _ratio

by_half = pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])
TINY = [0.0, 1e-45, 1e-42, 1.1e-38, 1.2e-38, 1e-30, 1e-12, 1e-7]


def around(middle, reach, points):
    return middle + torch.linspace(-reach, reach, points, dtype=torch.float64)


def single(case):
    """fp32 numbers: wide, dense where the function bends, tiny and far ones."""
    places = [around(0, 30, 1_000_001), around(0, 0.01, 20_001), around(0, 1e-6, 2001), around(case.minimum or 0, 0.5, 100_001)]
    places += [around(sign * far, far / 100, 501) for far in (100, 1e4) for sign in (1, -1)]
    tiny = torch.tensor(TINY, dtype=torch.float64)
    return torch.cat([*places, tiny, -tiny]).float()


@by_case
def test_derivatives_in_fp32_hold_the_bound_off_the_minimum(case):
    x = single(case)
    away = (x.double() - (case.minimum if case.minimum is not None else torch.inf)).abs() >= 0.01
    assert away.sum() > 1e6
    assert restored(case, x).isfinite().all()
    assert max(worst(case, x, away)) <= case.bound


@by_bent
@pytest.mark.parametrize("reach", [0.01, 1e-3, 1e-5], ids=str)
def test_derivatives_in_fp32_near_the_minimum_are_as_good_as_the_output_allows(case, reach):
    x = around(case.minimum, reach, 20_001).float()
    exact = off(case, x, bisected(case, x, case.function(x)))
    assert max(worst(case, x)) <= 1.2 * exact.max() < 3e-4


@by_case
@by_half
def test_derivatives_in_16_bits_are_as_good_as_the_output_allows(case, dtype):
    x = every_value(dtype, 1e4)
    y = case.function(x)
    exact = off(case, x, bisected(case, x, y))
    assert restored(case, x).isfinite().all()
    assert max(worst(case, x)) <= 1.2 * exact.max() + 1e-6


@by_case
@by_half
def test_rounding_what_comes_back_to_16_bits_adds_little(case, dtype):
    x = every_value(dtype, 1e4)
    exact = off(case, x, bisected(case, x, case.function(x)))
    most = torch.finfo(dtype).max  # the codec clamps to it, too
    assert off(case, x, restored(case, x).clamp(-most, most).to(dtype)).max() <= 1.2 * exact.max() + 2 * torch.finfo(dtype).eps


@by_case
@by_half
def test_every_finite_output_in_16_bits_gives_a_finite_input_and_slope(case, dtype):
    x = every_value(dtype)
    y = case.function(x)
    x, y = x[y.isfinite()], y[y.isfinite()]
    assert restored(case, x, y).isfinite().all()
    assert all(found.isfinite().all() for found in differentiated(case, x, y))


@by_case
def test_the_largest_outputs_give_finite_inputs_and_the_slope_there(case):
    most = torch.finfo(torch.float32).max
    x = torch.tensor([1e5, 1e10, 1e30, most, -1e5, -1e10, -1e30, -most])
    y = case.function(x)
    x, y = x[y.isfinite()], y[y.isfinite()]
    assert restored(case, x, y).isfinite().all()
    for found in differentiated(case, x, y):
        assert torch.allclose(found, derivative(case, x.clamp(-1e4, 1e4)), atol=6e-7)


@by_case
@pytest.mark.parametrize("x", [torch.inf, -torch.inf])
def test_infinite_inputs_give_the_slope_at_the_end_or_nan_where_the_output_is(case, x):
    x = torch.full((64,), x)
    y = case.function(x)
    back = restored(case, x, y)
    if y.isnan().all():
        assert back.isnan().all()
    else:
        for found in differentiated(case, x, y):
            assert torch.allclose(found, derivative(case, x.clamp(-1e4, 1e4)), atol=6e-7)


@by_case
@pytest.mark.parametrize("n", [1, 64])
def test_nan_gives_nan(case, n):
    for x in (torch.full((n,), torch.nan), torch.full((n,), -5.0)):
        y = torch.full((n,), torch.nan)
        assert restored(case, x, y).isnan().all()
        if case.inverse.differentiates:
            assert case.inverse.derivative(y, case.inverse.branch(x)).isnan().all()


@by_bent
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_outputs_below_the_minimum_give_the_minimum(case, dtype):
    lowest = case.function(torch.tensor(case.minimum, dtype=torch.float64))
    for y in (lowest.to(dtype), torch.nextafter(lowest.to(dtype), torch.tensor(-torch.inf, dtype=dtype))):
        for x in (case.minimum + 1e-3, case.minimum - 1e-3):
            below = y.double() <= lowest
            back = restored(case, torch.tensor([x]), y[None])
            assert (back - case.minimum).abs() <= (1e-6 if below else 6 * (y.double() - lowest).sqrt())


@by_bent
def test_zeros_and_subnormal_outputs_on_the_left_lie_where_the_slope_is_gone(case):
    y = -torch.tensor(TINY[:5])
    assert torch.signbit(y[0])
    x = torch.full_like(y, -50.0)
    assert all(found.abs().max() <= 1e-7 for found in differentiated(case, x, y))


@by_bent
def test_tiny_outputs_on_the_right_are_inputs_near_zero(case):
    y = torch.tensor([*TINY, *(-t for t in TINY)])
    for found in differentiated(case, torch.zeros_like(y), y):
        assert (found - derivative(case, torch.zeros_like(y))).abs().max() < 1e-5
    assert restored(case, torch.zeros_like(y), y).abs().max() < 1e-6


def test_softsign_keeps_the_whole_sign():
    (case,) = [case for case in CASES if case.name == "softsign"]
    for x in (single(case), *map(every_value, HALVES)):
        assert torch.equal(x.sign(), restored(case, x).to(x.dtype).sign())


@by_case
def test_float64_restores_the_derivative_as_well(case):
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    back = case.inverse.restore(case.function(x), case.inverse.branch(x))
    assert back.dtype is torch.float64
    assert off(case, x, back).max() <= 1e-5
    if case.inverse.differentiates:
        slope = case.inverse.derivative(case.function(x), case.inverse.branch(x))
        assert slope.dtype is torch.float64
        assert (slope - derivative(case, x)).abs().max() <= 1e-6


@by_case
def test_the_inverses_function_is_torch_s(case):
    x = torch.linspace(-30, 30, 6001, dtype=torch.float64)
    assert torch.allclose(case.inverse.function(x), case.function(x), rtol=1e-8, atol=1e-9)


def test_the_table_is_what_the_fit_makes():
    with mpmath.workdps(30):
        made = fit_inverses.table("mish")
    with open(tables.__file__, encoding="utf-8") as file:
        assert made.split("        Ratio(")[0] in file.read()
    (again,) = eval("{" + made + "}", vars(tables)).values()  # its rational fits are iterated: other libraries round otherwise
    kept = tables.TABLES["mish"]
    t = torch.linspace(0, 3, 1001, dtype=torch.float64)
    for fit, other in ((kept.rise, again.rise), (kept.fall, again.fall)):
        inside = t[t <= max(fit.middle, fit.middle + fit.half)]
        assert torch.allclose(_ratio(fit, inside) * inside, _ratio(other, inside) * inside, rtol=0, atol=1e-6)
