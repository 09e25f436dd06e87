import dataclasses
import functools

import numpy as np
import pytest
import torch
from codec_cases import (
    LAYOUTS,
    assert_guards_admit_odd_and_even,
    assert_same_layout,
    by_traits,
    channels_last,
    contiguous,
    group_extreme,
    ids,
    in_place,
    memory,
    normal,
    property_test,
    smallest_subnormal,
    sparse,
    steps_between_ends,
    symbolic_trace,
    takes,
    tensors,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from fx_actcomp.codecs import Layout, Noise, Traits, codec_named

ASYMMETRIC = ["int8", "int4", "int2", "int1"]
SIGN_EXACT = ["int8", "int4", "int2"]
by_asymmetric = pytest.mark.parametrize("name", ASYMMETRIC)
by_sign_exact = pytest.mark.parametrize("name", SIGN_EXACT)
POSITIVE = Traits(sign_exact=True)


@functools.cache
def codec_of(name):
    return codec_named(f"{name}:rounding=stochastic")


def roundtrip(name, x, traits, step=0, salt=11):
    codec, noisy = codec_of(name), dataclasses.replace(traits, noise=Noise(torch.tensor(step), salt))
    return codec.decompress(codec.compress(x, noisy), Layout.of(x), traits)


def step_of(name, x, traits):
    """The distance of neighbouring codes, as the docstring of ``Quantize`` has it, in the order of memory; in float64."""
    codec = codec_of(name)
    high = group_extreme(codec, x, traits, "amax").numpy()
    steps = steps_between_ends(codec, traits, on_ends=True)
    return high / steps - (0 if traits.sign_exact else group_extreme(codec, x, traits, "amin").numpy() / steps)


def bound(name, x, traits):
    codec = codec_of(name)
    computed, restored = torch.finfo(torch.promote_types(x.dtype, torch.float32)), torch.finfo(x.dtype)
    step = step_of(name, x, traits)
    largest = np.maximum(*(np.abs(group_extreme(codec, x, traits, end).numpy()) for end in ("amin", "amax")))
    return np.maximum(step, computed.tiny) + (8 * computed.eps + restored.eps) * largest + smallest_subnormal(x.dtype)


def assert_within_bound(name, x, y, traits):
    layout = Layout.of(x)
    assert (np.abs(memory(y, layout) - memory(x, layout)) <= bound(name, x, traits)).all()


@by_asymmetric
@by_traits
@property_test(40)
@given(x=tensors(), step=st.integers(0, 2**31 - 1))
def test_values_come_back_within_a_step(name, traits, x, step):
    assume(takes(codec_of(name), x, traits))
    y = roundtrip(name, x, traits, step)
    assert_within_bound(name, x, y, traits)
    assert_same_layout(x, y)


@by_sign_exact
@by_traits
@property_test(40)
@given(x=tensors(), step=st.integers(0, 2**31 - 1))
def test_signs_are_exact_and_values_within_a_step_where_nothing_is_negative(name, traits, x, step):
    traits = Traits(sign_exact=True, spatial=traits.spatial)
    assume(takes(codec_of(name), x, traits))
    for values in (in_place(x, torch.abs), in_place(x, torch.relu)):
        y = roundtrip(name, values, traits, step)
        assert torch.equal(y > 0, values > 0)
        assert y.min() >= 0
        assert_within_bound(name, values, y, traits)


@by_asymmetric
@pytest.mark.parametrize("layout", LAYOUTS, **ids)
def test_every_layout_comes_back(name, layout):
    x = layout(normal((3, 8, 16, 17), torch.float32))
    y = roundtrip(name, x, Traits())
    assert_same_layout(x, y)
    assert_within_bound(name, x, y, Traits())


def test_one_bit_refuses_exact_signs_with_its_reason():
    layout = Layout.of(torch.randn(64, 64))
    assert "one code for positive values" in codec_of("int1").fits(layout, POSITIVE)
    assert codec_of("int1").fits(layout, Traits()) is None
    assert codec_named("int1").fits(layout, POSITIVE) is None


def test_without_noise_it_says_what_is_missing():
    with pytest.raises(ValueError, match=r"'int4:rounding=stochastic' rounds at random and was given no Traits.noise"):
        codec_of("int4").compress(torch.randn(4, 64), Traits())


def test_only_stochastic_rounding_is_stochastic():
    assert codec_of("int4").stochastic
    assert not codec_named("int4").stochastic
    assert not codec_named("fp8").stochastic


CASES = [(name, Traits()) for name in ASYMMETRIC] + [(name, POSITIVE) for name in SIGN_EXACT]
STEPS = 400


@functools.cache
def scores(name, traits):
    """Standard errors between each value and the mean of its round trips, the expected variance of which is known."""
    torch.manual_seed(0)
    x = torch.randn(16, 256, dtype=torch.float64)
    x = x.abs() + 0.2 if traits.sign_exact else x
    total = torch.zeros_like(x)
    for step in range(STEPS):
        total += roundtrip(name, x, traits, step)
    distance = torch.from_numpy(step_of(name, x, traits))
    origin = 0 if traits.sign_exact else x.amin(1, keepdim=True)
    fraction = ((x - origin) / distance) % 1
    random = (fraction > 0.02) & (fraction < 0.98)
    error = (distance * (fraction * (1 - fraction) / STEPS).sqrt()).clamp_min(1e-300)
    return ((total / STEPS - x) / error)[random]


by_case = pytest.mark.parametrize(
    ("name", "traits"), CASES, ids=[f"{name}-{'sign_exact' if traits.sign_exact else 'plain'}" for name, traits in CASES]
)


@by_case
def test_the_mean_over_steps_is_the_value_within_its_standard_error(name, traits):
    z = scores(name, traits)
    assert len(z) > 3000
    assert z.abs().max() < 6
    assert abs(z.mean()) < 5 / len(z) ** 0.5


@by_case
def test_the_spread_over_steps_is_that_of_independent_draws(name, traits):
    z = scores(name, traits)
    assert abs(z.square().mean() - 1) < 5 * (2 / len(z)) ** 0.5 + 0.01


@by_case
def test_values_that_are_codes_come_back_as_they_were(name, traits):
    codes = torch.arange(steps_between_ends(codec_of(name), traits, on_ends=True) + 1, dtype=torch.float32)
    x = codes.repeat(512 // len(codes) + 1)[:512].view(2, 256) + (0 if traits.sign_exact else -3)
    for step in range(5):
        assert torch.allclose(roundtrip(name, x, traits, step), x, atol=1e-5)


def test_the_smallest_positive_code_is_too_small_to_matter():
    x = torch.full((1, 256), 1e-6)
    x[0, 0] = 1.0
    y = torch.stack([roundtrip("int4", x, POSITIVE, step) for step in range(50)])
    assert (y > 0).all()
    assert y[y < 0.01].max() <= torch.finfo(torch.float32).smallest_normal


@by_asymmetric
def test_constants_come_back_as_they_were(name):
    for number in (0.0, 0.3, -7.0, 1e4):
        x = torch.full((3, 300), number)
        assert torch.equal(roundtrip(name, x, Traits()), x)


@by_case
def test_what_is_not_finite_harms_no_other_group(name, traits):
    x = sparse((4, 256), torch.float32) if traits.sign_exact else normal((4, 256), torch.float32)
    clean = roundtrip(name, x, traits)
    for poison in (torch.inf, torch.nan):
        harmed = x.clone()
        harmed[2, 5] = poison
        y = roundtrip(name, harmed, traits)
        assert not y[2, 5].isfinite()
        assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])
        assert not traits.sign_exact or y[harmed == 0].eq(0).all()


