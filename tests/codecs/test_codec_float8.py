import math

import numpy as np
import pytest
import torch
from codec_cases import POSITIVE, assert_within_bound, normal, roundtrip, sparse, stored_bits
from torch import nn

from fx_actcomp.codecs import Traits, codec_named

NAMES = ["fp8", "fp8:format=e5m2"]
LARGEST = {"fp8": 416, "fp8:format=e5m2": 57344}
by_name = pytest.mark.parametrize("name", NAMES)


def every_finite_bf16():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return bits[bits.isfinite()]


@by_name
def test_every_finite_bf16_comes_back_within_the_bound_beside_any_other(name):
    x = every_finite_bf16()[torch.randperm(65280)]
    for rows in (x.view(-1, 256), x.sort().values.view(-1, 256), x.abs().sort().values.view(-1, 256)):
        y = roundtrip(codec_named(name), rows, Traits())
        assert y.isfinite().all()
        assert_within_bound(codec_named(name), rows, y, Traits())


@by_name
def test_every_positive_bf16_comes_back_positive_and_within_the_bound(name):
    x = every_finite_bf16().relu()[torch.randperm(65280)].view(-1, 256)
    y = roundtrip(codec_named(name), x, POSITIVE)
    assert torch.equal(y > 0, x > 0)
    assert_within_bound(codec_named(name), x, y, POSITIVE)


@by_name
def test_a_row_is_off_by_what_a_table_of_all_8_bit_floats_says(name):
    codec, x = codec_named(name), normal((4, 256), torch.float64)
    kind = {"fp8": torch.float8_e4m3fn, "fp8:format=e5m2": torch.float8_e5m2}[name]
    table = torch.arange(256, dtype=torch.uint8).view(kind).double()
    table = table[table.isfinite() & (table.abs() <= LARGEST[name])]
    scale = x.abs().amax(1, keepdim=True) / LARGEST[name]
    nearest = (x.unsqueeze(-1) - table * scale.unsqueeze(-1)).abs().amin(-1)
    off = (roundtrip(codec, x, Traits()) - x).abs()
    assert torch.allclose(off, nearest, rtol=1e-6, atol=1e-9)


@by_name
def test_small_values_keep_their_precision_beside_a_large_one(name):
    x = torch.full((256,), 0.02)
    x[7] = 1.0
    off = {other: (roundtrip(codec_named(other), x, Traits()) - x).abs()[8].item() for other in (name, "int4")}
    assert off[name] <= 0.02 / 8
    assert off["int4"] > 0.5 * 0.02


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_ends_of_the_range_saturate_to_themselves_and_not_to_infinity(name, dtype):
    most = torch.finfo(dtype).max
    for end in (most, most * (1 - 2**-6), 1.0, most / 3):
        x = torch.linspace(-1, 1, 512, dtype=torch.float64).mul(end).to(dtype).view(2, 256)
        y = roundtrip(codec_named(name), x, Traits())
        assert y.isfinite().all()
        assert torch.allclose(y[0, 0].double(), x[0, 0].double(), rtol=2**-6)


@by_name
@pytest.mark.parametrize(
    ("sign_exact", "poison"), [(False, math.inf), (False, -math.inf), (False, math.nan), (True, math.inf), (True, math.nan)]
)
def test_what_is_not_finite_comes_back_as_itself_and_harms_nothing_in_its_row(name, sign_exact, poison):
    traits = Traits(sign_exact=sign_exact)
    x = sparse((4, 256), torch.float32) if sign_exact else normal((4, 256), torch.float32)
    x[1, 9], x[2, 100] = 0.0, 0.0
    clean = roundtrip(codec_named(name), x, traits)
    x[1, 9] = x[2, 100] = poison
    y = roundtrip(codec_named(name), x, traits)
    for place in ((1, 9), (2, 100)):
        assert y[place] == poison or (math.isnan(poison) and y[place].isnan())
        y[place] = clean[place]
    assert torch.equal(y, clean)


@by_name
def test_a_row_of_nothing_finite_comes_back(name):
    x = torch.tensor([math.inf, -math.inf, math.nan, math.inf])
    assert torch.equal(roundtrip(codec_named(name), x, Traits()).nan_to_num(7.0), x.nan_to_num(7.0))


@by_name
def test_zeros_of_either_sign_are_zero(name):
    x = torch.tensor([0.0, -0.0] * 128)
    for traits in (Traits(), POSITIVE):
        assert roundtrip(codec_named(name), x, traits).eq(0).all()


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_positive_value_far_below_its_row_s_largest_stays_positive(name, dtype):
    x = torch.tensor([0.0, torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal, 0.0], dtype=dtype)
    assert torch.equal(roundtrip(codec_named(name), x, POSITIVE) > 0, x > 0)
    assert roundtrip(codec_named(name), x, Traits())[2] == 0


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 256), (16, 1024), (16, 4, 16, 16), (2, 8192)], ids=str)
def test_it_takes_8_25_bits_at_most(name, dtype, shape):
    x = torch.randn(shape).to(dtype)
    assert x.numel() == 2**14
    for traits in (Traits(), POSITIVE, Traits(spatial=True)):
        assert 8 < stored_bits(codec_named(name), x, traits) <= 8.25


def test_a_smaller_group_has_its_own_scale():
    x = torch.cat([torch.full((128,), 1e-6), torch.full((128,), 1e6)])
    off = {name: roundtrip(codec_named(name), x, Traits())[0] for name in ("fp8", "fp8:group=128")}
    assert off["fp8"] == 0
    assert math.isclose(off["fp8:group=128"], 1e-6, rel_tol=1e-6)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False), nn.ReLU(), nn.Linear(64, 8))


def weight_gradients(policy, scale):
    torch._dynamo.reset()
    model = mlp()
    call = torch.compile(model, backend="actcomp", options={"compiler": "aot_eager", "min_bytes": 0, "policy": policy})
    torch.manual_seed(1)
    call(torch.randn(128, 64) * scale).mul(torch.randn(128, 8)).sum().backward()
    return [model[i].weight.grad.double() for i in (2, 4)]


@by_name
def test_backward_unscales_inputs_of_any_size_alike(name):
    errors = []
    for scale in (1e-6, 1.0, 1e6):
        pairs = zip(weight_gradients("none", scale), weight_gradients(name, scale), strict=True)
        errors.append([((got - exact).norm() / exact.norm()).item() for exact, got in pairs])
    for small, middle, large in zip(*errors, strict=True):
        assert np.allclose([small, large], middle, rtol=0.2)
        assert 1e-3 < middle < 0.1


def test_three_bits_of_mantissa_halve_the_error_of_two():
    exact = weight_gradients("none", 1.0)
    e4m3, e5m2 = (
        [((a - b).norm() / b.norm()).item() for a, b in zip(weight_gradients(name, 1.0), exact, strict=True)] for name in NAMES
    )
    for three, two in zip(e4m3, e5m2, strict=True):
        assert 1.6 < two / three < 2.4
