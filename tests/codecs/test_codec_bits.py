import math

import pytest
import torch
from codec_cases import (
    DTYPES,
    LAYOUTS,
    assert_guards_admit_odd_and_even,
    assert_same_layout,
    channels_last,
    contiguous,
    every_other,
    property_test,
    roundtrip,
    symbolic_trace,
)
from hypothesis import given
from hypothesis import strategies as st

from fx_actcomp.codecs import CODECS, Layout, Traits
from fx_actcomp.codecs.bits import memory_shape, narrowest, pack, packed_bytes, packing_dim, unpack

BITS, TERNARY, NARROW = CODECS["bits"], CODECS["ternary"], CODECS["narrow"]
names = {"ids": lambda held: getattr(held, "__name__", str(held).removeprefix("torch."))}
by_layout = pytest.mark.parametrize("layout", LAYOUTS, **names)
by_width = pytest.mark.parametrize("bits", [1, 2, 4, 8])
sizes = st.lists(st.one_of(st.integers(1, 20), st.sampled_from([31, 64, 97])), min_size=1, max_size=3).map(tuple)


def codes_of(shape, bits):
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8)


@by_width
@property_test(60)
@given(shape=sizes)
def test_unpack_undoes_pack(bits, shape):
    codes = codes_of(shape, bits)
    assert torch.equal(unpack(pack(codes, bits), bits, shape).to(codes.dtype), codes)


@by_width
@pytest.mark.parametrize("shape", [(1,), (1, 1), (7,), (3, 5), (97,), (1, 13, 1), (31, 37), (2, 8, 16, 16)], ids=str)
def test_unpack_undoes_pack_for_every_code(bits, shape):
    for code in range(2**bits):
        codes = torch.full(shape, code, dtype=torch.uint8)
        assert torch.equal(unpack(pack(codes, bits), bits, shape).to(codes.dtype), codes)


@by_width
@property_test(50)
@given(shape=sizes)
def test_packing_wastes_less_than_a_byte_in_one_dimension(bits, shape):
    parts, d = 8 // bits, packing_dim(shape, 8 // bits)
    packed = pack(codes_of(shape, bits), bits)
    assert packed.shape[d] == math.ceil(shape[d] / parts)
    assert packed.numel() * shape[d] == math.prod(shape) * packed.shape[d]


@pytest.mark.parametrize(("shape", "parts", "d"), [((8, 3), 2, 0), ((3, 8), 2, 1), ((4, 4), 4, 0), ((1, 6, 8), 8, 2)])
def test_the_outermost_dimension_that_divides_is_cut(shape, parts, d):
    assert packing_dim(shape, parts) == d


def test_where_none_divides_the_one_that_wastes_least_is_cut():
    assert packing_dim((3, 101), 2) == 1


def test_a_byte_holds_codes_from_distant_parts_of_a_dimension():
    codes = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [1 | 3 << 4, 2 | 4 << 4]


@by_width
@pytest.mark.parametrize("shape", [(24, 6), (20, 3, 10), (32,)], ids=str)
def test_packing_traces_with_symbolic_sizes_and_no_guard_on_parity(bits, shape):
    traced = symbolic_trace(lambda codes: unpack(pack(codes, bits), bits, codes.shape))(codes_of(shape, bits))
    assert_guards_admit_odd_and_even(traced)
    for other in (shape, [n + 1 for n in shape], [n + 3 for n in shape], [1] * len(shape), [2] * len(shape)):
        codes = codes_of(other, bits)
        assert torch.equal(traced(codes), codes)


@by_width
@by_layout
def test_packed_bytes_is_what_pack_takes(bits, layout):
    x = layout(torch.zeros(3, 5, 7))
    held = Layout.of(x)
    codes = codes_of(memory_shape(held), bits)
    assert packed_bytes(x, bits) == pack(codes, bits).numel()


def masks(shape):
    return torch.rand(shape) < 0.5


@by_layout
@property_test(25)
@given(shape=sizes)
def test_masks_come_back_exactly(layout, shape):
    x = layout(masks(shape))
    y = roundtrip(BITS, x, Traits())
    assert torch.equal(y, x)
    assert_same_layout(x, y)


def test_a_mask_takes_a_bit_an_element():
    (part,) = BITS.compress(masks((64, 8, 5)), Traits())
    assert part.untyped_storage().nbytes() * 8 == 64 * 8 * 5


@by_layout
@pytest.mark.parametrize("shape", [(1,), (7,), (4, 9), (2, 8, 16, 17)], ids=str)
def test_signs_come_back_exactly(layout, shape):
    for dtype in [*DTYPES, torch.int64, torch.int8]:
        x = layout(torch.randint(-1, 2, shape).to(dtype))
        y = roundtrip(TERNARY, x, Traits())
        assert torch.equal(y, x)
        assert_same_layout(x, y)


