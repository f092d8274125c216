"""Grids against Python sets."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparseconv as sc
from sparseconv import IndexRange, VoxelGrid
from sparseconv.geometry import FixedGrid


@st.composite
def voxel_sets(draw, rank=None, batch=2):
    rank = rank or draw(st.integers(1, 4))
    row = st.tuples(st.integers(0, batch - 1), *[st.integers(-4, 4)] * rank)
    return draw(st.permutations(sorted(draw(st.sets(row, max_size=25))))), rank


def grid_of(rows, rank, batch=3) -> VoxelGrid:
    return VoxelGrid(torch.tensor(list(rows), dtype=torch.int64).reshape(-1, rank + 1), batch)


def rows_of(grid: VoxelGrid) -> set[tuple[int, ...]]:
    rows = [tuple(row) for row in grid.coords.tolist()]
    assert len(set(rows)) == len(rows)
    return set(rows)


@given(voxel_sets())
def test_lookup_finds_each_row_and_nothing_else(case):
    rows, rank = case
    grid = grid_of(rows, rank)
    assert grid.coords.dtype == torch.int32
    queries = torch.tensor(rows + [(0, *([9] * rank)), (7, *([0] * rank)), (0, *([-2000000] * rank))])
    assert grid.lookup(queries).tolist() == [*range(len(rows)), -1, -1, -1]


@given(st.data())
def test_set_operations(data):
    rank = data.draw(st.integers(1, 3))
    a, b = (data.draw(voxel_sets(rank))[0] for _ in range(2))
    one, two = grid_of(a, rank), grid_of(b, rank)
    assert rows_of(one.union(two)) == set(a) | set(b)
    assert rows_of(one.intersection(two)) == set(a) & set(b)
    assert rows_of(one.difference(two)) == set(a) - set(b)
    assert one.union(two).coords[: len(a)].equal(one.coords)


@given(voxel_sets(), st.integers(1, 3))
def test_coarsen_refine_dilate(case, factor):
    rows, rank = case
    grid = grid_of(rows, rank)
    coarse = grid.coarsen(factor)
    assert rows_of(coarse) == {(r[0], *(v // factor for v in r[1:])) for r in rows}
    assert coarse.voxel_size == (float(factor),) * rank
    fine = coarse.refine(factor)
    assert len(fine) == len(coarse) * factor**rank
    assert set(rows) <= rows_of(fine)
    reach = range(-1, 2)
    shifts = [(0,)]
    for _ in range(rank):
        shifts = [(*s, d) for s in shifts for d in reach]
    assert rows_of(grid.dilate(1)) == {tuple(a + b for a, b in zip(r, s)) for r in rows for s in shifts}


@given(voxel_sets(), st.sampled_from(["lexicographic", "morton"]))
def test_sorting_permutes_rows(case, order):
    rows, rank = case
    grid = grid_of(rows, rank)
    other, old = grid.sorted(order)
    assert torch.equal(other.coords, grid.coords[old])
    assert sorted(old.tolist()) == list(range(len(rows)))
    if order == "lexicographic":
        assert [tuple(r) for r in other.coords.tolist()] == sorted(rows)
    elif rows:
        low = other.extent.start

        def interleaved(row):
            local = [v - lo for v, lo in zip(row[1:], low)]
            return (
                row[0],
                sum(((v >> bit) & 1) << (bit * rank + rank - 1 - i) for i, v in enumerate(local) for bit in range(6)),
            )

        keys = [interleaved(r) for r in other.coords.tolist()]
        assert keys == sorted(keys)


def test_morton_of_a_far_flung_extent_takes_several_passes():
    coords = torch.tensor([[0, 2**30, 0, 0, 3], [0, 0, 2**20, 0, 1], [0, 1, 1, 1, 1], [0, -(2**9), 0, 2**3, 0]])
    coords[:, 1] //= 2**18  # 4 axes, still more than 62 bits interleaved with the others
    grid = VoxelGrid(coords)
    other, rows = grid.sorted("morton")
    assert torch.equal(other.coords, grid.coords[rows])


@given(voxel_sets())
def test_dense_round_trip(case):
    rows, rank = case
    grid = grid_of(rows, rank)
    features = torch.randn(len(grid), 3, dtype=torch.float64)
    dense = grid.to_dense(features, IndexRange((-4,) * rank, (5,) * rank))
    assert dense.shape == (3, 3, *[9] * rank)
    for row, feature in zip(rows, features):
        assert torch.equal(dense[(row[0], slice(None), *(v + 4 for v in row[1:]))], feature)
    back, values = VoxelGrid.from_dense(dense, rank=rank)
    assert rows_of(back) == {(r[0], *(v + 4 for v in r[1:])) for r in rows}
    assert torch.equal(back.to_dense(values, (9,) * rank), dense)


def test_to_dense_is_differentiable():
    grid = grid_of([(0, 1, 2), (1, 0, 0)], 2)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f: grid.to_dense(f, (2, 3)), x)
    assert torch.autograd.gradgradcheck(lambda f: grid.to_dense(f, (2, 3)) ** 2, x)


def test_to_dense_has_channels_first_in_memory_and_under_vmap():
    grid = grid_of([(0, 1, 2), (1, 0, 0)], 2)
    several = torch.randn(5, 2, 3)
    made = [grid.to_dense(x, (2, 3)) for x in several]
    assert all(dense.is_contiguous() for dense in made)
    assert torch.equal(torch.func.vmap(lambda x: grid.to_dense(x, (2, 3)))(several), torch.stack(made))


def test_batches_with_empty_items():
    grid = VoxelGrid(torch.tensor([[3, 0], [1, 5], [3, 1]]), batch_size=5)
    assert grid.batch_counts.tolist() == [0, 1, 0, 2, 0]
    assert grid.batch_offsets.tolist() == [0, 0, 1, 1, 3, 3]
    assert grid.batch_rows.tolist() == [1, 0, 2]
    both = VoxelGrid.cat([grid, grid])
    assert both.batch_size == 10
    assert both.batch_counts.tolist() == [0, 1, 0, 2, 0] * 2


def test_empty_grids_work_everywhere():
    for rank in range(1, 5):
        grid = VoxelGrid(torch.zeros(0, rank + 1, dtype=torch.int32), batch_size=2)
        for other in (grid.coarsen(2), grid.refine(2), grid.dilate(1), grid.union(grid), grid.sorted("morton")[0]):
            assert len(other) == 0
            assert other.batch_size == 2
        assert grid.lookup(torch.zeros(3, rank + 1, dtype=torch.int32)).tolist() == [-1] * 3
        assert grid.to_dense(torch.zeros(0, 4), (2,) * rank).shape == (2, 4, *[2] * rank)


@pytest.mark.parametrize("how", ["torch", "data", "numpy"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_buffer_that_is_filled_anew_changes_no_grid(how, dtype):
    buffer = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 5, 5]], dtype=dtype)
    grid, moved = VoxelGrid(buffer), torch.tensor([[0, 9, 9], [0, 3, 3], [0, 3, 4]], dtype=dtype)
    {"torch": buffer, "data": buffer.data, "numpy": torch.from_numpy(buffer.numpy())}[how].copy_(moved)
    assert grid.coords.tolist() == [[0, 0, 0], [0, 0, 1], [0, 5, 5]]
    assert grid.lookup(torch.tensor([[0, 0, 1], [0, 9, 9]])).tolist() == [1, -1]
    assert sc.ConvolutionPlan(grid, 3).kernel_map.num_pairs == 5
    assert sc.ConvolutionPlan(VoxelGrid(buffer), 3).kernel_map.num_pairs == 5
    assert VoxelGrid(buffer).coords.tolist() == moved.tolist()


def test_duplicates_are_named_or_dropped():
    coords = torch.tensor([[0, 1, 1], [0, 2, 2], [0, 3, 3], [0, 2, 2]])
    with pytest.raises(ValueError, match=r"rows 1 and 3 .*\(0, 2, 2\).*duplicates='first'"):
        VoxelGrid(coords)
    kept = VoxelGrid(coords, duplicates="first")
    assert kept.coords.tolist() == coords[:3].tolist()
    assert kept.lookup(coords).tolist() == [0, 1, 2, 1]


def test_keys_are_64_bit_and_count_only_the_extent():
    far = torch.tensor([[0, 2**31 - 2, -(2**31) + 1], [1, -(2**31) + 1, 2**31 - 2]])
    with pytest.raises(ValueError, match="63"):
        VoxelGrid(far)
    shifted = torch.tensor([[0, 2**31 - 2, 2**31 - 2, 2**31 - 2], [1, 2**31 - 9, 2**31 - 9, 2**31 - 2]])
    assert VoxelGrid(shifted).lookup(shifted).tolist() == [0, 1]
    city = torch.tensor([[0, 0, 0, 0], [0, 3_000_000, 3_000_000, 20_000]])
    assert VoxelGrid(city).lookup(city.flip(0)).tolist() == [1, 0]


def test_points_whose_keys_differ_by_2_to_the_32_stay_apart():
    cells = torch.tensor([[1699, 1699, 1699], [1486, 251, 596], [0, 0, 0]])  # of 1700^3; 1486, 251, 596 is 2^32
    grid, rows = sc.voxelize(cells.double() + 0.5, 1.0)
    assert grid.coords[:, 1:].tolist() == cells.flip(0).tolist()
    assert rows.tolist() == [2, 1, 0]


def test_a_grid_pickles_and_moves():
    grid = VoxelGrid(torch.tensor([[0, 1, 2], [1, -3, 4]]), voxel_size=(0.5, 0.25), origin=1.0)
    other = pickle.loads(pickle.dumps(grid))
    assert torch.equal(other.coords, grid.coords)
    assert (other.voxel_size, other.origin, other.batch_size) == ((0.5, 0.25), (1.0, 1.0), 2)
    assert other.extent == grid.extent == IndexRange((-3, 2), (2, 5))
    assert other.lookup(grid.coords).tolist() == [0, 1]
    assert grid.to("cpu") is grid
    assert grid.positions().tolist() == [[1.75, 1.625], [-0.25, 2.125]]


@pytest.mark.parametrize(
    ("coords", "error", "message"),
    [
        ([[0, 1]], TypeError, "torch.Tensor"),
        (torch.zeros(3, 4), TypeError, "voxelize"),
        (torch.zeros(3, 4, dtype=torch.bool), TypeError, "integers"),
        (torch.zeros(3, dtype=torch.int32), ValueError, "batch column"),
        (torch.zeros(1, 6, dtype=torch.int32), ValueError, "1 to 4"),
        (torch.zeros(1, 1, dtype=torch.int32), ValueError, "1 to 4"),
        (torch.tensor([[-1, 0]]), ValueError, "start at 0"),
        (torch.tensor([[0, 2**31]]), ValueError, "32 bits"),
    ],
)
def test_bad_coords(coords, error, message):
    with pytest.raises(error, match=message):
        VoxelGrid(coords)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: VoxelGrid(g.coords, batch_size=1), ValueError, "batch_size is 1"),
        (lambda g: VoxelGrid(g.coords, voxel_size=0.0), ValueError, "positive"),
        (lambda g: VoxelGrid(g.coords, voxel_size=(1.0, 2.0, 3.0)), ValueError, "one for each axis"),
        (lambda g: VoxelGrid(g.coords, duplicates="last"), ValueError, "'first'"),
        (lambda g: g.lookup(torch.zeros(2, 2, dtype=torch.int64)), ValueError, r"\(M, 3\)"),
        (lambda g: g.lookup(torch.zeros(2, 3)), TypeError, "integers"),
        (lambda g: g.subset(torch.ones(5, dtype=torch.bool)), ValueError, r"\(2,\) bool"),
        (lambda g: g.union(g.coarsen(2)), ValueError, "voxel_size"),
        (lambda g: g.sorted("hilbert"), ValueError, "'morton'"),
        (lambda g: g.coarsen(0), ValueError, "at least 1"),
        (lambda g: g.to_dense(torch.zeros(3, 1)), ValueError, r"\(2, C\)"),
        (lambda g: g.to_dense(torch.zeros(2, 1), (1, 1)), ValueError, "leaves the box"),
        (lambda g: VoxelGrid.cat([]), ValueError, "at least one"),
        (lambda g: VoxelGrid.from_dense(torch.zeros(3, 3)), ValueError, "1 to 4"),
    ],
)
def test_bad_calls(call, error, message):
    grid = VoxelGrid(torch.tensor([[0, 0, 0], [1, 4, 2]]))
    with pytest.raises(error, match=message):
        call(grid)


@given(st.lists(st.tuples(*[st.floats(-5, 5)] * 2), max_size=30), st.sampled_from([0.1, 1.0, (0.5, 2.0)]))
def test_voxelize_against_floor(points, size):
    cloud = torch.tensor(points, dtype=torch.float64).reshape(-1, 2)
    batch = torch.arange(len(points)) % 2
    grid, rows = sc.voxelize(cloud, size, batch, batch_size=3, origin=(0.25, -1.0))
    per_axis = torch.tensor([size, size] if isinstance(size, float) else size, dtype=torch.float64)
    cells = torch.floor((cloud - torch.tensor([0.25, -1.0], dtype=torch.float64)) / per_axis).long()
    want = [(int(b), *c.tolist()) for b, c in zip(batch, cells)]
    assert [tuple(grid.coords[r].tolist()) for r in rows] == want
    assert [tuple(c) for c in grid.coords.tolist()] == sorted(set(want))
    assert grid.batch_size == 3


@given(
    st.lists(st.tuples(*[st.sampled_from([-(2**31) + 2, -7, -1, 0, 1, 5, 2**31 - 2])] * 2), min_size=1, max_size=9),
    st.sampled_from([None, torch.uint8, torch.int64]),
)
def test_voxelize_far_apart(points, batched):
    """Sums on the way to the keys leave 64 bits, or nearly: the order is still that of the voxels."""
    cloud = torch.tensor(points, dtype=torch.float64)
    items = None if batched is None else (torch.arange(len(points)) % 2).to(batched)
    if items is not None and cloud.amin() < -7 and cloud.amax() > 5:
        cloud = cloud.clamp(max=5)  # two items of 2^64 cells are too many
    if (cloud.amax(0) - cloud.amin(0) + 1).prod() * (1 if items is None else 2) >= 2**63:
        with pytest.raises(ValueError, match="2\\^63"):
            sc.voxelize(cloud, 1.0, items)
        return
    grid, rows = sc.voxelize(cloud, 1.0, items)
    want = torch.cat([torch.zeros(len(cloud), 1) if items is None else items[:, None], cloud], 1).long()
    assert torch.equal(grid.coords[rows].long(), want)
    assert [tuple(c) for c in grid.coords.tolist()] == sorted(set(map(tuple, want.tolist())))
    again = VoxelGrid(grid.coords)
    assert (grid.extent, grid.batch_size) == (again.extent, again.batch_size)
    assert torch.equal(grid.lookup(want), rows)


@pytest.mark.parametrize(
    ("points", "options", "error", "message"),
    [
        (torch.zeros(3, 3, dtype=torch.int64), {}, TypeError, "VoxelGrid"),
        (torch.zeros(3), {}, ValueError, r"\(M, D\)"),
        (torch.zeros(3, 5), {}, ValueError, "1 to 4"),
        (torch.tensor([[0.0, 1.0], [float("nan"), 0.0]]), {}, ValueError, "point 1 .* not finite"),
        (torch.tensor([[0.0, float("inf")]]), {}, ValueError, "not finite"),
        (torch.tensor([[1e12, 0.0]]), {}, ValueError, "32 bits"),
        (torch.zeros(2, 2), {"voxel_size": -1.0}, ValueError, "positive"),
        (torch.zeros(2, 2), {"batch": torch.zeros(3, dtype=torch.int64)}, ValueError, r"\(2,\)"),
        (torch.zeros(2, 2), {"batch": torch.zeros(2)}, TypeError, "integers"),
        (torch.zeros(2, 2), {"batch": torch.tensor([0, -1])}, ValueError, "start at 0"),
        (
            torch.zeros(2, 2),
            {"batch": torch.tensor([0, 3]), "batch_size": 3},
            ValueError,
            "item 3, but batch_size is 3",
        ),
        (torch.zeros(2, 2), {"batch": torch.tensor([0, 2**31])}, ValueError, "batch_size must be"),
        (torch.zeros(2, 2), {"batch": torch.tensor([0, 2**62])}, ValueError, "batch_size must be"),
        (torch.zeros(2, 2), {"batch_size": 0}, ValueError, "batch_size is 0"),
        (torch.tensor([[3e38, 0.0]]), {"voxel_size": 1e-300}, ValueError, "32 bits"),
        (torch.tensor([[-(2.0**30)] * 3, [2.0**30] * 3]), {}, ValueError, "2\\^63"),
    ],
)
def test_bad_points(points, options, error, message):
    with pytest.raises(error, match=message):
        sc.voxelize(points, **{"voxel_size": 1.0, **options})


@pytest.mark.parametrize("place", [0, 1])
def test_dead_rows_do_not_become_voxels_of_a_batch(place):
    """One dead row, behind another item: its batch item would be that one's, and nothing else would tell."""
    grid = VoxelGrid(torch.tensor([[0, 0], [0, 1]]))
    fixed = FixedGrid(torch.tensor([[0, 0], [-1, -1]]).int(), torch.tensor([1]).int(), grid)
    grids = [grid, grid]
    grids[place] = fixed
    with pytest.raises(ValueError, match=f"at place {place}"):
        VoxelGrid.cat(grids)


@pytest.mark.parametrize(("size", "factor"), [(0.3, 3), (0.7, 7), (0.01, 6)])
def test_grids_that_were_coarsened_and_refined_meet_the_first_one(size, factor):
    """size * factor * (1 / factor) is not size, in floating point."""
    grid = VoxelGrid(torch.tensor([[0, 0, 5], [0, 1, 1]]), voxel_size=size, origin=1.0)
    back = grid.coarsen(factor).refine(factor)
    assert back.voxel_size != grid.voxel_size
    assert rows_of(back.union(grid)) == rows_of(back)
    assert len(grid.difference(back)) == 0
    assert VoxelGrid.cat([grid, back]).batch_size == 2
    with pytest.raises(ValueError, match="differ in voxel_size"):
        grid.union(grid.coarsen(2))
    with pytest.raises(ValueError, match="differ in origin"):
        grid.union(VoxelGrid(grid.coords, voxel_size=size, origin=1 + size / 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_positions_are_float32_whatever_the_default(dtype):
    grid = VoxelGrid(torch.tensor([[0, 4999, -2]]), voxel_size=0.5)
    torch.set_default_dtype(dtype)
    try:
        found = grid.positions()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert found.tolist() == [[2499.75, -0.75]]
