"""Pruning a sparse tensor, and where the voxels of a list of scenes lie."""

import pytest
import torch

import sparseconv as sc


def test_a_subset_keeps_rows_and_gradients():
    grid = sc.VoxelGrid(torch.tensor([[0, 4, 1], [1, 0, 0], [0, 2, 2], [1, 7, 7]]), voxel_size=0.5, origin=3.0)
    x = sc.SparseTensor(grid, torch.arange(8.0).view(4, 2).requires_grad_())
    mask = torch.tensor([True, False, False, True])
    y = x.subset(mask)
    assert y.coords.tolist() == [[0, 4, 1], [1, 7, 7]]
    assert y.features.tolist() == [[0.0, 1.0], [6.0, 7.0]]
    assert (y.grid.voxel_size, y.grid.origin, y.grid.batch_size) == (grid.voxel_size, grid.origin, 2)
    y.features.sum().backward()
    assert x.features.grad.sum(1).tolist() == [2.0, 0.0, 0.0, 2.0]
    assert x.subset(torch.zeros(4, dtype=torch.bool)).shape == (0, 2)
    for wrong in (mask[:3], mask.long()):
        with pytest.raises(ValueError, match=r"mask must be \(4,\) bool"):
            x.subset(wrong)


def test_a_list_of_scenes_lies_where_it_is_told():
    coords, features = [torch.tensor([[1, 2]]), torch.tensor([[0, 0], [5, 5]])], [torch.ones(1, 3), torch.zeros(2, 3)]
    x = sc.SparseTensor.from_list(coords, features, voxel_size=0.1, origin=(1.0, 2.0))
    assert x.grid.positions()[0].tolist() == pytest.approx([1.15, 2.25])
    assert sc.SparseTensor.from_list(coords, features).grid.voxel_size == (1.0, 1.0)
