"""`torch.fx.symbolic_trace` of networks of the drop-in: layers are nodes, tensors that are made inside are proxies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv.interop.spconv.pytorch import functional
from sparseconv.interop.spconv.pytorch.conv import SparseConvolution
from tests.interop.scenes import scene


def block(norm=torch.nn.BatchNorm1d, relu=torch.nn.ReLU):
    return spconv.SparseSequential(
        spconv.SubMConv3d(5, 8, 3, bias=False, indice_key="s1"), norm(8), relu(), torch.nn.Dropout(0.0)
    )


class Whole(torch.nn.Module):
    """Makes its tensor by itself, as a detector does."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, features, indices, spatial_shape, batch_size):
        return self.net(spconv.SparseConvTensor(features, indices, spatial_shape, batch_size))


class Residual(spconv.SparseModule):
    """A block as projects write it: features by hand, a way around."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = spconv.SubMConv3d(channels, channels, 3, indice_key="r")
        self.bn1 = torch.nn.BatchNorm1d(channels)
        self.conv2 = spconv.SubMConv3d(channels, channels, 3, indice_key="r")
        self.relu = torch.nn.ReLU()

    def forward(self, x):
        out = self.conv1(x)
        out = out.replace_feature(self.relu(self.bn1(out.features)))
        out = self.conv2(out)
        return out.replace_feature(out.features + x.features)


class EncoderDecoder(torch.nn.Module):
    """Down and up by the keys of the way down, with skips, pools, tables and sums."""

    def __init__(self):
        super().__init__()
        self.first = block()
        self.residual = Residual(8)
        self.down = spconv.SparseConv3d(8, 16, 3, 2, 1, indice_key="d1")
        self.pool = spconv.SparseMaxPool3d(2, indice_key="p1")
        self.deep = spconv.SparseSequential(spconv.SubMConv3d(16, 16, 1), torch.nn.BatchNorm1d(16), torch.nn.ReLU())
        self.unpool = spconv.SparseInverseConv3d(16, 16, 2, indice_key="p1")
        self.join, self.add = spconv.JoinTable(), spconv.AddTable()
        self.up = spconv.SparseInverseConv3d(32, 8, 3, indice_key="d1")
        self.widen = spconv.SparseConvTranspose3d(8, 4, 2, 2)
        self.norm = spconv.SparseSequential(spconv.SparseBatchNorm(8), spconv.SparseReLU(), spconv.SparseIdentity())
        self.mean, self.largest = spconv.SparseGlobalAvgPool(), spconv.SparseGlobalMaxPool()
        self.dense = spconv.ToDense()

    def forward(self, features, indices, spatial_shape, batch_size):
        x = self.residual(self.first(spconv.SparseConvTensor(features, indices, spatial_shape, batch_size)))
        down = self.down(x)
        deep = self.unpool(self.deep(self.pool(down)))
        up = self.norm(self.add([x, self.up(self.join([down, deep]))]))
        both = functional.sparse_add(up, x)
        return self.mean(up), self.largest(both), self.dense(self.widen(up)), up.dense(), up.features


NETWORKS = {
    "a block": lambda: Whole(block()),
    "norms of the whole tensor": lambda: Whole(block(spconv.SparseBatchNorm, spconv.SparseReLU)),
    "dense at the end": lambda: Whole(
        spconv.SparseSequential(
            spconv.SparseConv3d(5, 6, 3, 2, 1), spconv.ToDense(), torch.nn.Conv3d(6, 4, 1), torch.nn.ReLU()
        )
    ),
    "tables": lambda: Whole(
        spconv.SparseSequential(
            spconv.ConcatTable().add(spconv.SubMConv3d(5, 6, 3)).add(spconv.SubMConv3d(5, 7, 1)),
            spconv.JoinTable(),
            torch.nn.ReLU(),
        )
    ),
    "an encoder and decoder": EncoderDecoder,
}


def tensors(answer):
    """All that an answer holds, as tensors."""
    if isinstance(answer, spconv.SparseConvTensor):
        return [answer.features, answer.indices, torch.tensor(answer.spatial_shape)]
    return [answer] if isinstance(answer, torch.Tensor) else list(answer)


def same(answer, wanted):
    answer, wanted = tensors(answer), tensors(wanted)
    return len(answer) == len(wanted) and all(map(torch.equal, answer, wanted))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_traced_network_gives_the_same_bits(network, training):
    torch.manual_seed(0)
    net = NETWORKS[network]().train(training)
    traced = torch.fx.symbolic_trace(copy.deepcopy(net))
    traced.graph.lint()
    layers = [m for m in net.modules() if isinstance(m, SparseConvolution)]
    kinds = [type(traced.get_submodule(node.target)) for node in traced.graph.nodes if node.op == "call_module"]
    assert [kind for kind in kinds if issubclass(kind, SparseConvolution)] == [type(layer) for layer in layers]
    others = [copy.deepcopy(traced), pickle.loads(pickle.dumps(traced)), pickle.loads(pickle.dumps(net))]
    for seed, voxels in ((0, 150), (1, 90)):
        given = scene(seed=seed, voxels=voxels)
        wanted = net(*given)
        for other in (traced, *others):
            assert same(other(*given), wanted)


def test_inference_folds_norms_only_in_the_network_itself():
    torch.manual_seed(0)
    net = EncoderDecoder().eval()
    traced = torch.fx.symbolic_trace(net)
    with torch.no_grad():
        for got, wanted in zip(traced(*scene()), net(*scene())):
            torch.testing.assert_close(got, wanted)


def test_gradients_and_running_means_of_a_traced_network():
    torch.manual_seed(0)
    net = EncoderDecoder()
    traced = torch.fx.symbolic_trace(copy.deepcopy(net))
    for either in (net, traced):
        sum(t.square().sum() for t in either(*scene())).backward()
    for name, parameter in net.named_parameters():
        assert torch.equal(traced.get_parameter(name).grad, parameter.grad), name
    for name, buffer in net.named_buffers():
        assert torch.equal(traced.get_buffer(name), buffer), name


def test_a_scene_without_voxels_passes_a_traced_network():
    features, indices, shape, batch = scene()
    net = Whole(block())
    empty = features[:0], indices[:0], shape, batch
    assert same(torch.fx.symbolic_trace(net)(*empty), net(*empty))


def test_a_sequential_is_traced_on_its_own_and_copies():
    net = block().eval()
    traced = torch.fx.symbolic_trace(net)
    x = spconv.SparseConvTensor(*scene())
    for other in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        assert same(other(x), net(x))


def test_a_tracer_of_its_own_leaves_serves_too():
    """As projects that are written for spconv trace: its convolutions are leaves, by hand."""

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return isinstance(m, SparseConvolution) or super().is_leaf_module(m, module_qualified_name)

    net = EncoderDecoder().eval()
    tracer = Tracer()
    traced = torch.fx.GraphModule(net, tracer.trace(net))
    assert same(traced(*scene()), net(*scene()))


def test_a_tensor_with_a_way_to_add_to_it_is_traced():
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = spconv.SubMConv3d(5, 5, 3)

        def forward(self, features, indices, spatial_shape, batch_size):
            x = spconv.SparseConvTensor(features, indices, spatial_shape, batch_size)
            y = self.conv(x, add_input=x) + x
            return y.minus().select_by_index(slice(0, 20))

    net = Sum()
    assert same(torch.fx.symbolic_trace(net)(*scene()), net(*scene()))


def test_a_layer_by_itself_says_what_to_trace():
    with pytest.raises(ValueError, match="trace SparseSequential"):
        torch.fx.symbolic_trace(spconv.SubMConv3d(5, 6, 3))


LAYERS = [
    lambda: spconv.SubMConv3d(5, 6, 3),
    lambda: spconv.SparseMaxPool3d(2),
    spconv.SparseGlobalAvgPool,
    spconv.SparseGlobalMaxPool,
    spconv.JoinTable,
    spconv.AddTable,
    spconv.AddTableMisaligned,
    spconv.ToDense,
    spconv.RemoveGrid,
    lambda: functional.sparse_add,
]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("given", [torch.ones(3, 5), None, [torch.ones(3, 5)], [], 3])
def test_what_is_no_sparse_tensor_is_refused_in_words(layer, given):
    with pytest.raises(TypeError, match="SparseConvTensor"):
        layer()(given)
