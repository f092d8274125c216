"""Sparse tensors, fields and coordinate managers: reading, quantisation, arithmetic, slices, dense arrays."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import sparseconv.interop.minkowski as ME
from tests.interop.minkowski.meaning import as_set, cloud, strided

Mode = ME.SparseTensorQuantizationMode
COORDS = torch.IntTensor([[0, 1], [0, 1], [0, 2], [0, 2], [1, 0], [1, 0], [1, 1]])
FEATURES = torch.DoubleTensor([[0, 1, 2, 3, 5, 6, 7]]).T


# ---- reading


def test_what_is_read():
    features, coords = cloud(stride=2)
    x = ME.SparseTensor(features, coords, tensor_stride=2)
    for name in ("C", "coordinates", "coords"):
        assert torch.equal(getattr(x, name), coords), name
    for name in ("F", "features", "feats", "_F"):
        assert getattr(x, name) is features, name
    assert (x.D, x.dimension, x.tensor_stride, x.shape, x.dtype) == (3, 3, [2, 2, 2], features.shape, torch.float64)
    assert x.size() == features.shape
    assert len(x) == x.size(0) == len(features)
    assert x.coordinate_key == x.coordinate_map_key == x.coords_key
    assert x.coordinate_manager is x.coords_man is x._manager
    assert torch.equal(x.coordinate_manager.get_coordinates(2), coords)
    assert "coordinate_map_key=coordinate map key:[2, 2, 2]" in repr(x)
    assert x.float().F.dtype == torch.float32


def test_coordinates_are_the_callers_own():
    features, coords = cloud()
    kept = coords.clone()
    x = ME.SparseTensor(features, coords)
    y = x.like(features)
    x.C.add_(7)
    coords.zero_()
    assert torch.equal(y.C, kept)


def test_batch_items():
    coords = torch.IntTensor([[2, 0], [0, 0], [0, 1], [2, 2], [0, 2]])
    features = torch.arange(5.0)[:, None]
    x = ME.SparseTensor(features, coords)
    assert [f.flatten().tolist() for f in x.decomposed_features] == [[1, 2, 4], [], [0, 3]]
    assert [c.flatten().tolist() for c in x.decomposed_coordinates] == [[0, 1, 2], [], [0, 2]]
    assert [r.tolist() for r in x.decomposition_permutations] == [[1, 2, 4], [], [0, 3]]
    assert torch.equal(x.coordinates_at(2), x.coordinates_and_features_at(2)[0])
    assert x.features_at(2).flatten().tolist() == [0, 3]
    pruned = ME.MinkowskiPruning()(x, coords[:, 0] == 0)
    assert [len(f) for f in pruned.decomposed_features] == [3, 0, 0]


def test_other_ways_to_make_one():
    features, coords = cloud()
    x = ME.SparseTensor(features, coords)
    y = ME.SparseTensor(features * 2, coordinate_map_key=x.coordinate_map_key, coordinate_manager=x.coordinate_manager)
    assert torch.equal(y.C, coords)
    old = ME.SparseTensor(feats=features, coords=coords)
    older = ME.SparseTensor(features, coords_key=old.coords_key, coords_manager=old.coords_man)
    assert torch.equal(older.C, coords)
    floored = ME.SparseTensor(features, coords + torch.tensor([0, 0.3, 0.6, 0.9]))
    assert torch.equal(floored.C, coords)
    assert ME.SparseTensor(features.clone(), coords, requires_grad=True).requires_grad
    again = ME.SparseTensor(features, coords, coordinate_manager=x.coordinate_manager)
    assert again.coordinate_map_key != x.coordinate_map_key
    moved = x.to(dtype=torch.float32)
    assert moved.dtype == torch.float32
    assert moved.coordinate_map_key == x.coordinate_map_key
    assert x.cpu().coordinate_manager is x.coordinate_manager


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda f, c: ME.SparseTensor(f), ValueError, "either coordinates"),
        (lambda f, c: ME.SparseTensor(f, c[:2]), ValueError, "one row per point"),
        (lambda f, c: ME.SparseTensor(f[:, 0], c), ValueError, r"\(N, C\)"),
        (lambda f, c: ME.SparseTensor(f.tolist(), c), TypeError, "features"),
        (lambda f, c: ME.SparseTensor(f, c.tolist()), TypeError, "coordinates"),
        (lambda f, c: ME.SparseTensor(f, coordinate_map_key=ME.CoordinateMapKey([1], "")), ValueError, "manager"),
        (lambda f, c: ME.SparseTensor(f, c, tensor_stride=0), ValueError, "at least 1"),
        (lambda f, c: ME.TensorField(f, c, quantization_mode=Mode.NO_QUANTIZATION), ValueError, "one row per voxel"),
        (lambda f, c: ME.SparseTensor(f, c, quantization_mode=Mode.NO_QUANTIZATION), ValueError, "share a voxel"),
        (lambda f, c: ME.CoordinateManager(D=0), ValueError, "number of axes"),
        (lambda f, c: ME.CoordinateManager(D=1).get_coordinates(1), ValueError, "no voxels"),
        (lambda f, c: ME.CoordinateManager(D=2).insert_and_map(c), ValueError, r"\(N, 3\)"),
        (lambda f, c: ME.CoordinateMapKey(2).get_key(), ValueError, "not set"),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make(FEATURES, COORDS)


def test_a_key_of_other_voxels():
    x = ME.SparseTensor(*cloud())
    with pytest.raises(ValueError, match="names"):
        ME.SparseTensor(x.F[:3], coordinate_map_key=x.key, coordinate_manager=x.coordinate_manager)
    y = ME.SparseTensor(*cloud(seed=1))
    with pytest.raises(ValueError, match="no key of this"):
        ME.SparseTensor(x.F, coordinate_map_key=ME.CoordinateMapKey([9] * 3, ""), coordinate_manager=x._manager)
    with pytest.raises(ValueError, match="two coordinate managers"):
        x + y
    assert pickle.loads(pickle.dumps(x)).coordinate_map_key == x.coordinate_map_key


# ---- quantisation


@pytest.mark.parametrize(
    ("mode", "wanted", "share"),
    [
        (Mode.RANDOM_SUBSAMPLE, [0, 2, 5, 7], [1, 0, 1, 0, 1, 0, 1]),
        (Mode.UNWEIGHTED_AVERAGE, [0.5, 2.5, 5.5, 7], [0.5] * 6 + [1]),
        (Mode.UNWEIGHTED_SUM, [1, 5, 11, 7], [1] * 7),
        (Mode.MAX_POOL, [1, 3, 6, 7], [0, 1, 0, 1, 0, 1, 1]),
    ],
)
def test_points_that_share_a_voxel(mode, wanted, share):
    features = FEATURES.clone().requires_grad_()
    x = ME.SparseTensor(features, COORDS, quantization_mode=mode)
    assert x.F.flatten().tolist() == wanted
    assert x.C.tolist() == [[0, 1], [0, 2], [1, 0], [1, 1]]
    assert x.unique_index.tolist() == [0, 2, 4, 6]
    assert torch.equal(x.C[x.inverse_mapping], COORDS)
    assert torch.autograd.grad(x.F.sum(), features)[0].flatten().tolist() == share
    field = ME.TensorField(features, COORDS, quantization_mode=mode)
    y = field.sparse()
    assert y.F.flatten().tolist() == wanted
    assert torch.autograd.grad(y.F.sum(), features)[0].flatten().tolist() == share
    z = field.sparse(coordinate_map_key=x.coordinate_manager and y.coordinate_map_key)
    assert torch.equal(z.F, y.F)
    if mode is not Mode.MAX_POOL and mode is not Mode.UNWEIGHTED_SUM:
        back = x.slice(x)
        assert torch.equal(back.C, COORDS)
        assert torch.equal(back.F, x.F[x.inverse_mapping])


def test_a_field_and_its_voxels():
    gen = torch.Generator().manual_seed(0)
    points = torch.rand(50, 3, generator=gen) * 8 - 4
    coords = torch.cat([torch.arange(50)[:, None] % 2, points], 1)
    field = ME.TensorField(torch.randn(50, 3, generator=gen, dtype=torch.float64).requires_grad_(), coords)
    assert torch.equal(field.C, coords)
    assert [len(f) for f in field.decomposed_features] == [25, 25]
    x = field.sparse()
    assert as_set(x.C) == strided(torch.floor(coords).int(), (1, 1, 1))
    rows = field.inverse_mapping(x.coordinate_map_key)
    assert torch.equal(x.C[rows], torch.floor(coords).int())
    down = ME.MinkowskiConvolution(3, 5, 3, 2, dimension=3).double()(x)
    deep = field.inverse_mapping(down.coordinate_map_key)
    assert torch.equal(down.C[deep, 1:], (torch.floor(coords[:, 1:] / 2) * 2).int())
    out = down.slice(field)
    assert isinstance(out, ME.TensorField)
    assert torch.equal(out.F, down.F[deep])
    both = down.cat_slice(field)
    assert torch.equal(both.F, torch.cat([down.F[deep], field.F], 1))
    grad = torch.autograd.grad(both.F.square().sum(), field.F)[0]
    assert grad.shape == field.F.shape
    coarse = field.sparse(tensor_stride=4)
    assert coarse.tensor_stride == [4, 4, 4]
    assert as_set(coarse.C) == strided(torch.floor(coords).int(), (4, 4, 4))
    reduced = field.sparse(coordinate_map_key=down.coordinate_map_key)
    wanted = torch.stack([field.F[deep == row].mean(0) for row in range(len(down))])
    assert torch.allclose(reduced.F, wanted)


def test_points_outside_of_the_voxels():
    field = ME.TensorField(torch.ones(2, 1), torch.tensor([[0, 0.5], [0, 5.5]]))
    x = field.sparse()
    pruned = ME.MinkowskiPruning()(x, torch.tensor([True, False]))
    assert pruned.slice(field).F.tolist() == [[1], [0]]
    assert field.inverse_mapping(pruned.key).tolist() == [0, -1]
    for mode in (Mode.RANDOM_SUBSAMPLE, Mode.MAX_POOL, Mode.UNWEIGHTED_AVERAGE):
        assert field.sparse(coordinate_map_key=pruned.key, quantization_mode=mode).F.tolist() == [[1]]


def test_splat_and_interpolation():
    """The two are each other's transposes, and weights are those of linear interpolation."""
    gen = torch.Generator().manual_seed(0)
    coords = torch.cat([torch.zeros(20, 1), torch.rand(20, 2, generator=gen) * 4 - 2], 1).double()
    values = torch.randn(20, 3, generator=gen, dtype=torch.float64)
    field = ME.TensorField(values, coords)
    x = field.splat()
    wanted = {}
    for (_, a, b), value in zip(coords.tolist(), values):
        for i in (0, 1):
            for j in (0, 1):
                at = (int(np.floor(a)) + i, int(np.floor(b)) + j)
                weight = (1 - abs(a - at[0])) * (1 - abs(b - at[1]))
                wanted[at] = wanted.get(at, 0) + weight * value
    assert {tuple(c[1:]) for c in x.C.tolist()} == set(wanted)
    assert torch.allclose(x.F, torch.stack([wanted[tuple(c[1:])] for c in x.C.tolist()]))
    y = x.like(torch.randn(x.F.shape, generator=gen, dtype=torch.float64))
    there = y.interpolate(field)
    assert torch.allclose((there.F * values).sum(), (y.F * x.F).sum())
    assert torch.allclose(y.features_at_coordinates(y.C.double()), y.F)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_interpolation_of_halves_reads_points_as_they_are(dtype):
    """300.4 is no number of 16 bits: points are not those of the features' dtype."""
    gen = torch.Generator().manual_seed(0)
    points = torch.cat([torch.zeros(30, 1), torch.rand(30, 2, generator=gen) * 8 + 300], 1)
    field = ME.TensorField(torch.randn(30, 3, generator=gen), points)
    x = field.splat()
    there = x.like(x.F.to(dtype)).interpolate(field)
    assert there.dtype == dtype
    wanted = x.like(x.F.to(dtype).float()).interpolate(field)
    assert torch.allclose(there.F.float(), wanted.F, rtol=1e-2, atol=1e-2)


