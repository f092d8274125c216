"""What the namespace promises by itself: keys, errors, dtypes, empty tensors, pickles, and `import spconv`."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch

import sparseconv as sc
import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.interop.spconv.pytorch.utils import PointToVoxel
from sparseconv.plan import PlanSet
from tests.forked import printed
from tests.interop.scenes import scene


def tensor(**options):
    return spconv.SparseConvTensor(*scene(**options))


def unet(norm=torch.nn.BatchNorm1d):
    return spconv.SparseSequential(
        spconv.SubMConv3d(5, 8, 3, bias=False, indice_key="s1"),
        norm(8),
        torch.nn.ReLU(),
        spconv.SparseConv3d(8, 16, 3, 2, 1, indice_key="d1"),
        spconv.SubMConv3d(16, 16, 3, indice_key="s2"),
        spconv.SparseInverseConv3d(16, 8, 3, indice_key="d1"),
        spconv.SubMConv3d(8, 7, 1),
    )


# ---- keys


def test_layers_with_one_key_share_one_map():
    net = spconv.SparseSequential(
        spconv.SubMConv3d(5, 6, 3, indice_key="a"), spconv.SubMConv3d(6, 7, 3, indice_key="a")
    )
    x = tensor()
    first = net[0](x)
    plan = first.find_indice_pair("a").plan
    second = net[1](first)
    assert second.find_indice_pair("a").plan is plan
    assert x.indice_dict == {}, "the input is left alone"


def test_layers_without_a_key_share_a_map_all_the_same():
    x = tensor()
    one, two = (spconv.SparseConv3d(5, 6, 3, 2, 1)(x) for _ in range(2))
    assert one.voxels is two.voxels


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (lambda: spconv.SubMConv3d(5, 5, 5, indice_key="a"), "kernel size"),
        (lambda: spconv.SubMConv3d(5, 5, 3, dilation=2, indice_key="a"), "dilation"),
        (lambda: spconv.SparseConv3d(5, 5, 3, 2, indice_key="a"), "taken"),
        (lambda: spconv.SparseMaxPool3d(2, indice_key="a"), "taken"),
        (lambda: spconv.SparseInverseConv3d(5, 5, 3, indice_key="a"), "submanifold"),
        (lambda: spconv.SparseInverseConv3d(5, 5, 3, indice_key="b"), "no layer before"),
    ],
)
def test_a_key_with_another_geometry_is_an_error(second, words):
    x = spconv.SubMConv3d(5, 5, 3, indice_key="a")(tensor())
    with pytest.raises(ValueError, match=words):
        second()(x)


def test_a_key_on_other_voxels_is_an_error():
    x = spconv.SubMConv3d(5, 5, 3, indice_key="a")(tensor())
    moved = spconv.SparseConvTensor(
        x.features, torch.roll(x.indices, 1, 0), x.spatial_shape, 2, indice_dict=x.indice_dict
    )
    with pytest.raises(ValueError, match="other voxels"):
        spconv.SubMConv3d(5, 5, 3, indice_key="a")(moved)
    same = spconv.SparseConvTensor(x.features, x.indices.clone(), x.spatial_shape, 2, indice_dict=x.indice_dict)
    assert spconv.SubMConv3d(5, 5, 3, indice_key="a")(same).find_indice_pair("a") is x.find_indice_pair("a")


def test_an_inverse_needs_the_kernel_and_the_voxels_of_its_layer():
    x = spconv.SparseConv3d(5, 6, 3, 2, 1, indice_key="d")(tensor())
    with pytest.raises(ValueError, match="kernel size"):
        spconv.SparseInverseConv3d(6, 5, 2, indice_key="d")(x)
    with pytest.raises(ValueError, match="other voxels"):
        spconv.SparseInverseConv3d(6, 5, 3, indice_key="d")(
            spconv.SparseConvTensor(x.features[:3], x.indices[:3], x.spatial_shape, 2, indice_dict=x.indice_dict)
        )


def test_the_inverse_of_one_tap_goes_back():
    x = tensor()
    coarse = spconv.SparseConv3d(5, 6, 1, 2, indice_key="d")(x)
    assert spconv.SparseInverseConv3d(6, 5, 1, indice_key="d")(coarse).indices is x.indices


# ---- outputs


def test_outputs_stay_in_the_spatial_shape_and_are_sorted():
    y = spconv.SparseConv3d(5, 6, 3, 1, 0)(tensor())
    assert y.spatial_shape == [6, 6, 6]
    assert int(y.indices[:, 1:].min()) >= 0
    assert int(y.indices[:, 1:].max()) < 6
    assert torch.equal(y.indices, torch.unique(y.indices, dim=0))


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (3, {"stride": 2, "padding": 1}),
        ((2, 3, 1), {"stride": (2, 1, 3)}),
        ((3, 1, 2), {"stride": 2, "padding": (2, 0, 1)}),
        (2, {"stride": 3, "padding": 1, "output_padding": (1, 0, 2)}),
        (3, {"padding": 1, "dilation": 2}),
    ],
)
def test_layers_are_torchs_dense_ones(kernel, options):
    x = tensor()
    x = x.replace_feature(x.features.double())
    kinds = {"output_padding": ["Transpose"], "dilation": [""]}.get(next(reversed(options)), ["", "Transpose"])
    for kind in kinds:
        made = {"bias": False, "transposed": bool(kind), "dtype": torch.float64, **options}
        layer = spconv.conv.SparseConvolution(3, 5, 6, kernel, **made)
        axes = (4, 0, 1, 2, 3) if kind else (0, 4, 1, 2, 3)
        dense = getattr(torch.nn.functional, "conv_transpose3d" if kind else "conv3d")
        y = layer(x)
        want = dense(x.dense(), layer.weight.permute(axes), **options)
        assert y.spatial_shape == list(want.shape[2:])
        torch.testing.assert_close(y.dense(), want)


def test_an_output_without_cells_is_an_error():
    with pytest.raises(ValueError, match="no cell"):
        spconv.SparseConv3d(5, 6, 9)(tensor())


def test_dense_there_and_back():
    x = tensor()
    dense = x.dense(channels_first=False)
    assert torch.equal(dense.movedim(-1, 1), x.dense())
    assert dense.is_contiguous(), "clients view it"
    back = spconv.SparseConvTensor.from_dense(dense)
    assert torch.equal(back.dense(), x.dense())
    assert torch.equal(spconv.ToDense()(x), x.dense())


def test_a_batch_size_that_is_set_later_is_obeyed():
    indices = torch.tensor([[0, 1, 1, 1], [0, 2, 1, 1], [1, 3, 3, 3]], dtype=torch.int32)
    x = spconv.SparseConvTensor(torch.randn(3, 2, dtype=torch.float64), indices, [4, 4, 4], 2)
    layer = spconv.SubMConv3d(2, 2, 3, indice_key="fine").double()
    down = spconv.SparseConv3d(2, 2, 2, 2, indice_key="coarse").double()
    up = spconv.SparseInverseConv3d(2, 2, 2, indice_key="coarse").double()
    pool = spconv.SparseMaxPool3d(2)
    tensors = [x, layer(x), down(x), pool(x), up(down(x))]
    before = [t.dense() for t in tensors]
    for t, was in zip(tensors, before):
        t.batch_size = 4
        assert torch.equal(t.dense(), torch.cat([was, torch.zeros_like(was)]))
        assert t.voxels.batch_size == 4
    for after in (layer(tensors[1]), up(tensors[2]), down(tensors[0]), pool(tensors[0])):
        assert after.batch_size == 4
        assert len(after.dense()) == 4
    tensors[2].batch_size = 1
    with pytest.raises(ValueError, match="batch item 1"):
        tensors[2].dense()


def test_average_pools_count_the_voxels_that_are_there():
    x = spconv.SparseConvTensor(
        torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([[0, 0], [0, 1], [0, 4]]).int(), [6], 1
    )
    assert spconv.SparseAvgPool1d(2)(x).features.tolist() == [[2.0], [5.0]]
    assert spconv.SparseGlobalAvgPool()(x).tolist() == [[3.0]]
    assert spconv.SparseGlobalMaxPool()(x).tolist() == [[5.0]]


def test_tables():
    x = tensor()
    both = spconv.ConcatTable().add(spconv.SubMConv3d(5, 4, 3)).add(spconv.SubMConv3d(5, 4, 1))(x)
    assert spconv.JoinTable()(both).features.shape == (150, 8)
    assert torch.equal(spconv.AddTable()(both).features, both[0].features + both[1].features)
    other = spconv.SparseConvTensor(x.features[:9], x.indices[:9], x.spatial_shape, 2)
    with pytest.raises(ValueError, match="same indices"):
        spconv.AddTable()([x, other])
    total = spconv.AddTableMisaligned()([x, other])
    assert torch.equal(total.indices, x.indices)
    assert torch.equal(total.features[:9], 2 * x.features[:9])


@pytest.mark.parametrize("first", [True, False])
def test_coarse_voxels_are_added_to_others_of_their_shape(first):
    """A strided layer's outputs and some of them, or voxels that a client made for that shape."""
    coarse = spconv.SparseConv3d(5, 5, 3, 2, 1, indice_key="d")(tensor())
    fresh = spconv.SparseConvTensor(
        torch.ones(2, 5), torch.tensor([[0, 0, 0, 0], [1, 3, 3, 3]]), coarse.spatial_shape, coarse.batch_size
    )
    for other in (coarse.select_by_index(slice(7, None)), fresh):
        total = spconv.functional.sparse_add(*((coarse, other) if first else (other, coarse)))
        torch.testing.assert_close(total.dense(), coarse.dense() + other.dense())
        if len(total.indices) == len(coarse.indices):
            assert spconv.SparseInverseConv3d(5, 4, 3, indice_key="d")(total).features.shape == (150, 4)


