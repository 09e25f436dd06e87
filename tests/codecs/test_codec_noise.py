import itertools
import math

import pytest
import torch
from codec_cases import assert_guards_admit_odd_and_even, symbolic_trace

from fx_actcomp.codecs import Noise

SHAPE = (256, 1024)
STEPS = [0, 1, 2, 3, 1000, 2**31 - 1]
SALTS = [0, 1, 2, 0xDEADBEEF, 0xFFFFFFFF]


def draw(step=0, salt=7, shape=SHAPE):
    return Noise(torch.tensor(step), salt).uniform(torch.empty(shape))


by_step = pytest.mark.parametrize("step", STEPS)
by_salt = pytest.mark.parametrize("salt", SALTS)


def z_of_correlation(a, b):
    """Standard deviations from none, of two samples of uniform numbers."""
    a, b = a.flatten().double() - 0.5, b.flatten().double() - 0.5
    return (12 * (a * b).sum() / math.sqrt(a.numel())).item()


@by_step
@by_salt
def test_mean_and_variance_are_those_of_uniform_numbers(step, salt):
    u = draw(step, salt).double()
    n = u.numel()
    assert abs(u.mean() - 1 / 2) < 5 * math.sqrt(1 / 12 / n)
    assert abs((u - 0.5).square().mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)


@by_step
@by_salt
def test_256_bins_fill_alike(step, salt):
    counts = (draw(step, salt) * 256).long().flatten().bincount(minlength=256).double()
    expected = counts.sum() / 256
    chi = ((counts - expected).square() / expected).sum()
    assert len(counts) == 256
    assert abs(chi - 255) < 5 * math.sqrt(2 * 255)


def test_the_low_bits_fill_alike_too():
    low = (draw().double() * 2**24).long() % 256
    counts = low.flatten().bincount(minlength=256).double()
    expected = counts.sum() / 256
    assert abs(((counts - expected).square() / expected).sum() - 255) < 5 * math.sqrt(2 * 255)


@by_step
def test_numbers_are_at_least_0_and_below_1_in_steps_of_2_to_the_minus_24(step):
    u = draw(step)
    assert u.dtype is torch.float32
    assert u.min() >= 0
    assert u.max() < 1
    assert u.min() < 1e-4
    assert u.max() > 1 - 1e-4
    assert torch.equal(u * 2**24, (u * 2**24).round())


@by_step
@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 16, 256, 1024, 4096, 65536])
def test_neighbours_do_not_correlate(step, lag):
    u = draw(step).flatten()
    assert abs(z_of_correlation(u[:-lag], u[lag:])) < 5


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (7, 8), (0, 256), (1000, 1001), (2**31 - 1, 0), (2**30, 2**30 + 1)])
def test_steps_do_not_correlate(one, other):
    a, b = draw(one), draw(other)
    assert abs(z_of_correlation(a, b)) < 5
    assert abs(z_of_correlation(a.flatten()[:-1], b.flatten()[1:])) < 5
    assert (a == b).float().mean() < 1e-4


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(SALTS, 2)))
def test_salts_do_not_correlate(one, other):
    assert abs(z_of_correlation(draw(salt=one), draw(salt=other))) < 5


def test_one_place_over_the_steps_is_uniform_and_uncorrelated():
    u = torch.stack([draw(step, shape=(8, 4)) for step in range(4000)]).double()
    n = len(u)
    z = (u.mean(0) - 0.5) / math.sqrt(1 / 12 / n)
    assert z.abs().max() < 5
    assert all(abs(z_of_correlation(u[:-1, i, j], u[1:, i, j])) < 5 for i in range(8) for j in range(4))


def test_the_same_place_step_and_salt_draw_the_same():
    assert torch.equal(draw(3, 5), draw(3, 5))


def test_numbers_do_not_depend_on_the_values_or_their_type():
    x = torch.randn(64, 64)
    noise = Noise(torch.tensor(1), 2)
    assert torch.equal(noise.uniform(x), noise.uniform(x.bfloat16() * 1e9))


def test_the_position_counts_not_the_shape():
    assert torch.equal(draw(shape=(6, 8, 10)).flatten(), draw(shape=(480,)))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 5), (0, 3)], ids=str)
def test_small_shapes(shape):
    assert draw(shape=shape).shape == shape


def test_torch_s_own_generator_does_not_move():
    before = torch.get_rng_state()
    draw()
    assert torch.equal(before, torch.get_rng_state())


def test_symbolic_sizes_draw_what_static_ones_do():
    traced = symbolic_trace(lambda x, step: Noise(step, 9).uniform(x))(torch.randn(6, 10), torch.tensor(3))
    assert_guards_admit_odd_and_even(traced)
    for shape in [(6, 10), (7, 11), (1, 3), (2, 2)]:
        for step in (3, 4):
            assert torch.equal(traced(torch.randn(shape), torch.tensor(step)), draw(step, 9, shape))


def test_inductor_draws_what_eager_does_at_odd_sizes():
    shapes, salt = [(3, 1021), (7,), (1, 1), (5, 3, 67), (2, 4099)], 0xDEADBEEF

    def all_of(inputs, step):
        return [Noise(step, salt).uniform(x) for x in inputs]

    call, inputs = torch.compile(all_of, fullgraph=True), [torch.empty(shape) for shape in shapes]
    for step in (0, 3, 2**31 - 1):
        found = call(inputs, torch.tensor(step))
        assert all(torch.equal(got, draw(step, salt, shape)) for got, shape in zip(found, shapes, strict=True))
        assert len({u.item() for u in found[0].flatten()}) > 3000


def test_salts_that_differ_in_one_bit_draw_other_numbers_at_every_step():
    for step in range(4):
        drawn = {tuple(draw(step, salt, (64,)).tolist()) for salt in (*range(8), *(2**k for k in range(3, 32)))}
        assert len(drawn) == 8 + 29
