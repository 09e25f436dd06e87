"""Tensors of every layout, type and kind of value, and each codec's stated bound, computed apart from the codec."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fx_actcomp._torch import inductor_decompositions
from fx_actcomp.codecs import CODECS, Layout, Traits, codec_named
from fx_actcomp.codecs.float8 import Float8
from fx_actcomp.codecs.layout import group_blocks, group_view
from fx_actcomp.codecs.quantize import Quantize

ANY_SHAPE = Layout.of(torch.empty(2, 3))
WITH_PARAMETERS = ["fp8:format=e5m2", "int4:group=128"]
LOSSY = sorted(
    name
    for name in [*CODECS, *WITH_PARAMETERS]
    if (codec := codec_named(name)).bits is not None and codec.fits(ANY_SHAPE, Traits()) is None
)
"""Codecs for values of any shape; the ones for images alone have a file of their own."""

SIGN_EXACT = sorted(name for name in LOSSY if codec_named(name).keeps_sign)
QUANTIZE = sorted(name for name in LOSSY if isinstance(codec_named(name), Quantize))
POSITIVE = Traits(sign_exact=True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TRAITS = [Traits(), Traits(spatial=True)]
SHAPES = [
    (1,), (2,), (7,), (255,), (256,), (257,), (1021,), (2048,), (1, 1), (3, 5), (4, 300), (5, 1, 640), (3, 7, 131),
    (2, 3, 5, 7), (2, 8, 16, 16), (1, 16, 9, 9), (3, 4, 1, 33), (2, 64, 7, 7), (1, 2, 3, 20, 20),
]  # fmt: skip


def property_test(examples):
    """Hypothesis as the other tests run: the same draws each time, no clock."""
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=slow)


def contiguous(x):
    return x.contiguous()


def channels_last(x):
    """The second dimension innermost in memory, as in a channels_last image, at any rank."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 1 else x


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def every_other(x):
    """Gaps between neighbours."""
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


def every_other_row(x):
    return torch.cat([x, x], 0)[: 2 * x.shape[0] : 2].copy_(x)


def narrowed(x):
    """A slice of wider rows."""
    return torch.cat([x, x[..., :1]], -1)[..., :-1]


def expanded_first(x):
    return x[:1].contiguous().expand(x.shape)


def expanded_last(x):
    return x[..., :1].contiguous().expand(x.shape)


LAYOUTS = [
    contiguous, channels_last, transposed, every_other, every_other_row, narrowed, expanded_first, expanded_last,
]  # fmt: skip


def normal(shape, dtype):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def constant(shape, dtype):
    return torch.full(shape, 0.3, dtype=dtype)


def zeros(shape, dtype):
    return torch.zeros(shape, dtype=dtype)


def outlier(shape, dtype):
    x = normal(shape, dtype)
    x.view(-1)[x.numel() // 2] = 1e4
    return x


def sparse(shape, dtype):
    """What a ReLU gives: zeros, small and large values beside each other."""
    return normal(shape, dtype).relu()


def subnormal(shape, dtype):
    """Multiples of the smallest number of all, both signs."""
    steps = torch.randint(-50, 50, shape)
    return (steps.double() * smallest_subnormal(dtype)).to(dtype)


def offset(shape, dtype):
    """A tiny range far from zero."""
    return (1000 + torch.randn(shape, dtype=torch.float64) * 1e-3).to(dtype)


def wide(shape, dtype):
    """Every power of two of the type, short of its largest."""
    info = torch.finfo(dtype)
    low, high = math.log2(info.smallest_normal), math.log2(info.max) - 2
    sign = torch.randint(0, 2, shape) * 2 - 1
    return (sign * torch.empty(shape, dtype=torch.float64).uniform_(low, high).exp2()).to(dtype)


VALUES = [normal, constant, zeros, outlier, sparse, subnormal, offset, wide]


@st.composite
def tensors(draw, values=VALUES, dtypes=DTYPES, layouts=LAYOUTS):
    small = st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple)
    shape = draw(st.one_of(st.sampled_from(SHAPES), small))
    torch.manual_seed(draw(st.integers(0, 1000)))
    x = draw(st.sampled_from(values))(shape, draw(st.sampled_from(dtypes)))
    return draw(st.sampled_from(layouts))(x)


def roundtrip(codec, x, traits):
    return codec.decompress(codec.compress(x, traits), Layout.of(x), traits)


def symbolic_trace(function):
    """Trace with every size a symbol, on the operators that Inductor's decompositions leave."""
    return make_fx(function, tracing_mode="symbolic", decomposition_table=inductor_decompositions())


def assert_guards_admit_odd_and_even(traced):
    """Whatever the trace asked of its symbolic sizes is true of sizes of either parity near those it saw."""
    symbols = dict(traced.shape_env.backed_var_to_val)
    assert symbols
    for change in range(4):
        sizes = {symbol: int(seen) + change for symbol, seen in symbols.items()}
        assert all(guard.expr.subs(sizes) for guard in traced.shape_env.guards)


def takes(codec, x, traits):
    return codec.fits(Layout.of(x), traits) is None


def memory(x, layout):
    """In float64, in the order of memory."""
    return layout.to_memory(x).double().numpy()


