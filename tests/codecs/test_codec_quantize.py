import itertools

import pytest
import torch
from codec_cases import (
    DTYPES,
    POSITIVE,
    TRAITS,
    assert_within_bound,
    by_dtype,
    by_quantize,
    channels_last,
    contiguous,
    in_place,
    normal,
    property_test,
    roundtrip,
    stored_bits,
    symbolic_trace,
    tensors,
)
from hypothesis import given

from fx_actcomp.codecs import CODECS, Layout, Traits
from fx_actcomp.codecs.quantize import Quantize


@by_quantize
@by_dtype
@pytest.mark.parametrize("number", [0.0, 0.3, -7.0, 1e4])
def test_constants_come_back_as_they_were(codec, dtype, number):
    x = torch.full((3, 300), number, dtype=dtype)
    assert torch.equal(roundtrip(codec, x, Traits()), x)


USUAL = [
    (64, 64, 32, 32), (64, 512, 4, 4), (32, 512, 7, 7), (32, 2048, 7, 7), (64, 256, 14, 14), (8, 3, 224, 224),
    (8, 1024, 768), (4, 197, 384), (8, 12, 128, 64), (512, 50257), (16384,), (128, 4096), (2, 1500, 1280),
]  # fmt: skip


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


@pytest.mark.parametrize("traits", [Traits(), POSITIVE], ids=["plain", "sign_exact"])
def test_what_a_sigmoid_piles_up_at_the_ends_of_its_range_comes_back_in_8_bits(traits):
    x = torch.sigmoid(torch.linspace(-40, 40, 256)).repeat(4, 1)
    y = roundtrip(CODECS["int8"], x, traits)
    ends = (x < 1e-6) | (x > 1 - 1e-6)
    assert ends.float().mean() > 0.5
    assert (y - x).abs()[ends].max() < 2e-6


@pytest.mark.parametrize("name", ["int2", "int1"])
def test_codes_below_four_bits_need_a_known_size_to_cut(name):
    asked = []

    def look(x):
        asked.append(CODECS[name].fits(Layout.of(x), Traits()))
        return x + 1

    symbolic_trace(look)(torch.randn(6, 8))
    assert "needs a dimension of known size" in asked[0]
    assert CODECS[name].fits(Layout.of(torch.randn(6, 8)), Traits()) is None
