import itertools
import math

import numpy as np
import pytest
import torch
from codec_cases import (
    DTYPES,
    LAYOUTS,
    TRAITS,
    VALUES,
    assert_guards_admit_odd_and_even,
    assert_same_layout,
    assert_within_bound,
    by_codec,
    by_sign_exact_codec,
    by_traits,
    channels_last,
    contiguous,
    every_other,
    group_extreme,
    group_numbers,
    memory,
    normal,
    property_test,
    quantize_bound,
    roundtrip,
    smallest_subnormal,
    sparse,
    subnormal,
    symbolic_trace,
    takes,
    tensors,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from fx_actcomp._torch import make_fx
from fx_actcomp.codecs import CODECS, Layout, Traits
from fx_actcomp.codecs.quantize import Quantize

ids = {"ids": lambda held: getattr(held, "__name__", str(held).removeprefix("torch."))}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, **ids)
POSITIVE = Traits(sign_exact=True)


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


@by_sign_exact_codec
@by_dtype
def test_the_largest_numbers_do_not_overflow_where_the_sign_is_exact(codec, dtype):
    x = (torch.linspace(0, 1, 256, dtype=torch.float64) * torch.finfo(dtype).max).to(dtype)
    y = roundtrip(codec, x, POSITIVE)
    assert y.isfinite().all()
    assert_within_bound(codec, x, y, POSITIVE)


@by_codec
@by_dtype
@pytest.mark.parametrize("number", [0.0, 0.3, -7.0, 1e4])
def test_constants_come_back_as_they_were(codec, dtype, number):
    x = torch.full((3, 300), number, dtype=dtype)
    assert torch.equal(roundtrip(codec, x, Traits()), x)


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


@by_sign_exact_codec
@by_traits
@pytest.mark.parametrize("poison", [math.inf, math.nan])
@property_test(25)
@given(x=tensors(), place=st.integers(0, 10**6))
def test_a_group_that_is_not_finite_harms_no_other_where_the_sign_is_exact(codec, traits, poison, x, place):
    traits = Traits(sign_exact=True, spatial=traits.spatial)
    assert_harms_no_other(codec, traits, poison, in_place(x, torch.abs), place)


def in_place(x, function):
    """What ``function`` makes of the values, in the layout of ``x``."""
    layout = Layout.of(x)
    return layout.from_memory(function(layout.to_memory(x)))


def assert_harms_no_other(codec, traits, poison, x, place):
    layout = Layout.of(x)
    held = layout.to_memory(x).clone()
    clean = memory(roundtrip(codec, layout.from_memory(held), traits), layout)
    groups = group_numbers(codec, x, traits).flatten()
    place %= held.numel()
    held.view(-1)[place] = poison
    harmed = memory(roundtrip(codec, layout.from_memory(held), traits), layout)
    others = (groups != groups[place]).numpy()
    assert np.array_equal(harmed.ravel()[others], clean.ravel()[others])
    assert not np.isfinite(harmed.ravel()[place])


@by_codec
@by_dtype
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_what_was_not_finite_comes_back_not_finite(codec, dtype, poison):
    x = normal((4, 512), dtype)
    x[1, 3] = x[3, 500] = poison
    y = roundtrip(codec, x, Traits())
    assert not y[~x.isfinite()].isfinite().any()


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


USUAL = [
    (64, 64, 32, 32), (64, 512, 4, 4), (32, 512, 7, 7), (32, 2048, 7, 7), (64, 256, 14, 14), (8, 3, 224, 224),
    (8, 1024, 768), (4, 197, 384), (8, 12, 128, 64), (512, 50257), (16384,), (128, 4096), (2, 1500, 1280),
]  # fmt: skip


def stored_bits(codec, x, traits):
    """Bits an element that the parts keep alive."""
    kept = sum(part.untyped_storage().nbytes() for part in codec.compress(x, traits))
    return 8 * kept / x.numel()


@pytest.mark.parametrize("shape", USUAL, ids=str)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_metadata_takes_a_quarter_of_a_bit_at_most(name, shape):
    for dtype, layout, traits in itertools.product(DTYPES[:3], [contiguous, channels_last], TRAITS):
        x = layout(torch.empty(shape, dtype=dtype, device="meta"))
        assert stored_bits(CODECS[name], x, traits) <= CODECS[name].bits + 0.25


@pytest.mark.parametrize("shape", USUAL, ids=str)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_sign_exact_code_takes_half_the_metadata(name, shape):
    x = torch.empty(shape, device="meta")
    assert stored_bits(CODECS[name], x, POSITIVE) <= CODECS[name].bits + 0.125


@by_codec
def test_an_expanded_dimension_is_stored_once(codec):
    x = normal((1, 4, 512), torch.float32)
    assert stored_bits(codec, x.expand(8, 4, 512), Traits()) == stored_bits(codec, x, Traits()) / 8


