"""Our namespace against the library itself: same voxels, values, gradients and state."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sparseconv as sc
import sparseconv.interop.spconv.pytorch as ours
from sparseconv import nn
from sparseconv.interop import load
from sparseconv.interop.spconv.pytorch import ops
from sparseconv.interop.spconv.pytorch.utils import PointToVoxel
from tests.interop.scenes import real_spconv, scene

LAYERS = {
    "subm": (3, lambda L: L.SubMConv3d(5, 7, 3)),
    "subm_stride_ignored": (3, lambda L: L.SubMConv3d(5, 7, 3, stride=2, padding=2)),
    "subm_box_dilated": (3, lambda L: L.SubMConv3d(5, 7, (1, 3, 5), dilation=(1, 2, 1))),
    "subm_one_tap": (3, lambda L: L.SubMConv3d(5, 7, 1)),
    "one_tap": (3, lambda L: L.SparseConv3d(5, 7, 1)),
    "one_tap_strided": (3, lambda L: L.SparseConv3d(5, 7, 1, 2)),
    "strided": (3, lambda L: L.SparseConv3d(5, 7, 3, 2, 1)),
    "strided_unpadded": (3, lambda L: L.SparseConv3d(5, 7, 2, 2, bias=False)),
    "strided_dilated": (3, lambda L: L.SparseConv3d(5, 7, 3, 2, 1, 2)),
    "stride_one": (3, lambda L: L.SparseConv3d(5, 7, 3, 1, 1)),
    "valid": (3, lambda L: L.SparseConv3d(5, 7, 3)),
    "flat": (3, lambda L: L.SparseConv3d(5, 7, (3, 1, 1), (2, 1, 1), bias=False)),
    "transposed": (3, lambda L: L.SparseConvTranspose3d(5, 7, 3, 2, 1)),
    "transposed_dilated": (3, lambda L: L.SparseConvTranspose3d(5, 7, 3, 2, 1, 2)),
    "transposed_box": (3, lambda L: L.SparseConvTranspose3d(5, 7, (2, 3, 1), (2, 1, 3))),
    **{f"subm_{r}": (r, lambda L, r=r: getattr(L, f"SubMConv{r}d")(5, 7, 3)) for r in (1, 2, 4)},
    **{f"strided_{r}": (r, lambda L, r=r: getattr(L, f"SparseConv{r}d")(5, 7, 3, 2, 1)) for r in (1, 2, 4)},
    **{f"transposed_{r}": (r, lambda L, r=r: getattr(L, f"SparseConvTranspose{r}d")(5, 7, 2, 2)) for r in (1, 2, 4)},
    "inverse": (
        3,
        lambda L: L.SparseSequential(
            L.SparseConv3d(5, 6, 3, 2, 1, indice_key="a"), L.SparseInverseConv3d(6, 7, 3, indice_key="a")
        ),
    ),
    "pool_then_inverse": (
        3,
        lambda L: L.SparseSequential(
            torch.nn.ReLU(), L.SparseMaxPool3d(2, 2, indice_key="a"), L.SparseInverseConv3d(5, 7, 2, indice_key="a")
        ),
    ),
    "max_pool": (3, lambda L: L.SparseSequential(torch.nn.ReLU(), L.SparseMaxPool3d(3, 2, 1))),
    "max_pool_default_stride": (2, lambda L: L.SparseSequential(torch.nn.ReLU(), L.SparseMaxPool2d(2))),
    "network": (
        3,
        lambda L: L.SparseSequential(
            L.SubMConv3d(5, 8, 3, bias=False, indice_key="s"),
            torch.nn.BatchNorm1d(8),
            torch.nn.ReLU(),
            L.SubMConv3d(8, 8, 3, indice_key="s"),
            L.SparseConv3d(8, 12, 3, 2, 1, bias=False, indice_key="d1"),
            torch.nn.ReLU(),
            L.SparseConv3d(12, 12, 3, 2, 1, indice_key="d2"),
            L.SparseInverseConv3d(12, 8, 3, indice_key="d2"),
            L.SparseInverseConv3d(8, 6, 3, indice_key="d1"),
            L.SubMConv3d(6, 7, 1),
        ),
    ),
}


@pytest.fixture(scope="module")
def real():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the library's results differ from run to run with more
    yield real_spconv()
    torch.set_num_threads(threads)


def run(lib, net, features, *rest):
    x = features.clone().requires_grad_()
    return x, net(lib.SparseConvTensor(x, *rest))


@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_library(real, name):
    rank, make = LAYERS[name]
    data = scene(rank, {1: 9, 2: 40}.get(rank, 150), {1: 12, 2: 9, 3: 8, 4: 5}[rank])
    torch.manual_seed(0)
    theirs, mine = make(real), make(ours)
    state = theirs.state_dict()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in mine.state_dict().items()}
    mine.load_state_dict(state)
    x_theirs, y_theirs = run(real, theirs, *data)
    x_mine, y_mine = run(ours, mine, *data)
    assert y_mine.spatial_shape == y_theirs.spatial_shape
    assert y_mine.batch_size == y_theirs.batch_size
    assert y_mine.indices.dtype == torch.int32
    rows = y_mine.voxels.lookup(y_theirs.indices)
    assert sorted(rows.tolist()) == list(range(len(y_mine.indices)))
    torch.testing.assert_close(y_mine.features[rows], y_theirs.features, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(y_mine.dense(), y_theirs.dense(), atol=1e-5, rtol=1e-5)
    weight = torch.randn(y_theirs.features.shape, generator=torch.Generator().manual_seed(1))
    (y_theirs.features * weight).sum().backward()
    (y_mine.features[rows] * weight).sum().backward()
    torch.testing.assert_close(x_mine.grad, x_theirs.grad, atol=1e-5, rtol=1e-5)
    for (key, p), q in zip(theirs.named_parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(
            q.grad, p.grad, atol=1e-5 * max(1.0, float(p.grad.abs().max())), rtol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


@st.composite
def layers(draw):
    """Any strided or transposed layer in rank 1 to 3 with a cell left of its output."""
    rank = draw(st.integers(1, 3))
    axis = st.lists(st.integers(1, 3), min_size=rank, max_size=rank)
    kernel, stride, dilation = draw(axis), draw(axis), draw(axis)
    padding = [draw(st.integers(0, d * (k - 1))) for k, d in zip(kernel, dilation)]
    transposed = draw(st.booleans())
    extent = 9 if rank < 3 else 7
    size = ops.get_deconv_output_size if transposed else ops.get_conv_output_size
    rest = ([0] * rank,) if transposed else ()
    one_tap = math.prod(kernel) == 1 and math.prod(stride) == 1
    assume(not one_tap and min(size([extent] * rank, kernel, stride, padding, dilation, *rest)) > 0)
    return rank, extent, transposed, kernel, stride, padding, dilation, draw(st.integers(0, 5))


@settings(max_examples=40)
@given(layer=layers())
def test_any_layer(real, layer):
    rank, extent, transposed, kernel, stride, padding, dilation, seed = layer
    name = f"SparseConv{'Transpose' if transposed else ''}{rank}d"
    features, indices, shape, batch = scene(rank, extent**rank // 3, extent, channels=2, seed=seed)
    theirs, mine = (getattr(lib, name)(2, 3, kernel, stride, padding, dilation) for lib in (real, ours))
    mine.load_state_dict(theirs.state_dict())
    want = theirs(real.SparseConvTensor(features, indices, shape, batch))
    got = mine(ours.SparseConvTensor(features, indices, shape, batch))
    assert got.spatial_shape == want.spatial_shape
    rows = got.voxels.lookup(want.indices)
    assert sorted(rows.tolist()) == list(range(len(got.indices)))
    torch.testing.assert_close(got.features[rows], want.features, atol=1e-5, rtol=1e-5)


def test_a_network_of_our_own_modules_from_its_weights(real):
    """The library's checkpoint in modules of sparseconv.nn, box kernels and layers of one tap included."""
    theirs = real.SparseSequential(
        real.SubMConv3d(5, 6, (3, 1, 5)),
        torch.nn.BatchNorm1d(6),
        torch.nn.ReLU(),
        real.SparseConv3d(6, 8, 2, 2, bias=False),
        real.SparseConv3d(8, 4, 1, 2, bias=False),
        real.SubMConv3d(4, 7, 1),
    )
    mine = nn.Sequential(
        nn.SubmanifoldConv(5, 6, (3, 1, 5)),
        nn.BatchNorm(6),
        nn.ReLU(),
        nn.Conv(6, 8, 2, stride=2, bias=False),
        nn.Conv(8, 4, 1, stride=2, bias=False),
        nn.SubmanifoldConv(4, 7, 1),
    )
    assert load(mine, theirs.state_dict(), "spconv", strided_one_tap=["4.weight"]).convolutions == 4
    features, indices, shape, batch = scene()
    want = theirs(real.SparseConvTensor(features, indices, shape, batch))
    got = mine(sc.SparseTensor(sc.VoxelGrid(indices, batch), features))
    rows = got.grid.lookup(want.indices)
    assert sorted(rows.tolist()) == list(range(len(got.grid)))
    torch.testing.assert_close(got.features[rows], want.features, atol=1e-5, rtol=1e-5)


