"""Points to voxels, by the names of spconv 1.x and 2.x."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparseconv.interop.spconv import point_loop
from sparseconv.interop.spconv.pytorch.utils import PointToVoxel, gather_features_by_pc_voxel_id
from sparseconv.interop.spconv.utils import Point2VoxelCPU3d, VoxelGenerator, VoxelGeneratorV2


def test_generators_agree():
    points = np.random.default_rng(0).uniform(-1, 5, (500, 4)).astype(np.float32)
    box = [0, 0, 0, 4, 4, 2]
    v2 = VoxelGeneratorV2([0.5, 0.5, 1.0], box, 3, 100)
    assert v2.grid_size.tolist() == [8, 8, 2]
    made = v2.generate(points)
    voxels, coordinates, counts = VoxelGenerator([0.5, 0.5, 1.0], box, 3, 100).generate(points)
    third = Point2VoxelCPU3d([0.5, 0.5, 1.0], box, 4, 100, 3).point_to_voxel(points)
    for a, b, c in zip(
        (made["voxels"], made["coordinates"], made["num_points_per_voxel"]),
        (voxels, coordinates, counts),
        third,
        strict=True,
    ):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c.numpy())
    assert made["voxel_point_mask"].sum() == counts.sum()
    assert coordinates[:, 0].max() < 2, "the slowest axis, z, comes first"


def test_points_find_their_voxels_and_means_fill_empty_places():
    points = torch.tensor([[0.1, 0.1], [0.3, 0.5], [1.5, 0.5], [9.0, 0.0]])
    make = PointToVoxel([1.0, 1.0], [0.0, 0.0, 2.0, 2.0], 2, 10, 3)
    voxels, indices, counts, ids = make.generate_voxel_with_id(points, empty_mean=True)
    assert indices.tolist() == [[0, 0], [0, 1]]
    assert counts.tolist() == [2, 1]
    assert ids.tolist() == [0, 0, 1, -1]
    torch.testing.assert_close(voxels[0, 2], torch.tensor([0.2, 0.3]))
    torch.testing.assert_close(voxels[1, 1:], torch.tensor([[1.5, 0.5]] * 2))
    seen = gather_features_by_pc_voxel_id(torch.tensor([[5.0], [7.0]]), ids, -1)
    assert seen.tolist() == [[5.0], [5.0], [7.0], [-1.0]]
    assert all(len(t) == 0 for t in make(torch.zeros(0, 2)))


@pytest.mark.parametrize(
    ("size", "box", "cells"),
    [
        ([1.0], [0.0, 2.5], [3]),  # halves away from 0, as spconv's C++ rounds
        ([1.0, 0.2], [-40.0, 0.0, -29.5, 2.08], [10, 11]),
        ([0.16], [0.0, 1.68], [11]),  # in fp32; fp64 finds a little less than 10.5
        ([0.1], [-54.0, -52.85], [12]),  # and here a little more than 11.5
        ([0.5], [0.0, 0.24999], [0]),
    ],
)
def test_a_box_has_as_many_voxels_as_in_spconv(size, box, cells):
    made = PointToVoxel(size, box, len(size), 10, 3)
    assert made.grid_size == cells
    assert VoxelGeneratorV2(size, box, 3, 10).grid_size.tolist() == cells[::-1]


def test_points_in_the_last_half_of_a_cell_are_kept():
    make = PointToVoxel([1.0], [0.0, 2.5], 1, 10, 3)
    assert make.generate_voxel_with_id(torch.tensor([[2.2], [0.5], [2.9], [3.0]]))[3].tolist() == [0, 1, 0, -1]


def test_arrays_that_run_backwards_are_taken():
    points = np.random.default_rng(0).uniform(0, 2, (50, 4)).astype(np.float32)
    make = VoxelGeneratorV2([0.5, 0.5, 1.0], [0, 0, 0, 2, 2, 2], 3, 100)
    for view in (points[::-1], points[:, ::-1], np.asfortranarray(points)):
        assert np.array_equal(make.generate(view)["voxels"], make.generate(view.copy("C"))["voxels"])


def one_by_one(points, size, box, most_voxels, most_points):
    """The definition: point after point, in the points' own precision."""
    axes, number = len(size), points.dtype.type
    size, low = np.array(size, number)[::-1], np.array(box[:axes], number)[::-1]
    shape = [round((b - a) / s) for a, b, s in zip(box, box[axes:], np.array(size, float)[::-1])][::-1]
    kept: dict[tuple[int, ...], list[np.ndarray]] = {}
    counts, ids = [], []
    for point in points:
        with np.errstate(invalid="ignore"):
            cell = np.floor((point[:axes][::-1] - low) / size)
        at = -1
        if all(0 <= c < n for c, n in zip(cell, shape)):
            name = tuple(map(int, cell))
            if name in kept or len(kept) < most_voxels:
                rows = kept.setdefault(name, [])
                at = list(kept).index(name)
                if len(rows) < most_points:
                    rows.append(point.astype(np.float32))
        ids.append(at)
    voxels = np.zeros((len(kept), most_points, points.shape[1]), np.float32)
    for voxel, rows in zip(voxels, kept.values()):
        voxel[: len(rows)] = rows
    counts = [len(rows) for rows in kept.values()]
    return voxels, np.array(list(kept), np.int32).reshape(-1, axes), np.array(counts, np.int32), np.array(ids)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("axes", "columns"), [(1, 1), (2, 5), (3, 4), (4, 4)])