def test_a_sum_of_two_dtypes_has_the_wider_one():
    x = tensor()
    narrow = x.replace_feature(x.features.bfloat16())
    for parts in ((x, narrow), (narrow, x)):
        total = spconv.functional.sparse_add(*parts)
        assert total.features.dtype == torch.float32
        assert torch.equal(total.features, x.features + narrow.features)


def test_tensor_arithmetic_and_selection():
    x = spconv.SubMConv3d(5, 5, 3, indice_key="a")(tensor())
    assert torch.equal((x + x).features, 2 * x.features)
    x += x.features
    chosen = x.select_by_index(torch.arange(150) % 2 == 0)
    assert chosen.indices.shape == (75, 4)
    assert chosen.indice_dict == {}
    assert "a" in x.indice_dict, "the tensor selected from keeps what its keys remember"
    with pytest.raises(ValueError, match="replace_feature"):
        x.features = x.features


@pytest.mark.parametrize("shape", [{}, {"voxels": 0}, {"voxels": 1}])
def test_empty_and_single_voxels_pass_through_a_network(shape):
    net = unet()
    x = tensor(**shape)
    if shape.get("voxels") == 1:
        net.eval()
    y = net(x)
    assert y.features.shape == (len(x.indices), 7)
    y.features.sum().backward()
    assert all(p.grad is not None for p in net.parameters() if shape.get("voxels") != 0 or p.ndim > 1)


