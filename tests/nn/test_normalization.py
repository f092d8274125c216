"""Norms against torch's on full grids, per batch item, and on hardly any voxel."""

from __future__ import annotations

import copy

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from tests.cases import TOLERANCE, Case, error, random_grid
from tests.nn.test_convolution import full, sparse

NORMS = {
    "batch": lambda **o: (nn.BatchNorm(6, **o), torch.nn.BatchNorm3d(6, **o)),
    "group": lambda **o: (nn.GroupNorm(3, 6, **o), torch.nn.GroupNorm(3, 6, **o)),
    "instance": lambda **o: (nn.InstanceNorm(6, affine=True, **o), torch.nn.InstanceNorm3d(6, affine=True, **o)),
    "instance_plain": lambda **o: (nn.InstanceNorm(6, **o), torch.nn.InstanceNorm3d(6, **o)),
}


@pytest.mark.parametrize("name", NORMS)
def test_equal_to_torch_on_a_full_grid(name):
    dense, x = full(3, 6, 3)
    ours, theirs = NORMS[name](dtype=torch.float64)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    for _ in range(2):
        got, want = ours(x).to_dense(), theirs(dense)
        assert error(got, want) < 1e-10
    inputs, grad = (dense, *ours.parameters()), torch.randn_like(want)
    mine = torch.autograd.grad(got, inputs, grad, retain_graph=True)
    other = torch.autograd.grad(want, (dense, *theirs.parameters()), grad)
    for a, b in zip(mine, other):
        assert error(a, b) < 1e-8
    for key, value in theirs.state_dict().items():
        assert torch.allclose(ours.state_dict()[key], value), key
    assert error(ours.eval()(x).to_dense(), theirs.eval()(dense)) < 1e-10


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_sees_the_voxels_of_its_item_only(groups, shuffle):
    grid = random_grid(Case("items", voxels=30, batch=3), shuffle=shuffle)
    x = torch.randn(len(grid), 6, dtype=torch.float64) + 5
    got = nn.GroupNorm(groups, 6, dtype=torch.float64)(sc.SparseTensor(grid, x)).features
    for b in range(grid.batch_size):
        rows = grid.coords[:, 0] == b
        for channels in torch.arange(6).view(groups, -1):
            part = x[rows][:, channels]
            want = (part - part.mean()) / (part.var(correction=0) + 1e-5).sqrt() if part.numel() else part
            assert error(got[rows][:, channels], want) < 1e-10


def test_layer_norm_is_torchs_on_each_voxel():
    x, norm = sparse(6), nn.LayerNorm(6)
    assert torch.equal(norm(x).features, torch.nn.LayerNorm(6)(x.features))


@pytest.mark.parametrize("norm", [nn.BatchNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm(4, affine=True)], ids=repr)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("voxels", [0, 1, 2])
def test_hardly_any_voxel(norm, voxels, training):
    x = sparse(voxels=voxels)
    x = x.with_features(x.features.requires_grad_())
    state = {k: v.clone() for k, v in norm.state_dict().items()}
    norm.train(training).zero_grad()
    y = norm(x).features
    assert y.shape == x.features.shape
    assert y.isfinite().all()
    y.sum().backward()
    assert norm.weight.grad.isfinite().all()
    assert x.features.grad.isfinite().all()
    for key, value in norm.state_dict().items():
        assert value.isfinite().all()
        assert voxels == 2 or torch.equal(value, state[key]), key
    norm.load_state_dict(state)


def test_one_voxel_in_training_is_the_bias():
    norm, x = nn.BatchNorm(4), sparse(voxels=1)
    torch.nn.init.normal_(norm.bias)
    assert torch.equal(norm(x).features[0], norm.bias)
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [nn.BatchNorm(6), nn.GroupNorm(2, 6), nn.InstanceNorm(6), nn.LayerNorm(6)], ids=repr)
def test_halves(norm, dtype):
    x = sparse(6)
    x = x.with_features(100 + x.features).to(dtype=dtype)
    want = norm(x.to(dtype=torch.float64).to(dtype=torch.float32)).features
    # torch keeps a half BatchNorm's mean in halves on the CPU; with its parameters in fp32, as under autocast, in fp32
    module = norm if isinstance(norm, nn.BatchNorm) else copy.deepcopy(norm).to(dtype)
    y = module(x).features
    assert y.dtype == dtype
    assert error(y, want.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm(4, affine=True), nn.BatchNorm(4)], ids=repr)
def test_gradients_to_the_second_order(norm):
    norm = norm.double()
    grid = sparse(voxels=8).grid
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)

    def function(t):
        return norm(sc.SparseTensor(grid, t)).features

    assert torch.autograd.gradcheck(function, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x,), fast_mode=True, atol=1e-4)


def test_plain_features_need_their_grid():
    x, norm = sparse(), nn.GroupNorm(2, 4)
    assert torch.equal(norm(x.features, grid=x.grid), norm(x).features)
    with pytest.raises(TypeError, match="grid="):
        norm(x.features)
    with pytest.raises(ValueError, match="made for 4 channels"):
        norm(sparse(5))
    empty = sparse(voxels=0)
    assert norm(empty.features, grid=empty.grid).shape == (0, 4)
    assert nn.GlobalMaxPool()(empty.features, grid=empty.grid).shape == (3, 4)


@pytest.mark.parametrize("voxels", [1, 7])
def test_a_weight_without_a_bias_as_later_releases_of_torch_have(voxels):
    x = torch.randn(voxels, 6, dtype=torch.float64)
    scene = sc.SparseTensor(sc.VoxelGrid(torch.nn.functional.pad(torch.arange(voxels)[:, None], (1, 0))), x)
    for norm in (nn.BatchNorm(6, dtype=torch.float64), nn.GroupNorm(3, 6, dtype=torch.float64)):
        torch.nn.init.normal_(norm.weight)
        want = norm(scene).features
        norm.bias = None
        assert torch.equal(norm(scene).features, want)
