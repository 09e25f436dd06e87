from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from codec_cases import (
    DTYPES,
    assert_same_layout,
    channels_last,
    contiguous,
    every_other,
    narrowed,
    property_test,
    steps_that_count,
    stored_bits,
    transposed,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fx_actcomp.codecs import Layout, Traits, codec_named
from fx_actcomp.codecs.base import Reference

EPS = 1e-5
NAMES = ["blpa8", "blpa4", "blpa8:sigmas=3.0", "blpa4:sigmas=4.25"]
SHAPES = [
    (8, 3),
    (7, 4),
    (2, 5),
    (13, 6),
    (1, 3, 5),
    (4, 2, 9),
    (3, 4, 5, 7),
    (1, 2, 4, 4),
    (5, 3, 8, 8),
    (2, 3, 2, 3, 4),
    (16, 6, 5, 5),
]
WEIGHTS = [1.0, -1.0, 0.37, -2.5, 1e-3, -40.0, 0.0]
SHIFTS = [0.0, 0.02, -0.3, 1.0, -1.4, 2.7, -2.7, 2.99, -2.99, 3.0, -3.0, 3.01, -3.01, 4.25, -4.25, 5.0, -5.0, 1e6, -1e6]
"""Bias over weight; the ends of both ranges are among them."""


def per_channel(v, x):
    return v.reshape(-1, *[1] * (x.dim() - 2))


def over(x):
    return [0, *range(2, x.dim())]


def statistics(x):
    """In float64."""
    var, mean = torch.var_mean(x.double(), over(x), correction=0)
    return mean, (var + EPS).rsqrt()


def rectified_norm(x, weight, bias):
    with torch.no_grad():
        return F.relu(F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS))


def traits_of(x, weight=None, bias=None, *, rectified=True):
    mean, rstd = (v.to(torch.promote_types(x.dtype, torch.float32)) for v in statistics(x))
    held = rectified_norm(x, weight, bias) if rectified else None
    return Traits(normed=True, rectified=rectified, reference=Reference(mean, rstd, weight, bias, held))


def roundtrip(codec, x, traits):
    """The norm's input, and the ReLU where the codes serve for it."""
    parts, layout = codec.compress(x, traits), Layout.of(x)
    in_backward = replace(traits, reference=replace(traits.reference, rectified=None))
    restored = codec.decompress(parts, layout, in_backward)
    return restored, codec.rectify(parts, layout, in_backward) if traits.rectified else None


def stated_bound(codec, z):
    """What the docstring of ``Blpa`` states of z."""
    return 1.5 * codec.sigmas / 2**codec.bits + (z.abs() - codec.sigmas).clamp_min(0)


def rounding(x, rstd):
    """Of z: what the types that it is computed in and restored to lose, many times over."""
    computed, restored = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps, torch.finfo(x.dtype).eps
    largest = x.double().abs().amax(over(x), keepdim=True) + 10 / per_channel(rstd, x)
    return (16 * computed + 2 * restored) * largest * per_channel(rstd, x)


@st.composite
def norms(draw):
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 1000)))
    spread, offset = draw(st.sampled_from([1.0, 0.02, 30.0])), draw(st.sampled_from([0.0, 0.5, -20.0]))
    x = (torch.randn(shape, dtype=torch.float64) * spread + offset).to(dtype)
    if draw(st.booleans()):
        x.view(-1)[0] = offset + 20 * spread
    x = draw(st.sampled_from([contiguous, channels_last, transposed, every_other, narrowed]))(x)

    def numbers(choices):
        return torch.tensor(draw(st.lists(st.sampled_from(choices), min_size=shape[1], max_size=shape[1])))

    kind = torch.float64 if dtype is torch.float64 else torch.float32
    weight = numbers(WEIGHTS).to(kind) if draw(st.booleans()) else None
    size = torch.ones(shape[1]) if weight is None else torch.where(weight == 0, 1.0, weight.abs())
    bias = (numbers(SHIFTS) * size).to(kind) if draw(st.booleans()) else None
    return x, weight, bias


by_name = pytest.mark.parametrize("name", NAMES)


@by_name
@given(norms())
@property_test(60)
def test_the_sign_of_the_relu_is_forwards_own(name, norm):
    x, weight, bias = norm
    _, relu = roundtrip(codec_named(name), x, traits_of(x, weight, bias))
    assert torch.equal(relu > 0, rectified_norm(x, weight, bias) > 0)
    assert (relu >= 0).all()