def test_fields_of_integers_past_those_of_fp32_keep_their_voxels():
    coords = torch.tensor([[0, 2**24, -(2**30)], [0, 2**24 + 1, -(2**30) - 1], [1, 2**31 - 9, 0]])
    field = ME.TensorField(torch.eye(3), coords)
    x = field.sparse()
    assert torch.equal(x.C, coords.int())
    assert torch.equal(x.slice(field).F, torch.eye(3))
    assert ME.TensorField(torch.eye(3), coords % 9).like(torch.eye(3)).C.dtype == torch.float32


# ---- arithmetic


def united(combine):
    """What MinkowskiEngine computes over the union: a where a alone is, else combine(a or 0, b)."""
    a = {0: 1.0, 1: 2.0}
    b = {1: 3.0, 2: 4.0}
    return {c: combine(a.get(c, 0.0), b[c]) if c in b else a[c] for c in {*a, *b}}


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv"])
def test_different_voxels(name):
    import operator

    function = getattr(operator, name)
    a = ME.SparseTensor(torch.tensor([[1.0], [2.0]]).requires_grad_(), torch.IntTensor([[0, 0], [0, 1]]))
    b = ME.SparseTensor(
        torch.tensor([[3.0], [4.0]]).requires_grad_(),
        torch.IntTensor([[0, 1], [0, 2]]),
        coordinate_manager=a.coordinate_manager,
    )
    c = function(a, b)
    assert {tuple(k)[1]: v for k, v in zip(c.C.tolist(), c.F.flatten().tolist())} == pytest.approx(united(function))
    c.F.sum().backward()
    if name == "add":
        assert a.F.grad.tolist() == b.F.grad.tolist() == [[1], [1]]


