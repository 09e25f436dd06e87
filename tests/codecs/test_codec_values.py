import itertools
import math

import pytest
import torch
from codec_cases import (
    DTYPES,
    LAYOUTS,
    POSITIVE,
    VALUES,
    assert_guards_admit_odd_and_even,
    assert_harms_no_other,
    assert_same_layout,
    assert_within_bound,
    by_codec,
    by_dtype,
    by_traits,
    channels_last,
    contiguous,
    every_other,
    ids,
    normal,
    property_test,
    roundtrip,
    smallest_subnormal,
    sparse,
    stored_bits,
    symbolic_trace,
    takes,
    tensors,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from fx_actcomp.codecs import Layout, Traits


@by_codec
@by_traits
@property_test(40)
@given(x=tensors())
def test_values_come_back_within_the_bound(codec, traits, x):
    assume(takes(codec, x, traits))
    assert_within_bound(codec, x, roundtrip(codec, x, traits), traits)


@by_codec
@by_traits
@property_test(30)
@given(x=tensors())
def test_shape_strides_and_type_come_back(codec, traits, x):
    assume(takes(codec, x, traits))
    assert_same_layout(x, roundtrip(codec, x, traits))


@by_codec
@pytest.mark.parametrize("layout", LAYOUTS, **ids)
def test_every_layout_takes_every_type_and_kind_of_value(codec, layout):
    for dtype, values in itertools.product(DTYPES, VALUES):
        x = layout(values((3, 8, 16, 17), dtype))
        if takes(codec, x, Traits()):
            y = roundtrip(codec, x, Traits())
            assert_same_layout(x, y)
            assert_within_bound(codec, x, y, Traits())


@by_codec
@by_dtype
@pytest.mark.parametrize("ends", [(-1, 1), (0, 1), (-1, 0), (1, 1), (-1, -1)])
def test_the_largest_numbers_do_not_overflow(codec, dtype, ends):
    x = torch.linspace(*ends, 256, dtype=torch.float64) * torch.finfo(dtype).max
    x = x.to(dtype)
    y = roundtrip(codec, x, Traits())
    assert y.isfinite().all()
    assert_within_bound(codec, x, y, Traits())


@by_codec
@by_dtype
def test_the_smallest_number_does_not_come_back_large(codec, dtype):
    x = torch.zeros(300, dtype=dtype)
    x[7] = smallest_subnormal(dtype)
    assert roundtrip(codec, x, Traits()).abs().max() <= torch.finfo(dtype).smallest_normal


@by_codec
@by_traits
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@property_test(25)
@given(x=tensors(), place=st.integers(0, 10**6))
def test_a_group_that_is_not_finite_harms_no_other(codec, traits, poison, x, place):
    assume(takes(codec, x, traits))
    assert_harms_no_other(codec, traits, poison, x, place)


@by_codec
@by_dtype
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_what_was_not_finite_comes_back_not_finite(codec, dtype, poison):
    x = normal((4, 512), dtype)
    x[1, 3] = x[3, 500] = poison
    y = roundtrip(codec, x, Traits())
    assert not y[~x.isfinite()].isfinite().any()


@by_codec
@by_dtype
def test_a_single_element_or_none_is_refused_with_a_reason(codec, dtype):
    for shape in [(), (0,), (3, 0), (0, 2, 4, 4)]:
        for traits in (Traits(), POSITIVE, Traits(spatial=True)):
            reason = codec.fits(Layout.of(torch.zeros(shape, dtype=dtype)), traits)
            assert isinstance(reason, str)
            assert reason


@by_codec
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64], **ids)
def test_other_types_are_refused_with_their_name(codec, dtype):
    reason = codec.fits(Layout.of(torch.zeros(4, 4, dtype=dtype)), Traits())
    assert str(dtype).removeprefix("torch.") in reason
    assert codec.name in reason


@by_codec
def test_an_expanded_dimension_is_stored_once(codec):
    x = normal((1, 4, 512), torch.float32)
    assert stored_bits(codec, x.expand(8, 4, 512), Traits()) == stored_bits(codec, x, Traits()) / 8


@by_codec
@pytest.mark.parametrize("traits", [Traits(), POSITIVE, Traits(spatial=True)], ids=["plain", "sign_exact", "spatial"])
@pytest.mark.parametrize("layout", [contiguous, channels_last, every_other], **ids)
def test_the_round_trip_traces_with_symbolic_sizes_and_no_guard_on_parity(codec, traits, layout):
    if codec.bits < 4:
        return  # refused where every size is symbolic, as the next test shows
    traced = symbolic_trace(lambda x: roundtrip(codec, x, traits))(layout(sparse((6, 8, 4, 10), torch.float32)))
    assert_guards_admit_odd_and_even(traced)
    for shape in [(5, 8, 4, 10), (7, 3, 5, 11), (2, 9, 3, 3)]:
        x = layout(sparse(shape, torch.float32))
        y = traced(x)
        assert_same_layout(x, y)
        if traits.sign_exact:
            assert torch.equal(y > 0, x > 0)
        assert (y - x).abs().max() <= x.max() / (2**codec.bits - 1)