def test_non_contiguous_features_and_weights_give_the_same():
    features, indices, shape, batch = scene()
    wide = torch.stack([features, features], 2).reshape(150, 10)[:, ::2]
    layer = spconv.SubMConv3d(5, 7, 3)
    want = layer(spconv.SparseConvTensor(wide.contiguous(), indices, shape, batch)).features
    assert torch.equal(layer(spconv.SparseConvTensor(wide, indices, shape, batch)).features, want)
    layer.weight.data = layer.weight.data.movedim(-1, 0).contiguous().movedim(0, -1)
    assert torch.equal(layer(spconv.SparseConvTensor(wide, indices, shape, batch)).features, want)


# ---- dtypes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    x = tensor(dtype=dtype)
    z = spconv.SubMConv3d(5, 7, 3).to(dtype)
    out = z(x)
    assert out.features.dtype == dtype
    want = z.double()(x.replace_feature(x.features.double())).features
    assert float((out.features.detach().double() - want.detach()).abs().max()) < {torch.float64: 1e-12}.get(dtype, 0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", [1, 3])
def test_halves_meet_fp32_weights(dtype, kernel):
    x, net = tensor(), spconv.SparseSequential(spconv.SubMConv3d(5, 7, kernel), torch.nn.BatchNorm1d(7))
    halves = x.replace_feature(x.features.detach().to(dtype).requires_grad_())
    layer = net[0]
    y = layer(halves)
    assert y.features.dtype == dtype
    assert torch.equal(y.features, copy.deepcopy(layer).to(dtype)(halves).features)
    y.features.float().sum().backward()
    assert halves.features.grad.dtype == dtype
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    torch.nn.init.normal_(net[1].running_mean)
    with torch.no_grad():
        folded, wanted = net.eval()(halves).features, net(x.replace_feature(halves.features.float())).features
    assert float((folded.float() - wanted).abs().max()) < 0.05
    with pytest.raises(TypeError, match="cast one, or use torch"):
        layer(x.replace_feature(x.features.double()))
    with pytest.raises(TypeError, match="cast one, or use torch"):
        layer.to(dtype)(x.replace_feature(x.features.float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_obeys_the_asked_dtype(dtype):
    net = unet()
    with torch.autocast("cpu", dtype):
        y = net(tensor())
    assert y.features.dtype == dtype
    y.features.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())


def test_an_optimiser_step_is_seen_by_the_packed_weight():
    layer, x = spconv.SubMConv3d(5, 7, 3), tensor()
    with torch.no_grad():
        before = layer(x).features
        layer.weight.mul_(2)
        after = layer(x).features - layer.bias
        layer.weight.data.mul_(2)  # no version tells of this one
        last = layer(x).features - layer.bias
    torch.testing.assert_close(after, 2 * (before - layer.bias))
    torch.testing.assert_close(last, 4 * (before - layer.bias))


def down_and_back() -> spconv.SparseSequential:
    return spconv.SparseSequential(
        *(spconv.SubMConv3d(5, 8, 3, indice_key="a"), torch.nn.BatchNorm1d(8), torch.nn.ReLU()),
        *(spconv.SparseConv3d(8, 8, 3, 2, 1, indice_key="b"), spconv.SparseMaxPool3d(2, 2, indice_key="c")),
        *(spconv.SparseInverseConv3d(8, 8, 2, indice_key="c"), spconv.SparseInverseConv3d(8, 4, 3, indice_key="b")),
    ).eval()


def test_layers_run_in_inference_mode():
    net, x = down_and_back(), tensor()
    want = net(x).features.detach()
    with torch.inference_mode():
        fresh = spconv.SparseConvTensor(x.features.clone(), x.indices.clone(), x.spatial_shape, x.batch_size)
        torch.testing.assert_close(net(fresh).features, want)
        torch.testing.assert_close(net(x).features, want)
        y = net[0](fresh)
        y.indices[:, 1:] += 1  # the copy counts its writes here too
        assert int(y.voxels.coords[:, 1:].min()) == int(x.indices[:, 1:].min()) + 1
    torch.testing.assert_close(net(x).features, want)


@pytest.mark.parametrize("layer", ["conv", "pool", "transposed", "inverse", "add", "from_sparse"])
def test_indices_that_a_client_writes_to_are_no_plans_own(layer):
    given = tensor()
    x = spconv.SparseConvTensor.from_sparse_tensor(given.to_sparse_tensor(), given.spatial_shape)
    down = spconv.SparseConv3d(5, 5, 3, 2, 1, indice_key="d")
    run = {
        "conv": down,
        "pool": spconv.SparseMaxPool3d(2, 2, indice_key="p"),
        "transposed": spconv.SparseConvTranspose3d(5, 5, 2, 2),
        "inverse": lambda x: spconv.SparseInverseConv3d(5, 5, 3, indice_key="d")(down(x)),
        "add": lambda x: spconv.functional.sparse_add(x, x.minus()),
        "from_sparse": lambda x: spconv.SparseConvTensor.from_sparse_tensor(x.to_sparse_tensor(), x.spatial_shape),
    }[layer]
    first = run(x)
    grid, before = first.voxels, first.voxels.coords.clone()
    first.indices[:, 1:] *= 2
    assert torch.equal(grid.coords, before)
    assert torch.equal(first.voxels.coords[:, 1:], 2 * before[:, 1:])  # the tensor itself has moved
    assert torch.equal(run(x).indices, before)
    for data in first.indice_dict.values():
        for handed in (data.pair_fwd, data.pair_bwd, data.out_indices):
            handed.zero_()
        assert int(data.pair_fwd.max()) > 0


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_tensor_made_of_anothers_indices_shares_its_grid(mode):
    """As blocks make one for the branch beside their convolutions; what was written to, or differs, does not."""
    coords = torch.cartesian_prod(*map(torch.arange, (1, 6, 6, 6))).int()
    features = torch.randn(len(coords), 4)
    with mode():
        net = spconv.SubMConv3d(4, 4, 3, padding=1, bias=False, indice_key="a")
        first = net(spconv.SparseConvTensor(features, coords.clone(), [9, 9, 9], 1))
        again = spconv.SparseConvTensor(first.features, first.indices, [9, 9, 9], 1)
        assert again.voxels is first.voxels
        assert spconv.SparseConvTensor(features, first.indices.clone(), [9, 9, 9], 1).voxels is not first.voxels
        assert spconv.SparseConvTensor(features, first.indices, [9, 9, 9], 2).voxels.batch_size == 2
        written = first.indices
        before = first.voxels
        written[:, 1:] += 2
        other = spconv.SparseConvTensor(features, written, [9, 9, 9], 1)
        assert other.voxels is not before
        assert torch.equal(other.voxels.coords, coords + torch.tensor([0, 2, 2, 2], dtype=torch.int32))
        kept = weakref.ref(before)
        del first, again, before, written
        gc.collect()
        assert kept() is None


def test_a_key_whose_indices_were_written_to_is_refused():
    x = tensor()
    y = spconv.SubMConv3d(5, 5, 3, indice_key="a")(x)
    x.indices[:, 1:] += 1
    with pytest.raises(ValueError, match="written to since"):
        spconv.SubMConv3d(5, 5, 3, indice_key="a")(y)


def test_our_layer_onto_the_voxels_within_a_shape_gives_the_same():
    """What the page on migration says of spatial shapes: ours alone reaches past the last voxel."""
    features, indices, shape, batch = scene(voxels=300, extent=8, channels=4, dtype=torch.float64)
    layer = spconv.SparseConv3d(4, 5, 3, 2, 1, bias=False).double()
    want = layer(spconv.SparseConvTensor(features, indices, shape, batch))
    ours = sc.nn.Conv(4, 5, 3, stride=2, padding=1, bias=False).double()
    ours.weight.data = layer.weight.data.permute(1, 2, 3, 4, 0).reshape(27, 4, 5)
    x = sc.SparseTensor(sc.VoxelGrid(indices, batch), features)
    reached = ours(x).grid.coords
    within = reached[(reached[:, 1:] < torch.tensor(want.spatial_shape)).all(1)]
    assert len(within) < len(reached)
    got = ours(x, target=sc.VoxelGrid(within, batch))
    assert torch.equal(got.features[got.grid.lookup(want.indices)], want.features)


def test_gradients_to_second_order_and_groups():
    features, indices, shape, batch = scene(voxels=12, extent=3, channels=4, dtype=torch.float64)
    net = spconv.SparseSequential(spconv.SubMConv3d(4, 6, 3, groups=2), spconv.SparseConv3d(6, 2, 2, 2)).double()

    def run(x):
        return net(spconv.SparseConvTensor(x, indices, shape, batch)).features

    assert torch.autograd.gradcheck(run, features.requires_grad_())
    assert torch.autograd.gradgradcheck(run, features)


# ---- modules


def test_sequential_takes_modules_dictionaries_and_keywords():
    conv = spconv.SubMConv3d(5, 6, 3)
    by_dict = spconv.SparseSequential(OrderedDict(a=conv, b=torch.nn.ReLU()))
    by_word = spconv.SparseSequential(a=conv, b=torch.nn.ReLU())
    assert list(by_dict.state_dict()) == list(by_word.state_dict()) == ["a.weight", "a.bias"]
    by_word.add(spconv.SparseReLU())
    assert len(by_word) == 3
    assert isinstance(by_word[-1], spconv.SparseReLU)
    x = tensor()
    assert torch.equal(by_dict(x).features, by_word(x).features)
    with pytest.raises(ValueError, match="two modules"):
        spconv.SparseSequential(conv, **{"0": conv})
    with pytest.raises(IndexError):
        by_word[3]


def test_modules_written_against_the_documentation_run():
    class Block(spconv.SparseModule):
        def __init__(self, channels, key):
            super().__init__()
            self.conv1 = spconv.SubMConv3d(channels, channels, 3, 1, 1, bias=False, indice_key=key)
            self.bn1 = torch.nn.BatchNorm1d(channels)
            self.relu = torch.nn.ReLU()

        def forward(self, x):
            out = self.conv1(x)
            out = out.replace_feature(self.bn1(out.features))
            out = out.replace_feature(self.relu(out.features + x.features))
            return out

    y = spconv.SparseSequential(Block(5, "a"), Block(5, "a"), spconv.RemoveGrid(), spconv.Identity())(tensor())
    assert y.features.shape == (150, 5)
    assert y.grid is None


def test_the_voxel_count_is_recorded_and_loads_from_files_without_it():
    layer = spconv.SparseConv3d(5, 6, 3, 2, 1, record_voxel_count=True)
    y = layer(tensor())
    assert layer.get_max_num_voxels().tolist() == [len(y.indices)]
    state = {k: v for k, v in layer.state_dict().items() if "max_num" not in k}
    layer.load_state_dict(state)
    assert layer.get_max_num_voxels().tolist() == [0]
    assert spconv.SubMConv3d(5, 6, 3).get_max_num_voxels() is None


def test_networks_and_tensors_pickle_and_copy():
    net, x = unet().eval(), tensor()
    y = net(x)
    for other in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert torch.equal(other(x).features, y.features)
    back = pickle.loads(pickle.dumps(y))
    assert torch.equal(back.dense(), y.dense())
    assert back.find_indice_pair("d1").ksize == [3, 3, 3]
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    net.load_state_dict(torch.load(buffer, weights_only=True))


def through_pickle(x):
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, through_pickle])
def test_a_copied_tensor_goes_on_with_its_keys(mode, through):
    """A loader's worker sends one, and the program unpickles it in whatever mode it is."""
    net = unet().eval()
    with mode():
        x = tensor()
        want = net(x).features
        torch.testing.assert_close(net(through(x)).features, want)
        half = spconv.SparseSequential(*list(net)[:4])(x)
        torch.testing.assert_close(spconv.SparseSequential(*list(net)[4:])(through(half)).features, want)
        first, again = (spconv.SubMConv3d(n, 8, 3, indice_key="s1") for n in (5, 8))
        y = first(x)
        assert torch.equal(again(through(y)).features, again(y).features)


