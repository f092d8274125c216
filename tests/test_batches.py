"""Several scenes as one batch: what lists of them are told, and what torch's loaders make of them."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import sparseconv as sc
from sparseconv import nn

CLOUDS = [torch.rand(5, 3), torch.rand(4, 3)]
CELLS = [torch.tensor([[0, 0, 1], [4, 1, 1]]), torch.tensor([[0, 0, 1], [2, 2, 2], [3, 3, 3]])]
FEATURES = [torch.rand(2, 4), torch.rand(3, 4)]
X = sc.SparseTensor.from_list(CELLS, FEATURES, voxel_size=0.5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sc.voxelize(CLOUDS, 0.1), "torch.cat(points) with batch=torch.repeat_interleave("),
        (lambda: sc.voxelize(tuple(CLOUDS), 0.1), "torch.cat(points) with batch="),
        (lambda: sc.voxelize([c.numpy() for c in CLOUDS], 0.1), "torch.from_numpy(numpy.concatenate(points)) with"),
        (lambda: sc.voxelize(torch.rand(2, 5, 3), 0.1), "points.flatten(0, 1) with batch="),
        (lambda: sc.VoxelGrid(CELLS), "SparseTensor.from_list(coords, features)"),
        (lambda: sc.VoxelGrid([c.numpy() for c in CELLS]), "SparseTensor.from_list(coords, features)"),
        (lambda: sc.VoxelGrid(torch.zeros(2, 5, 3).int()), "SparseTensor.from_list(list(coords), list(features))"),
        (lambda: sc.SparseTensor(CELLS, FEATURES), "SparseTensor.from_list(coords, features)"),
        (lambda: sc.SparseTensor([X.grid, X.grid], FEATURES), "VoxelGrid.cat(grids)"),
        (lambda: sc.SparseTensor(X.grid, FEATURES), "torch.cat(features)"),
        (lambda: nn.SubmanifoldConv(4, 8, 3)([X, X]), "torch.utils.data.default_collate"),
        (lambda: X.cat([X, X]), "x.cat(y, z)"),
        (lambda: sc.VoxelGrid.cat([X, X]), "the grid of a SparseTensor, x.grid"),
        (lambda: sc.SparseTensor.from_list([X.grid], FEATURES[:1]), "coords[0] must be a torch.Tensor"),
        (lambda: sc.SparseTensor.from_list([torch.rand(2, 3)], FEATURES[:1]), "voxelize() turns positions"),
        (lambda: sc.SparseTensor.from_list([X, X], [X, X]), "default_collate"),
        (lambda: sc.SparseTensor.from_list(CELLS, [FEATURES[0], FEATURES[0]]), "item 1 has 3 voxels, but 2 rows"),
        (lambda: sc.SparseTensor.from_list([CELLS[0][0]], [FEATURES[0][0]]), "coords[0] must be (N, D)"),
        (lambda: sc.SparseTensor.from_list([CELLS[0], CELLS[1][:, :2]], FEATURES), "coords[1] has 2 axes"),
        (lambda: sc.SparseTensor.from_list(CELLS, [FEATURES[0], FEATURES[1][:, :2]]), "features[1] has 2 channels"),
    ],
)
def test_a_list_of_scenes_is_told_what_joins_them(call, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        call()


def test_the_advice_is_right():
    batch = torch.repeat_interleave(torch.tensor([len(p) for p in CLOUDS]))
    assert sc.voxelize(torch.cat(CLOUDS), 0.1, batch)[0].batch_size == 2
    arrays = [c.numpy() for c in CLOUDS]
    assert torch.equal(torch.from_numpy(np.concatenate(arrays)), torch.cat(CLOUDS))
    points = torch.rand(2, 5, 3)
    items = torch.arange(len(points)).repeat_interleave(points.shape[1])
    assert sc.voxelize(points.flatten(0, 1), 0.1, items)[0].batch_size == 2


@pytest.mark.parametrize("first", [lambda b: 0, lambda b: b], ids=["zeros", "the item"])
def test_a_batch_column_in_a_list_is_noticed(first):
    cells = [torch.nn.functional.pad(c, (1, 0), value=first(b)) for b, c in enumerate(CELLS)]
    with pytest.warns(UserWarning, match=r"from_list numbers the items itself.*c\[:, 1:\]"):
        assert sc.SparseTensor.from_list(cells, FEATURES).grid.rank == 4
    with pytest.raises(ValueError, match=r"c\[:, 1:\]"):
        sc.SparseTensor.from_list([torch.nn.functional.pad(c, (1, 0)) for c in cells], FEATURES)


def test_four_axes_are_taken_without_a_word():
    cells = [torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]), torch.tensor([[5, 0, 0, 1]])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = sc.SparseTensor.from_list(cells, [torch.ones(2, 1), torch.ones(1, 1)])
        assert sc.SparseTensor.from_list([c[:0] for c in cells], [torch.ones(0, 1)] * 2).shape == (0, 1)
    assert (x.grid.rank, x.grid.batch_size) == (4, 2)


class Scenes(Dataset):
    """Scenes of different size, the third without a voxel, with their numbers."""

    def __init__(self, of) -> None:
        self.of = of

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int):
        count = 0 if number == 2 else 3 + number
        coords = torch.zeros(count, 4).int()
        coords[:, 1] = torch.arange(count)
        x = sc.SparseTensor(sc.VoxelGrid(coords, 1, voxel_size=0.5), torch.full((count, 2), float(number)))
        return self.of(x, number)


def test_a_loader_joins_sparse_tensors():
    for x, numbers in DataLoader(Scenes(_labelled), batch_size=2):
        assert x.grid.batch_size == 2
        assert x.grid.voxel_size == (0.5,) * 3
        sizes = [0 if n == 2 else 3 + n for n in numbers.tolist()]
        assert x.grid.batch_counts.tolist() == sizes
        assert [item.tolist() for item in x.to_list()] == [
            [[float(n)] * 2] * s for n, s in zip(numbers.tolist(), sizes)
        ]


def _labelled(x, number):
    return x, number


def _named(x, number):
    return {"scene": x, "grid": x.grid, "number": number}


def test_a_loader_joins_what_stands_in_a_dict_in_workers():
    batches = list(DataLoader(Scenes(_named), batch_size=4, num_workers=1))
    assert len(batches) == 1
    x, grid = batches[0]["scene"], batches[0]["grid"]
    assert torch.equal(x.coords, grid.coords)
    assert grid.batch_counts.tolist() == [3, 4, 0, 6]
    assert nn.SubmanifoldConv(2, 3, 3)(x).shape == (13, 3)


def test_scenes_that_do_not_fit_are_not_joined():
    other = sc.SparseTensor(sc.VoxelGrid(X.coords, voxel_size=0.1), X.features)
    with pytest.raises(ValueError, match="differ in voxel_size"):
        default_collate([X, other])
    with pytest.raises(ValueError, match=r"item 1 has 2 channels"):
        default_collate([X, X.with_features(X.features[:, :2])])


def test_gradients_come_back_to_the_scenes():
    a, b = X.with_features(X.features.clone().requires_grad_()), X.detach()
    joined = default_collate([a, b])
    joined.features[: len(a.grid)].square().sum().backward()
    assert torch.equal(a.features.grad, 2 * a.features.detach())


def test_jagged_tensors_follow_the_rows_of_each_item():
    coords = torch.tensor([[2, 0], [0, 3], [2, 5], [0, 1], [2, 4], [3, 3]])
    grid = sc.VoxelGrid(coords, 4)
    x = sc.SparseTensor(grid, torch.arange(12.0).view(6, 2).requires_grad_())
    nested = x.to_nested()
    assert [len(item) for item in nested.unbind()] == [2, 0, 3, 1]
    for mine, item in zip(nested.unbind(), x.to_list(), strict=True):
        assert torch.equal(mine, item)
    back = sc.SparseTensor.from_nested(grid, nested)
    assert torch.equal(back.features, x.features)
    (back.features * x.features.detach()).sum().backward()
    assert torch.equal(x.features.grad, x.features.detach())
    with pytest.raises(ValueError, match="lengths"):
        sc.SparseTensor.from_nested(sc.VoxelGrid(coords, 5), nested)
