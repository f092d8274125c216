"""torchsparse's layers and functions against loops over coordinates, dense convolutions and each other."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

import sparseconv.interop.torchsparse as torchsparse
import sparseconv.interop.torchsparse.nn as spnn
from sparseconv.interop.torchsparse import SparseTensor, conventions
from sparseconv.interop.torchsparse.backbones import SparseResNet21D, SparseResUNet42
from sparseconv.interop.torchsparse.nn import functional as F
from sparseconv.interop.torchsparse.tensor import TensorCacheMode, set_tensor_cache_mode
from sparseconv.interop.torchsparse.utils import sparse_collate_fn, sparse_quantize
from tests import oracle
from tests.forked import printed


@pytest.fixture(autouse=True)
def _defaults():
    yield
    torchsparse.set_version("2.1")
    conventions.set_allow_negative_coordinates(False)
    F.conv_config.clear_global_conv_config()


def cloud(n=60, extent=7, channels=3, batch=2, low=0, seed=0):
    gen = torch.Generator().manual_seed(seed)
    voxels = torch.randint(low, extent, (n, 3), generator=gen)
    coords = torch.unique(torch.cat([torch.randint(0, batch, (n, 1), generator=gen), voxels], 1), dim=0).int()
    coords = coords[torch.randperm(len(coords), generator=gen)]
    return torch.randn(len(coords), channels, generator=gen, dtype=torch.float64), coords


def taps(kernel):
    """The first axis is fastest for an odd number of taps, the last one for an even one."""
    if np.prod(kernel) % 2:
        return [t[::-1] for t in itertools.product(*map(range, reversed(kernel)))]
    return list(itertools.product(*map(range, kernel)))


def check(layer, x, y, stride, padding, dilation=(1, 1, 1)):
    """in = stride * out + dilation * (tap - padding), values and gradients."""
    found = [tuple(d * (t - p) for t, p, d in zip(tap, padding, dilation)) for tap in taps(layer.kernel_size)]
    found = oracle.edges(x.C.numpy(), y.C.numpy(), found, stride, (0, 0, 0))
    weight = layer.kernel.detach().numpy().reshape(-1, *layer.kernel.shape[-2:])
    bias = None if layer.bias is None else layer.bias.detach().numpy()
    wanted = oracle.convolve(x.F.detach().numpy(), weight, found, len(y.F), bias=bias)
    assert np.allclose(y.F.detach().numpy(), wanted, atol=1e-12)
    grad = torch.randn(y.F.shape, dtype=torch.float64)
    got = torch.autograd.grad(y.F, [x.F, layer.kernel], grad)
    assert np.allclose(got[0].numpy(), oracle.input_grad(grad.numpy(), weight, found, len(x.F)), atol=1e-12)
    wanted = oracle.weight_grad(x.F.detach().numpy(), grad.numpy(), found, len(weight))
    assert np.allclose(got[1].numpy().reshape(weight.shape), wanted, atol=1e-12)


def tensor(**options):
    feats, coords = cloud(**options)
    return SparseTensor(feats.requires_grad_(), coords)


@pytest.mark.parametrize(
    ("kernel", "dilation", "begin"),
    [
        ((3, 3, 3), 1, (1, 1, 1)),
        ((3, 3, 3), 2, (1, 1, 1)),
        ((1, 5, 3), 1, (0, 2, 1)),
        ((2, 2, 2), 1, (0, 0, 0)),
        ((2, 3, 4), 1, (0, 0, 0)),
    ],
)
def test_submanifold(kernel, dilation, begin):
    x = tensor()
    layer = spnn.Conv3d(3, 4, kernel, dilation=dilation, bias=True).double()
    y = layer(x)
    assert y.C is x.C
    check(layer, x, y, (1, 1, 1), begin, (dilation,) * 3)
    if np.prod(kernel) % 2 == 0:
        F.set_kmap_mode("hashmap")
        x = tensor()
        check(layer, x, layer(x), (1, 1, 1), tuple((k - 1) // 2 for k in kernel))


def test_one_tap():
    x = tensor()
    layer = spnn.Conv3d(3, 4, 1, bias=True).double()
    assert layer.kernel.shape == (3, 4)
    assert torch.allclose(layer(x).F, x.F @ layer.kernel + layer.bias)
    assert spnn.Conv3d(3, 4, 1, 2).kernel.shape == (1, 3, 4)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [
        ((2, 2, 2), 2, 0),
        ((3, 3, 3), 2, 1),
        ((3, 3, 3), 2, 0),
        ((1, 3, 1), (1, 2, 1), 0),
        ((2, 3, 4), (2, 1, 3), (0, 1, 2)),
    ],
)
def test_strided_layers_are_dense_ones_where_there_are_voxels(kernel, stride, padding, given):
    feats, coords = cloud()
    x = SparseTensor(feats.requires_grad_(), coords, spatial_range=(2, 9, 9, 9) if given else None)
    layer = spnn.Conv3d(3, 4, kernel, stride, padding).double()
    y = layer(x)
    step = layer.stride
    size = [9] * 3 if given else (coords[:, 1:].max(0).values + 1).tolist()
    dense = torch.zeros(2, 3, *size, dtype=torch.float64)
    dense[coords[:, 0].long(), :, coords[:, 1].long(), coords[:, 2].long(), coords[:, 3].long()] = feats.detach()
    weight = layer.kernel.detach()
    weight = weight.view(*(kernel[::-1] if np.prod(kernel) % 2 else kernel), 3, 4)
    order = (4, 3, 2, 1, 0) if np.prod(kernel) % 2 else (4, 3, 0, 1, 2)
    wanted = torch.nn.functional.conv3d(dense, weight.permute(order), stride=step, padding=layer.padding)
    seen = torch.nn.functional.conv3d(
        (dense != 0).any(1, True).double(), torch.ones(1, 1, *kernel).double(), stride=step, padding=layer.padding
    )
    assert torch.equal(torch.unique(y.C, dim=0).long(), (seen[:, 0] > 0.5).nonzero())
    assert torch.allclose(y.F, wanted.movedim(1, -1)[tuple(y.C.long().t())], atol=1e-12)
    assert y.stride == step
    assert y.spatial_range == ((2, *wanted.shape[2:]) if given else None)
    check(layer, x, y, step, layer.padding)


@pytest.mark.parametrize("kernel", [2, 3])
def test_transposed_layers_undo_a_strided_one(kernel):
    x = tensor()
    down = spnn.Conv3d(3, 5, kernel, 2, padding=kernel // 3).double()(x)
    inner = down.like(down.F.detach().requires_grad_())
    layer = spnn.Conv3d(5, 4, kernel, 2, transposed=True, bias=True).double()
    y = layer(inner)
    assert y.C is x.C
    assert y.stride == (1, 1, 1)
    plan = x.kmaps[(1, 1, 1), (kernel,) * 3, (2, 2, 2), (1, 1, 1)]
    adjoint = plan.execute(y.F, layer.kernel.transpose(1, 2))
    value = torch.randn_like(adjoint)
    got = torch.autograd.grad(adjoint, y.F, value)[0]
    assert torch.allclose(got, layer(inner.like(value)).F - layer.bias)
    with pytest.raises(ValueError, match="undoes such a layer"):
        spnn.Conv3d(5, 4, 5, 2, transposed=True).double()(inner)


@pytest.mark.parametrize("way", ["attributes", "arguments"])
@torch.no_grad()
def test_maps_are_handed_on_as_torchsparse_1_and_2_0_do(way):
    """As SPVCNN does between its points and voxels: coordinates alone, and the maps of another tensor."""
    torchsparse.set_version("2.0")
    feats, coords = cloud()
    x = SparseTensor(feats, coords[:, [1, 2, 3, 0]])
    x.cmaps.setdefault(x.stride, x.coords)
    same, down = spnn.Conv3d(3, 3, 3).double(), spnn.Conv3d(3, 5, 2, 2).double()
    up = spnn.Conv3d(5, 4, 2, 2, transposed=True).double()
    coarse = down(same(x))
    if way == "attributes":
        other = SparseTensor(coarse.F * 2, coarse.C, coarse.s)
        other.cmaps, other.kmaps = coarse.cmaps, coarse.kmaps
    else:
        other = SparseTensor(coarse.F * 2, coarse.C, coarse.s, cmaps=coarse.cmaps, kmaps=coarse.kmaps)
    assert other.cmaps is x.cmaps
    assert other.kmaps is x.kmaps
    y = up(other)
    assert y.C is x.C
    assert torch.equal(y.F, up(coarse.like(coarse.F * 2)).F)
    assert other.grid is coarse.grid
    before = dict(x.kmaps)
    assert torch.equal(same(y.like(feats)).F, same(x).F)
    assert x.kmaps == before  # no map was made again
    again = copy.deepcopy(other)
    assert torch.equal(up(pickle.loads(pickle.dumps(again))).F, y.F)
    again.cmaps = {}
    assert x.cmaps
    with pytest.raises(ValueError, match="undoes such a layer"):
        up(again)


def test_centred_windows_and_floors():
    x = tensor()
    F.set_kmap_mode("hashmap")
    F.set_downsample_mode("minkowski")
    layer = spnn.Conv3d(3, 4, 3, 2).double()
    y = layer(x)
    cells = torch.cat([x.C[:, :1], x.C[:, 1:] // 2], 1)
    assert torch.equal(torch.unique(y.C, dim=0), torch.unique(cells, dim=0))
    check(layer, x, y, (2, 2, 2), (1, 1, 1))
    F.set_downsample_mode("spconv")
    x = tensor()
    layer = spnn.Conv3d(3, 4, 3, 2, padding=1).double()
    check(layer, x, layer(x), (2, 2, 2), (1, 1, 1))


def test_windows_that_tile_the_axes_with_a_stride_have_floors():
    """Whatever they are on the other axes."""
    F.set_kmap_mode("hashmap")
    x = tensor()
    layer = spnn.Conv3d(3, 4, (2, 3, 2), (2, 1, 2)).double()
    y = layer(x)
    cells = torch.cat([x.C[:, :1], x.C[:, 1:] // torch.tensor([2, 1, 2])], 1)
    assert torch.equal(torch.unique(y.C, dim=0), torch.unique(cells, dim=0).int())
    check(layer, x, y, (2, 1, 2), (0, 1, 0))


def test_a_layers_own_settings_place_its_windows():
    for kernel, modes in ((3, {"kmap_mode": "hashmap", "downsample_mode": "minkowski"}), (2, {"kmap_mode": "hashmap"})):
        config = F.conv_config.get_default_conv_config()
        config.update(modes)
        layer = spnn.Conv3d(3, 4, kernel, 2, config=config).double()
        got = layer(tensor())
        default = F.conv3d(tensor(), layer.kernel, kernel, stride=2)
        F.conv_config.set_global_conv_config(config)
        wanted = F.conv3d(tensor(), layer.kernel, kernel, stride=2)
        F.conv_config.clear_global_conv_config()
        assert torch.equal(got.C, wanted.C)
        assert torch.equal(got.F, wanted.F)
        assert got.F.shape != default.F.shape or not torch.allclose(got.F, default.F)
    with pytest.raises(ValueError, match="kmap_mode must be"):
        spnn.Conv3d(3, 4, 2, 2, config={"kmap_mode": "grid"}).double()(tensor())


def test_negative_coordinates():
    feats, coords = cloud(low=-6)
    layer = spnn.Conv3d(3, 4, 2, 2).double()
    assert int(layer(SparseTensor(feats, coords)).C[:, 1:].min()) >= 0
    conventions.set_allow_negative_coordinates(True)
    y = layer(SparseTensor(feats, coords))
    assert int(y.C[:, 1:].min()) == -3


def test_generative_layers():
    x = tensor(n=8)
    layer = spnn.Conv3d(3, 4, 3, 2, transposed=True, generative=True).double()
    x.spatial_range = (2, 12, 12, 12)
    y = layer(x)
    moves = [tuple(t - 1 for t in tap) for tap in taps((3, 3, 3))]
    wanted = {(b, *(min(max(2 * c + t, 0), 11) for c, t in zip(at, move))) for b, *at in x.C.tolist() for move in moves}
    assert {tuple(c) for c in y.C.tolist()} == wanted
    zeros = SparseTensor(x.F, torch.cat([x.C[:, :1], x.C[:, 1:] * 2], 1))
    check(layer, zeros, y, (1, 1, 1), (1, 1, 1))
    assert y.kmaps == {}
    again = spnn.Conv3d(4, 4, 3).double()(y)
    assert again.C is y.C


@pytest.mark.parametrize(("kernel", "stride"), [((2, 2, 2), 2), ((4, 4, 4), 2), ((2, 3, 1), (2, 2, 1)), ((2, 2, 2), 1)])
def test_generative_layers_of_even_kernels_reach_what_the_strided_layer_saw(kernel, stride):
    """Even axes as torch's transposed convolution has them; odd ones the other way round, as torchsparse."""
    feats, coords = cloud(n=12, low=2)
    x = SparseTensor(feats.requires_grad_(), coords, 4)
    layer = spnn.Conv3d(3, 4, kernel, stride, transposed=True, generative=True).double()
    y = layer(x)
    steps = layer.stride
    moves = {
        tap: tuple((k - 1) // 2 - t if k % 2 else t - (k - 1) // 2 for t, k in zip(tap, kernel)) for tap in taps(kernel)
    }
    wanted = {}
    for (item, *at), values in zip(coords.tolist(), feats):
        for number, tap in enumerate(taps(kernel)):
            fine = (item, *(s * c + m for s, c, m in zip(steps, at, moves[tap])))
            wanted[fine] = wanted.get(fine, 0) + values @ layer.kernel[number]
    assert sorted(y.C.tolist()) == sorted(map(list, wanted))
    assert torch.allclose(y.F, torch.stack([wanted[tuple(c)] for c in y.C.tolist()]))
    assert y.stride == tuple(4 // s for s in steps)


def test_levels_below_stride_1_have_strides_of_their_own():
    F.set_kmap_mode("hashmap")
    up = spnn.Conv3d(1, 1, 3, 2, transposed=True, generative=True)
    down, same = spnn.Conv3d(1, 1, 2, 2), spnn.Conv3d(1, 1, 3)
    x = SparseTensor(torch.ones(1, 1), torch.tensor([[0, 3, 3, 3]]).int(), spatial_range=(1, 32, 32, 32))
    y = up(x)
    z = up(y)
    assert (y.s, z.s) == ((Fraction(1, 2),) * 3, (Fraction(1, 4),) * 3)
    coarse = [down(y), down(down(z))]
    assert [len(c.C) for c in coarse] == [8, 8]
    assert [c.s for c in coarse] == [(1, 1, 1)] * 2
    assert all(c.stride == (1, 1, 1) and isinstance(c.stride[0], int) for c in coarse)
    assert same(y).s == y.s
    assert sorted(y.cmaps) == [(Fraction(1, 4),) * 3, (Fraction(1, 2),) * 3, (1, 1, 1)]
    again = SparseTensor(y.F, y.C, y.s, y.spatial_range)
    assert torch.equal(down(again).C, coarse[0].C)
    assert up(SparseTensor(x.F, x.C, 3)).s == (Fraction(3, 2),) * 3
    with pytest.raises(ValueError, match=r"stride \(1/2, 1/2, 1/2\)"):
        spnn.Conv3d(1, 1, 2, 2, transposed=True)(SparseTensor(x.F, x.C))
    torchsparse.set_version("2.0")
    with pytest.raises(ValueError, match="whole"):
        same(SparseTensor(x.F, x.C, (Fraction(1, 2), 1, 1)))
    for wrong in (0, -1, (1, 0, 1), (Fraction(-1, 2),) * 3, (Fraction(1, 2),) * 2):
        with pytest.raises(ValueError, match="stride must be"):
            SparseTensor(x.F, x.C, wrong)


def test_a_transposed_layer_undoes_no_map_of_other_voxels():
    down, up = spnn.Conv3d(3, 3, 2, stride=2).double(), spnn.Conv3d(3, 3, 2, stride=2, transposed=True).double()
    x = tensor()
    first = down(x)
    x.C = torch.cat([x.C[:, :1], x.C[:, 1:] + 8], 1)
    second = down(x)
    assert len(first.F) == len(second.F)
    with pytest.raises(ValueError, match="led to other voxels"):
        up(first)
    assert torch.equal(up(second).C, x.C)


@pytest.mark.parametrize("version", ["2.0", "2.1"])
def test_a_batch_whose_items_share_a_bound_is_told_of_once(version, monkeypatch):
    """The outputs of an item end where the largest of the batch does."""
    monkeypatch.setattr("sparseconv.interop.torchsparse.geometry._WARNED", set())
    torchsparse.set_version(version)
    order = [0, 1, 2, 3] if version == "2.1" else [1, 2, 3, 0]
    coords = torch.tensor([[0, 3, 3, 3], [1, 5, 5, 5], [1, 0, 0, 0]], dtype=torch.int32)[:, order]
    feats, layer = torch.ones(3, 1), spnn.Conv3d(1, 1, 3, 2)
    item = coords[:, order.index(0)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = layer(SparseTensor(feats[:1], coords[:1]))
        if version == "2.1":
            layer(SparseTensor(feats, coords, spatial_range=(2, 6, 6, 6)))
    with pytest.warns(UserWarning, match="depend on the others"):
        both = layer(SparseTensor(feats, coords))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(SparseTensor(feats, coords))
    assert int((both.C[:, order.index(0)] == 0).sum()) > len(alone.C)
    assert int((item == 0).sum()) == 1


def test_the_coordinates_of_older_versions():
    """(x, y, z, batch), multiples of the stride; outputs are floors where windows tile the axes."""
    feats, coords = cloud(low=-6)
    net = torch.nn.Sequential(
        spnn.Conv3d(3, 4, 3),
        spnn.Conv3d(4, 5, 2, 2),
        spnn.Conv3d(5, 5, 3),
        spnn.Conv3d(5, 4, (2, 3, 2), (2, 1, 2)),
        spnn.Conv3d(4, 4, 3),
    ).double()
    F.set_kmap_mode("hashmap")
    F.set_downsample_mode("minkowski")
    wanted = net(SparseTensor(feats, coords))
    torchsparse.set_version("2.0")
    got = net(SparseTensor(feats, coords[:, [1, 2, 3, 0]].contiguous()))
    assert got.stride == (4, 2, 4)
    assert torch.equal(got.C[:, 3], wanted.C[:, 0])
    assert torch.equal(got.C[:, :3], wanted.C[:, 1:] * torch.tensor([4, 2, 4]))
    assert torch.equal(got.F, wanted.F)
    pooled = F.spdownsample(coords[:, [1, 2, 3, 0]], 2, tensor_stride=2)
    assert torch.equal(pooled[:, :3] % 4, torch.zeros_like(pooled[:, :3]))


@pytest.mark.parametrize(
    ("kernel", "stride"), [(3, 2), ((1, 3, 1), (1, 2, 1)), (5, (3, 2, 1)), (1, 2), (2, 2), ((3, 2, 5), (2, 2, 1))]
)
@pytest.mark.parametrize("low", [-5, 0, 3])
@pytest.mark.parametrize("step", [1, 2])
def test_strided_layers_of_older_versions_reach_what_torchsparse_1_4_reaches(kernel, stride, low, step):
    """Floors where windows tile the axes. Else all voxels that see one, from the least coordinates of the inputs on."""
    torchsparse.set_version("1.4")
    feats, coords = cloud(low=low, extent=low + 8)
    last = coords[:, [1, 2, 3, 0]] * torch.tensor([step] * 3 + [1], dtype=torch.int32)
    layer = spnn.Conv3d(3, 4, kernel, stride).double()
    kernel, steps = layer.kernel_size, [s * step for s in layer.stride]
    if all(s in (1, k) for s, k in zip(layer.stride, kernel)):
        wanted = {(*(c // s * s for c, s in zip(row, steps)), row[3]) for row in last.tolist()}
    else:
        moves = list(itertools.product(*([(t - (k - 1) // 2) * step for t in range(k)] for k in kernel)))
        least = last[:, :3].min(0).values.tolist()
        reached = {(*(c - m for c, m in zip(row, move)), row[3]) for row in last.tolist() for move in moves}
        wanted = {row for row in reached if all(c % s == 0 and c >= n for c, s, n in zip(row, steps, least))}
    x = SparseTensor(feats.requires_grad_(), last, step)
    y = layer(x)
    assert sorted(y.C.tolist()) == sorted(map(list, wanted))
    assert y.stride == tuple(steps)
    inner, outer = (torch.cat([c[:, 3:], c[:, :3] // step], 1) for c in (x.C, y.C))
    placed = SparseTensor(x.F, inner), SparseTensor(y.F, outer)
    check(layer, *placed, (1, 1, 1), tuple((k - 1) // 2 for k in kernel))
    in_order = sorted(wanted, key=lambda row: (row[3], *row[:3]))
    assert F.spdownsample(last, stride, kernel, step).tolist() == list(map(list, in_order))
    assert F.spdownsample(last.long(), stride, kernel, tensor_stride=step).tolist() == list(map(list, in_order))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_group_norm_of_halves_is_counted_in_fp32(dtype):
    """Squares of 300 are past fp16."""
    feats, coords = cloud(channels=6)
    halves, layer = (feats * 400 + 1000).to(dtype), spnn.GroupNorm(3, 6)
    got, wanted = layer(SparseTensor(halves, coords)).F, layer(SparseTensor(halves.float(), coords)).F
    assert got.dtype == dtype
    assert torch.allclose(got.float(), wanted, rtol=1e-2, atol=1e-2)


def test_strided_layers_of_one_tap_load_the_weights_of_their_version():
    """(C_in, C_out) in 1.4 and 2.0, (1, C_in, C_out) in 2.1; the order of arguments changed, too."""
    feats, coords = cloud()
    torchsparse.set_version("2.0")
    layer = spnn.Conv3d(3, 4, 1, 2).double()
    layer.load_state_dict({"kernel": torch.ones(3, 4)})
    y = layer(SparseTensor(feats, coords[:, [1, 2, 3, 0]]))
    even = (coords[:, 1:] % 2 == 0).all(1)
    assert sorted(y.F[:, 0].tolist()) == pytest.approx(sorted(feats[even].sum(1).tolist()))
    torchsparse.set_version("2.1")
    assert spnn.Conv3d(3, 4, 1, 2).kernel.shape == (1, 3, 4)
    with pytest.raises(TypeError, match="bias=True"):
        spnn.Conv3d(3, 4, 3, 1, 1, True)


@pytest.mark.parametrize("padding", [0, 1, (0, 1, 2)])
@pytest.mark.parametrize("box", [None, (2, 4, 3, 2)])
def test_spdownsample_of_2_1_gives_the_outputs_of_windows_that_overlap(padding, box):
    _, coords = cloud()
    pad = conventions.make_ntuple(padding)
    ends = [(int(n) + 2 * p - 2) // 2 + 1 for n, p in zip(coords[:, 1:].max(0).values, pad)] if box is None else box[1:]
    wanted = {
        (b, *((c + p - t) // 2 for c, p, t in zip(at, pad, tap)))
        for b, *at in coords.tolist()
        for tap in itertools.product(range(3), repeat=3)
        if all((c + p - t) % 2 == 0 and 0 <= (c + p - t) // 2 < n for c, p, t, n in zip(at, pad, tap, ends))
    }
    got = F.spdownsample(coords, 2, 3, padding, box)
    assert got.tolist() == sorted(map(list, wanted))
    floors = torch.unique(torch.cat([coords[:, :1], coords[:, 1:] // 2], 1), dim=0)
    assert torch.equal(F.spdownsample(coords, 2, 3, padding, box, "minkowski"), floors)
    assert torch.equal(F.spdownsample(coords), floors)


def test_norms_and_activations():
    x = tensor(channels=6)
    items = [x.F[x.C[:, 0] == b] for b in range(2)]
    layer = spnn.GroupNorm(3, 6).double()
    torch.nn.init.normal_(layer.weight)
    wanted = torch.empty_like(x.F)
    for b, item in enumerate(items):
        one = torch.nn.functional.group_norm(item.t()[None], 3, layer.weight, layer.bias, layer.eps)
        wanted[x.C[:, 0] == b] = one[0].t()
    got = layer(x).F
    assert torch.allclose(got, wanted)
    grads = (torch.autograd.grad(t.pow(3).sum(), x.F, retain_graph=True)[0] for t in (got, wanted))
    assert torch.allclose(*grads)
    assert torch.allclose(spnn.BatchNorm(6).double()(x).F, torch.nn.BatchNorm1d(6).double()(x.F))
    for name in ("ReLU", "LeakyReLU", "SiLU"):
        assert torch.equal(getattr(spnn, name)()(x).F, getattr(torch.nn, name)()(x.F))
    assert torch.equal(F.relu(x, inplace=False).F, x.F.relu())
    assert torch.allclose(spnn.GlobalAvgPool()(x), torch.stack([i.mean(0) for i in items]))
    assert torch.allclose(spnn.GlobalMaxPool()(x), torch.stack([i.max(0).values for i in items]))
    cut = spnn.SparseCrop((1, 1, 1), (5, 5, 5))(x)
    assert torch.equal(cut.C, x.C[((x.C[:, 1:] >= 1) & (x.C[:, 1:] < 5)).all(1)])


def test_tensors_at_equal_coordinates_are_joined_whoever_made_them():
    x = tensor()
    y = SparseTensor(x.F, x.C.clone())
    assert torch.equal((x + y).F, 2 * x.F)
    assert torchsparse.cat([x, y]).F.shape == (len(x.F), 6)


def test_tensors():
    x = tensor()
    assert torch.equal((x + x).F, x.F * 2)
    assert torchsparse.cat([x, x]).F.shape == (len(x.F), 6)
    assert x.s == x.stride == (1, 1, 1)
    x.s = 2
    assert x.stride == (2, 2, 2)
    dense = SparseTensor(x.F, x.C, spatial_range=(2, 7, 7, 7)).dense()
    assert torch.equal(dense[tuple(x.C.long().t())], x.F)
    with pytest.raises(ValueError, match="spatial_range"):
        x.dense()
    y = tensor(seed=4)
    both = torchsparse.generative_add(x, y)
    total = {}
    for part in (x, y):
        for at, value in zip(part.C.tolist(), part.F):
            total[tuple(at)] = total.get(tuple(at), 0) + value
    assert torch.allclose(both.F, torch.stack([total[tuple(at)] for at in both.C.tolist()]))
    set_tensor_cache_mode(TensorCacheMode.GLOBAL_TENSOR_CACHE)
    assert tensor()._caches is tensor()._caches
    torchsparse.tensor.clear_global_tensor_cache()
    set_tensor_cache_mode(TensorCacheMode.SEPARATE_TENSOR_CACHE)
    assert tensor()._caches is not tensor()._caches


def test_maps_are_shared_and_follow_the_coordinates():
    x = tensor()
    net = spnn.Conv3d(3, 3, 3).double()
    first = net(net(x))
    assert len(x.kmaps) == 1
    assert first.grid is x.grid
    with torch.no_grad():
        x.coords[:, 1] += 5
    assert torch.allclose(net(net(x)).F, first.F)
    x.C = torch.roll(x.C, 1, 0)
    assert not torch.allclose(net(x).F, net(tensor()).F)


def test_a_transposed_layer_has_the_coordinates_of_its_map():
    down = spnn.Conv3d(3, 3, 2, stride=2).double()
    up = spnn.Conv3d(3, 3, 2, stride=2, transposed=True).double()
    x = tensor()
    down(down(x))
    x.C, x.F = 2 * x.C[7:], x.F[7:]  # of other voxels, with the old cache
    x.C[:, 0] //= 2
    middle = down(x)
    back = up(down(middle))
    assert torch.equal(back.C, middle.C)
    assert torch.equal(up(middle).C, x.C)
    wide = spnn.Conv3d(3, 3, 3, stride=2, padding=1).double()
    y = tensor()
    wide(y)  # which reaches other coarse voxels
    middle = down(y)
    assert torch.equal(up(down(middle)).C, middle.C)


def test_layers_onto_the_same_voxels_share_their_coordinates():
    x, down, conv = tensor(), spnn.Conv3d(3, 3, 2, stride=2).double(), spnn.Conv3d(3, 3, 3).double()
    first, second = down(x), down(x)
    assert first.C is second.C
    assert first.grid is second.grid
    conv(second)
    known = dict(x.kmaps)
    conv(first)
    assert all(x.kmaps[key] is plan for key, plan in known.items())
    first.C[:, 0] = 1 - first.C[:, 0]  # a client's own
    third = down(x)
    assert third.C is not first.C
    assert torch.equal(third.C, torch.cat([1 - first.C[:, :1], first.C[:, 1:]], 1))


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_bias_leaves_the_dtype_of_autocast(kernel):
    with torch.autocast("cpu", torch.bfloat16):
        y = spnn.Conv3d(3, 4, kernel, bias=True)(tensor().like(tensor().F.float()))
    assert y.F.dtype == torch.bfloat16


def test_voxels_of_many_halves_are_summed_in_fp32():
    rows = torch.zeros(3000, dtype=torch.int32)
    mean = F.spvoxelize(torch.full((3000, 1), 100.0, dtype=torch.float16), rows, F.spcount(rows, 1))
    assert mean.dtype == torch.float16
    assert mean.tolist() == [[100.0]]


# ---- points


def test_hashes():
    _, coords = cloud(low=-6)
    hashed = F.sphash(coords)
    for row, value in zip(coords.tolist(), hashed.tolist()):
        wanted = 14695981039346656037
        for word in row:
            wanted = ((wanted ^ (word % 2**32)) * 1099511628211) % 2**64
        assert value == (wanted >> 60) ^ (wanted & 0xFFFFFFFFFFFFFFF)
    offsets = torch.tensor([[0, 0, 0], [1, -1, 2]], dtype=torch.int32)
    moved = coords.clone()
    moved[:, :3] += offsets[1]
    assert torch.equal(F.sphash(coords, offsets), torch.stack([hashed, F.sphash(moved)]))
    rows = torch.tensor([3, 1, 3, 7])
    queries = torch.cat([hashed[rows], torch.tensor([12345])]).view(5, 1)
    assert F.sphashquery(queries, hashed).tolist() == [[3], [1], [3], [7], [-1]]
    assert F.sphashquery(queries, hashed[:0]).tolist() == [[-1]] * 5
    table = torchsparse.backend.GPUHashTable(8)
    last = coords[:, [1, 2, 3, 0]]
    table.insert_coords(last)
    assert table.lookup_coords(last, 1, 1, 1)[:, 0].tolist() == list(range(1, len(coords) + 1))
    around = table.lookup_coords(last, torch.tensor([2, 2, 2]), torch.tensor([1, 1, 1]), 8)
    listed = [tuple(c) for c in coords.tolist()]
    for (b, *at), found in zip(listed, around.tolist()):
        near = [(b, *(c + t for c, t in zip(at, tap))) for tap in itertools.product((0, 1), repeat=3)]
        assert found == [listed.index(c) + 1 if c in listed else 0 for c in near]


def test_points_to_voxels_and_back():
    gen = torch.Generator().manual_seed(0)
    feats = torch.randn(20, 3, generator=gen, dtype=torch.float64).requires_grad_()
    rows = torch.randint(-1, 5, (20,), generator=gen)
    counts = F.spcount(rows.int(), 6)
    assert counts.tolist() == [int((rows == v).sum()) for v in range(6)]
    voxels = F.spvoxelize(feats, rows.int(), counts)
    wanted = torch.stack([feats[rows == v].mean(0) if counts[v] else feats[0] * 0 for v in range(6)])
    assert torch.allclose(voxels, wanted)
    coords = torch.rand(20, 3, generator=gen, dtype=torch.float64) * 10 - 5
    near = torch.randint(-1, 6, (20, 8), generator=gen)
    near[3] = -1
    for scale in (1, 2):
        weights = F.calc_ti_weights(coords, near, scale)
        part = coords / scale - torch.floor(coords / scale)
        each = torch.stack(
            [
                torch.stack([p if c else 1 - p for p, c in zip(part.t(), corner)]).prod(0)
                for corner in itertools.product((0, 1), repeat=3)
            ],
            1,
        ) * (near >= 0)
        assert torch.allclose(weights, each / (each.sum(1, keepdim=True) + 1e-8))
        across = F.calc_ti_weights(coords, near.t().contiguous(), scale)
        assert torch.equal(across, weights.t())
        out = F.spdevoxelize(voxels, near.int(), weights)
        padded = torch.cat([voxels, voxels.new_zeros(1, 3)])
        wanted = (padded[torch.where(near < 0, 6, near)] * weights[..., None]).sum(1)
        assert torch.allclose(out, wanted)
        got, want = (torch.autograd.grad(t.square().sum(), feats, retain_graph=True)[0] for t in (out, wanted))
        assert torch.allclose(got, want)


def test_quantisation_and_collation():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(200, 3))
    cells = np.floor(points / [0.5, 0.5, 1]).astype(int)
    wanted, index, inverse = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    assert np.array_equal(sparse_quantize(points[::-1], [0.5, 0.5, 1]), wanted)
    got = sparse_quantize(points, (0.5, 0.5, 1), return_index=True, return_inverse=True)
    assert all(np.array_equal(a, b) for a, b in zip(got, (wanted, index, inverse.ravel())))
    assert np.array_equal(sparse_quantize(points, (0.5, 0.5, 1)), wanted)
    scenes = [{"x": SparseTensor(np.ones((n, 2)), np.full((n, 3), n)), "y": np.zeros(3), "z": {"n": n}} for n in (1, 2)]
    batch = sparse_collate_fn(scenes)
    assert batch["x"].C.tolist() == [[0, 1, 1, 1], [1, 2, 2, 2], [1, 2, 2, 2]]
    assert batch["y"].shape == (2, 3)
    assert batch["z"] == {"n": [1, 2]}
    torchsparse.set_version("1.4")
    assert sparse_collate_fn(scenes)["x"].C[0].tolist() == [1, 1, 1, 0]


def test_backbones():
    feats, coords = cloud(extent=24, n=300, channels=4)
    x = SparseTensor(feats.float(), coords)
    outputs = SparseResUNet42(in_channels=4, width_multiplier=0.25)(x)
    assert [y.stride[0] for y in outputs] == [1, 2, 4, 8, 16, 8, 4, 2, 1]
    assert outputs[-1].C is coords
    net = SparseResNet21D(in_channels=4)
    assert [y.F.shape[1] for y in net(SparseTensor(feats.float(), coords))] == [16, 32, 64, 128, 128]
    assert "0.1.main.3.kernel" in net.state_dict()


def test_import_of_the_name():
    code = """
import sparseconv.interop.torchsparse as ours
ours.install()
import torchsparse
import torchsparse.nn as spnn
import torchsparse.nn.functional as F
from torchsparse import PointTensor, SparseTensor
from torchsparse.nn.functional.devoxelize import calc_ti_weights
from torchsparse.nn.utils import fapply, get_kernel_offsets
from torchsparse.utils import make_ntuple
from torchsparse.utils.collate import sparse_collate_fn
from torchsparse.utils.quantize import sparse_quantize
from torchsparse.utils.tensor_cache import TensorCache
from torchsparse.backbones import SparseResUNet42
assert torchsparse is ours and spnn.Conv3d is ours.nn.Conv3d and F.conv3d is ours.nn.functional.conv3d
ours.uninstall()
try:
    import torchsparse
except ModuleNotFoundError:
    print("gone")
"""
    assert printed("-c", code) == "gone\n"


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_coordinates_written_past_torchs_counter_are_seen(how):
    feats, coords = cloud()
    x, conv = SparseTensor(feats, coords), spnn.Conv3d(3, 5, 3).double()
    conv(x)
    moved = x.coords.clone()
    moved[:, 1] += torch.arange(len(moved), dtype=torch.int32) * 9
    (x.coords.data if how == "data" else torch.from_numpy(x.coords.numpy())).copy_(moved)
    torch.testing.assert_close(conv(x).feats, conv(SparseTensor(feats, moved)).feats)


def _of_wrong_rank():
    feats, coords = cloud()
    last = coords[:, [1, 2, 3, 0]]
    table = torchsparse.backend.GPUHashTable()
    turned = SparseTensor(feats, coords.flip(0))
    yield lambda: torchsparse.cat([SparseTensor(feats, coords), turned]), "the same coordinates"
    yield lambda: SparseTensor(feats, coords) + turned, "different coordinates"
    yield lambda: spnn.ReLU()(SparseTensor(feats[:-1], coords)), "one row for each of coords"
    yield lambda: F.spcrop(SparseTensor(feats[1:], coords), 0), "one row for each of coords"
    yield lambda: F.global_avg_pool(SparseTensor(feats, coords[0, 0])), "one row for each of coords"
    yield lambda: torchsparse.generative_add(SparseTensor(feats, coords[:, :3]), SparseTensor(feats, coords)), "coords"
    yield lambda: torchsparse.utils.to_dense(feats[:, :, None], coords, (2, 7, 7, 7)), "feats must be"
    yield lambda: torchsparse.utils.to_dense(feats[1:], coords, (2, 7, 7, 7)), "feats must be"
    yield lambda: torchsparse.utils.to_dense(feats, coords[:, :3], (2, 7, 7, 7)), "coords must be"
    yield lambda: torchsparse.utils.collate.sparse_collate([SparseTensor(feats, coords)]), "each input must have"
    yield lambda: torchsparse.utils.collate.sparse_collate([SparseTensor(feats[1:], coords[:, 1:])]), "each input must"
    two = [SparseTensor(f, coords[:, 1:]) for f in (feats, feats[:, :1])]
    yield lambda: torchsparse.utils.collate.sparse_collate(two), "as many channels"
    yield lambda: table.insert_coords(last[0]), "coords must be"
    yield lambda: table.insert_coords(last) or table.lookup_coords(last[None], 3, 1, 27), "coords must be"


@pytest.mark.parametrize("number", range(14))
def test_ranks_and_rows_are_looked_at(number):
    call, words = list(_of_wrong_rank())[number]
    with pytest.raises(ValueError, match=words):
        call()


def test_planes_at_every_height_have_the_outputs_of_their_pairs():
    """Of windows that tile the axes; height 2 and 3 lie in one output, as 0 and 1."""
    F.set_kmap_mode("hashmap")
    layer = spnn.Conv3d(1, 2, 2, 2)
    for height in range(4):
        coords = torch.tensor([[0, i, height, k] for i in range(6) for k in range(6)]).int()
        y = layer(SparseTensor(torch.ones(36, 1), coords, spatial_range=(1, 6, 6, 6)))
        assert len(y.C) == 9
        assert set(y.C[:, 2].tolist()) == {height // 2}


def test_a_strided_layer_of_older_versions_along_a_diagonal():
    """Batches last, windows of 3 at stride 2 with weights of one."""
    torchsparse.set_version("2.0")
    coords = torch.tensor([[i, i, i, 0] for i in range(16)]).int()
    layer = spnn.Conv3d(1, 1, 3, 2)
    torch.nn.init.ones_(layer.kernel)
    y = layer(SparseTensor(torch.arange(1.0, 17)[:, None], coords))
    wanted = {}
    for i, move in itertools.product(range(16), itertools.product((-1, 0, 1), repeat=3)):
        at = (*(i - m for m in move), 0)
        if all(v % 2 == 0 and v >= 0 for v in at):
            wanted[at] = wanted.get(at, 0) + i + 1
    assert dict(zip(map(tuple, y.C.tolist()), y.F.flatten().tolist())) == wanted


def test_points_are_voxelized_by_hashes_on_both_sides_of_0():
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(200, 3, generator=generator) * 8 - 4
    points = torch.cat([points, torch.randint(0, 2, (200, 1), generator=generator)], 1)
    cells, features = torch.floor(points).int(), torch.rand(200, 2, generator=generator)
    hashes = F.sphash(cells)
    distinct = torch.unique(hashes)
    rows = F.sphashquery(hashes, distinct)
    counts = F.spcount(rows.int(), len(distinct))
    voxels = torch.round(F.spvoxelize(torch.floor(points), rows, counts)).int()
    assert sorted(map(tuple, voxels.tolist())) == sorted(set(map(tuple, cells.tolist())))
    wanted = torch.stack([features[rows == row].mean(0) for row in range(len(distinct))])
    assert torch.allclose(F.spvoxelize(features, rows, counts), wanted)


def test_a_network_down_and_up_joins_each_level():
    x = tensor(n=200, extent=16)
    y, levels = x, []
    for _ in range(3):
        levels.append(y)
        y = spnn.Conv3d(3, 3, 2, 2).double()(y)
    for level in reversed(levels):
        y = spnn.Conv3d(3, 3, 2, 2, transposed=True).double()(y)
        assert torch.equal(y.C, level.C)
        y = spnn.Conv3d(6, 3, 3).double()(torchsparse.cat([y, level]))
    assert y.C is x.C


def test_the_range_of_a_layers_outputs_stays_theirs_after_a_client_wrote_to_their_coordinates():
    x = torchsparse.SparseTensor(torch.ones(2, 1), torch.tensor([[0, 0, 0, 0], [0, 5, 5, 5]]).int(), 1, (1, 8, 8, 8))
    layer = spnn.Conv3d(1, 1, 2, stride=2)
    first = layer(x)
    assert first.spatial_range == (1, 4, 4, 4)
    first.coords += 0
    first.coords[0, 1] = 1
    again = layer(x)
    assert again.spatial_range == (1, 4, 4, 4)
    assert again.coords.tolist() == [[0, 0, 0, 0], [0, 2, 2, 2]]