@pytest.mark.parametrize("bits", [1, 2])
@property_test(30)
@given(x=tensors())
def test_narrower_codes_keep_their_bound(bits, x):
    codec = Quantize(f"int{bits}", bits)
    assert_within_bound(codec, x, roundtrip(codec, x, Traits()), Traits())


@pytest.mark.parametrize("bits", [1, 2])
@property_test(30)
@given(x=tensors())
def test_narrower_codes_keep_signs(bits, x):
    codec, values = Quantize(f"int{bits}", bits), in_place(x, torch.relu)
    y = roundtrip(codec, values, POSITIVE)
    assert torch.equal(y > 0, values > 0)
    assert_within_bound(codec, values, y, POSITIVE)


def test_an_outlier_costs_its_own_group_only():
    x = normal((4, 256), torch.float32)
    x[2, 17] = 1e4
    off = (roundtrip(CODECS["int8"], x, Traits()) - x).abs().amax(1)
    assert off[[0, 1, 3]].max() < 0.02


def test_the_error_of_an_outlier_stays_inside_its_channel_in_either_memory_format():
    x = normal((2, 4, 16, 16), torch.float32)
    x[1, 2, 3, 3] = 1e4
    for image in (x, x.contiguous(memory_format=torch.channels_last)):
        off = (roundtrip(CODECS["int8"], image, Traits(spatial=True)) - image).abs().amax((2, 3))
        assert (off > 0.1).nonzero().tolist() == [[1, 2]]


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


@pytest.mark.parametrize("name", ["int2", "int1"])
def test_codes_below_four_bits_need_a_known_size_to_cut(name):
    asked = []

    def look(x):
        asked.append(CODECS[name].fits(Layout.of(x), Traits()))
        return x + 1

    symbolic_trace(look)(torch.randn(6, 8))
    assert "needs a dimension of known size" in asked[0]
    assert CODECS[name].fits(Layout.of(torch.randn(6, 8)), Traits()) is None


COMPILED = {
    (codec, layout.__name__, sign_exact): (CODECS[codec], layout, Traits(spatial=True, sign_exact=sign_exact))
    for codec, layout, sign_exact in [
        ("int8", contiguous, False), ("int8", channels_last, True), ("int4", contiguous, True), ("int4", channels_last, False)
    ]
}  # fmt: skip


@pytest.fixture(scope="module")
def through_inductor(tmp_path_factory):
    """Inputs with a NaN and an infinity each, and what comes back; compression and decompression are a program each."""
    torch.manual_seed(0)
    inputs = [layout(sparse((3, 8, 16, 17), torch.float32)) for _, layout, _ in COMPILED.values()]
    for x in inputs:
        x[1, 2, 3, 4], x[2, 1, 3, 4] = math.nan, math.inf

    def compress(inputs):
        return [codec.compress(x, traits) for x, (codec, _, traits) in zip(inputs, COMPILED.values(), strict=True)]

    def decompress(parts):
        cases = zip(parts, inputs, COMPILED.values(), strict=True)
        return [codec.decompress(part, Layout.of(x), traits) for part, x, (codec, _, traits) in cases]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        parts = torch.compile(make_fx(compress)(inputs), fullgraph=True)(inputs)
        restored = torch.compile(make_fx(decompress)(parts), fullgraph=True)(parts)
    return {case: (x, y) for case, x, y in zip(COMPILED, inputs, restored, strict=True)}


by_compiled = pytest.mark.parametrize(
    "case", COMPILED, ids=lambda case: f"{case[0]}-{case[1]}-{['plain', 'sign_exact'][case[2]]}"
)


@by_compiled
def test_inductor_keeps_the_bound(through_inductor, case):
    (codec, _, traits), (x, y) = COMPILED[case], through_inductor[case]
    finite = group_extreme(codec, x, traits, "amax").isfinite().numpy()
    off = np.abs(memory(y, Layout.of(y))[finite] - memory(x, Layout.of(x))[finite])
    assert finite.mean() > 0.9
    assert (off <= quantize_bound(codec, x, traits)[finite]).all()


@by_compiled
def test_inductor_keeps_the_layout(through_inductor, case):
    assert_same_layout(*through_inductor[case])


@by_compiled
def test_inductor_keeps_what_is_not_finite(through_inductor, case):
    x, y = through_inductor[case]
    assert not y[~x.isfinite()].isfinite().any()


@pytest.mark.parametrize("case", [case for case in COMPILED if case[2]], ids=str)
def test_inductor_keeps_exact_signs(through_inductor, case):
    x, y = through_inductor[case]
    beside_nan = y.isnan()
    assert torch.equal((y > 0)[~beside_nan], (x > 0)[~beside_nan])
    assert y[x == 0].eq(0).all()