def test_submanifold_layers_keep_the_callers_rows(real):
    features, indices, shape, batch = scene()
    y = ours.SubMConv3d(5, 7, 3)(ours.SparseConvTensor(features, indices, shape, batch))
    assert y.indices is indices
    assert torch.equal(
        real.SubMConv3d(5, 7, 3)(real.SparseConvTensor(features, indices, shape, batch)).indices, indices
    )


def test_what_a_key_remembers(real):
    data = scene()
    theirs, mine = (
        lib.SparseConv3d(5, 7, 3, 2, 1, indice_key="k")(lib.SparseConvTensor(*data)) for lib in (real, ours)
    )
    a, b = theirs.find_indice_pair("k"), mine.find_indice_pair("k")
    for name in ("ksize", "stride", "padding", "dilation", "spatial_shape", "out_spatial_shape", "is_subm"):
        assert getattr(a, name) == getattr(b, name), name
    assert torch.equal(a.indice_pair_num, b.indice_pair_num)
    assert a.indice_pairs.shape == b.indice_pairs.shape
    rows = mine.voxels.lookup(theirs.indices)
    for tap, count in enumerate(b.indice_pair_num.tolist()):
        want = {(i, int(rows[o])) for i, o in a.indice_pairs[:, tap, :count].T.tolist()}
        assert want == {tuple(pair) for pair in b.indice_pairs[:, tap, :count].T.tolist()}
        assert bool((b.indice_pairs[:, tap, count:] == -1).all())


