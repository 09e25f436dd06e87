import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from codec_cases import assert_same_layout, channels_last, contiguous, every_other, roundtrip, transposed
from torch import nn

import fx_actcomp
from fx_actcomp.codecs import CODECS, Layout, Traits
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