def test_a_copy_forgets_no_write():
    x = tensor()
    y = spconv.SubMConv3d(5, 5, 3, indice_key="a")(x)
    x.indices[:, 1:] += 1
    with pytest.raises(ValueError, match="other voxels"):
        spconv.SubMConv3d(5, 5, 3, indice_key="a")(through_pickle(y))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda f, i, s, b: spconv.SparseConvTensor(f, i.float(), s, b), TypeError, "integers"),
        (lambda f, i, s, b: spconv.SparseConvTensor(f, i, s[:2], b), ValueError, "one entry"),
        (lambda f, i, s, b: spconv.SparseConvTensor(f[0], i, s, b), ValueError, "must be"),
        (lambda f, i, s, b: spconv.SparseConvTensor(f, i, s, 0), ValueError, "batch_size"),
        (lambda f, i, s, b: spconv.SubMConv3d(9, 2, 3)(spconv.SparseConvTensor(f, i, s, b)), ValueError, "9 channels"),
        (lambda f, i, s, b: spconv.SparseConv3d(5, 2, 1, padding=1), ValueError, "no padding"),
        (lambda f, i, s, b: spconv.SubMConv3d(5, 6, 3, groups=2), ValueError, "groups"),
        (lambda f, i, s, b: spconv.SubMConv3d(5, 6, (3, 3)), ValueError, "3 of them"),
        (
            lambda f, i, s, b: spconv.SubMConv3d(5, 6, 3)(
                spconv.SparseConvTensor(torch.cat([f, f]), torch.cat([i, i]), s, b)
            ),
            ValueError,
            "same voxel",
        ),
    ],
)
def test_errors_say_what_is_wrong(call, kind, words):
    with pytest.raises(kind, match=words):
        call(*scene())


