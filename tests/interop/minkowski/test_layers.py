"""Pools, broadcasts, norms, pruning, interpolation, activations and containers, against what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparseconv.interop.minkowski as ME
from sparseconv.interop.minkowski import MinkowskiFunctional as MF
from sparseconv.interop.minkowski.blocks import BasicBlock, Bottleneck, SEBasicBlock, SEBottleneck
from tests.interop.minkowski.meaning import as_set, cloud, cube, edges, strided


def tensor(**options):
    features, coords = cloud(**options)
    return ME.SparseTensor(features.requires_grad_(), coords, tensor_stride=options.get("stride", 1))


def pooled(features, found, count, how):
    """Loops over edges, with the features' graph."""
    rows = [[i for _, i, o in found if o == out] for out in range(count)]
    reduce = {"sum": lambda x: x.sum(0), "mean": lambda x: x.mean(0), "max": lambda x: x.max(0).values}[how]
    return torch.stack([reduce(features[r]) if r else features.new_zeros(features.shape[1]) for r in rows])


# ---- pools


@pytest.mark.parametrize("how", ["sum", "mean", "max"])
@pytest.mark.parametrize(("kernel", "stride"), [((3, 3, 3), (2, 2, 2)), ((3, 3, 3), (1, 1, 1)), ((2, 3, 1), (2, 1, 2))])
def test_local_pools(how, kernel, stride):
    layer = {"sum": ME.MinkowskiSumPooling, "mean": ME.MinkowskiAvgPooling, "max": ME.MinkowskiMaxPooling}[how]
    x = tensor(stride=2)
    y = layer(kernel, stride, dimension=3)(x)
    assert as_set(y.C) == strided(x.C, [2 * s for s in stride])
    wanted = pooled(x.F, edges(x.C, y.C, cube(kernel), (2, 2, 2)), len(y), how)
    assert torch.allclose(y.F, wanted)
    got, want = (torch.autograd.grad(t.square().sum(), x.F)[0] for t in (y.F, wanted))
    assert torch.allclose(got, want)


