import math

import numpy as np
import pytest
import torch
from codec_cases import (
    BOUNDS,
    assert_same_layout,
    channels_last,
    contiguous,
    group_extreme,
    memory,
    sparse,
)

from fx_actcomp._torch import make_fx
from fx_actcomp.codecs import Layout, Traits, codec_named

COMPILED = {
    (codec, layout.__name__, sign_exact): (codec_named(codec), layout, Traits(spatial=True, sign_exact=sign_exact))
    for codec, layout, sign_exact in [
        ("int8", contiguous, False), ("int8", channels_last, True), ("int4", contiguous, True), ("int4", channels_last, False),
        ("fp8", contiguous, True), ("fp8:format=e5m2", channels_last, False),
    ]
}  # fmt: skip


@pytest.fixture(scope="module")
def through_inductor(tmp_path_factory):
    """Inputs with a NaN and an infinity each, and what comes back; compression and decompression are a program each."""
    torch.manual_seed(0)
    inputs = [layout(sparse((3, 8, 16, 17), torch.float32)) for _, layout, _ in COMPILED.values()]
    for x in inputs:
        x[1, 2, 3, 4], x[2, 1, 3, 4] = math.nan, math.inf
    for x, (_, _, traits) in zip(inputs, COMPILED.values(), strict=True):
        if not traits.sign_exact:
            x[0, 1, 3, 4] = -math.inf

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
    finite = (group_extreme(codec, x, traits, "amax") - group_extreme(codec, x, traits, "amin")).isfinite().numpy()
    off = np.abs(memory(y, Layout.of(y))[finite] - memory(x, Layout.of(x))[finite])
    assert finite.mean() > 0.8
    assert (off <= BOUNDS[type(codec)](codec, x, traits)[finite]).all()


@by_compiled
def test_inductor_keeps_the_layout(through_inductor, case):
    assert_same_layout(*through_inductor[case])


@by_compiled
def test_inductor_keeps_what_is_not_finite(through_inductor, case):
    x, y = through_inductor[case]
    assert not y[~x.isfinite()].isfinite().any()
    if COMPILED[case][0].bits == 8:
        assert torch.equal(y.isnan(), x.isnan())
        assert torch.equal(y[x.isinf()], x[x.isinf()])


def test_inductor_keeps_shares(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    codec, traits = codec_named("int8"), Traits(sign_exact=True, shares=True)
    x = (5 * torch.randn(32, 256)).softmax(1)
    x[3] = math.nan

    def roundtrip(x):
        return codec.decompress(codec.compress(x, traits), Layout.of(x), traits)

    y = torch.compile(roundtrip, fullgraph=True)(x)
    assert torch.allclose(y, roundtrip(x), rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("case", [case for case in COMPILED if case[2]], ids=str)
def test_inductor_keeps_exact_signs(through_inductor, case):
    x, y = through_inductor[case]
    beside_nan = y.isnan()
    assert torch.equal((y > 0)[~beside_nan], (x > 0)[~beside_nan])
    assert y[x == 0].eq(0).all()
