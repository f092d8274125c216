"""Nothing is rounded, wrapped or left out in silence by the drop-in: what it cannot take is an error in words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv.interop.spconv.pytorch import functional, ops
from sparseconv.interop.spconv.pytorch.core import scatter_nd
from sparseconv.interop.spconv.pytorch.utils import PointToVoxel, gather_features_by_pc_voxel_id
from tests.interop.scenes import scene

FEATURES, INDICES, SHAPE, BATCH = scene()


def tensor(features=FEATURES, indices=INDICES, shape=SHAPE, batch=BATCH):
    return spconv.SparseConvTensor(features, indices, shape, batch)


def moved(indices):
    """A tensor whose indices were set by its client."""
    x = tensor()
    x.indices = indices
    return x


def past_32_bits():
    indices = INDICES.long()
    indices[0, 1] += 2**32
    return indices


def points(**options):
    given = {"max_num_voxels": 10, "max_num_points_per_voxel": 3, **options}
    return PointToVoxel([0.5] * 3, [0.0] * 3 + [9.0] * 3, 3, **given)


def other_places():
    """As many rows at other indices."""
    return tensor(indices=INDICES.flip(0))


WRONG = {
    "other indices, joined": (lambda: spconv.JoinTable()([tensor(), other_places()]), ValueError, "the same indices"),
    "other indices, in a table": (
        lambda: spconv.AddTable()([tensor(), other_places()]),
        ValueError,
        "the same indices",
    ),
    "other indices, added": (lambda: tensor() + other_places(), ValueError, "different indices"),
    "a norm of torch": (lambda: torch.nn.BatchNorm1d(5)(tensor()), AttributeError, "x.replace_feature"),
    "a batch item of torch.sparse": (
        lambda: tensor(FEATURES[:, 0], INDICES.t()),
        ValueError,
        r"features must be \(N, C\)",
    ),
    "rows in one line": (
        lambda: spconv.SubMConv3d(5, 6, 3)(tensor().replace_feature(FEATURES.flatten())),
        ValueError,
        "5 channels",
    ),
    "rows in one line, added": (
        lambda: functional.sparse_add(tensor(), tensor().replace_feature(FEATURES.flatten())),
        ValueError,
        "must be",
    ),
    "a third axis, joined": (
        lambda: spconv.JoinTable()([tensor(), tensor().replace_feature(FEATURES[..., None])]),
        ValueError,
        "JoinTable takes features",
    ),
    "two widths, added": (
        lambda: spconv.AddTable()([tensor(), tensor().replace_feature(FEATURES[:, :3])]),
        ValueError,
        "one width",
    ),
    "an axis before, added": (lambda: tensor() + FEATURES[None], ValueError, "cannot add"),
    "updates of other rows": (
        lambda: scatter_nd(INDICES.long(), FEATURES[1:], [BATCH, *SHAPE, 5]),
        ValueError,
        "updates",
    ),
    "indices past 32 bits": (lambda: tensor(indices=past_32_bits()), ValueError, "32 bits"),
    "indices set past 32 bits": (lambda: moved(past_32_bits()), ValueError, "32 bits"),
    "indices set to floats": (lambda: moved(INDICES * 0.5), TypeError, "must be integers"),
    "indices set to a mask": (lambda: moved(INDICES > 0), TypeError, "must be integers"),
    "indices set to nothing": (lambda: moved(None), TypeError, "it is None"),
    "features in numpy": (lambda: tensor(features=FEATURES.numpy()), TypeError, "ndarray"),
    "a part of a cell": (lambda: tensor(shape=[8.7, 8, 8]), TypeError, "spatial_shape must be whole"),
    "a shape that is text": (lambda: tensor(shape="888"), TypeError, "spatial_shape must be whole"),
    "a shape below nothing": (lambda: tensor(shape=[8, -8, 8]), ValueError, "at least 1"),
    "a part of a scene": (lambda: tensor(batch=2.7), TypeError, "batch_size must be whole"),
    "a kernel between two": (lambda: spconv.SubMConv3d(5, 6, (2.5, 3, 3)), TypeError, "whole numbers"),
    "a kernel of a float": (lambda: spconv.SubMConv3d(5, 6, 2.5), TypeError, "whole numbers"),
    "a kernel of nothing": (lambda: spconv.SubMConv3d(5, 6, 0), ValueError, "kernel_size must be at least 1"),
    "no stride": (lambda: spconv.SparseConv3d(5, 6, 3, 0), ValueError, "stride must be at least 1"),
    "a stride between two": (lambda: spconv.SparseConv3d(5, 6, 3, (1.5, 1, 1)), TypeError, "whole numbers"),
    "a pool between two": (lambda: spconv.SparseMaxPool3d((2.9, 2, 2)), TypeError, "whole numbers"),
    "a pool backwards": (lambda: spconv.SparseMaxPool3d(2, -1), ValueError, "stride must be at least 1"),
    "rows without an index": (
        lambda: spconv.SubMConv3d(5, 6, 1)(tensor(features=FEATURES[:-3])),
        ValueError,
        "one row per index",
    ),
    "a sum without an index": (
        lambda: functional.sparse_add(tensor(features=FEATURES[:-3]), tensor()),
        ValueError,
        "one row per voxel",
    ),
    "another dtype, one tap": (
        lambda: spconv.SubMConv3d(5, 6, 1)(tensor(features=FEATURES.double())),
        TypeError,
        "autocast",
    ),
    "points that are integers": (
        lambda: points()(torch.randint(0, 9, (20, 3))),
        TypeError,
        "points must be floating point",
    ),
    "a part of a voxel": (lambda: points(max_num_voxels=10.5), TypeError, "max_num_voxels must be whole"),
    "fewer voxels than none": (lambda: points(max_num_voxels=-1), ValueError, "at least 0"),
    "a point in a voxel too far": (
        lambda: gather_features_by_pc_voxel_id(torch.ones(3, 2), torch.tensor([0, 5])),
        ValueError,
        "voxel 5",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_it_is_refused_in_words(what):
    call, kind, words = WRONG[what]
    with pytest.raises(kind, match=words):
        call()


def test_whole_numbers_of_any_library_are_taken():
    x = tensor(shape=np.array([8.0, 8, 8]), batch=torch.tensor(2))
    assert x.spatial_shape == [8, 8, 8]
    assert x.batch_size == 2
    layer = spconv.SparseConv3d(5, 6, np.int64(3), np.array([2, 1, 2]), torch.tensor([1, 1, 1]).tolist())
    assert (layer.kernel_size, layer.stride) == ([3, 3, 3], [2, 1, 2])
    assert tensor(indices=INDICES.long()).indices.dtype == torch.int32
    assert tensor(indices=INDICES.to(torch.uint8)).indices.equal(INDICES)


OUTSIDE = {
    "submanifold": lambda: spconv.SubMConv3d(5, 6, 3),
    "strided": lambda: spconv.SparseConv3d(5, 6, 3, 2, 1),
    "transposed": lambda: spconv.SparseConvTranspose3d(5, 6, 3, 2, 1),
    "pool": lambda: spconv.SparseMaxPool3d(2),
    "sum": lambda: lambda x: functional.sparse_add(x, x),
}


@pytest.mark.parametrize("index", [-1, 8, 2**20])
@pytest.mark.parametrize("layer", OUTSIDE)
def test_indices_outside_of_the_spatial_shape_are_refused(layer, index):
    """spconv numbers cells by the shape, so that such voxels are taken for others or lost."""
    run, x = OUTSIDE[layer](), tensor(indices=INDICES.clone())
    run(x)
    x.indices[7, 2] = index
    with pytest.raises(ValueError, match=r"within spatial_shape \[8, 8, 8\].*first in row 7"):
        run(tensor(indices=x.indices.clone()))
    with pytest.raises(ValueError, match="within spatial_shape"):
        run(x)  # written to since the layer saw it
    run(tensor(indices=INDICES + torch.tensor([0, 1, 1, 1]).int(), shape=[9, 9, 9]))


def test_a_shape_that_a_client_makes_smaller_is_met():
    x = tensor()
    spconv.SubMConv3d(5, 6, 3)(x)
    assert int(INDICES[:, 3].max()) == 7
    x.spatial_shape = [8, 8, 4]
    with pytest.raises(ValueError, match="within spatial_shape"):
        spconv.SubMConv3d(5, 6, 3)(x)
    with pytest.raises(ValueError, match="within spatial_shape"):
        spconv.SparseConvTensor.from_sparse_tensor(tensor().to_sparse_tensor(), [8, 8, 4])
    with pytest.raises(ValueError, match="within spatial_shape"):
        ops.get_indice_pairs(INDICES, BATCH, [8, 8, 4], None, [3] * 3, [1] * 3, [1] * 3, [1] * 3, [0] * 3)


def test_tensors_at_equal_indices_are_added_whoever_made_them():
    x, y = tensor(), tensor(indices=INDICES.clone())
    assert torch.equal((x + y).features, 2 * FEATURES)
    assert spconv.JoinTable()([x, y]).features.shape == (len(FEATURES), 10)
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        x.nonsense
    assert not hasattr(x, "__len__")
