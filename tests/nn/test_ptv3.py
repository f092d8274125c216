"""Point Transformer V3 against figures of Pointcept's own file, run unmodified in fp64 under spconv's names."""

from __future__ import annotations

import pickle

import pytest
import torch

import sparseconv as sc
from sparseconv import nn, ops
from sparseconv.interop import load_published
from sparseconv.nn.convolution import ConvolutionModule
from sparseconv.nn.models import ptv3_parts
from sparseconv.nn.models.ptv3 import PointTransformerOptions, PointTransformerV3
from sparseconv.ops.serialization import ORDERS

SMALL = {
    "order": ORDERS,
    "stride": (2, 2),
    "enc_depths": (1, 2, 1),
    "enc_channels": (8, 16, 24),
    "enc_num_head": (1, 2, 2),
    "enc_patch_size": (32, 32, 32),
    "dec_depths": (2, 1),
    "dec_channels": (12, 16),
    "dec_num_head": (2, 2),
    "dec_patch_size": (32, 32),
    "drop_path": 0.0,
}
#: what Utonia's variant takes: heads of a multiple of six channels
M3 = {
    "variant": "m3",
    "rope_base": 10,
    "enc_channels": (12, 12, 24),
    "dec_channels": (12, 24),
    "dec_num_head": (1, 2),
}
#: options, rows of each item, training, and what Pointcept's file gives: sum and sum of squares of the output, three
#: of its values, the sums of squares of the gradients of the input and of all parameters
CASES = {
    "flash-attn": (
        {},
        (300, 20),
        False,
        [3103.5552705871, 6546.1268595325, -0.35377867653425, 1.5382921146886,
         2.4690126600353, 34.961084184973, 137771.93581686],
    ),
    "training": (
        {},
        (250, 100),
        True,
        [2923.4193340472, 7833.9135904959, 0.038618553441289, 0.94091619220675,
         2.6145589519829, 5033.609080823, 5264111.6333249],
    ),
    "relative positions": (
        {"enable_rpe": True, "enable_flash": False},
        (200, 40),
        True,
        [697.34384383884, 3386.6303917352, 0.14623976655807, 0.52303008804731,
         1.0414063327146, 613.71643971144, 457421.08091105],
    ),
    "m2": (
        {"variant": "m2", "layer_scale": 0.3, "mask_token": True, "stride": (2, 3)},
        (300, 20),
        True,
        [872.04529461721, 1232.3074228608, -0.87375810537778, -0.20417073661661,
         0.34761165244949, 190.85459717882, 60568.964452831],
    ),
    "m3, rotary on the way down": (
        M3 | {"dec_rope_enable": False},
        (300, 20),
        False,
        [2900.295943778, 6880.9094365333, -0.52361494580535, 1.2676178328983,
         2.6533655140682, 93.326532702198, 105786.82617006],
    ),
    "m3, stretched": (
        M3 | {"jitter_coords": 1.1, "rescale_coords": 1.2, "shift_coords": 0.2, "layer_scale": 0.3},
        (250, 100),
        True,
        [824.38910231643, 651.17171329042, 0.49577592188756, -0.10308833339517,
         -0.15636161599592, 123.45842823285, 39662.529268025],
    ),
    "norms behind": (
        {"pre_norm": False, "shuffle_orders": False, "qk_scale": 0.2},
        (200, 40),
        False,
        [-225.26989632964, 2706.5688522987, 0.49724559165452, -0.31539670953736,
         1.1594409202106, 2.4481339150182, 8166.2691790617],
    ),
}  # fmt: skip