def test_to_and_from_our_own_tensors():
    x = tensor()
    own = x.to_sparse_tensor()
    assert isinstance(own, sc.SparseTensor)
    back = spconv.SparseConvTensor.from_sparse_tensor(own, x.spatial_shape)
    assert back.voxels is own.grid
    assert torch.equal(back.dense(), x.dense())


def test_a_scene_goes_with_its_tensors():
    """Nothing of a scene waits for the garbage collector, whatever keys remember."""
    net = unet()
    gc.collect()
    gc.disable()
    try:
        x = tensor()
        y = net(x)
        y.features.sum().backward()
        left = [weakref.ref(x.voxels), weakref.ref(y.find_indice_pair("d1").plan.kernel_map)]
        del x, y
        assert [ref() for ref in left] == [None, None]
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_gpu(dtype):
    net, (features, indices, shape, batch) = unet().eval(), scene()
    want = net(spconv.SparseConvTensor(features, indices, shape, batch)).features.detach()
    net.to("cuda", dtype)
    x = features.to("cuda", dtype).requires_grad_()
    got = net(spconv.SparseConvTensor(x, indices.cuda(), shape, batch)).features
    got.sum().backward()
    assert bool(x.grad.isfinite().all())
    assert float((got.detach().cpu().float() - want).abs().max()) < (1e-3 if dtype == torch.float32 else 0.2)
    points = torch.rand(500, 4)
    box = ([0.1] * 3, [0, 0, 0, 1, 1, 1], 4, 300, 3)
    here, there = PointToVoxel(*box)(points), PointToVoxel(*box, torch.device("cuda"))(points.cuda())
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


