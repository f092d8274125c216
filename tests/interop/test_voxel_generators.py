"""Points to voxels, by the names of spconv 1.x and 2.x."""

from __future__ import annotations

import numpy as np
import torch

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
