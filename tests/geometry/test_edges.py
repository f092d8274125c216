"""What a window says about the grids at its two ends before anybody looks at their voxels."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseconv import ConvolutionPlan, VoxelGrid
from sparseconv.geometry.edges import Window, coarse_grid, fine_grid, fits
from sparseconv.geometry.ranges import Boundary, IndexRange


@st.composite
def scenes(draw: st.DrawFn) -> tuple[VoxelGrid, Window]:
    rank = draw(st.integers(1, 3))
    point = st.tuples(st.just(0), *[st.integers(-6, 6)] * rank)
    coords = torch.tensor(sorted(draw(st.sets(point, min_size=1, max_size=6))))

    def axes(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    if draw(st.booleans()):
        window = Window.of(rank, axes(1, 4), axes(1, 3), axes(1, 2), axes(-1, 3))
    else:
        taps = draw(st.sets(st.tuples(*[st.integers(-3, 3)] * rank), min_size=1, max_size=5))
        window = Window.of(rank, None, axes(1, 3), taps=sorted(taps))
    return VoxelGrid(coords), window


def box_of(coords: torch.Tensor) -> IndexRange:
    return IndexRange(tuple(coords[:, 1:].amin(0).tolist()), tuple((coords[:, 1:].amax(0) + 1).tolist()))


@given(scenes())
def test_extents_are_known_before_the_voxels(scene: tuple[VoxelGrid, Window]) -> None:
    grid, window = scene
    absent = Boundary.absent()
    assert window.fine_extent(grid.extent) == box_of(fine_grid(grid, window, absent).coords)
    coarse, known = coarse_grid(grid, window, absent).coords, window.coarse_bounds(grid.extent)
    if window.sees_all:
        assert known == box_of(coarse)
    elif len(coarse):
        assert known.encloses(box_of(coarse))


@given(scenes(), st.data())
def test_forbid_keeps_the_voxels_whose_window_lies_in_the_extent(
    scene: tuple[VoxelGrid, Window], data: st.DataObject
) -> None:
    grid, window = scene

    def lies_in(extent: IndexRange, at: list[int]) -> bool:
        return all(lo <= v < hi for lo, v, hi in zip(extent.start, at, extent.end))

    margins = data.draw(st.tuples(*[st.integers(0, 3)] * (2 * grid.rank)))
    wider = IndexRange(
        tuple(s - m for s, m in zip(grid.extent.start, margins)),
        tuple(e + m for e, m in zip(grid.extent.end, margins[grid.rank :])),
    )
    everything = coarse_grid(grid, window, Boundary.absent())
    for boundary, extent in ((Boundary.forbid(wider), wider), (Boundary("forbid"), grid.extent)):
        kept = []
        for row in everything.coords.tolist():
            seen = [[s * c + o for s, c, o in zip(window.stride, row[1:], offset)] for offset in window.offsets]
            kept += [row] if all(lies_in(extent, at) for at in seen) else []
        assert coarse_grid(grid, window, boundary).coords.tolist() == kept
        assert fits(everything, grid, window, boundary).coords.tolist() == kept
    reached = fine_grid(grid, window, Boundary.absent()).coords.tolist()
    inner = IndexRange(
        tuple(min(e - 1, s + m) for s, e, m in zip(grid.extent.start, grid.extent.end, margins)), grid.extent.end
    )
    kept = [row for row in reached if lies_in(inner, row[1:])]
    assert fine_grid(grid, window, Boundary.forbid(inner)).coords.tolist() == kept


def test_common_windows_need_no_look() -> None:
    for kernel, stride in ((2, 2), (3, 2), (3, 1), (4, 3), ((2, 3, 1), (2, 2, 1))):
        assert Window.of(3, kernel, stride).sees_all
    assert not Window.of(3, 1, 2).sees_all  # a voxel between the windows is seen by none


@given(scenes(), st.data())
def test_a_box_holds_the_voxels_that_are_reached_within_it(
    scene: tuple[VoxelGrid, Window], data: st.DataObject
) -> None:
    grid, window = scene
    reached = coarse_grid(grid, window, Boundary.absent())
    ends = [sorted(data.draw(st.tuples(*[st.integers(-4, 9)] * 2))) for _ in range(grid.rank)]
    box = IndexRange(tuple(lo for lo, _ in ends), tuple(hi for _, hi in ends))
    inside = [row for row in reached.coords.tolist() if all(lo <= v < hi for v, (lo, hi) in zip(row[1:], ends))]
    assert coarse_grid(grid, window, Boundary.absent(), box).coords.tolist() == inside


@given(scenes())
def test_windows_side_by_side_see_every_voxel_once(scene: tuple[VoxelGrid, Window]) -> None:
    grid, window = scene
    coarse = coarse_grid(grid, window, Boundary.absent())
    plan = ConvolutionPlan.between(grid, coarse, window, Boundary.absent())
    if window.is_tiling:
        assert plan.kernel_map.num_pairs == len(grid)
        assert torch.equal(plan.kernel_map.in_rows.sort().values, torch.arange(len(grid), dtype=torch.int32))


def test_equal_arguments_share_a_window_and_others_do_not() -> None:
    assert Window.of(3, 3) is Window.of(3, (3, 3, 3), (1, 1, 1))
    assert Window.of(2, [3, 2]) is Window.of(2, (3, 2))
    for bad in ((3.0, 3), 3.0):  # equal to integers, but none
        with pytest.raises(TypeError, match="kernel_size must be one integer or 2 of them"):
            Window.of(2, bad)  # type: ignore[arg-type]


def test_a_window_travels_without_what_a_card_reads_of_it():
    window = Window.of(3, 3)
    window.encoded[0] = None
    assert window.encoded is Window.of(3, 3).encoded
    other = pickle.loads(pickle.dumps(window))
    assert other == window
    assert not other.encoded
    del window.encoded[0]


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int16, torch.int64])
def test_an_axis_that_is_longer_than_the_integers_of_an_index(kind):
    """torch wraps a number beyond a tensor's dtype round to it."""
    index = torch.tensor([0, 5, 100, 127]).to(kind)
    for size in (3, 100, 200, 300, 40_000, 2**33):
        inside = [i < size for i in (0, 5, 100, 127)]
        for boundary, want in [
            (Boundary.absent(), [min(i, size - 1) for i in (0, 5, 100, 127)]),
            (Boundary("periodic"), [i % size for i in (0, 5, 100, 127)]),
        ]:
            found, real = boundary.resolve(index, size)
            assert found.tolist() == want
            assert real.tolist() == (inside if boundary.kind == "absent" else [True] * 4)
        for boundary in (Boundary.negative(), Boundary("forbid")):
            if all(inside):
                assert boundary.resolve(index, size)[0].tolist() == index.tolist()
            else:
                with pytest.raises(IndexError, match=f"out of bounds for an axis of {size}"):
                    boundary.resolve(index, size)