def test_a_sign_takes_two_bits_an_element():
    (part,) = TERNARY.compress(torch.zeros(64, 5), Traits())
    assert part.untyped_storage().nbytes() * 4 == 64 * 5


UPPERS = [0, 1, 255, 256, 32767, 32768, 2**31 - 1]


@by_layout
@pytest.mark.parametrize("upper", UPPERS)
def test_integers_up_to_their_bound_come_back_exactly(layout, upper):
    for shape in [(1,), (7,), (4, 9)]:
        x = torch.randint(0, upper + 1, shape)
        x.view(-1)[0] = upper
        x = layout(x)
        y = roundtrip(NARROW, x, Traits(upper=upper))
        assert torch.equal(y, x)
        assert_same_layout(x, y)


def test_a_single_integer_comes_back():
    x = torch.tensor(200)
    assert torch.equal(roundtrip(NARROW, x, Traits(upper=255)), x)


@pytest.mark.parametrize(
    ("upper", "bits"),
    [(1, 1), (2, 2), (3, 2), (4, 4), (15, 4), (16, 8), (255, 8), (256, 16), (32767, 16), (32768, 32), (2**31 - 1, 32)],
)
def test_integers_take_the_fewest_bits(upper, bits):
    x = torch.zeros(16, dtype=torch.int64)
    (part,) = NARROW.compress(x, Traits(upper=upper))
    assert part.untyped_storage().nbytes() == 2 * bits


@property_test(50)
@given(st.integers(1, 400), st.lists(st.integers(0, 399), min_size=1, max_size=50))
def test_integers_within_the_bound_come_back(upper, numbers):
    x = torch.tensor(numbers).clamp(max=upper)
    assert torch.equal(roundtrip(NARROW, x, Traits(upper=upper)), x)


@property_test(50)
@given(st.integers(0, 2**40))
def test_narrowest_holds_the_bound(upper):
    bits = narrowest(upper)
    assert upper < 2 ** (bits if bits <= 8 else bits - 1)


@pytest.mark.parametrize("codec", [BITS, TERNARY], ids=["bits", "ternary"])
def test_what_has_no_dimension_is_refused_with_a_reason(codec):
    assert codec.fits(Layout.of(torch.tensor(True)), Traits()) == "a single element"


@pytest.mark.parametrize("codec", [BITS, TERNARY], ids=["bits", "ternary"])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 8)], ids=str)
def test_an_empty_tensor_is_refused_or_comes_back_empty(codec, shape):
    x = torch.zeros(shape, dtype=torch.bool if codec is BITS else torch.float32)
    assert codec.fits(Layout.of(x), Traits()) or roundtrip(codec, x, Traits()).shape == x.shape


def test_bits_refuses_other_types_with_their_name():
    assert "float32" in BITS.fits(Layout.of(torch.zeros(4)), Traits())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], **names)
def test_narrow_refuses_what_is_no_integer_with_its_name(dtype):
    assert str(dtype).removeprefix("torch.") in NARROW.fits(Layout.of(torch.zeros(4, dtype=dtype)), Traits(upper=1))


def test_narrow_refuses_integers_without_a_bound():
    assert NARROW.fits(Layout.of(torch.zeros(4, dtype=torch.int64)), Traits()) == "no bound on its values is proved"


@pytest.mark.parametrize(("dtype", "upper"), [(torch.uint8, 16), (torch.int16, 256), (torch.int64, 2**31)], **names)
def test_narrow_refuses_what_is_narrow_already(dtype, upper):
    assert str(upper) in NARROW.fits(Layout.of(torch.zeros(4, dtype=dtype)), Traits(upper=upper))


@pytest.mark.parametrize("layout", [contiguous, channels_last, every_other], **names)
def test_masks_and_signs_trace_with_symbolic_sizes_and_no_guard_on_parity(layout):
    def function(mask, signs):
        return roundtrip(BITS, mask, Traits()), roundtrip(TERNARY, signs, Traits())

    def inputs(*shape):
        return layout(masks(shape)), layout(torch.randint(-1, 2, shape).float())

    traced = symbolic_trace(function)(*inputs(24, 16, 6, 4))
    assert_guards_admit_odd_and_even(traced)
    for shape in [(5, 16, 6, 4), (7, 3, 5, 11)]:
        given_here = inputs(*shape)
        for x, y in zip(given_here, traced(*given_here), strict=True):
            assert torch.equal(x, y)
            assert_same_layout(x, y)