def test_the_same_voxels():
    features, coords = cloud()
    a = ME.SparseTensor(features, coords)
    b = a.like(features + 3)
    assert torch.equal((a + b).F, features + (features + 3))
    assert torch.equal((a * b / b - a).F, features * (features + 3) / (features + 3) - features)
    assert torch.equal((a**2).F, features**2)
    assert torch.equal((a + 1).F, features + 1)
    assert torch.equal((a * features).F, features * features)
    kept = b.F.clone()
    held = b
    b += a
    b -= a
    b *= a
    b /= a
    assert held is b
    assert torch.allclose(b.F, kept)
    other = ME.SparseTensor(*cloud(seed=3), coordinate_manager=a.coordinate_manager)
    with pytest.raises(ValueError, match="different coordinates"):
        a += other


def test_union_of_several_strides_and_batches():
    features, coords = cloud(batch=3)
    a = ME.SparseTensor(features, coords)
    b = ME.MinkowskiConvolution(3, 3, 2, 2, dimension=3).double()(a)
    _, more = cloud(seed=7, batch=1)
    c = ME.SparseTensor(torch.ones(len(more), 3).double(), more, coordinate_manager=a.coordinate_manager)
    out = ME.MinkowskiUnion()(a, b, c)
    assert out.tensor_stride == [1, 1, 1]
    assert as_set(out.C) == as_set(a.C) | as_set(b.C) | as_set(c.C)
    total = {}
    for x in (a, b, c):
        for at, value in zip(x.C.tolist(), x.F.detach()):
            total[tuple(at)] = total.get(tuple(at), 0) + value
    assert torch.allclose(out.F, torch.stack([total[tuple(at)] for at in out.C.tolist()]))
    assert len(ME.MinkowskiConvolution(3, 3, 3, dimension=3).double()(out)) == len(out)