def group_extreme(codec, x, traits, extreme):
    """For each element its group's minimum or maximum (``"amin"``, ``"amax"``), in the order of memory."""
    layout = Layout.of(x)
    held = layout.to_memory(x)
    inner_first = range(held.dim())[::-1]
    grow = [layout.order.index(d) for d in inner_first] if traits.spatial else inner_first
    view, dims = group_view(held.double(), group_blocks(held.shape, grow, codec.group))
    return getattr(view, extreme)(dims, keepdim=True).expand_as(view).reshape(held.shape)


def group_numbers(codec, x, traits):
    """For each element the number of its group, in the order of memory."""
    layout = Layout.of(x)
    held = layout.to_memory(x)
    numbers = torch.arange(held.numel(), dtype=torch.float64).view(held.shape)
    return group_extreme(codec, layout.from_memory(numbers), traits, "amin")


def in_place(x, function):
    """What ``function`` makes of the values, in the layout of ``x``."""
    layout = Layout.of(x)
    return layout.from_memory(function(layout.to_memory(x)))


def stored_bits(codec, x, traits):
    """Bits an element that the parts keep alive."""
    kept = sum(part.untyped_storage().nbytes() for part in codec.compress(x, traits))
    return 8 * kept / x.numel()


def smallest_subnormal(dtype):
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def steps_between_ends(codec, traits, *, on_ends):
    """What the docstring of ``Quantize`` divides a group's range by."""
    if codec.bits == 8:
        return 252
    return 2**codec.bits - (1 if traits.sign_exact else 0) - (1 if on_ends else 0)


def quantize_bound(codec, x, traits):
    """What the docstring of ``Quantize`` states, and the rounding of the types that it computes in and restores to."""
    low = group_extreme(codec, x, traits, "amin").numpy()
    high = group_extreme(codec, x, traits, "amax").numpy()
    levels = steps_between_ends(codec, traits, on_ends=codec.bits == 8)
    computed, restored = torch.finfo(torch.promote_types(x.dtype, torch.float32)), torch.finfo(x.dtype)
    step = high / levels - (0 if traits.sign_exact else low / levels)
    stated = np.where(step > computed.tiny, step / 2, computed.tiny)
    largest = np.maximum(np.abs(low), np.abs(high))
    rounding = 8 * computed.eps * largest + restored.eps * largest + smallest_subnormal(x.dtype)
    return stated + rounding


def float8_bound(codec, x, traits):
    """What the docstring of ``Float8`` states, and the rounding of the types that it computes in and restores to."""
    relative, absolute, largest = {"e4m3fn": (2.0**-4, 2.0**-10, 416), "e5m2": (2.0**-3, 2.0**-17, 57344)}[codec.format]
    layout = Layout.of(x)
    held = layout.to_memory(x).double()
    finite = layout.from_memory(torch.where(held.isfinite(), held.abs(), 0.0))
    scale = group_extreme(codec, finite, traits, "amax").numpy() / largest
    computed, restored = torch.finfo(torch.promote_types(x.dtype, torch.float32)), torch.finfo(x.dtype)
    size = np.abs(held.numpy())
    stated = np.maximum(relative * size, absolute * scale * (2 if traits.sign_exact else 1))
    stated = np.where(scale > computed.tiny, stated, np.maximum(relative * size, computed.tiny))
    rounding = 8 * (2.0**-24 + computed.eps) + 2 * restored.eps
    return stated * (1 + rounding) + rounding * size + smallest_subnormal(x.dtype)


BOUNDS = {Quantize: quantize_bound, Float8: float8_bound}
"""How far a value may be off, in the order of memory, by the class of the codec."""


def assert_within_bound(codec, x, y, traits):
    layout = Layout.of(x)
    assert type(codec) in BOUNDS, f"codec {codec.name!r} has no bound in codec_cases.BOUNDS: state it"
    off = np.abs(memory(y, layout) - memory(x, layout))
    assert (off <= BOUNDS[type(codec)](codec, x, traits)).all()


def steps_that_count(x):
    """Strides, but for dimensions of size 1, in which no step is ever taken."""
    return tuple(step if size > 1 else None for size, step in zip(x.shape, x.stride(), strict=True))


def assert_same_layout(x, y):
    assert (y.shape, y.dtype, steps_that_count(y)) == (x.shape, x.dtype, steps_that_count(x))


ids = {"ids": lambda held: getattr(held, "__name__", str(held).removeprefix("torch."))}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, **ids)
by_codec = pytest.mark.parametrize("codec", [codec_named(name) for name in LOSSY], ids=LOSSY)
by_quantize = pytest.mark.parametrize("codec", [codec_named(name) for name in QUANTIZE], ids=QUANTIZE)
by_sign_exact_codec = pytest.mark.parametrize("codec", [codec_named(name) for name in SIGN_EXACT], ids=SIGN_EXACT)
by_traits = pytest.mark.parametrize("traits", TRAITS, ids=["flat", "spatial"])


def assert_harms_no_other(codec, traits, poison, x, place):
    """One element of ``x`` made NaN or infinite stays so and changes nothing in other groups."""
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
