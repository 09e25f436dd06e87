import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from ranges_cases import assert_true_on, by_table, image, property_test, result, trace

from fx_actcomp.ranges import upper_bound

BOUNDED = {
    "argmax": (lambda x: x.argmax(1), 2),
    "argmax of all": (lambda x: x.argmax(), 2 * 3 * 8 * 8 - 1),
    "argmin, last dimension": (lambda x: x.argmin(-1), 7),
    "argmax, kept dimension": (lambda x: x.argmax(1, keepdim=True), 2),
    "max": (lambda x: x.max(1).indices, 2),
    "min": (lambda x: x.min(-1).indices, 7),
    "sort": (lambda x: x.sort(1).indices, 2),
    "sort, last dimension": (lambda x: x.sort().indices, 7),
    "stable sort": (lambda x: x.sort(dim=1, stable=True).indices, 2),
    "stable sort, last dimension": (lambda x: x.sort(stable=True).indices, 7),
    "topk": (lambda x: x.topk(2, 1).indices, 2),
    "topk, last dimension": (lambda x: x.topk(2).indices, 7),
    "kthvalue": (lambda x: x.kthvalue(2, 1).indices, 2),
    "max_pool": (lambda x: F.max_pool2d(x, 2, return_indices=True)[1], 63),
    "adaptive_max_pool": (lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True)[1], 63),
    "arange": (lambda _: torch.arange(10), 9),
    "arange from": (lambda _: torch.arange(3, 10), 9),
    "full": (lambda _: torch.full((3,), 7), 7),
    "remainder": (lambda x: (10 * x).long() % 5, 4),
    "where": (lambda x: torch.where(x.amax(1) > 0, x.argmax(1), 5), 5),
    "where of two": (lambda x: torch.where(x.amax(1) > 0, x.argmax(1), x.argmin(1)), 2),
    "view": (lambda x: x.argmax(1).view(-1), 2),
    "expanded": (lambda x: x.argmax(1, keepdim=True).expand(2, 3, 8, 8), 2),
    "gathered": (lambda x: x.argmax(1).gather(1, x.argmin(1)), 2),
    "sum of two": (lambda x: x.argmax(1) + x.argmin(1), 4),
    "sum with a number": (lambda x: x.argmax(1) + 7, 9),
    "product": (lambda x: x.argmax(1) * 10, 20),
    "cat": (lambda x: torch.cat([x.argmax(1), x.argmin(1)]), 2),
    "cast": (lambda x: x.argmax(1).int().long(), 2),
    "mask": (lambda x: (x > 0).long(), 1),
    "byte": (lambda x: x.abs().to(torch.uint8).long(), 255),
    "a single element": (lambda _: torch.ones(3, 1).argmax(1), 0),
}  # fmt: skip


