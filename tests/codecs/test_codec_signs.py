import math

import pytest
import torch
from codec_cases import (
    POSITIVE,
    assert_harms_no_other,
    assert_same_layout,
    assert_within_bound,
    by_dtype,
    by_sign_exact_codec,
    by_traits,
    in_place,
    property_test,
    roundtrip,
    smallest_subnormal,
    sparse,
    subnormal,
    tensors,
)
from hypothesis import given
from hypothesis import strategies as st

from fx_actcomp.codecs import Traits


@by_sign_exact_codec
@by_dtype
def test_the_largest_numbers_do_not_overflow_where_the_sign_is_exact(codec, dtype):
    x = (torch.linspace(0, 1, 256, dtype=torch.float64) * torch.finfo(dtype).max).to(dtype)
    y = roundtrip(codec, x, POSITIVE)
    assert y.isfinite().all()
    assert_within_bound(codec, x, y, POSITIVE)


@by_sign_exact_codec
@by_traits
@pytest.mark.parametrize("poison", [math.inf, math.nan])
@property_test(25)
@given(x=tensors(), place=st.integers(0, 10**6))
def test_a_group_that_is_not_finite_harms_no_other_where_the_sign_is_exact(codec, traits, poison, x, place):
    traits = Traits(sign_exact=True, spatial=traits.spatial)
    assert_harms_no_other(codec, traits, poison, in_place(x, torch.abs), place)


@by_sign_exact_codec
@by_traits
@property_test(40)
@given(x=tensors())
def test_signs_are_exact_where_nothing_is_negative(codec, traits, x):
    traits = Traits(sign_exact=True, spatial=traits.spatial)
    for values in (in_place(x, torch.abs), in_place(x, torch.relu)):
        y = roundtrip(codec, values, traits)
        assert torch.equal(y > 0, values > 0)
        assert (y >= 0).all()
        assert_same_layout(values, y)
        assert_within_bound(codec, values, y, traits)


@by_sign_exact_codec
@by_dtype
def test_signs_are_exact_from_the_smallest_number_to_the_largest(codec, dtype):
    x = torch.zeros(512, dtype=dtype)
    x[::2] = torch.finfo(dtype).max
    x[1::4] = smallest_subnormal(dtype)
    assert torch.equal(roundtrip(codec, x, POSITIVE) > 0, x > 0)


@by_sign_exact_codec
@by_dtype
def test_signs_are_exact_among_subnormals(codec, dtype):
    x = subnormal((4, 300), dtype).relu()
    y = roundtrip(codec, x, POSITIVE)
    assert torch.equal(y > 0, x > 0)
    assert y.max() <= 2 * torch.finfo(dtype).smallest_normal


@by_sign_exact_codec
@by_dtype
def test_signs_are_exact_beside_an_infinity(codec, dtype):
    x = sparse((4, 512), dtype)
    x[1, 5] = math.inf
    y = roundtrip(codec, x, POSITIVE)
    assert torch.equal(y > 0, x > 0)
    assert y[1, 5].isinf()


@by_sign_exact_codec
@by_dtype
def test_zeros_beside_a_nan_stay_zeros(codec, dtype):
    x = sparse((4, 512), dtype)
    x[1, 5] = math.nan
    y = roundtrip(codec, x, POSITIVE)
    assert y[x == 0].eq(0).all()
    assert y[1, 5].isnan()


@by_sign_exact_codec
def test_negative_zero_is_not_positive(codec):
    x = torch.tensor([-0.0, 0.0, 1.0, 2.0])
    assert torch.equal(roundtrip(codec, x, POSITIVE) > 0, x > 0)
