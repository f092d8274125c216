"""Containers, blocks and the U-Net: what they compute, count, and survive."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from tests.cases import error
from tests.nn.test_convolution import sparse


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_sequential_mixes_sparse_and_plain_modules():
    x = sparse()
    net = nn.Sequential(
        nn.SubmanifoldConv(4, 8, 3), torch.nn.LayerNorm(8), nn.ReLU(), nn.GlobalAvgPool(), torch.nn.Linear(8, 2)
    )
    y = net(x)
    assert y.shape == (x.grid.batch_size, 2)
    hidden = torch.relu(net[1](net[0](x).features))
    assert torch.equal(net[:3](x).features, hidden)
    assert isinstance(net[:3], nn.Sequential)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (nn.ReLU(), torch.relu),
        (nn.LeakyReLU(0.2), torch.nn.LeakyReLU(0.2)),
        (nn.PReLU(), torch.nn.PReLU()),
        (nn.ELU(), torch.nn.ELU()),
        (nn.GELU(), torch.nn.GELU()),
        (nn.SiLU(), torch.nn.SiLU()),
        (nn.Sigmoid(), torch.sigmoid),
        (nn.Tanh(), torch.tanh),
        (nn.Softplus(), torch.nn.Softplus()),
        (nn.Pointwise(torch.nn.Hardtanh()), torch.nn.Hardtanh()),
        (nn.Dropout(0.5).eval(), lambda t: t),
    ],
    ids=lambda m: type(m).__name__,
)
def test_features_alone(ours, theirs):
    x = sparse()
    want = theirs(x.features)
    assert torch.equal(ours(x).features, want)
    assert torch.equal(ours(x.features), want)


def test_linear_keeps_the_state_of_torchs():
    ours, theirs, x = nn.Linear(4, 6), torch.nn.Linear(4, 6), sparse()
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(x).features, theirs(x.features))
    assert isinstance(ours, torch.nn.Linear)


def test_joins():
    x = sparse()
    y = nn.SubmanifoldConv(4, 4, 3)(x)
    assert torch.equal(nn.Cat()(x, y, x).features, torch.cat([x.features, y.features, x.features], 1))
    assert torch.equal(nn.Add()(x, y, x).features, x.features + y.features + x.features)
    assert torch.equal(nn.Residual(nn.ReLU())(x).features, x.features + x.features.relu())
    assert torch.equal(nn.ToDense()(x), x.to_dense())
    with pytest.raises(ValueError, match="different voxels"):
        nn.Add()(x, sparse(voxels=49))


def test_dense_box():
    x = sc.SparseTensor(sc.VoxelGrid(torch.tensor([[0, 1, 2]])), torch.ones(1, 3))
    assert nn.ToDense((4, 4))(x).shape == (1, 3, 4, 4)


def test_pooling_round_trip():
    x = sparse()
    pool = nn.MaxPool(2, return_winners=True)
    y, winners = pool(x)
    back = nn.MaxUnpool(2)(y, winners, onto=x)
    assert back.grid is x.grid
    kept = back.features != 0
    assert torch.equal(back.features[kept], x.features[kept])
    assert nn.Unpool(2)(y, onto=x).grid is x.grid
    assert (nn.Unpool(2)(y, onto=x).features >= x.features).all()
    total, mean = nn.SumPool(2)(x), nn.AvgPool(2, count_absent=True)(x)
    assert total.grid is y.grid
    assert error(mean.features * 8, total.features.double()) < 1e-5
    with pytest.raises(TypeError, match="onto="):
        nn.Unpool(2)(y)


def test_residual_block_is_its_formula():
    x, block = sparse(), nn.ResidualBlock(4, 6)
    conv1, norm1, _, conv2, norm2 = block.body
    body = norm2(conv2(norm1(conv1(x)).with_features(norm1(conv1(x)).features.relu())))
    want = (body.features + x.features @ block.skip.weight.T).relu()
    assert error(block(x).features, want.double()) < 1e-5
    assert nn.ResidualBlock(4, 4).skip is None
    assert nn.ResidualBlock(4, 4)(x).channels == 4


def test_bottleneck_counts():
    block = nn.Bottleneck(32, 64, reduction=4, norm=partial(nn.GroupNorm, 4))
    assert count(block) == 32 * 16 + 27 * 16 * 16 + 16 * 64 + 2 * (16 + 16 + 64) + 32 * 64
    assert block(sparse(32)).channels == 64
    assert nn.Bottleneck(8, 12, groups=2, reduction=5).body[3].in_channels == 4


def test_unet_of_the_benchmark():
    net = nn.UNet(4, 20)
    down = sum(27 * (4 * 32 if c == 4 else 2 * c * c) for c in (4, 32, 64, 128, 256))
    steps = sum(2 * 8 * a * b for a, b in ((32, 64), (64, 128), (128, 256)))
    up = sum(27 * 3 * a * a + 2 * a * a for a in (32, 64, 128))
    norms = 2 * (32 + 2 * (32 + 64 + 128 + 256) + 2 * (32 + 64 + 128) + (64 + 128 + 256) + (32 + 64 + 128))
    assert count(net) == down + steps + up + norms + 33 * 20 == 7_181_460
    assert round(count(net) / 1e6, 2) == 7.18


def test_unet_is_its_layers():
    x, net = sparse(dtype=torch.float64), nn.UNet(4, 3, channels=(8, 12)).double().eval()
    fine = net.encoder[0](net.stem(x))
    plan = sc.ConvolutionPlan(x.grid, 2, stride=2)
    coarse = sc.SparseTensor(plan.target, plan.execute(fine.features, net.down[0][0].weight))
    coarse = net.encoder[1](net.down[0][1:](coarse))
    back = plan.transpose().execute(coarse.features, net.up[0].weight)
    back = net.up_norm[0](x.with_features(back))
    want = net.head(net.decoder[0](fine.cat(back)))
    assert error(net(x).features, want.features) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block": "bottleneck", "blocks": (1, 2), "decoder_blocks": 2},
        {"block": "plain", "norm": partial(nn.GroupNorm, 2), "activation": nn.GELU, "stem_kernel": 5},
        {"block": nn.ResidualBlock, "down_kernel": 3, "down_stride": (2, 2, 1)},
        {"channels": (8,)},
    ],
    ids=str,
)
@pytest.mark.parametrize("voxels", [0, 1, 40])
def test_unet_in_other_shapes(options, voxels):
    net = nn.UNet(4, 3, **{"channels": (8, 12), **options})
    x = sparse(voxels=voxels)
    y = net(x)
    assert y.grid is x.grid
    assert y.features.isfinite().all()
    y.features.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_unet_of_another_rank(rank):
    assert nn.UNet(4, 3, channels=(4, 6), rank=rank)(sparse(rank=rank, voxels=6)).channels == 3


def test_unet_gradients():
    """Directional derivatives of the whole network in fp64."""
    x, net = sparse(voxels=12, dtype=torch.float64), nn.UNet(4, 2, channels=(4, 6), activation=nn.Tanh).double()
    features = x.features.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: net(x.with_features(t)).features, (features,), fast_mode=True, atol=1e-4)


def test_state_travels():
    torch.manual_seed(0)
    x, net, other = sparse(), nn.UNet(4, 3, channels=(8, 12)), nn.UNet(4, 3, channels=(8, 12))
    net(x)  # moves the running statistics
    other.load_state_dict(net.state_dict())
    want = net.eval()(x).features
    for same in (other, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(same.eval()(x).features, want)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        y = copy.deepcopy(net).to(dtype)(x.to(dtype=dtype))
        assert y.dtype == dtype
        assert error(y.features, want.double()) < 0.2


def test_unet_errors():
    with pytest.raises(ValueError, match="blocks must be"):
        nn.UNet(4, 3, channels=(4, 8), blocks=(1, 2, 3))
    with pytest.raises(ValueError, match="block must be one of"):
        nn.UNet(4, 3, block="dense")
    with pytest.raises(ValueError, match="at least one level"):
        nn.UNet(4, 3, channels=())


def test_norms_become_synchronised_ones():
    """torch's conversion replaces norms by plain modules, and a network still hands them the features."""
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(nn.UNet(4, 3, channels=(4, 6)))
    norms = [m for m in net.modules() if isinstance(m, torch.nn.SyncBatchNorm)]
    assert len(norms) == 9
    assert not any(isinstance(m, nn.BatchNorm) for m in net.modules())
    for module in net.modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            module.forward = torch.nn.BatchNorm1d.forward.__get__(torch.nn.BatchNorm1d(module.num_features))
    assert net(sparse()).channels == 3


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda call: pickle.loads(pickle.dumps(call))], ids=["copy", "pickle"]
)
def test_a_captured_inference_is_copied_and_pickled(copied):
    """Where there is no graph: its lock was no part of a copy."""
    x = sparse()
    call = nn.capture(nn.UNet(4, 3, channels=(4, 6)).eval(), x)
    assert torch.equal(copied(call)(x).features, call(x).features)