UNBOUNDED = {
    "values": lambda x: x,
    "floats": lambda x: x.relu(),
    "cast": lambda x: x.long(),
    "difference": lambda x: x.argmax(1) - 1,
    "sum with a negative number": lambda x: x.argmax(1) + (-1),
    "sum a negative number of times": lambda x: torch.add(x.argmax(1), x.argmin(1), alpha=-1),
    "product with a negative number": lambda x: x.argmax(1) * -1,
    "remainder by a negative number": lambda x: (10 * x).long() % -5,
    "fmod": lambda x: torch.fmod((10 * x).long(), 5),
    "where or -1": lambda x: torch.where(x.amax(1) > 0, x.argmax(1), -1),
    "full of -1": lambda _: torch.full((3,), -1),
    "arange from below 0": lambda _: torch.arange(-3, 3),
    "arange down": lambda _: torch.arange(5, -1, -1),
    "maxima of unknown integers": lambda x: (10 * x).long().max(1).values,
    "cumulated": lambda x: x.argmax(1).cumsum(0),
    "sum over a dimension": lambda x: x.argmax(1).sum(0),
    "negated": lambda x: -x.argmax(1),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_upper_bound(name):
    function, bound = BOUNDED[name]
    traced = trace(function, image())
    assert upper_bound(result(traced)) == bound
    assert_true_on(traced, image())


@pytest.mark.parametrize("name", [name for name in BOUNDED if name != "adaptive_max_pool"])
def test_upper_bound_after_inductors_decompositions_is_true(name):
    assert_true_on(trace(BOUNDED[name][0], image(), table="inductor"), image())


@by_table
@pytest.mark.parametrize("name", UNBOUNDED)
def test_no_upper_bound_without_a_proof(name, table):
    traced = trace(UNBOUNDED[name], image(), table=table)
    assert upper_bound(result(traced)) is None
    assert_true_on(traced, image())


ODD_BOUNDS = {
    "a cast that wraps": lambda _: torch.arange(300).to(torch.int8),
    "a sum that wraps": lambda _: torch.arange(100, dtype=torch.int8) + 100,
    "a product that wraps": lambda _: torch.arange(100, dtype=torch.int8) * 2,
    "bytes read as integers": lambda x: x.view(torch.uint8).clone().view(torch.int64),
    "integers read as narrower ones": lambda _: torch.full((4,), 2**31).view(torch.int32),
    "a sum times alpha": lambda x: torch.add(x.argmax(1), x.argmin(1), alpha=3),
    "remainder of a negative tensor": lambda x: torch.remainder((x * 10).long(), 7),
    "arange with a step": lambda _: torch.arange(2, 30, 7),
    "arange of one": lambda _: torch.arange(0, 1),
    "indices of padded max_pool": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[1],
    "indices of dilated max_pool": lambda x: F.max_pool2d(x, 2, 2, 0, 2, return_indices=True)[1],
    "indices of max_pool of all -inf": lambda x: F.max_pool2d(x * 0 - torch.inf, 2, return_indices=True)[1],
    "argmax of NaN": lambda x: (x * torch.nan).argmax(1),
    "three-dimensional max_pool": lambda x: F.max_pool3d(x, 2, return_indices=True)[1],
    "median": lambda x: x.median(1).indices,
    "mode": lambda x: x.mode(1).indices,
    "negated view": lambda x: torch._neg_view(x.argmax(1)),
    "arange from a float": lambda _: torch.arange(0.0, 3.5).long(),
}


@pytest.mark.parametrize("name", ODD_BOUNDS)
def test_odd_bounds_are_not_claimed_wrongly(name):
    x = 3 * image()
    assert_true_on(trace(ODD_BOUNDS[name], x, table="inductor"), x)


def test_an_index_along_a_symbolic_dimension_has_no_bound():
    traced = trace(lambda x: x.argmax(0), torch.randn(5, 7), mode="symbolic")
    assert upper_bound(result(traced)) is None


INTEGERS = [
    lambda i: i + 3, lambda i: i - 1, lambda i: i * 2, lambda i: -i, lambda i: i % 4, lambda i: i.flip(0), lambda i: i.clone(),
    lambda i: i.view(3, 8).t().reshape(-1), lambda i: i.int().long(), lambda i: i.sort().indices, lambda i: i.sort().values,
    lambda i: i.gather(0, i % 24), lambda i: torch.where(i > 2, i, 1), lambda i: torch.where(i > 2, i, -i), lambda i: i.cumsum(0),
    lambda i: torch.cat([i[:12], torch.arange(12)]), lambda i: i + i.argsort(), lambda i: i * i % 97, lambda i: (i > 3).long(),
    lambda i: i.to(torch.uint8).long(), lambda i: i // 2, lambda i: i.clamp(0, 5), lambda i: i.abs(), lambda i: i.fmod(3),
    lambda i: i.max(0, keepdim=True).indices.expand(24), lambda i: i.masked_fill(i > 5, -2), lambda i: i.repeat(2)[:24],
]  # fmt: skip


@by_table
@property_test
@given(steps=st.lists(st.sampled_from(INTEGERS), max_size=6))
def test_whatever_is_claimed_of_integers_is_true(table, steps):
    def function(x):
        i = x.topk(24).indices
        for step in steps:
            i = step(i)
        return i

    x = torch.randn(40)
    assert_true_on(trace(function, x, table=table), x)