def test_the_library_clamps_maxima_at_zero_and_we_do_not(real):
    features, *rest = scene()
    theirs = real.SparseMaxPool3d(2, 2)(real.SparseConvTensor(features, *rest))
    mine = ours.SparseMaxPool3d(2, 2)(ours.SparseConvTensor(features, *rest))
    rows = mine.voxels.lookup(theirs.indices)
    assert float(mine.features.min()) < 0
    assert torch.equal(mine.features[rows].clamp(min=0), theirs.features)


def test_sparse_add(real):
    features, indices, shape, batch = scene()
    parts = [(features[:100], indices[:100]), (features[60:], indices[60:])]
    theirs = real.functional.sparse_add(*(real.SparseConvTensor(*part, shape, batch) for part in parts))
    mine = ours.functional.sparse_add(*(ours.SparseConvTensor(*part, shape, batch) for part in parts))
    assert torch.equal(mine.indices, theirs.indices)
    torch.testing.assert_close(mine.features, theirs.features)


@pytest.mark.parametrize("most", [1000, 40])
def test_points_to_voxels(real, most):
    from spconv.pytorch.utils import PointToVoxel as Theirs

    gen = torch.Generator().manual_seed(0)
    points = torch.rand(2000, 4, generator=gen) * torch.tensor([12.0, 12.0, 5.0, 1.0]) - 1
    box = ([0.5, 0.25, 1.0], [0, 0, -0.5, 10, 10, 3.5], 4, most, 3)
    theirs, mine = Theirs(*box, torch.device("cpu")), PointToVoxel(*box)
    assert (theirs.grid_size, theirs.vsize, theirs.coors_range) == (mine.grid_size, mine.vsize, mine.coors_range)
    for a, b in zip(theirs.generate_voxel_with_id(points), mine.generate_voxel_with_id(points), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