def test_a_union_of_two_dtypes_has_the_wider_one():
    features, coords = cloud()
    a = ME.SparseTensor(features.float(), coords)
    b = a.like(a.F.half())
    for parts in ((a, b), (b, a)):
        assert torch.equal(ME.MinkowskiUnion()(*parts).F, a.F + b.F)


def test_the_global_manager():
    features, coords = cloud()
    modes = ME.SparseTensorOperationMode
    ME.set_sparse_tensor_operation_mode(modes.SHARE_COORDINATE_MANAGER)
    try:
        a, b = ME.SparseTensor(features, coords), ME.SparseTensor(*cloud(seed=1))
        assert a.coordinate_manager is b.coordinate_manager is ME.global_coordinate_manager()
        assert len(a + b) == len(as_set(a.C) | as_set(b.C))
        ME.clear_global_coordinate_manager()
        assert ME.global_coordinate_manager() is None
        ME.set_global_coordinate_manager(a.coordinate_manager)
        assert ME.TensorField(features, coords.float()).coordinate_manager is a.coordinate_manager
    finally:
        ME.clear_global_coordinate_manager()
        ME.set_sparse_tensor_operation_mode(modes.SEPARATE_COORDINATE_MANAGER)
    assert ME.sparse_tensor_operation_mode() is modes.SEPARATE_COORDINATE_MANAGER


# ---- dense arrays


