"""8-bit codes of probabilities, and of tensors in which something isn't finite."""

import dataclasses
import math

import pytest
import torch
from codec_cases import (
    DTYPES,
    QUANTIZE,
    assert_same_layout,
    by_traits,
    in_place,
    memory,
    property_test,
    takes,
    tensors,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from fx_actcomp.codecs import Layout, Noise, Traits, codec_named
from fx_actcomp.codecs.layout import group_view

INT8 = codec_named("int8")
SHARES = Traits(sign_exact=True, shares=True)
EQUAL_STEPS = Traits(sign_exact=True)
EIGHT_BITS = sorted({*(name for name in QUANTIZE if codec_named(name).bits == 8), "int8:rounding=stochastic", "int8:group=64"})


def roundtrip(x, traits, codec=INT8):
    noisy = dataclasses.replace(traits, noise=Noise(torch.tensor(3), 5))
    return codec.decompress(codec.compress(x, noisy), Layout.of(x), traits)


def largest_of_groups(x):
    """Of each element, the largest of its group, in float64."""
    layout = Layout.of(x)
    grouped, dims = group_view(layout.to_memory(x).double(), layout.groups(False, INT8.group))
    return layout.from_memory(grouped.amax(dims, keepdim=True).expand_as(grouped).reshape(layout.to_memory(x).shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@property_test(60)
@given(seed=st.integers(0, 2**31 - 1), rows=st.integers(1, 9), columns=st.integers(1, 700), sharpness=st.floats(0, 40))
def test_shares_come_back_within_the_bound_and_none_becomes_zero(dtype, seed, rows, columns, sharpness):
    torch.manual_seed(seed)
    x = (sharpness * torch.randn(rows, columns, dtype=torch.float64)).softmax(1).to(dtype)
    y = roundtrip(x, SHARES)
    exact, largest = x.double(), largest_of_groups(x)
    step = torch.where(largest <= 0.5, largest.sqrt(), 2**0.5 - (1 - largest).sqrt()) / 252
    stated = step * torch.minimum(exact, 1 - exact).sqrt() + step**2 / 4
    computed, restored = torch.finfo(torch.promote_types(dtype, torch.float32)), torch.finfo(dtype)
    assert ((y.double() - exact).abs() <= stated * (1 + 1e-5) + 8 * computed.eps + restored.eps * exact + restored.tiny).all()
    assert torch.equal(y > 0, x > 0)
    assert y.max() <= 1
    assert_same_layout(x, y)


def test_a_long_tail_keeps_its_weight():
    """With equal steps the smaller ones would all be zero."""
    tail = torch.rand(16, 255)
    x = torch.cat([torch.full((16, 1), 0.9), 0.1 * tail / tail.sum(1, keepdim=True)], 1)
    lost = [(1 - roundtrip(x, traits).sum(1)).abs().max().item() for traits in (SHARES, EQUAL_STEPS)]
    assert lost[0] < 0.01
    assert lost[1] > 0.09


def test_none_and_all_come_back_as_they_were():
    x = torch.eye(300)
    assert torch.equal(roundtrip(x, SHARES), x)


def test_random_rounding_stays_without_bias():
    """Random codes of a root would have one."""
    codec = codec_named("int8:rounding=stochastic")
    x = (3 * torch.randn(4, 256)).softmax(1)
    noisy = dataclasses.replace(SHARES, noise=Noise(torch.tensor(0), 0))
    plain = dataclasses.replace(EQUAL_STEPS, noise=Noise(torch.tensor(0), 0))
    assert all(torch.equal(a, b) for a, b in zip(codec.compress(x, noisy), codec.compress(x, plain), strict=True))


@pytest.mark.parametrize("name", EIGHT_BITS)
@by_traits
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@property_test(30)
@given(x=tensors(), places=st.lists(st.integers(0, 10**6), min_size=1, max_size=9))
def test_what_is_not_finite_comes_back_as_itself_and_harms_nothing(name, traits, poison, x, places):
    codec = codec_named(name)
    assume(takes(codec, x, traits))
    for known, values in [(traits, x), (dataclasses.replace(traits, sign_exact=True), in_place(x, torch.abs))]:
        if known.sign_exact and poison < 0:
            continue
        layout = Layout.of(values)
        held = layout.to_memory(values).clone()
        harmed = torch.zeros(held.numel(), dtype=torch.bool)
        harmed[[place % held.numel() for place in places]] = True
        given_ = layout.from_memory(torch.where(harmed.view(held.shape), poison, held))
        y = torch.from_numpy(memory(roundtrip(given_, known, codec), layout)).flatten()
        expected = within(values, harmed, known, codec)
        assert y[~harmed].isfinite().all()
        assert ((y - held.flatten().double())[~harmed].abs() <= expected[~harmed]).all()
        assert (y[harmed].isnan() if math.isnan(poison) else y[harmed] == poison).all()
        assert not known.sign_exact or torch.equal(y > 0, layout.to_memory(given_).flatten() > 0)


def within(x, harmed, traits, codec):
    """How far each value may be off, by the range of its group's other values."""
    layout = Layout.of(x)
    held = layout.to_memory(x).double()
    lost = harmed.view(held.shape)
    groups = layout.groups(traits.spatial, codec.group)
    (low, dims), (high, _) = (group_view(torch.where(lost, worst, held), groups) for worst in (math.inf, -math.inf))
    low, high = low.amin(dims, keepdim=True), high.amax(dims, keepdim=True)
    steps = (high - (0 if traits.sign_exact else low)) / 252 * (1 if codec.stochastic else 0.5)
    computed, restored = torch.finfo(torch.promote_types(x.dtype, torch.float32)), torch.finfo(x.dtype)
    rounding = (8 * computed.eps + restored.eps) * torch.maximum(low.abs(), high.abs()) + restored.smallest_normal
    shape = group_view(held, groups)[0].shape
    return (steps + rounding + computed.tiny).expand(shape).reshape(held.shape).flatten()


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_a_group_of_nothing_finite_comes_back(poison):
    x = torch.full((2, 256), poison)
    x[1] = torch.randn(256)
    assert torch.equal(roundtrip(x, Traits())[0].nan_to_num(7), x[0].nan_to_num(7))
    assert roundtrip(x, Traits())[1].isfinite().all()


def test_a_mask_does_not_widen_the_range():
    x = 1000 + torch.rand(4, 256)
    x[:, ::2] = -math.inf
    y = roundtrip(x, Traits())
    assert torch.equal(y[:, ::2], x[:, ::2])
    assert (y - x)[:, 1::2].abs().max() <= 1 / 500
