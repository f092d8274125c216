"""Shapes, strides and task spaces; the strides of outputs are judged by torch.add itself."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from sparseconv.pointwise import Config
from sparseconv.pointwise.kernel.layout import (
    broadcast_shape,
    broadcast_strides,
    contiguous_strides,
    iterate,
    output_strides,
)


@st.composite
def tensors(draw, count: int = 2):
    """Tensors of broadcastable shapes in any stride order, some broadcast, some with gaps."""
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=5))
    found = []
    for _ in range(count):
        own = [n if draw(st.booleans()) or draw(st.booleans()) else 1 for n in shape][
            draw(st.integers(0, len(shape))) * draw(st.integers(0, 1)) :
        ]
        order = draw(st.permutations(range(len(own))))
        gaps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in own]
        base = torch.empty([own[k] * gaps[k] for k in order])
        view = base[tuple(slice(None, None, gaps[k]) for k in order)].permute([order.index(k) for k in range(len(own))])
        if own and draw(st.booleans()) and draw(st.booleans()):
            axis = draw(st.integers(0, len(own) - 1))
            view = view.narrow(axis, 0, 1).expand(own)
        found.append(view)
    return found


@settings(max_examples=400, deadline=None)
@given(tensors())
def test_outputs_have_the_strides_that_torch_gives(pair):
    a, b = pair
    judge = torch.add(a, b)
    shape = broadcast_shape([a.shape, b.shape])
    got = output_strides(shape, [broadcast_strides(t.shape, t.stride(), shape) for t in pair])
    assert shape == tuple(judge.shape)
    assert all(n == 1 or s == t for n, s, t in zip(shape, got, judge.stride())), (got, judge.stride())
    assert torch.empty_strided(shape, got).numel() == torch.Size(shape).numel()


def test_shapes_that_do_not_broadcast_are_named():
    with pytest.raises(ValueError, match=r"add: shapes \(2, 3\), \(2,\) do not broadcast"):
        broadcast_shape([(2, 3), (2,)], "add")
    assert broadcast_shape([(0, 1), (3,)]) == (0, 3)


def space(shape, *strides, **options):
    return iterate(shape, strides, itemsize=4, config=options.pop("config", Config()), **options)


def test_dense_operands_of_one_stride_order_are_one_axis():
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        x = torch.empty([(5, 6, 7, 8)[k] for k in order]).permute([order.index(k) for k in range(4)])
        found = space(x.shape, x.stride(), x.stride(), x.stride())
        assert found.sizes == (5 * 6 * 7 * 8,)
        assert found.strides == ((1,), (1,), (1,))


def test_axes_of_size_one_vanish_and_broadcast_axes_stay():
    shape = (4, 1, 8)
    found = space(shape, contiguous_strides(shape), (0, 8, 1))
    assert found.sizes == (4, 8)
    assert found.strides == ((8, 1), (0, 1))
    assert space((), ()).sizes == (1,)
    assert space((1, 1), (1, 1)).sizes == (1,)


def test_operands_of_different_order_get_a_square_tile_over_both_fast_axes():
    found = space((512, 16, 512), (16 * 512, 512, 1), (1, 600 * 512, 512))
    assert found.sizes == (16, 512, 512)
    assert found.across
    assert found.strides[1] == (600 * 512, 1, 512)
    assert found.tile[0] == found.tile[1] == 64


def test_without_collapsing_the_rank_stays():
    found = space((4, 1, 8), (8, 8, 1), (8, 8, 1), collapse=False)
    assert len(found.sizes) == 3
    assert sorted(found.sizes) == [1, 4, 8]


@settings(max_examples=200, deadline=None)
@given(tensors(), st.sampled_from([1, 2]), st.booleans())
def test_a_task_space_visits_every_element_of_every_operand_once(pair, tile_axes, collapse):
    shape = broadcast_shape([t.shape for t in pair])
    operands = [broadcast_strides(t.shape, t.stride(), shape) for t in pair]
    out = output_strides(shape, operands)
    found = iterate(shape, [out, *operands], itemsize=4, config=Config(tile_axes=tile_axes), collapse=collapse)

    def addresses(sizes, lines):
        grid = torch.zeros((1, len(lines)), dtype=torch.int64)
        for k, n in enumerate(sizes):
            steps = torch.arange(n).unsqueeze(1) * torch.tensor([[line[k] for line in lines]])
            grid = (grid.unsqueeze(1) + steps.unsqueeze(0)).reshape(-1, len(lines))
        return sorted(map(tuple, grid.tolist()))

    assert addresses(found.sizes, found.strides) == addresses(shape, [out, *operands])
    assert found.programs >= 1


def test_wide_addresses_where_32_bits_do_not_reach():
    n = 2**31
    assert not space((2**30,), (1,)).wide
    assert space((n,), (1,)).wide
    assert space((4,), (1,), (n // 2,)).wide
    assert space((4,), (1,), (-(n // 2),)).wide
    assert space((4,), (1,), reach=n).wide


def test_masks_are_left_out_of_full_tiles_where_they_would_make_accesses_narrow():
    assert space((2**20,), (1,)).parts == 1
    assert space((2**20 + 1,), (1,)).parts == 2
    assert space((3,), (1,)).parts == 1


@pytest.mark.parametrize(
    ("size", "itemsize", "config", "cut"),
    [
        (2**24, 2, Config(), ((8192,), 32)),
        (2**24 + 8, 2, Config(), ((2048,), 8)),
        (2**23, 2, Config(), ((2048,), 8)),
        (2**24, 4, Config(), ((1024,), 4)),
        (2**24, 2, Config(elements=512), ((512,), 8)),
        (2**24, 2, Config(num_warps=4), ((2048,), 4)),
    ],
)
def test_many_halves_in_full_tiles_get_the_widest_programs(size, itemsize, config, cut):
    found = iterate((size,), [(1,)] * 3, itemsize=itemsize, config=config)
    assert (found.tile, found.warps) == cut
    assert found.programs == -(-size // found.tile[0])