def test_dense():
    features, coords = cloud(rank=2, stride=2)
    features.requires_grad_()
    x = ME.SparseTensor(features, coords, tensor_stride=2)
    low = coords[:, 1:].min(0).values
    dense, start, stride = x.dense(min_coordinate=low)
    assert dense.is_contiguous(), "clients view it"
    assert stride.tolist() == [2, 2]
    assert start.tolist() == [low.tolist()]
    for row, (b, *at) in zip(features, coords.tolist()):
        assert torch.equal(dense[b, :, (at[0] - low[0]) // 2, (at[1] - low[1]) // 2], row)
    assert torch.allclose(dense.sum(), features.sum())
    grad = torch.autograd.grad(dense.sum(), features)[0]
    assert torch.equal(grad, torch.ones_like(grad))
    wide, _, _ = x.dense(shape=torch.Size([4, 1, 40, 40]), min_coordinate=torch.IntTensor([-20, -20]))
    assert wide.shape == (4, 3, 40, 40)
    loose, _, _ = x.dense(min_coordinate=low, contract_stride=False)
    assert torch.equal(loose[:, :, ::2, ::2], dense)
    made, _, _ = x.sparse(min_coords=low)
    assert torch.equal(made.to_dense().movedim(-1, 1), dense)
    with pytest.raises(ValueError, match="min_coordinate"):
        x.dense()
    with pytest.raises(ValueError, match="do not fit"):
        x.dense(shape=torch.Size([2, 3, 2, 2]), min_coordinate=low)
    with pytest.raises(ValueError, match="multiple"):
        x.dense(min_coordinate=low - 1)


def test_dense_and_back():
    dense = torch.rand(2, 3, 4, 5)
    dense[:, :, 1] = 0
    x = ME.to_sparse(dense)
    assert len(x) == 2 * 3 * 5
    assert torch.equal(ME.MinkowskiToDenseTensor(dense.shape)(x), dense)
    every = ME.MinkowskiToSparseTensor(remove_zeros=False, coordinates=ME.dense_coordinates(dense.shape))(dense)
    assert len(every) == 2 * 4 * 5
    assert torch.equal(ME.MinkowskiToDenseTensor()(every), dense)
    assert len(ME.MinkowskiToSparseTensor()(dense)) == 2 * 3 * 5
    given = ME.MinkowskiToSparseTensor(coordinates=ME.dense_coordinates(dense.shape))(dense)
    assert torch.equal(given.C, every.C)  # coordinates leave no site out, as MinkowskiEngine's text says
    last = ME.to_sparse(dense.movedim(1, -1), format="BXXC")
    assert torch.equal(last.C, x.C)
    assert torch.equal(last.F, x.F)
    empty = ME.to_sparse(torch.zeros(4, 1, 6, 6))
    assert ME.MinkowskiToDenseTensor(torch.Size([4, 1, 6, 6]))(empty).abs().sum() == 0


# ---- the coordinate manager


def test_maps_of_a_manager():
    manager = ME.CoordinateManager(D=1)
    key, (unique, inverse) = manager.insert_and_map(COORDS, [1])
    assert torch.equal(COORDS[unique][inverse], COORDS)
    coarse = manager.stride(key, [4])
    assert as_set(manager.get_coordinates(coarse)) == {(0, 0), (1, 0)}
    rows, held = manager.stride_map(key, coarse)
    assert torch.equal(manager.get_coordinates(coarse)[held, 1], manager.get_coordinates(key)[rows, 1] // 4 * 4)
    assert manager.kernel_map(key, coarse, 4, 4, is_pool=True)[0].shape == (2, 4)
    pairs = manager.kernel_map(1, 4, 4, 4)
    for tap, (ins, outs) in pairs.items():
        assert torch.equal(manager.get_coordinates(1)[ins.long(), 1], manager.get_coordinates(4)[outs.long(), 1] + tap)
    for region in (0, 1, ME.RegionType.HYPER_CROSS):  # numbers are MinkowskiEngine's; one tap is a cube
        assert [p.tolist() for p in manager.kernel_map(1, 1, kernel_size=1, region_type=region).values()] == [
            [[0, 1, 2, 3]] * 2
        ]
    back = manager.kernel_map(4, 1, 4, 4, is_transpose=True)
    assert {k: p.flip(0).tolist() for k, p in back.items()} == {k: p.tolist() for k, p in pairs.items()}
    assert manager.get_coordinates(manager.origin()).tolist() == [[0, 0], [1, 0]]
    assert manager.number_of_unique_batch_indices() == 2
    assert manager.size(key) == 4
    assert manager.get_unique_coordinate_map_key(1) != key
    items, rows = manager.origin_map(key)
    assert items.tolist() == [0, 1]
    assert [r.tolist() for r in rows] == [[0, 1], [2, 3]]


def test_negative_coordinates_and_long_strides():
    for stride in (2, 40):
        coords = torch.IntTensor([[0, c, -c] for c in range(-90, 90, 7)])
        manager = ME.CoordinateManager(D=2)
        key, _ = manager.insert_and_map(coords)
        assert as_set(manager.get_coordinates(manager.stride(key, stride))) == strided(coords, (stride, stride))