@by_name
@pytest.mark.parametrize("rectified", [True, False])
@given(norms())
@property_test(60)
def test_the_norms_input_comes_back_within_the_stated_bound(name, rectified, norm):
    x, weight, bias = norm
    codec = codec_named(name)
    restored, _ = roundtrip(codec, x, traits_of(x, weight, bias, rectified=rectified))
    mean, rstd = statistics(x)
    z = (x.double() - per_channel(mean, x)) * per_channel(rstd, x)
    got = (restored.double() - per_channel(mean, x)) * per_channel(rstd, x)
    size = torch.ones_like(mean) if weight is None else weight.double().abs()
    underflow = 2.0**-24 / size.clamp_min(1e-6) if x.dtype is torch.float16 else torch.zeros_like(mean)
    off = (got - z).abs() - stated_bound(codec, z) - rounding(x, rstd) - per_channel(underflow, x)
    if rectified:  # a channel whose output is zero everywhere has a test of its own
        vanishes = (size == 0) & (torch.ones_like(size, dtype=torch.bool) if bias is None else bias == 0)
        off = off.masked_fill(per_channel(vanishes, x), 0)
    assert (off <= 0).all()


@by_name
@given(norms())
@property_test(60)
def test_the_relu_comes_back_within_the_bound_times_the_weight(name, norm):
    x, weight, bias = norm
    codec = codec_named(name)
    _, relu = roundtrip(codec, x, traits_of(x, weight, bias))
    mean, rstd = statistics(x)
    z = (x.double() - per_channel(mean, x)) * per_channel(rstd, x)
    size = per_channel(torch.ones_like(mean) if weight is None else weight.double().abs(), x)
    shift = per_channel(torch.zeros_like(mean) if bias is None else bias.double(), x)
    sign = 1 if weight is None else torch.where(per_channel(weight, x) < 0, -1.0, 1.0)
    exact = (size * z * sign + shift).clamp_min(0)
    tolerance = size * (stated_bound(codec, z) + rounding(x, rstd)) + (exact + shift.abs()) * 2 * torch.finfo(x.dtype).eps
    assert ((relu.double() - exact).abs() <= tolerance + 2.0**-24).all()


@by_name
@given(norms())
@property_test(40)
def test_shape_strides_and_type_are_restored(name, norm):
    x, weight, bias = norm
    restored, relu = roundtrip(codec_named(name), x, traits_of(x, weight, bias))
    assert_same_layout(x, restored)
    assert (relu.shape, relu.dtype) == (x.shape, x.dtype)
    assert steps_that_count(relu) == steps_that_count(x)


@by_name
@pytest.mark.parametrize("shape", [(8, 3, 5, 5), (2, 7), (1, 4, 3), (6, 5, 2, 3, 3)])
@pytest.mark.parametrize("arrange", [contiguous, channels_last])
@pytest.mark.parametrize("rectified", [True, False])
def test_a_code_an_element_is_stored_and_nothing_else(name, shape, arrange, rectified):
    codec, x = codec_named(name), arrange(torch.randn(shape))
    assert stored_bits(codec, x, traits_of(x, rectified=rectified)) == codec.bits


@by_name
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
def test_a_channel_with_an_infinity_or_nan_comes_back_as_nan_and_no_other_does(name, dtype, poison):
    codec, x = codec_named(name), torch.randn(4, 3, 5, 5).to(dtype)
    weight, bias = torch.tensor([1.0, -0.5, 2.0]), torch.tensor([0.1, -4.0, 1.0])
    weight, bias = (v.double() if dtype is torch.float64 else v for v in (weight, bias))
    clean = roundtrip(codec, x, traits_of(x, weight, bias))
    x[2, 1, 3, 3] = poison
    for before, after in zip(clean, roundtrip(codec, x, traits_of(x, weight, bias)), strict=True):
        assert after[:, 1].isnan().all()
        assert torch.equal(after[:, ::2], before[:, ::2])


@pytest.mark.parametrize("arrange", [contiguous, channels_last])
@pytest.mark.parametrize("batch", [1, 2, 3, 17, 31])
@by_name
def test_any_batch_size_keeps_the_mask(name, batch, arrange):
    codec, x = codec_named(name), arrange(torch.randn(batch, 3, 5, 7))
    restored, relu = roundtrip(codec, x, traits_of(x))
    assert torch.equal(relu > 0, rectified_norm(x, None, None) > 0)
    evenly_spread_in_a_bin = 2 * codec.sigmas / 2**codec.bits / 12**0.5
    mean, rstd = (per_channel(v, x) for v in statistics(x))
    clipped = (((x - mean) * rstd).abs() - codec.sigmas).clamp_min(0).norm() / x.norm()
    assert ((restored - x).norm() / x.norm()).item() < 1.3 * evenly_spread_in_a_bin + 1.1 * clipped + 0.002


@by_name
def test_a_constant_channel_comes_back_within_a_bin_of_its_tiny_deviation(name):
    codec, x = codec_named(name), torch.full((4, 2, 3, 3), 7.0)
    restored, _ = roundtrip(codec, x, traits_of(x))
    assert ((restored - x).abs() <= (1.5 * codec.sigmas / 2**codec.bits) * EPS**0.5 + 1e-6).all()