def test_compiled_whole_once_the_maps_are_there():
    net, x = unet().eval(), tensor()
    want = net(x).features
    got = torch.compile(lambda t: net(t).features, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, want)


def test_plans_made_ahead_serve_these_layers_too(monkeypatch):
    net, x = unet().eval(), tensor()
    want = net(x).features

    def prepare(t):
        return spconv.SparseConvTensor.from_sparse_tensor(t, x.spatial_shape)

    plans = pickle.loads(pickle.dumps(PlanSet.of(net, sc.VoxelGrid(x.indices, 2), prepare=prepare)))
    monkeypatch.setattr(sc.ConvolutionPlan, "_join", None)
    assert torch.equal(net(prepare(sc.SparseTensor(plans.grid, x.features))).features, want)


# ---- the name spconv

PROGRAM = """
import sys, sparseconv.interop.spconv as compat
compat.install()
import spconv, torch
import spconv.pytorch as sp
from spconv.pytorch import SparseConvTensor, functional as Fsp
from spconv.pytorch.functional import sparse_add
from spconv.pytorch.modules import SparseModule, is_spconv_module
from spconv.pytorch.utils import PointToVoxel
from spconv.utils import VoxelGeneratorV2, Point2VoxelCPU3d
from spconv.core import ConvAlgo
from spconv.constants import SAVED_WEIGHT_LAYOUT, SPCONV_ALLOW_TF32, SPCONV_DO_SORT, SPCONV_USE_DIRECT_TABLE
from spconv.pytorch.conv import SparseConvolution
from spconv.pytorch.pool import SparseMaxPool
assert sp.SubMConv3d.__module__.startswith("sparseconv."), sp.SubMConv3d.__module__
assert isinstance(sp.SubMConv3d(2, 2, 3, algo=ConvAlgo.Native), SparseModule)
assert spconv.SPCONV_VERSION_NUMBERS[0] == 2
assert "triton" not in sys.modules and "cupy" not in sys.modules
compat.uninstall()
assert "spconv" not in sys.modules and "spconv.pytorch" not in sys.modules
"""