def test_steps_and_salts_give_other_codes_and_the_same_ones_the_same():
    x = normal((16, 256), torch.float32)
    first = roundtrip("int4", x, Traits(), 1, 2)
    assert torch.equal(first, roundtrip("int4", x, Traits(), 1, 2))
    assert not torch.equal(first, roundtrip("int4", x, Traits(), 2, 2))
    assert not torch.equal(first, roundtrip("int4", x, Traits(), 1, 3))


def test_codes_take_the_bits_of_nearest_ones():
    x, noise = normal((64, 256), torch.float32), Noise(torch.tensor(0), 0)
    for traits in (Traits(), POSITIVE):
        stochastic = codec_of("int4").compress(x.abs(), dataclasses.replace(traits, noise=noise))
        nearest = codec_named("int4").compress(x.abs(), traits)
        assert [(p.shape, p.dtype) for p in stochastic] == [(p.shape, p.dtype) for p in nearest]


@pytest.mark.parametrize("layout", [contiguous, channels_last], **ids)
@pytest.mark.parametrize("traits", [Traits(), POSITIVE], ids=["plain", "sign_exact"])
def test_the_round_trip_traces_with_symbolic_sizes(layout, traits):
    def function(x, step):
        codec = codec_of("int4")
        parts = codec.compress(x, dataclasses.replace(traits, noise=Noise(step, 5)))
        return codec.decompress(parts, Layout.of(x), traits)

    traced = symbolic_trace(function)(layout(sparse((6, 8, 4, 10), torch.float32)), torch.tensor(0))
    assert_guards_admit_odd_and_even(traced)
    for shape in [(5, 8, 4, 10), (7, 3, 5, 11)]:
        x = layout(sparse(shape, torch.float32))
        y, z = traced(x, torch.tensor(1)), traced(x, torch.tensor(2))
        assert_same_layout(x, y)
        assert (y - x).abs().max() <= x.max() / 14 * (1 + 1e-5)
        assert not torch.equal(y, z)