@by_name
def test_an_input_near_the_largest_number_of_a_type_comes_back_finite(name):
    x = torch.empty(8, 2, 6, 6).uniform_(-65000, 65000).half()
    x[0, 0, 0, 0] = 65504
    restored, _ = roundtrip(codec_named(name), x, traits_of(x))
    assert restored.isfinite().all()


@by_name
def test_a_relu_near_the_largest_number_of_a_type_comes_back_finite(name):
    x, bias = torch.empty(8, 2, 6, 6).uniform_(-1, 1).half(), torch.full((2,), 3e4)
    weight = (65400 - bias) / (
        (x.double() - x.double().mean(over(x), keepdim=True)) * per_channel(statistics(x)[1], x)
    ).amax().float()
    assert rectified_norm(x, weight, bias).isfinite().all()
    _, relu = roundtrip(codec_named(name), x, traits_of(x, weight, bias))
    assert relu.isfinite().all()


@by_name
def test_a_channel_of_weight_and_bias_zero_has_its_input_within_the_bound(name):
    codec, x = codec_named(name), torch.randn(8, 2, 4, 4)
    restored, _ = roundtrip(codec, x, traits_of(x, torch.zeros(2), torch.zeros(2)))
    mean, rstd = (per_channel(v, x) for v in statistics(x))
    z, got = (x.double() - mean) * rstd, (restored.double() - mean) * rstd
    assert ((got - z).abs() <= stated_bound(codec, z) + 1e-5).all()


@by_name
def test_a_norm_that_nothing_rectifies_gives_its_input_alone(name):
    codec, x = codec_named(name), torch.randn(16, 3, 8, 8)
    weight, bias = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([-2.9, 0.5, 3.0])
    plain = codec.compress(x, traits_of(x, rectified=False))[0]
    assert torch.equal(
        codec.compress(x.neg(), traits_of(x.neg(), -weight, bias, rectified=False))[0][:, [0, 2]], plain[:, [0, 2]]
    )


def originals_mask(x, ratio, bits):
    """Chakrabarti and Moseley's, section 3, on the norm's output over its weight."""
    N = 2**bits
    mean, rstd = (per_channel(v, x) for v in statistics(x))
    a = (x.double() - mean) * rstd + ratio
    start = max(1, N // 2 - int(torch.tensor(ratio * N / 6).floor()))
    codes = (((a - 1e-6) * N / 6).floor() + start).clamp(0, N - 1)
    return codes >= start


def test_where_the_originals_mask_is_off_for_every_positive_value_ours_is_on():
    x, ratio = torch.randn(64, 2, 16, 16), -2.7
    bias = torch.full((2,), ratio)
    positive = rectified_norm(x, None, bias) > 0
    assert positive.any()
    assert not originals_mask(x, ratio, 4)[positive].any()
    _, relu = roundtrip(codec_named("blpa4"), x, traits_of(x, None, bias))
    assert torch.equal(relu > 0, positive)


@by_name
@pytest.mark.parametrize(
    ("x", "traits", "why"),
    [
        (torch.zeros(4, 3), Traits(), "batch norm in training"),
        (torch.zeros(4, 3, 1).expand(4, 3, 5), Traits(normed=True), "expanded"),
        (torch.zeros(0, 3), Traits(normed=True), "none"),
        (torch.zeros(4, 3, dtype=torch.int64), Traits(normed=True), "floating-point"),
    ],
    ids=["no norm", "expanded", "empty", "integers"],
)
def test_it_refuses_and_says_why(name, x, traits, why):
    assert why in codec_named(name).fits(Layout.of(x), traits)


def test_a_size_known_at_run_time_alone_is_refused():
    refusals = []

    def rows_that_count(x):
        rows = x[x[:, 0] > 0]
        refusals.append(codec_named("blpa4").fits(Layout.of(rows), Traits(normed=True)))
        return rows

    make_fx(rows_that_count, tracing_mode="symbolic")(torch.randn(6, 3))
    assert "known at run time" in refusals[0]


@by_name
def test_a_batch_norms_input_is_taken(name):
    assert codec_named(name).fits(Layout.of(torch.zeros(4, 3, 5, 5)), Traits(normed=True)) is None


@pytest.mark.parametrize("sigmas", ["0", "-1", "nan"])
def test_a_range_of_no_width_is_refused(sigmas):
    with pytest.raises(ValueError, match="sigmas is"):
        codec_named(f"blpa4:sigmas={sigmas}")


@by_name
def test_without_its_norms_statistics_it_says_what_it_lacks(name):
    with pytest.raises(ValueError, match=r"Traits\.reference"):
        codec_named(name).compress(torch.zeros(4, 3), Traits(normed=True))