def test_install_serves_the_name_spconv():
    printed("-c", PROGRAM)


def test_install_refuses_to_hide_a_library_that_is_in_use():
    program = "import sys, types; sys.modules['spconv'] = types.ModuleType('spconv')\n"
    program += "import sparseconv.interop.spconv as c\ntry: c.install()\nexcept RuntimeError as e: print(e)\n"
    program += "c.install(force=True)\nimport spconv; assert spconv is c\n"
    program += "c.uninstall()\nassert sys.modules['spconv'].__name__ == 'spconv'"
    assert "imported already" in printed("-c", program)


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_indices_written_past_torchs_counter_are_seen(how):
    x, conv = tensor(), spconv.SubMConv3d(5, 7, 3)
    conv(x)
    moved = x.indices.clone()
    moved[:, 1:] //= 2
    moved[:, 1] += torch.arange(len(moved)) * 9  # no two are one
    x.spatial_shape[0] = 9 * len(moved) + 9
    (x.indices.data if how == "data" else torch.from_numpy(x.indices.numpy())).copy_(moved)
    want = conv(spconv.SparseConvTensor(x.features, moved, x.spatial_shape, x.batch_size)).features
    torch.testing.assert_close(conv(x).features, want)


# ---- weights laid in memory as kernels read them


class Layers(torch.nn.Module):
    """Every kind of layer, one of one tap and one in groups among them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = spconv.SparseSequential(
            spconv.SubMConv3d(5, 8, 3, indice_key="a"),
            spconv.SubMConv3d(8, 8, 3, groups=2),
            spconv.SubMConv3d(8, 8, 1),
            spconv.SparseConv3d(8, 8, 3, 2, 1, indice_key="b"),
            spconv.SparseInverseConv3d(8, 4, 3, indice_key="b"),
            spconv.SparseConvTranspose3d(4, 4, 2, 2),
        )

    def forward(self, x):
        return self.net(x).features


def test_packed_layers_give_the_same_and_train_the_same():
    torch.manual_seed(0)
    net, x = Layers(), tensor()
    twin = copy.deepcopy(net)
    strides = [layer.weight.stride() for layer in net.net]
    assert nn.pack(net) is net
    for at, layer in enumerate(net.net):
        taps = layer.weight.flatten(1, -2).permute(1, 2, 0)
        assert taps.is_contiguous() == (at != 2)  # the one of a single tap reads its memory otherwise
        assert torch.equal(layer.weight, twin.net[at].weight)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (net, twin)]
    for _ in range(3):
        for one, optimizer in zip((net, twin), optimizers):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
        assert torch.allclose(net(x), twin(x), atol=1e-6)
    assert net.net[0].weight.flatten(1, -2).permute(1, 2, 0).is_contiguous()
    nn.pack(net, False)
    assert [layer.weight.stride() for layer in net.net] == strides
    assert torch.allclose(net(x), twin(x), atol=1e-6)


WRITES = {
    "in_place": lambda w: w.mul_(2),
    "data": lambda w: w.data.mul_(2),
    "numpy": lambda w: np.multiply(w.numpy(), 2, out=w.numpy()),
    "another": lambda w: setattr(w, "data", 2 * w.data),
}


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_packed_layers_follow_whatever_writes_to_them(write):
    layer, x = nn.pack(spconv.SubMConv3d(5, 8, 3, bias=False)).eval(), tensor()
    before = layer(x).features
    WRITES[write](layer.weight.detach() if write == "numpy" else layer.weight)
    assert torch.equal(layer(x).features, 2 * before)


@torch.no_grad()
def test_packed_layers_are_copied_loaded_and_moved():
    layer, x = nn.pack(spconv.SubMConv3d(5, 8, 3)), tensor()
    want = layer(x).features
    fresh = spconv.SubMConv3d(5, 8, 3)
    fresh.load_state_dict(layer.state_dict())
    packed = nn.pack(spconv.SubMConv3d(5, 8, 3))
    packed.load_state_dict(fresh.state_dict())
    for other in (fresh, packed, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x).features, want)
    assert fresh.weight.is_contiguous()
    for other in (packed, copy.deepcopy(layer), copy.deepcopy(layer).double()):
        assert other.weight.flatten(1, -2).permute(1, 2, 0).is_contiguous()
    with pytest.raises(TypeError, match=r"pack takes a torch.nn.Module, but it was given .*: plan.pack packs a weight"):
        nn.pack(layer.weight)
