import math

import pytest
import torch
from codec_cases import LAYOUTS, SHAPES, assert_same_layout, normal, property_test, tensors
from hypothesis import given
from hypothesis import strategies as st

from fx_actcomp.codecs import Layout
from fx_actcomp.codecs.bits import memory_shape
from fx_actcomp.codecs.layout import group_blocks, group_view, smallest_divisor

DENSE = [layout for layout in LAYOUTS if layout.__name__ in {"contiguous", "channels_last", "transposed"}]
EXPANDED = [layout for layout in LAYOUTS if layout.__name__ in {"expanded_first", "expanded_last"}]


@property_test(100)
@given(tensors())
def test_the_way_to_memory_and_back_changes_nothing(x):
    layout = Layout.of(x)
    y = layout.from_memory(layout.to_memory(x))
    assert_same_layout(x, y)
    assert torch.equal(x, y)


@property_test(80)
@given(tensors())
def test_the_memory_view_is_contiguous(x):
    layout = Layout.of(x)
    held = layout.to_memory(x)
    assert held.is_contiguous()
    assert tuple(held.shape) == memory_shape(layout)


@property_test(80)
@given(tensors(layouts=DENSE))
def test_the_memory_view_of_a_dense_tensor_copies_nothing(x):
    layout = Layout.of(x)
    assert layout.dense
    assert layout.to_memory(x).data_ptr() == x.data_ptr()


@property_test(80)
@given(tensors(layouts=EXPANDED))
def test_of_an_expanded_dimension_one_element_is_kept(x):
    distinct = math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step != 0)
    assert Layout.of(x).to_memory(x).numel() == distinct


def test_an_expanded_dimension_beside_gaps_comes_back_with_its_strides():
    x = torch.randn(4, 6)[:, ::2].unsqueeze(0).expand(3, 4, 3)
    layout = Layout.of(x)
    assert_same_layout(x, layout.from_memory(layout.to_memory(x)))


def test_tensors_with_gaps_are_not_dense():
    assert not Layout.of(torch.zeros(4, 6)[:, ::2]).dense


def test_overlapping_windows_come_back_with_their_values():
    x = torch.arange(6.0).unfold(0, 3, 1)
    layout = Layout.of(x)
    assert torch.equal(layout.from_memory(layout.to_memory(x)), x)


def test_a_scalar_has_a_layout():
    x = torch.tensor(2.0)
    layout = Layout.of(x)
    assert torch.equal(layout.from_memory(layout.to_memory(x)), x)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 4)])
def test_an_empty_tensor_has_a_layout(shape):
    x = torch.zeros(shape)
    layout = Layout.of(x)
    assert layout.from_memory(layout.to_memory(x)).shape == x.shape


def test_layouts_compare_and_hash():
    x = torch.zeros(2, 3)
    assert Layout.of(x) == Layout.of(x + 1)
    assert hash(Layout.of(x)) == hash(Layout.of(x + 1))
    assert Layout.of(x) != Layout.of(x.t())


def test_spatial_groups_grow_over_width_height_channels_batch_in_any_layout():
    x = torch.zeros(2, 3, 5, 7)
    for image in (x, x.contiguous(memory_format=torch.channels_last)):
        layout = Layout.of(image)
        for least, sizes in [(7, [7]), (8, [5, 7]), (36, [3, 5, 7]), (106, [2, 3, 5, 7])]:
            taken = layout.groups(spatial=True, least=least)
            assert sorted(taken.values()) == sizes
            assert sorted(layout.order[d] for d in taken) == list(range(4 - len(sizes), 4))


shapes = st.one_of(st.sampled_from(SHAPES), st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple))


@property_test(100)
@given(shapes, st.integers(1, 600), st.randoms())
def test_a_group_holds_at_least_what_is_asked_or_everything(shape, least, random):
    grow = list(range(len(shape)))
    random.shuffle(grow)
    held = math.prod(group_blocks(shape, grow, least).values())
    assert held >= min(least, math.prod(shape))


@property_test(100)
@given(shapes, st.integers(1, 600))
def test_groups_divide_their_dimensions_so_nothing_is_padded(shape, least):
    for d, block in group_blocks(shape, tuple(reversed(range(len(shape)))), least).items():
        assert shape[d] % block == 0


@property_test(100)
@given(st.one_of(st.sampled_from(SHAPES), st.lists(st.integers(1, 12), min_size=1, max_size=4)), st.integers(1, 600))
def test_every_element_is_in_one_group(shape, least):
    x = torch.ones(shape, dtype=torch.int64)
    blocks = group_blocks(shape, tuple(reversed(range(len(shape)))), least)
    view, dims = group_view(x, blocks)
    assert view.data_ptr() == x.data_ptr()
    counted = view.sum(dims) if dims else view
    assert counted.unique().tolist() == [math.prod(blocks.values())]
    assert counted.sum() == x.numel()


def test_groups_of_an_inner_dimension_are_runs_of_it():
    view, dims = group_view(torch.arange(2048).view(2, 1024), group_blocks((2, 1024), (1, 0), 256))
    assert view.shape == (2, 4, 256)
    assert dims == [2]


def test_small_images_share_a_group_with_other_channels_of_their_sample():
    blocks = group_blocks((2, 64, 7, 7), (3, 2, 1, 0), 256)
    assert blocks == {3: 7, 2: 7, 1: 8}


@property_test(80)
@given(st.integers(1, 5000), st.integers(1, 5000))
def test_smallest_divisor_is_the_smallest(size, need):
    enough = [d for d in range(1, size + 1) if size % d == 0 and d >= need]
    assert smallest_divisor(size, need) == min(enough, default=size)


def test_restored_tensors_do_not_overlap_what_they_were_made_from():
    x = normal((4, 6), torch.float32)[:, ::2]
    layout = Layout.of(x)
    restored = layout.from_memory(layout.to_memory(x))
    assert restored.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