@pytest.mark.parametrize("how", ["sum", "mean", "max"])
@pytest.mark.parametrize("size", [2, 3, 16])
def test_pools_whose_kernel_is_their_stride_take_whole_cells(how, size):
    """Odd kernels too, which are centred elsewhere."""
    layer = {"sum": ME.MinkowskiSumPooling, "mean": ME.MinkowskiAvgPooling, "max": ME.MinkowskiMaxPooling}[how]
    x = tensor(extent=20)
    y = layer(size, size, dimension=3)(x)
    cells = [tuple(row) for row in y.C.tolist()]
    found = [(0, i, cells.index((b, *(c // size * size for c in at)))) for i, (b, *at) in enumerate(x.C.tolist())]
    wanted = pooled(x.F, found, len(y), how)
    assert torch.allclose(y.F, wanted)
    got, want = (torch.autograd.grad(t.square().sum(), x.F)[0] for t in (y.F, wanted))
    assert torch.allclose(got, want)
    up = ME.MinkowskiPoolingTranspose(size, size, dimension=3)(y)
    assert up.coordinate_map_key == x.coordinate_map_key
    assert torch.equal(up.F, y.F[[o for _, _, o in found]])


def test_transposed_pools_add_up():
    x = tensor()
    down = ME.MinkowskiSumPooling(3, 2, dimension=3)(x)
    up = ME.MinkowskiPoolingTranspose(3, 2, dimension=3)(down)
    found = [(k, o, i) for k, i, o in edges(x.C, down.C, cube((3, 3, 3)), (1, 1, 1))]
    assert torch.allclose(up.F, pooled(down.F, found, len(x), "sum"))
    new = ME.MinkowskiPoolingTranspose(2, 2, expand_coordinates=True, dimension=3)(down)
    assert len(new) == 8 * len(down)


@pytest.mark.parametrize("how", ["sum", "mean", "max"])
def test_global_pools(how):
    layer = {
        "sum": ME.MinkowskiGlobalSumPooling(),
        "mean": ME.MinkowskiGlobalPooling(),
        "max": ME.MinkowskiGlobalMaxPooling(),
    }[how]
    x = tensor(batch=3)
    kept = ME.MinkowskiPruning()(x, x.C[:, 0] != 1)
    few = ME.SparseTensor(x.F[x.C[:, 0] < 1], x.C[x.C[:, 0] < 1], coordinate_manager=x.coordinate_manager)
    for source in (x, kept, few):
        y = layer(source)
        assert y.tensor_stride == [0, 0, 0]
        assert y.C.tolist() == [[b, 0, 0, 0] for b in range(3)]
        items = [source.F[source.C[:, 0] == b] for b in range(3)]
        empty = torch.zeros(3, dtype=torch.float64)
        reduce = {"sum": lambda t: t.sum(0), "mean": lambda t: t.mean(0), "max": lambda t: t.max(0).values}[how]
        wanted = torch.stack([reduce(t) if len(t) else empty for t in items])
        assert torch.allclose(y.F, wanted)
        got, want = (torch.autograd.grad(t.square().sum(), source.F, retain_graph=True)[0] for t in (y.F, wanted))
        assert torch.allclose(got, want)
    field = ME.TensorField(x.F, x.C.float())
    assert torch.allclose(layer(field).F, layer(x).F)


def test_a_maximum_over_pairs():
    ins, outs = torch.tensor([0, 3, 2, 1]), torch.tensor([1, 1, 0, 1])
    x = torch.randn(4, 2, dtype=torch.float64)
    y = ME.MinkowskiDirectMaxPoolingFunction.apply(ins, outs, x, 3)
    assert torch.equal(y, torch.stack([x[2], x[[0, 3, 1]].max(0).values, torch.zeros(2, dtype=torch.float64)]))


# ---- broadcasts, norms


def test_broadcasts():
    x = tensor(batch=3)
    whole = ME.MinkowskiGlobalSumPooling()(x)
    each = whole.F[x.C[:, 0].long()]
    assert torch.allclose(ME.MinkowskiBroadcast()(x, whole).F, each)
    assert torch.allclose(ME.MinkowskiBroadcastAddition()(x, whole).F, x.F + each)
    assert torch.allclose(ME.MinkowskiBroadcastConcatenation()(x, whole).F, torch.cat([x.F, each], 1))
    y = ME.MinkowskiBroadcastMultiplication()(x, whole).F
    assert torch.allclose(y, x.F * each)
    got, want = (torch.autograd.grad(t.square().sum(), x.F, retain_graph=True)[0] for t in (y, x.F * each))
    assert torch.allclose(got, want)
    with pytest.raises(ValueError, match="pool globally"):
        ME.MinkowskiBroadcast()(x, ME.SparseTensor(whole.F[:1], whole.C[:1]))


def test_norms():
    x = tensor(batch=3)
    layer = ME.MinkowskiInstanceNorm(3).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2, 3]]))
        layer.bias.fill_(0.5)
    y = layer(x)
    items = [x.F[x.C[:, 0] == b] for b in range(3)]
    wanted = x.F.new_zeros(x.F.shape)
    for b, item in enumerate(items):
        wanted[x.C[:, 0] == b] = (item - item.mean(0)) / (item.var(0, unbiased=False) + 1e-8).sqrt()
    assert torch.allclose(y.F, wanted * layer.weight + 0.5)
    assert torch.autograd.gradcheck(
        lambda f: ME.MinkowskiInstanceNormFunction.apply(f, x.key, None, x.coordinate_manager), (x.F,)
    )
    assert ME.MinkowskiStableInstanceNorm(3).double()(x).F.shape == x.F.shape
    bn = ME.MinkowskiBatchNorm(3).double()
    assert torch.allclose(bn(x).F, torch.nn.BatchNorm1d(3).double()(x.F))
    assert sorted(bn.state_dict()) == sorted(f"bn.{n}" for n in torch.nn.BatchNorm1d(3).state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", [ME.MinkowskiInstanceNorm, ME.MinkowskiStableInstanceNorm])
def test_norms_of_halves_are_counted_in_fp32(norm, dtype):
    """Squares of 300 are past fp16, and 1e-8 is 0 there: items of one voxel were NaN, others 0."""
    features, coords = cloud(batch=2)
    coords[-1, 0] = 5  # an item of one voxel
    x = ME.SparseTensor((features.detach() * 400 + 1000).to(dtype), coords)
    layer = norm(x.F.shape[1])
    wide = layer(x.like(x.F.float()))
    assert torch.allclose(layer(x).F, wide.F, rtol=1e-4, atol=1e-4)
    assert torch.allclose(layer.to(dtype)(x).F.float(), wide.F, rtol=1e-2, atol=1e-2)
    assert layer(x).dtype == dtype
    function = ME.MinkowskiInstanceNormFunction.apply(x.F, x.key, None, x.coordinate_manager)
    assert function.dtype == dtype
    assert torch.allclose(function.float(), wide.F, rtol=1e-2, atol=1e-2)


def test_a_bias_of_a_channelwise_layer_keeps_the_dtype_of_autocast():
    features, coords = cloud()
    x = ME.SparseTensor(features.detach().float(), coords)
    layer = ME.MinkowskiChannelwiseConvolution(x.F.shape[1], 3, bias=True, dimension=3)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == ME.MinkowskiConvolution(x.F.shape[1], 4, 3, bias=True, dimension=3)(x).dtype


def test_synchronised_norms():
    net = torch.nn.Sequential(ME.MinkowskiBatchNorm(3), torch.nn.Sequential(ME.MinkowskiBatchNorm(4, momentum=0.3)))
    net[0].bn.running_mean.fill_(2)
    keys, weight = list(net.state_dict()), net[0].bn.weight
    made = ME.MinkowskiSyncBatchNorm.convert_sync_batchnorm(net.eval())
    assert isinstance(made[0], ME.MinkowskiSyncBatchNorm)
    assert isinstance(made[1][0].bn, torch.nn.SyncBatchNorm)
    assert list(made.state_dict()) == keys
    assert made[0].bn.weight is weight
    assert made[1][0].bn.momentum == 0.3
    x = tensor()
    assert torch.allclose(made[0].double()(x).F, (x.F - 2) / np.sqrt(1 + 1e-5))
    assert isinstance(
        ME.MinkowskiSyncBatchNorm.convert_sync_batchnorm(ME.MinkowskiBatchNorm(2)), ME.MinkowskiSyncBatchNorm
    )


# ---- voxels


def test_pruning():
    x = tensor()
    mask = x.F[:, 0].detach() > 0
    y = ME.MinkowskiPruning()(x, mask)
    assert torch.equal(y.C, x.C[mask])
    assert torch.equal(y.F, x.F[mask])
    assert y.tensor_stride == x.tensor_stride
    z = ME.MinkowskiConvolution(3, 4, 3, dimension=3).double()(y)
    assert torch.equal(z.C, y.C)
    assert len(ME.MinkowskiPruning()(x, torch.zeros_like(mask))) == 0
    key = ME.CoordinateMapKey(4)
    out = ME.MinkowskiPruningFunction.apply(x.F, mask, x.key, key, x.coordinate_manager)
    assert torch.equal(x.coordinate_manager.get_coordinates(key), y.C)
    assert torch.equal(out, y.F)


@pytest.mark.parametrize("stride", [1, (2, 4)])
def test_interpolation(stride):
    x = tensor(rank=2, stride=stride, points=80)
    steps = torch.tensor([stride] * 2 if isinstance(stride, int) else stride).double()
    gen = torch.Generator().manual_seed(0)
    points = torch.cat([torch.randint(0, 4, (30, 1), generator=gen), torch.rand(30, 2, generator=gen) * 12 - 6], 1)
    points = points.double().requires_grad_()
    layer = ME.MinkowskiInterpolation(return_kernel_map=True, return_weights=True)
    y, (ins, outs), weights = layer(x, points)
    near = (1 - (points[:, None, 1:] - x.C[None, :, 1:]).abs() / steps).clamp_min(0).prod(-1)
    matrix = near * (points[:, None, 0] == x.C[None, :, 0])
    assert torch.allclose(y, matrix @ x.F)
    listed = torch.zeros_like(matrix)
    listed[outs, ins] = weights
    assert torch.allclose(listed, matrix)
    got, want = (torch.autograd.grad(t.square().sum(), (x.F, points), retain_graph=True) for t in (y, matrix @ x.F))
    assert torch.allclose(got[0], want[0])
    assert torch.allclose(got[1][:, 1:], want[1][:, 1:])
    assert torch.equal(ME.MinkowskiInterpolation()(x, points), y)


def test_sparse_products():
    rows, cols = torch.tensor([0, 0, 1, 1]).int(), torch.tensor([0, 3, 2, 3]).int()
    vals, mat = torch.rand(4).double(), torch.rand(4, 3).double().requires_grad_()
    dense = torch.zeros(2, 4).double()
    dense[rows.long(), cols.long()] = vals
    assert torch.allclose(ME.spmm(rows, cols, vals, (2, 4), mat), dense @ mat)
    assert torch.equal(ME.spmm(rows.float(), cols.double(), vals, (2, 4), mat), ME.spmm(rows, cols, vals, (2, 4), mat))
    with pytest.raises(ValueError, match="some are not"):
        ME.spmm(rows + 0.5, cols, vals, (2, 4), mat)
    assert torch.allclose(ME.MinkowskiSPMMFunction.apply(rows, cols, vals, [2, 4], mat), dense @ mat)
    mean = ME.MinkowskiSPMMAverageFunction.apply(rows, cols, (2, 4), mat)
    assert torch.allclose(mean, (dense != 0).double() @ mat / 2)


# ---- layers of torch, containers


def test_activations_and_functions():
    x = tensor()
    field = ME.TensorField(x.F, x.C.float())
    for name in ("ReLU", "GELU", "Softmax", "PReLU", "Dropout", "LogSoftmax", "Threshold"):
        args = {"Softmax": (1,), "LogSoftmax": (1,), "Threshold": (0.1, 2)}.get(name, ())
        ours, torchs = (getattr(m, n)(*args).double().eval() for m, n in ((ME, f"Minkowski{name}"), (torch.nn, name)))
        for source in (x, field):
            y = ours(source)
            assert type(y) is type(source)
            assert torch.equal(y.F, torchs(x.F))
    for name in ("relu", "silu", "normalize", "tanh"):
        assert torch.equal(getattr(MF, name)(x).F, getattr(torch.nn.functional, name)(x.F))
    target = torch.zeros(len(x), dtype=torch.long)
    assert torch.equal(MF.cross_entropy(x, target), torch.nn.functional.cross_entropy(x.F, target))
    assert list(ME.MinkowskiPReLU().state_dict()) == ["module.weight"]
    layer = ME.MinkowskiSinusoidal(3, 5).double()
    assert torch.allclose(layer(x).F, torch.sin(x.F @ layer.kernel + layer.bias) * layer.coef)
    linear = ME.MinkowskiLinear(3, 5, bias=False).double()
    assert list(linear.state_dict()) == ["linear.weight"]
    assert torch.equal(linear(field).F, x.F @ linear.linear.weight.t())
    assert ME.MinkowskiToFeature()(x) is x.F


def test_containers():
    x = tensor()
    parts = [ME.MinkowskiLinear(3, 4).double() for _ in range(3)]
    each = torch.stack([p(x).F for p in parts])
    assert torch.equal(ME.MinkowskiStackCat(*parts)(x).F, torch.cat(list(each), 1))
    assert torch.allclose(ME.MinkowskiStackSum(*parts)(x).F, each.sum(0))
    assert torch.allclose(ME.MinkowskiStackMean(*parts)(x).F, each.mean(0))
    assert torch.allclose(ME.MinkowskiStackVar(*parts)(x).F, each.var(0, unbiased=False))
    assert torch.equal(ME.cat(x, x, x).F, ME.cat([x, x, x]).F)
    assert torch.equal(ME.sum(x, x).F, x.F * 2)
    with pytest.raises(ValueError, match="two coordinate managers"):
        ME.cat(x, tensor())
    with pytest.raises(ValueError, match="two tensors"):
        ME.cat(x)


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_residual_blocks(block):
    x = tensor(channels=8)
    wide = 4 * block.expansion
    down = torch.nn.Sequential(ME.MinkowskiConvolution(8, wide, 1, 2, dimension=3), ME.MinkowskiBatchNorm(wide))
    layer = block(8, 4, stride=2, dilation=2, downsample=down, dimension=3).double()
    names = {n.split(".")[0] for n in layer.state_dict()}
    assert names == {"downsample"} | {f"{k}{i}" for k in ("conv", "norm") for i in range(1, len(block.sizes) + 1)}
    out = layer(x)
    assert out.tensor_stride == [2, 2, 2]
    by_hand = x
    for i in range(1, len(block.sizes) + 1):
        by_hand = getattr(layer, f"norm{i}")(getattr(layer, f"conv{i}")(by_hand))
        by_hand = MF.relu(by_hand) if i < len(block.sizes) else by_hand
    assert torch.allclose(out.F, torch.relu(by_hand.F + layer.downsample(x).F))
    strides = [getattr(layer, f"conv{i}").kernel_generator.kernel_stride[0] for i in range(1, len(block.sizes) + 1)]
    assert strides == ([2, 1] if block is BasicBlock else [1, 2, 1])


def test_blocks_with_squeeze_and_excitation():
    x = tensor(channels=16)
    for block, planes in ((SEBasicBlock, 16), (SEBottleneck, 4)):
        layer = block(16, planes, reduction=4, D=3).double()
        assert {"se.fc.0.linear.weight", "se.fc.2.linear.bias"} <= set(layer.state_dict())
        assert layer(x).F.shape == x.F.shape


def _of_wrong_rank():
    x = tensor()
    key, manager, f = x.coordinate_map_key, x.coordinate_manager, x.F
    mask = torch.ones(len(f), dtype=torch.bool)
    pruned, united = ME.MinkowskiPruningFunction.apply, ME.MinkowskiUnionFunction.apply
    spread = ME.MinkowskiBroadcastFunction.apply
    added = ME.BroadcastMode.ELEMENTWISE_ADDITON
    rows = torch.arange(len(f))
    yield lambda: pruned(f[None], mask, key, None, manager), "in_feat must be"
    yield lambda: pruned(f, mask[1:], key, None, manager), "mask must be"
    yield lambda: united([key, key], ME.CoordinateMapKey(4), manager, f, f[:-1]), "in_feats must be"
    yield lambda: united([key, key], ME.CoordinateMapKey(4), manager, f, f[:, :1]), "as many channels"
    yield lambda: spread(f[:-1], torch.ones(2, 3).double(), added, key, None, manager), "input_features must be"
    yield lambda: spread(f, torch.ones(2, 2).double(), added, key, None, manager), "3 channels and batch items 2"
    yield lambda: spread(f, torch.ones(()).double(), added, key, None, manager), r"must be \(N, C\)"
    yield lambda: ME.MinkowskiDirectMaxPoolingFunction.apply(rows, rows[1:], f, len(f)), "in_map and out_map must be"
    yield lambda: ME.MinkowskiDirectMaxPoolingFunction.apply(rows + 1, rows, f, len(f)), "in_map must name rows"
    yield lambda: x.sparse(min_coords=torch.zeros(2).int()), "min_coords must be"
    yield lambda: x.sparse(max_coords=torch.zeros(3, 2).int()), "max_coords must be"
    layer = ME.MinkowskiConvolutionTranspose(3, 4, 2, 2, dimension=3).double()
    yield lambda: layer(x, x.C), "a multiple of its own stride"


@pytest.mark.parametrize("number", range(12))
def test_ranks_and_rows_are_looked_at(number):
    call, words = list(_of_wrong_rank())[number]
    with pytest.raises(ValueError, match=words):
        call()


def test_a_decoder_finds_the_voxels_of_a_pruned_encoder():
    features, coords = cloud()
    down = [ME.MinkowskiConvolution(3, 3, 2, 2, dimension=3).double() for _ in range(2)]
    up = ME.MinkowskiConvolutionTranspose(3, 3, 2, 2, dimension=3).double()
    x = ME.SparseTensor(features, coords)
    pruned = ME.MinkowskiPruning()(x, torch.arange(len(coords)) % 2 == 0)
    first = down[0](pruned)
    second = down[1](first)
    back = up(second)
    assert back.coordinate_map_key == first.coordinate_map_key
    assert ME.cat(back, first).F.shape == (len(first), 6)
    assert up(back).coordinate_map_key == x.coordinate_map_key  # MinkowskiEngine's key comes first where it is there


def test_what_follows_from_a_pruned_tensor_is_its_own():
    """Coarse voxels that were pruned by themselves are not those of a fine tensor that was pruned, too."""
    features, coords = cloud()
    down = ME.MinkowskiConvolution(3, 3, 2, 2, dimension=3).double()
    x, prune = ME.SparseTensor(features, coords), ME.MinkowskiPruning()
    coarse = down(x)
    prune(coarse, torch.arange(len(coarse)) == 0)
    fine = prune(x, torch.arange(len(x)) % 3 > 0)
    assert as_set(down(fine).C) == strided(fine.C, [2, 2, 2])


def test_what_is_quantized_anew_is_a_mean_over_the_voxels_it_holds():
    """A tensor made of a key, pooled; and interpolation between pooled voxels, in units of their stride."""
    features, coords = cloud()
    x = ME.SparseTensor(features, coords)
    positions = ME.SparseTensor(
        coords[:, 1:].double(), coordinate_map_key=x.coordinate_map_key, coordinate_manager=x.coordinate_manager
    )
    y = ME.MinkowskiAvgPooling(2, 2, dimension=3)(positions)
    coarse = torch.cat([coords[:, :1], torch.div(coords[:, 1:], 2, rounding_mode="floor") * 2], 1)
    wanted = [positions.F[(coarse == voxel).all(1)].mean(0) for voxel in y.C]
    assert torch.allclose(y.F, torch.stack(wanted))
    line = ME.SparseTensor(torch.arange(8.0)[:, None], torch.tensor([[0, i] for i in range(8)]))
    pooled = ME.MinkowskiAvgPooling(2, 2, dimension=1)(line)
    samples = torch.tensor([[0.0, i] for i in range(4)])
    assert ME.MinkowskiInterpolation()(pooled, samples).flatten().tolist() == [0.5, 1.5, 2.5, 3.5]


def test_a_slice_gives_each_point_the_pooled_voxel_that_holds_it():
    coords = torch.zeros(10, 4)
    coords[:, 3] = torch.arange(10)
    field = ME.TensorField(torch.arange(20.0).view(10, 2), coords)
    pooled = ME.MinkowskiAvgPooling(3, 2, dimension=3)(field.sparse())
    means = {int(at[3]): field.F[max(0, int(at[3]) - 1) : int(at[3]) + 2].mean(0) for at in pooled.C}
    assert torch.allclose(pooled.slice(field).F, torch.stack([means[i // 2 * 2] for i in range(10)]))
