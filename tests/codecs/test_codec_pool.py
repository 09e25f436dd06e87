import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from codec_cases import assert_same_layout, channels_last, contiguous, every_other, roundtrip, transposed
from torch import nn

import fx_actcomp
from fx_actcomp.codecs import CODECS, Layout, Traits, codec_named
from fx_actcomp.records import Role

CONVOLVED = frozenset({Role.CONV_WEIGHT_GRAD})
IMAGES = Traits(spatial=True, roles=CONVOLVED)
POSITIVE = Traits(spatial=True, roles=CONVOLVED, sign_exact=True)
NAMES = ["pool2", "pool4", "division"]
SHAPES = [(2, 3, 17), (2, 3, 16, 16), (1, 5, 7, 9), (3, 2, 1, 1), (2, 4, 13, 32), (1, 2, 5, 6, 7)]
by_name = pytest.mark.parametrize("name", NAMES)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
by_layout = pytest.mark.parametrize("layout", [contiguous, channels_last, transposed, every_other], ids=lambda f: f.__name__)


def windows(x, side):
    """Each window of a (N, C, *space) array as (place, values), by plain slicing."""
    space = x.shape[2:]
    for place in np.ndindex(*[-(-n // side) for n in space]):
        where = tuple(slice(p * side, min((p + 1) * side, n)) for p, n in zip(place, space, strict=True))
        yield (slice(None), slice(None), *where)


@by_shape
@pytest.mark.parametrize("side", [2, 4])
def test_a_pooled_value_is_its_window_s_mean(shape, side):
    x = torch.randn(shape)
    y = roundtrip(CODECS[f"pool{side}"], x, IMAGES).numpy()
    for where in windows(x.numpy(), side):
        dims = tuple(range(2, x.dim()))
        mean = x.double().numpy()[where].mean(axis=dims, keepdims=True)
        assert np.allclose(y[where], mean, atol=1e-6)


@by_shape
@pytest.mark.parametrize("side", [2, 4])
def test_over_a_mask_the_mean_is_of_the_positive_entries(shape, side):
    x = torch.randn(shape).relu()
    y = roundtrip(CODECS[f"pool{side}"], x, POSITIVE).numpy()
    for where in windows(x.numpy(), side):
        dims = tuple(range(2, x.dim()))
        cut = x.double().numpy()[where]
        mean = cut.sum(axis=dims, keepdims=True) / np.maximum((cut > 0).sum(axis=dims, keepdims=True), 1)
        assert np.allclose(y[where], np.where(cut > 0, mean, 0), atol=1e-6)


@by_shape
@by_dtype
@pytest.mark.parametrize("traits", [IMAGES, POSITIVE], ids=["plain", "sign_exact"])
def test_division_keeps_its_bound(shape, dtype, traits):
    x = (torch.randn(shape) * 3).to(dtype)
    x = x.relu() if traits.sign_exact else x
    y = roundtrip(CODECS["division"], x, traits)
    counts = (x > 0).double() if traits.sign_exact else torch.ones(shape, dtype=torch.float64)
    rest, means = np.zeros(shape), np.zeros(shape)
    for where in windows(x.float().numpy(), 8):
        dims = tuple(range(2, x.dim()))
        cut, counted = x.double().numpy()[where], counts.numpy()[where]
        means[where] = (cut * counted).sum(axis=dims, keepdims=True) / np.maximum(counted.sum(axis=dims, keepdims=True), 1)
        rest[where] = (cut - means[where]) * counted
    space = tuple(range(2, x.dim()))
    low, high = rest.min(axis=space, keepdims=True), rest.max(axis=space, keepdims=True)
    largest = np.maximum(-low, high)
    bound = (high - low) / 8 + 2**-7 * largest + 2**-8 * np.abs(means) + 2**-8 * np.abs(means) + 0.01 * largest
    bound += torch.finfo(dtype).eps * x.double().abs().numpy() + 1e-6
    assert (np.abs(y.double().numpy() - x.double().numpy()) <= bound).all()


@by_shape
@pytest.mark.parametrize("side", [2, 4])
@pytest.mark.parametrize("traits", [IMAGES, POSITIVE], ids=["plain", "sign_exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_means_in_8_bits_are_off_by_the_window_s_range_and_half_a_step_at_most(shape, side, traits, dtype):
    x = torch.randn(shape)
    x = (x.relu() if traits.sign_exact else x).to(dtype)
    y = roundtrip(codec_named(f"pool{side}:means=int8"), x, traits).double().numpy()
    dims, values = tuple(range(2, x.dim())), x.double().numpy()
    counted = values > 0 if traits.sign_exact else np.ones(shape, dtype=bool)
    means = np.zeros(shape)
    for where in windows(values, side):
        cut, count = values[where], counted[where].sum(axis=dims, keepdims=True)
        means[where] = (cut * counted[where]).sum(axis=dims, keepdims=True) / np.maximum(count, 1)
    half = (means.max() - means.min()) / 504
    rounding = 4 * torch.finfo(dtype).eps * np.abs(means).max()
    assert (np.abs(y - means)[counted] <= half + rounding).all()
    assert (y[~counted] == 0).all()
    for where in windows(values, side):
        low = np.where(counted[where], values[where], np.inf).min(axis=dims, keepdims=True)
        high = np.where(counted[where], values[where], -np.inf).max(axis=dims, keepdims=True)
        stated = np.where(counted[where], high - low, 0) + half + rounding
        assert (np.abs(y[where] - values[where]) <= stated).all()


@pytest.mark.parametrize("side", [2, 4])
def test_means_in_8_bits_are_within_half_a_step_of_their_own_channel(side):
    scales = torch.tensor([1e-3, 1.0, 1e3]).view(1, 3, 1, 1)
    x = torch.randn(2, 3, 64, 64) * scales
    off = roundtrip(codec_named(f"pool{side}:means=int8"), x, IMAGES) - roundtrip(CODECS[f"pool{side}"], x, IMAGES)
    means = x.unfold(2, side, side).unfold(3, side, side).mean((-1, -2))
    half = (means.amax((2, 3)) - means.amin((2, 3))) / 504
    assert (off.abs().amax((2, 3)) <= half * (1 + 1e-4)).all()
    assert (off.abs().amax((2, 3)) > half / 2).all()


@by_layout
@by_shape
def test_means_in_8_bits_keep_shape_strides_and_signs(layout, shape):
    for traits in (IMAGES, POSITIVE):
        x = layout(torch.randn(shape).relu())
        y = roundtrip(codec_named("pool2:means=int8"), x, traits)
        assert_same_layout(x, y)
        assert not traits.sign_exact or torch.equal(y > 0, x > 0)


def test_means_in_8_bits_take_a_quarter_of_exact_ones():
    x = torch.randn(16, 32, 32, 32)
    taken = {name: sum(p.nbytes for p in codec_named(name).compress(x, IMAGES)) for name in ("pool2", "pool2:means=int8")}
    assert taken["pool2"] == x.nbytes / 4
    assert x.nbytes / 16 <= taken["pool2:means=int8"] <= x.nbytes / 16 * 1.04


CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@by_shape
@by_layout
@pytest.mark.parametrize("name", ["pool2", "pool4", "pool2:means=int8"])
def test_the_contracted_pair_has_the_weight_gradient_of_the_restored_tensor(name, shape, layout):
    codec, x = codec_named(name), layout(torch.randn(shape, dtype=torch.float64))
    parts = codec.compress(x, IMAGES)
    restored = codec.decompress(parts, Layout.of(x), IMAGES)
    dy = layout(torch.randn(shape[0], 6, *shape[2:], dtype=torch.float64))
    small, means, factor = codec.contract(dy, parts, Layout.of(x))
    assert small.shape[2:] == means.shape[2:] == tuple(-(-n // codec.side) for n in shape[2:])
    expected = torch.einsum("no...,nc...->oc", dy, restored)
    assert torch.allclose(torch.einsum("no...,nc...->oc", small, means) * factor, expected, rtol=1e-10, atol=1e-10)
    weight = torch.zeros(6, shape[1], *[1] * (len(shape) - 2), dtype=torch.float64, requires_grad=True)
    CONV[len(shape) - 2](means, weight).backward(small)
    assert torch.allclose(weight.grad.view(6, shape[1]) * factor, expected, rtol=1e-10, atol=1e-10)


def test_the_windows_sums_of_a_low_precision_gradient_are_taken_in_float32():
    x, dy = torch.randn(2, 3, 8, 8).bfloat16(), torch.randn(2, 5, 8, 8).bfloat16()
    small, _, factor = CODECS["pool4"].contract(dy, CODECS["pool4"].compress(x, IMAGES), Layout.of(x))
    sums = dy.float().unfold(2, 4, 4).unfold(3, 4, 4).sum((-1, -2))
    assert torch.equal(small * factor, sums.bfloat16())


def test_the_windows_sums_of_a_float16_gradient_do_not_overflow():
    x, dy = torch.full((1, 3, 8, 8), 2.0**-10).half(), torch.full((1, 2, 8, 8), 2.0**13).half()
    small, means, factor = CODECS["pool4"].contract(dy, CODECS["pool4"].compress(x, IMAGES), Layout.of(x))
    found = torch.einsum("nohw,nchw->oc", small.double(), means.double()) * factor
    assert torch.equal(found, torch.full((2, 3), 8.0 * 64, dtype=torch.float64))


def test_only_pointwise_uses_without_a_mask_contract():
    pointwise = Traits(spatial=True, roles=CONVOLVED, pointwise=True)
    for name in ("pool2", "pool4", "pool2:means=int8"):
        assert codec_named(name).contracts(pointwise)
        assert not codec_named(name).contracts(IMAGES)
        assert not codec_named(name).contracts(Traits(spatial=True, roles=CONVOLVED, pointwise=True, sign_exact=True))
    for name in ("division", "int8", "fp8"):
        assert not codec_named(name).contracts(pointwise)
    with pytest.raises(NotImplementedError, match="codec 'int8' contracts nothing"):
        CODECS["int8"].contract(torch.zeros(1), (), Layout.of(torch.zeros(1)))


@by_name
@by_shape
@by_dtype
@by_layout
def test_shape_strides_and_type_come_back(name, shape, dtype, layout):
    for traits in (IMAGES, POSITIVE):
        x = layout(torch.randn(shape).relu().to(dtype))
        assert_same_layout(x, roundtrip(CODECS[name], x, traits))


@by_name
@by_shape
@by_dtype
def test_signs_are_exact_where_nothing_is_negative(name, shape, dtype):
    x = (torch.randn(shape).relu() * torch.randint(-14, 3, shape).double().exp2()).to(dtype)
    assert torch.equal(roundtrip(CODECS[name], x, POSITIVE) > 0, x > 0)


@by_name
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_what_is_not_finite_harms_no_other_sample_or_channel(name, poison):
    x = torch.randn(3, 4, 16, 16)
    y = roundtrip(CODECS[name], x, IMAGES)
    x[1, 2, 3, 3] = poison
    z = roundtrip(CODECS[name], x, IMAGES)
    assert not z[1, 2, 3, 3].isfinite()
    z[1, 2] = y[1, 2]
    assert torch.equal(z, y)


@by_name
def test_constants_and_zeros_come_back(name):
    for number in (0.0, 0.25, -2.0):
        x = torch.full((2, 3, 9, 16), number)
        assert torch.allclose(roundtrip(CODECS[name], x, IMAGES), x, atol=1e-30)


def test_division_takes_2_3_bits_and_one_more_with_a_mask():
    x = torch.randn(16, 32, 32, 32)
    bits = {
        traits: sum(p.nbytes for p in CODECS["division"].compress(x, traits)) * 8 / x.numel() for traits in (IMAGES, POSITIVE)
    }
    assert bits[IMAGES] <= 2.3
    assert bits[POSITIVE] <= 3.3


def test_pooling_is_for_what_weight_gradients_of_convolutions_alone_read():
    layout = Layout.of(torch.randn(2, 3, 16, 16))
    assert "weight gradients" in CODECS["pool2"].fits(layout, Traits(spatial=True))
    assert CODECS["pool2"].fits(layout, IMAGES) is None
    assert "(N, C, *space)" in CODECS["pool2"].fits(Layout.of(torch.randn(2, 3)), IMAGES)
    assert "convolutions" in CODECS["division"].fits(layout, Traits())


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


def test_in_a_model_pooling_moves_weight_gradients_alone():
    model, x = Convolutions(), torch.randn(4, 3, 15, 16)
    found = fx_actcomp.gradient_error(model, x, policy="pool2", compiler="aot_eager", min_bytes=0)
    each = found.per_parameter
    assert each["b.weight"].relative > 0
    assert each["c.weight"].relative > 0
    assert max(each[name].relative for name in ("a.weight", "a.bias", "b.bias", "c.bias")) <= 1e-6
    rows = fx_actcomp.explain(model, x, policy="pool2", compiler="aot_eager", min_bytes=0).saved
    assert {row.codec for row in rows if row.kind == "activation"} == {"pool2"}


@pytest.mark.parametrize(("policy", "bound", "saving"), [("int2", 0.35, 12.0), ("pool2", 0.53, 1.3), ("division", 0.35, 9.0)])
def test_resnet_holds_its_bars(policy, bound, saving):
    import models

    model, inputs = models.resnet18()
    assert fx_actcomp.gradient_error(model, *inputs, policy=policy, compiler="aot_eager").relative <= bound
    found = fx_actcomp.explain(model, *inputs, policy=policy, compiler="aot_eager")
    assert found.bytes_before / found.bytes_after >= saving
