"""Maps seen from above, by torchsparse's names, against loops over voxels."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import sparseconv.interop.torchsparse as torchsparse
import sparseconv.interop.torchsparse.nn as spnn

SHAPE, STRIDE = (6, 4, 5), 2


@pytest.fixture(params=["2.1", "2.0"])
def version(request):
    torchsparse.set_version(request.param)
    yield request.param
    torchsparse.set_version("2.1")


def scene(version, channels=3):
    """A tensor of stride 2, and its voxels as (batch, x, y, z) in units of the stride."""
    gen = torch.Generator().manual_seed(0)
    cells = torch.stack([torch.randint(0, n, (60,), generator=gen) for n in (2, *SHAPE)], 1).unique(dim=0)
    cells = cells[torch.randperm(len(cells), generator=gen)]
    coords = cells if version == "2.1" else torch.cat([cells[:, 1:] * STRIDE, cells[:, :1]], 1)
    feats = torch.randn(len(cells), channels, generator=gen, dtype=torch.float64, requires_grad=True)
    return torchsparse.SparseTensor(feats, coords.int(), STRIDE), cells.tolist()


def columns(x, cells, dim, each):
    """(batch, the two other axes) -> the sum of ``each(row, height)``."""
    found = defaultdict(float)
    for row, (batch, *cell) in enumerate(cells):
        height = cell.pop(dim)
        name = (batch, *cell)
        found[name] = found[name] + each(row, height)
    return found


def as_dictionary(y, version, dim):
    rows = y.coords.tolist()
    if version == "2.0":
        rows = [(b, *(v // s for v, s in zip(cell, y.stride))) for *cell, b in rows]
    assert all(row[1 + dim] == 0 for row in rows)
    return {(row[0], *(v for axis, v in enumerate(row[1:]) if axis != dim)): f for row, f in zip(rows, y.feats)}


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_matrix_for_each_height(version, dim):
    x, cells = scene(version)
    dense = spnn.ToDenseBEVConvolution(3, 4, SHAPE, dim=dim, bias=True).double()
    sparse = spnn.ToBEVConvolution(3, 4, SHAPE[dim], dim=dim, bias=True).double()
    assert sorted(dense.state_dict()) == ["bias", "kernel", "offset", "shape"]
    assert dense.kernel.shape == (SHAPE[dim], 3, 4)
    sparse.load_state_dict({"kernel": dense.kernel, "bias": torch.randn(1, 4)})
    torch.nn.init.normal_(dense.bias)
    with torch.no_grad():
        sparse.bias.copy_(dense.bias)
    wanted = columns(x, cells, dim, lambda row, h: x.feats[row] @ dense.kernel[h] + dense.bias[0])
    image, flat = dense(x), sparse(x)
    sizes = [n for axis, n in enumerate(SHAPE) if axis != dim]
    assert image.shape == (2, 4, *sizes)
    found = as_dictionary(flat, version, dim)
    assert found.keys() == wanted.keys()
    assert flat.stride == (STRIDE,) * 3
    for (b, u, v), value in wanted.items():
        torch.testing.assert_close(image[b, :, u, v], value)
        torch.testing.assert_close(found[b, u, v], value)
    assert int((image != 0).any(1).sum()) == len(wanted)
    got = torch.autograd.grad(image.square().sum(), (x.feats, dense.kernel), retain_graph=True)
    total = sum(value.square().sum() for value in wanted.values())
    for a, b in zip(got, torch.autograd.grad(total, (x.feats, dense.kernel)), strict=True):
        torch.testing.assert_close(a, b)


def test_coarser_columns(version):
    x, cells = scene(version)
    layer = spnn.ToBEVConvolution(3, 2, SHAPE[1], stride=2, dim=1).double()
    flat = layer(x)
    assert flat.stride == (2 * STRIDE,) * 3
    coarse = [[b, a // 2, h, c // 2] for b, a, h, c in cells]
    wanted = columns(x, coarse, 1, lambda row, h: x.feats[row] @ layer.kernel[h])
    found = as_dictionary(flat, version, 1)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_heights_in_the_channels_and_means(version, dim):
    x, cells = scene(version)
    image = spnn.ToBEVHeightCompression(3, SHAPE, dim=dim)(x)
    sizes = [n for axis, n in enumerate(SHAPE) if axis != dim]
    assert image.shape == (2, 3 * SHAPE[dim], *sizes)
    for row, (b, *cell) in enumerate(cells):
        h = cell.pop(dim)
        assert torch.equal(image[b, 3 * h : 3 * h + 3, cell[0], cell[1]], x.feats[row])
    assert int((image != 0).sum()) == x.feats.numel()
    mean = as_dictionary(spnn.ToBEVReduction(dim)(x), version, dim)
    sums = columns(x, cells, dim, lambda row, _: torch.cat([x.feats[row], x.feats.new_ones(1)]))
    assert mean.keys() == sums.keys()
    for name, value in sums.items():
        torch.testing.assert_close(mean[name], value[:3] / value[3])


def test_an_offset_and_heights_beyond(version):
    x, cells = scene(version)
    unit = 1 if version == "2.1" else STRIDE
    moved = spnn.ToBEVHeightCompression(3, (8, 2, 5), offset=(-unit, 0, 0), dim=1)(x)
    assert moved.shape == (2, 6, 8, 5)
    assert not moved[:, :, 0].any()
    top = columns(x, cells, 1, lambda row, h: x.feats[row] if h >= 1 else 0 * x.feats[row])
    for (b, u, v), value in top.items():
        torch.testing.assert_close(moved[b, 3:, u + 1, v], value)


def test_what_does_not_fit_is_told(version):
    x, _ = scene(version)
    with pytest.raises(ValueError, match="a layer needs a kernel for each height"):
        spnn.ToBEVConvolution(3, 4, SHAPE[1] - 1)(x.like(x.feats.float()))
    with pytest.raises(ValueError, match="lies outside of a map of 2 x 5 cells"):
        spnn.ToBEVHeightCompression(3, (2, 4, 5))(x)
    with pytest.raises(ValueError, match="dim must be 0, 1 or 2"):
        spnn.ToBEVReduction(3)