def voxels(counts, edge=12):
    """(N, 4) distinct voxels of items, and (N, 5) features."""
    gen = torch.Generator().manual_seed(7)
    coords = []
    for item, rows in enumerate(counts):
        cells = torch.randperm(edge**3, generator=gen)[:rows]
        coords.append(torch.stack([torch.full((rows,), item), cells // edge**2, cells // edge % edge, cells % edge], 1))
    return torch.cat(coords), torch.randn(sum(counts), 5, generator=gen, dtype=torch.float64)


def published_state(net):
    """Weights by a seed, under Pointcept's names and in spconv's shapes."""
    gen = torch.Generator().manual_seed(8)
    convolutions = {f"{name}.weight" for name, layer in net.named_modules() if isinstance(layer, ConvolutionModule)}
    state = {}
    for key, value in sorted(net.state_dict().items()):
        shape = tuple(value.shape)
        if key in convolutions:
            edge = round(shape[0] ** (1 / 3))
            shape = (shape[2], edge, edge, edge, shape[1])
        drawn = torch.randn(shape, generator=gen, dtype=torch.float64)
        if key.endswith("num_batches_tracked"):
            state[key] = value
        elif key.endswith("running_var"):
            state[key] = 1 + 0.3 * drawn.tanh()
        else:
            state[key] = 0.2 * drawn + (1.0 if "norm" in key and key.endswith("weight") else 0.0)
    return state


def figures(y, x, parameters):
    """What is compared: of the output (N, C) by rows of the input, and of gradients of a weighted sum."""
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    grads = torch.autograd.grad((y * weight).sum(), [x, *parameters])
    squares = [g.square().sum().item() for g in grads]
    values = [y[row, column].item() for row, column in ((0, 0), (7, 3), (len(y) - 1, 11))]
    return [y.sum().item(), y.square().sum().item(), *values, squares[0], sum(squares[1:])]


@pytest.mark.parametrize("name", CASES)
def test_as_pointcepts_file(name):
    options, counts, training, want = CASES[name]
    net = PointTransformerV3(5, **(SMALL | options)).double()
    net.load_state_dict(published_state(net), strict=True)
    net.train(training)
    coords, features = voxels(counts)
    features.requires_grad_()
    torch.manual_seed(3)
    mask = torch.arange(len(coords)) % 3 == 0 if "mask_token" in options else None
    positions = 0.3 * coords[:, 1:].double() if options.get("variant") == "m3" else None
    y = net(sc.SparseTensor(sc.VoxelGrid(coords, len(counts)), features), mask=mask, positions=positions)
    got = figures(y.features, features, net.parameters())
    assert got == pytest.approx(want, rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("options", [{}, {"enable_flash": False, "enable_rpe": True}, {"variant": "m2"}])
def test_inference_goes_through_rows_in_parts(options, monkeypatch):
    """And brings features to the slots of patches, not queries, keys and values."""
    monkeypatch.setattr(ptv3_parts, "MLP_ROWS", 100)
    net = PointTransformerV3(5, **(SMALL | options)).double().eval()
    coords, features = voxels((700, 30))
    x = sc.SparseTensor(sc.VoxelGrid(coords, 2), features)
    torch.manual_seed(3)
    want = net(x).features
    torch.manual_seed(3)
    with torch.no_grad():
        got = net(x).features
    assert torch.allclose(got, want, rtol=1e-11, atol=1e-12)


def test_published_figures():
    """46.2 M, as the tables of Point Transformer V3 give it."""
    with torch.device("meta"):
        net = PointTransformerV3(6)
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == 46.2


def test_a_whole_checkpoint_loads():
    """A segmentor's file: the network lies under backbone., next to its head."""
    net = PointTransformerV3(5, **SMALL).double()
    state = published_state(net)
    public = {f"module.backbone.{key}": value for key, value in state.items()}
    public["module.seg_head.weight"] = torch.zeros(20, 12)
    report = load_published(net, public, "pointcept/ptv3")
    assert report.convolutions == 8
    other = PointTransformerV3(5, **SMALL).double()
    other.load_state_dict(state)
    assert all(torch.equal(value, net.state_dict()[key]) for key, value in other.state_dict().items())
    other.load_state_dict(net.state_dict())  # its own layout too
    holder = torch.nn.ModuleDict({"backbone": pickle.loads(pickle.dumps(other))})
    holder.load_state_dict({f"backbone.{key}": value for key, value in state.items()})
    state.pop("enc.enc1.down.proj.bias")
    with pytest.raises(RuntimeError, match=r"Missing key.*enc\.enc1\.down\.proj\.bias"):
        other.load_state_dict(state)


def small(**options):
    torch.manual_seed(0)
    return PointTransformerV3(5, **(SMALL | options)).double().eval()


def test_rows_may_come_in_any_order_and_voxels_lie_anywhere():
    net = small()
    coords, features = voxels((200, 90))
    turn = torch.randperm(len(coords))
    results = []
    for place, order in ((coords, None), (coords, turn), (coords - torch.tensor([0, 64, 64, 64]), None)):
        grid = sc.VoxelGrid(place if order is None else place[order], 2)
        curves = ops.serialize(grid, ORDERS, depth=7)
        torch.manual_seed(1)
        y = net(sc.SparseTensor(grid, features if order is None else features[order]), curves)
        results.append(y.features)
    torch.testing.assert_close(results[1], results[0][turn], rtol=1e-12, atol=1e-12)
    assert results[2].shape == results[0].shape
    assert bool(results[2].isfinite().all())


def test_orders_are_shuffled_by_torchs_generator():
    net = small()
    coords, features = voxels((300,))
    x = sc.SparseTensor(sc.VoxelGrid(coords), features)
    torch.manual_seed(1)
    first, second = net(x).features, net(x).features
    torch.manual_seed(1)
    assert torch.equal(net(x).features, first)
    assert not torch.equal(second, first)


def test_no_voxel_and_few():
    net = small().train()
    for coords in (torch.zeros(0, 4).int(), torch.tensor([[1, 3, 3, 3]]), torch.tensor([[0, 0, 0, 0], [0, -1, 0, 5]])):
        grid = sc.VoxelGrid(coords, 2)
        features = torch.randn(len(grid), 5, dtype=torch.float64, requires_grad=True)
        y = net(sc.SparseTensor(grid, features))
        assert y.features.shape == (len(grid), 12)
        y.features.square().sum().backward()
        assert bool(features.grad.isfinite().all())


def test_positions_are_the_voxels_unless_given():
    net = small(**M3, order="z")
    coords, features = voxels((200, 90))
    x = sc.SparseTensor(sc.VoxelGrid(coords, 2), features)
    want = net(x).features
    assert torch.equal(net(x, positions=x.coords[:, 1:].double()).features, want)
    moved = net(x, positions=x.coords[:, 1:].double() + torch.tensor([100.0, -7, 0.5])).features
    torch.testing.assert_close(moved, want, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(net(x, positions=2 * x.coords[:, 1:].double()).features, want)
    with torch.autocast("cpu", torch.bfloat16):  # which leaves positions alone
        halves = net.float()(x.float()).features.double()
    assert float((halves - want).detach().norm() / want.detach().norm()) < 0.05


def test_encoder_alone():
    net = small(enc_mode=True)
    assert not any(name.startswith("dec") for name in net.state_dict())
    coords, features = voxels((200,))
    grid = sc.VoxelGrid(coords)
    y = net(sc.SparseTensor(grid, features))
    assert y.channels == 24
    assert torch.equal(y.grid.coords, grid.coarsen(4).coords)


def test_it_learns_and_drops():
    net = small(drop_path=0.5, attn_drop=0.2, proj_drop=0.2).train()
    coords, features = voxels((200,))
    x = sc.SparseTensor(sc.VoxelGrid(coords), features)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = (net(x).features[:, 0] - features[:, 1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad is not None for p in net.parameters())


def test_other_ranks_and_halves():
    coords = torch.unique(torch.randint(0, 20, (100, 3)) * torch.tensor([0, 1, 1]), dim=0)
    net = PointTransformerV3(5, **SMALL, rank=2)
    x = sc.SparseTensor(sc.VoxelGrid(coords), torch.randn(len(coords), 5))
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    assert y.features.shape == (len(coords), 12)
    y.features.float().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters())


@pytest.mark.parametrize(("training", "variant"), [(False, "m1"), (True, "m1"), (False, "m2"), (False, "m3")])
def test_grids_of_fixed_size(training, variant):
    """Nothing of the network asks the host how many voxels there are."""
    options = M3 if variant == "m3" else {"variant": variant}
    net = small(order=("hilbert",), **options).train(training)  # one curve, since poolings shuffle
    coords, features = voxels((150, 60))
    grid = sc.VoxelGrid(coords, 2)
    padded = torch.cat([grid.coords, torch.full((30, 4), -1, dtype=torch.int32)])
    fixed = sc.geometry.FixedGrid(padded, torch.tensor([len(grid)], dtype=torch.int32), grid)
    results = []
    for place, rows in ((grid, features), (fixed, torch.cat([features, torch.ones(30, 5, dtype=torch.float64)]))):
        rows = rows.clone().requires_grad_()
        y = net(sc.SparseTensor(place, rows)).features[: len(grid)]
        grads = torch.autograd.grad(y.square().sum(), [rows, *net.parameters()])
        results.append([y, grads[0][: len(grid)], *grads[1:]])
    assert fixed.fault.item() == 0
    for mine, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_capture_is_the_plain_call_on_a_cpu():
    net = small()
    coords, features = voxels((150, 60))
    x = sc.SparseTensor(sc.VoxelGrid(coords, 2), features)
    torch.manual_seed(1)
    want = net(x).features
    torch.manual_seed(1)
    assert torch.equal(nn.capture(net)(x).features, want)


def test_errors():
    with pytest.raises(ValueError, match="dec_channels must name 2 stages"):
        PointTransformerV3(5, **(SMALL | {"dec_channels": (8,)}))
    with pytest.raises(ValueError, match="enc_num_head must name 3 stages"):
        PointTransformerOptions(**(SMALL | {"enc_num_head": (8,)}))
    with pytest.raises(ValueError, match="stride must name 2 poolings"):
        PointTransformerOptions(**(SMALL | {"stride": (2,)}))
    with pytest.raises(ValueError, match="powers of two"):
        PointTransformerV3(5, **(SMALL | {"stride": (2, 3)}))
    with pytest.raises(ValueError, match="options of variant='m2'"):
        PointTransformerOptions(layer_scale=1e-5)
    with pytest.raises(ValueError, match="options of variant='m3'"):
        PointTransformerOptions(variant="m2", jitter_coords=1.1)
    with pytest.raises(ValueError, match="variant must be one of 'm1', 'm2', 'm3'"):
        PointTransformerOptions(variant="m4")
    with pytest.raises(ValueError, match="multiple of 6 channels; got 8"):
        PointTransformerV3(5, **SMALL, variant="m3")
    x = sc.SparseTensor(sc.VoxelGrid(torch.tensor([[0, 0, 0, 0]])), torch.ones(1, 5))
    with pytest.raises(ValueError, match="positions need variant='m3'"):
        PointTransformerV3(5, **SMALL)(x, positions=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="masks need variant='m2' or 'm3'"):
        PointTransformerV3(5, **SMALL)(x, mask=torch.tensor([True]))
    with pytest.raises(ValueError, match="mask_token=True"):
        PointTransformerV3(5, **SMALL, variant="m2")(x, mask=torch.tensor([True]))
    with pytest.raises(ValueError, match="order must be one of"):
        PointTransformerOptions(order=("z", "peano"))
    with pytest.raises(ValueError, match="pdnorm_bn=True"):
        PointTransformerV3(5, pdnorm_bn=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'patch'"):
        PointTransformerV3(5, patch=3)
    assert PointTransformerV3(5, **SMALL, upcast_softmax=True, pdnorm_ln=False).options.enable_flash
    with pytest.raises(ValueError, match="must lie in 0"):
        PointTransformerV3(5, **(SMALL | {"drop_path": 1.0}))
