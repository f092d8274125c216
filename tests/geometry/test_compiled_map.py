"""Compiled loops of the CPU's maps against what torch and numpy find: the same bits in the same order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseconv import VoxelGrid
from sparseconv.geometry.cpu import compiled
from sparseconv.geometry.edges import coarse_grid, find_edges, fine_grid
from sparseconv.geometry.ranges import Boundary, IndexRange
from sparseconv.geometry.window import Window
from sparseconv.llvm.compile import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason="llvmlite is not installed")


def grid_of(seed: int, rank: int, count: int, size: int, shuffled: bool) -> VoxelGrid:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randint(-size, size, (count, rank), generator=generator)
    coords = torch.unique(torch.cat([torch.randint(0, 3, (count, 1), generator=generator), points], 1), dim=0)
    return VoxelGrid(coords[torch.randperm(len(coords), generator=generator)] if shuffled else coords, 3)


def without_loops(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compiled, "serves", lambda grid: False)


def everything(grid: VoxelGrid, window: Window, boundary: Boundary, within: IndexRange | None) -> list:
    """What a strided, a generative and three submanifold layers find on a grid of its own."""
    grid = VoxelGrid(grid.coords, grid.batch_size)
    same = Window.of(grid.rank, window.projection.counts, 1, window.projection.step)
    coarse, fine = coarse_grid(grid, window, boundary, within), fine_grid(grid, window, boundary)
    ends = ((grid, grid, same), (grid, coarse, window), (coarse, coarse, same), (fine, grid, window))
    maps = [find_edges(*end, boundary) for end in ends]
    arrays = [array for found in maps for array in (found.neighbors, found.tap_offsets)]
    return [repr(coarse), repr(fine), coarse.coords, fine.coords, *arrays]


def assert_same(found: list, want: list) -> None:
    assert len(found) == len(want)
    for one, other in zip(found, want):
        if isinstance(one, str):
            assert one == other
        else:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@settings(deadline=None, max_examples=80)
@given(data=st.data(), seed=st.integers(0, 999), rank=st.integers(1, 4), shuffled=st.booleans())
def test_the_same_bits_in_the_same_order(data, seed, rank, shuffled):
    grid = grid_of(seed, rank, data.draw(st.integers(0, 200)), data.draw(st.sampled_from((1, 3, 9, 70))), shuffled)
    axes = [tuple(data.draw(st.lists(st.integers(1, most), min_size=rank, max_size=rank))) for most in (4, 3, 2)]
    window = Window.of(rank, *axes, data.draw(st.sampled_from((None, 0, 1, 2))))
    within = data.draw(
        st.sampled_from((None, IndexRange((0,) * rank, (4,) * rank), IndexRange((-1,) * rank, (90,) * rank)))
    )
    boundary = data.draw(st.sampled_from((Boundary.absent(), Boundary.forbid(IndexRange((-9,) * rank, (9,) * rank)))))
    found = everything(grid, window, boundary, within)
    with pytest.MonkeyPatch.context() as patch:
        without_loops(patch)
        assert_same(found, everything(grid, window, boundary, within))


def test_the_loops_are_used():
    grid, window = grid_of(0, 3, 100, 9, True), Window.of(3, 3, 2, 1, 1)
    box = window.coarse_bounds(grid.extent)
    assert compiled.serves(grid)
    coords, extent = compiled.reached_voxels(grid, window, box, to_fine=False)
    coarse = coarse_grid(grid, window, Boundary.absent())
    assert torch.equal(coords, coarse.coords)
    assert extent == coarse.extent == VoxelGrid(coords).extent


def test_a_box_too_large_for_its_voxels_and_a_window_with_gaps_are_left_to_torch():
    far = VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 10**6, 10**6, 10**3]]))
    window, dilated = Window.of(3, 3, 2), Window.of(3, 3, 2, 2)
    assert compiled.reached_voxels(far, window, window.coarse_bounds(far.extent), to_fine=False) is None
    near = grid_of(0, 3, 100, 9, True)
    assert compiled.reached_voxels(near, dilated, dilated.coarse_bounds(near.extent), to_fine=False) is None
    for grid, asked in ((far, window), (near, dilated)):
        found = everything(grid, asked, Boundary.absent(), None)
        with pytest.MonkeyPatch.context() as patch:
            without_loops(patch)
            assert_same(found, everything(grid, asked, Boundary.absent(), None))


def test_coarse_voxels_in_another_order_than_theirs():
    fine, coarse, window = grid_of(0, 3, 100, 5, True), grid_of(1, 3, 80, 3, True), Window.of(3, 3, 2, 1, 1)
    found = find_edges(fine, coarse, window, Boundary.absent())
    with pytest.MonkeyPatch.context() as patch:
        without_loops(patch)
        want = find_edges(fine, coarse, window, Boundary.absent())
    assert_same([found.in_rows, found.out_rows], [want.in_rows, want.out_rows])


def test_reached_voxels_are_no_inference_tensors():
    with torch.inference_mode():
        grid = grid_of(0, 3, 100, 9, True)
        coarse = coarse_grid(grid, Window.of(3, 3, 2, 1, 1), Boundary.absent())
    assert not coarse.coords.is_inference()