@pytest.mark.parametrize("most_voxels", [0, 7, 1000])
def test_every_point_goes_where_the_definition_says(compiled, dtype, axes, columns, most_voxels, monkeypatch):
    if not compiled:
        monkeypatch.setattr(point_loop, "serves", lambda points: False)
    rng = np.random.default_rng(axes)
    points = rng.uniform(-1.2, 3.2, (400, columns)).astype(dtype)
    points[5, 0], points[6, axes - 1], points[7, 0], points[8:20] = np.nan, np.inf, -np.inf, points[20]
    size, box = [0.5, 0.4, 0.7, 1.0][:axes], [-1.0] * axes + [3.0] * axes
    wanted = one_by_one(points, size, box, most_voxels, 3)
    make = PointToVoxel(size, box, columns, most_voxels, 3)
    for given in (points, np.asfortranarray(points), points.repeat(2, 0)[::2]):
        got = make.generate_voxel_with_id(torch.from_numpy(given))
        assert [t.dtype for t in got] == [torch.float32, torch.int32, torch.int32, torch.int64]
        for a, b in zip(got, wanted, strict=True):
            assert np.array_equal(a.numpy(), b, equal_nan=True)
            assert a.is_contiguous()
            assert a.untyped_storage().nbytes() == a.nbytes, "a worker would send what nobody asked for"


def test_a_loop_and_torch_give_the_same_means(monkeypatch):
    points = torch.rand(3000, 4, generator=torch.Generator().manual_seed(0)) * 3
    make = PointToVoxel([0.5, 0.5, 0.5], [0.0] * 3 + [3.0] * 3, 4, 1000, 20)
    looped = make(points, empty_mean=True)
    monkeypatch.setattr(point_loop, "serves", lambda points: False)
    for a, b in zip(looped, make(points, empty_mean=True), strict=True):
        assert torch.equal(a[..., 0], b[..., 0]) if a.dtype == torch.int32 else torch.allclose(a, b, rtol=1e-6)


def test_a_box_of_more_cells_than_64_bits_number_is_an_error():
    make = PointToVoxel([1.0] * 4, [0.0] * 4 + [2.0**17] * 4, 4, 10, 3)
    with pytest.raises(ValueError, match=r"larger voxels or a smaller box"):
        make(torch.zeros(1, 4))


def test_half_precision_and_points_with_gradients():
    points = torch.tensor([[0.5, 0.5], [1.5, 0.25]])
    make = PointToVoxel([1.0, 1.0], [0.0, 0.0, 2.0, 2.0], 2, 10, 1)
    wanted = make(points)
    for given in (points.half(), points.bfloat16(), points.clone().requires_grad_()):
        for a, b in zip(make(given), wanted, strict=True):
            assert torch.equal(a, b)
