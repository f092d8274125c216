"""The CPU's search by lines of taps against a dictionary, over every kind of window."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseconv import VoxelGrid
from sparseconv.geometry.cpu.compiled import find_edges
from sparseconv.geometry.keys import KeySpace
from sparseconv.geometry.ranges import IndexRange
from sparseconv.geometry.window import Window

CUBE = tuple(itertools.product((-1, 0, 1), repeat=3))
WINDOWS = {
    "cube": ((1, 1, 1), CUBE),
    "two": ((2, 2, 2), tuple(itertools.product((0, 1), repeat=3))),
    "even": ((1, 1, 1), tuple(itertools.product((-1, 0), repeat=3))),
    "dilated": ((1, 1, 1), tuple(tuple(2 * o for o in tap) for tap in CUBE)),
    "mixed": ((2, 1, 3), tuple(itertools.product((-1, 0, 1), (0, 2), (-3, -2, 0, 4)))),
    "cross": ((1, 1, 1), ((0, 0, 1), (0, 0, 0), (1, 0, 0), (-1, 0, 0), (0, 5, 0))),
    "far": ((1, 1, 1), ((0, 0, -40), (0, 0, 40), (0, -40, 39))),
}


def window_of(name: str) -> Window:
    stride, offsets = WINDOWS[name]
    return Window.of(3, None, stride, taps=offsets)


def grid_of(seed: int, count: int, size: int, batch: int = 2) -> VoxelGrid:
    """Shuffled voxels, negative ones too."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randint(-size, size, (count, 3), generator=generator)
    items = torch.randint(0, batch, (count, 1), generator=generator)
    coords = torch.unique(torch.cat([items, points], 1), dim=0)
    return VoxelGrid(coords[torch.randperm(len(coords), generator=generator)], batch)


def listed(edges) -> list[tuple[int, int, int]]:
    ins, outs, offsets = edges
    taps = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    assert ins.dtype == outs.dtype == torch.int32
    return sorted(zip(taps.tolist(), ins.tolist(), outs.tolist()))


def searched(fine: VoxelGrid, coarse: VoxelGrid, stride, offsets) -> list[tuple[int, int, int]]:
    row_of = {tuple(c): row for row, c in enumerate(fine.coords.tolist())}
    found = []
    for out, (item, *point) in enumerate(coarse.coords.tolist()):
        for tap, offset in enumerate(offsets):
            row = row_of.get((item, *(s * p + o for s, p, o in zip(stride, point, offset))))
            if row is not None:
                found.append((tap, row, out))
    return sorted(found)


@pytest.mark.parametrize("name", WINDOWS)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 999), count=st.integers(0, 60), size=st.integers(1, 4))
def test_every_window(name, seed, count, size):
    stride, offsets = WINDOWS[name]
    fine, coarse = grid_of(seed, count, size), grid_of(seed + 1, 30, 3)
    assert listed(find_edges(fine, coarse, window_of(name))) == searched(fine, coarse, stride, offsets)
    assert listed(find_edges(fine, fine, window_of(name))) == searched(fine, fine, stride, offsets)


def test_a_reach_past_63_bits_is_left_to_the_general_search():
    far = 2**30 - 1
    coords = torch.tensor([[0, 0, 0, 0], [0, far, far, 3], [0, far, far, 4]])
    grid = VoxelGrid(coords)
    assert find_edges(grid, grid, window_of("cube")) is not None
    wide = VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 2**31 - 2, 2**30 - 1, 2]]))
    assert find_edges(wide, wide, window_of("cube")) is None


@given(st.integers(1, 5), st.integers(0, 10**6), st.sampled_from([torch.int32, torch.int64]))
def test_keys_are_pythons_numbers(columns, seed, dtype):
    """Row-major numbers of boxes near the ends of 32 bits and wide ones: what overflows on the way comes back."""
    draw = random.Random(seed)
    low = [draw.choice([0, -5, 2**31 - 60, -(2**31), draw.randint(-(2**31), 2**31 - 60)]) for _ in range(columns)]
    shape = [draw.choice([draw.randint(1, 40), draw.randint(1, 2**31 - 1 - a)]) for a in low]
    try:
        space = KeySpace(IndexRange(tuple(low), tuple(a + n for a, n in zip(low, shape))))
    except ValueError:
        assert math.prod(shape) >= 2**63
        return
    coords = torch.tensor([[draw.randint(a, a + n - 1) for a, n in zip(low, shape)] for _ in range(8)]).to(dtype)
    want = []
    for row in coords.tolist():
        key = 0
        for value, a, n in zip(row, low, shape):
            key = key * n + value - a
        want.append(key)
    before = coords.clone()
    assert space.keys(coords).tolist() == space.keys(coords, narrow=True).tolist() == want
    assert space.keys(coords).dtype == torch.int64
    assert torch.equal(coords, before)
