"""Networks by the names of other libraries within what torch does around them: modes, copies, in-place functions."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import sparseconv.interop.minkowski as ME
import sparseconv.interop.spconv.pytorch as spconv
import sparseconv.interop.torchsparse as torchsparse
import sparseconv.interop.torchsparse.nn as spnn
from tests.interop.scenes import scene

FEATURES, INDICES, SHAPE, BATCH = scene(channels=4)


def by_minkowski():
    size = {"stride": 2, "dimension": 3}
    return torch.nn.Sequential(
        *(ME.MinkowskiConvolution(4, 8, 3, dimension=3), ME.MinkowskiBatchNorm(8), ME.MinkowskiReLU(inplace=True)),
        *(ME.MinkowskiConvolution(8, 8, 2, **size), ME.MinkowskiReLU(inplace=True)),
        *(ME.MinkowskiConvolutionTranspose(8, 4, 2, **size), ME.MinkowskiConvolution(4, 4, 1, bias=True, dimension=3)),
        ME.MinkowskiReLU(inplace=True),
    )


def by_torchsparse():
    return torch.nn.Sequential(
        *(spnn.Conv3d(4, 8, 3), spnn.BatchNorm(8), spnn.ReLU(True), spnn.Conv3d(8, 8, 2, 2), spnn.ReLU(True)),
        *(spnn.Conv3d(8, 4, 2, 2, transposed=True), spnn.Conv3d(4, 4, 1, bias=True), spnn.ReLU(True)),
    )


def by_spconv():
    return spconv.SparseSequential(
        *(spconv.SubMConv3d(4, 8, 3), torch.nn.BatchNorm1d(8), torch.nn.ReLU(inplace=True)),
        *(spconv.SparseConv3d(8, 8, 2, 2, indice_key="d"), torch.nn.ReLU(inplace=True)),
        *(spconv.SparseInverseConv3d(8, 4, 2, indice_key="d"), spconv.SubMConv3d(4, 4, 1)),
        torch.nn.ReLU(inplace=True),
    )


#: a network, a tensor of features and indices, and the features of one
NAMES = {
    "minkowski": (by_minkowski, ME.SparseTensor, lambda y: y.F),
    "torchsparse": (by_torchsparse, torchsparse.SparseTensor, lambda y: y.F),
    "spconv": (by_spconv, lambda f, c: spconv.SparseConvTensor(f, c, SHAPE, BATCH), lambda y: y.features),
}
pytestmark = pytest.mark.parametrize("name", NAMES)


def made(name):
    make, tensor, read = NAMES[name]
    torch.manual_seed(0)
    return make().eval(), lambda: tensor(FEATURES.clone(), INDICES.clone()), read


def test_inference_mode(name):
    net, tensor, read = made(name)
    want = read(net(tensor())).detach()
    outside = tensor()
    with torch.inference_mode():
        for x in (tensor(), outside):
            for _ in range(2):
                torch.testing.assert_close(read(net(x)), want)
    torch.testing.assert_close(read(net(outside)), want)


def test_in_place_functions_follow_in_training(name):
    net, tensor, read = made(name)
    twin = copy.deepcopy(net)
    for module in twin.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    for one in (net, twin):
        read(one.train()(tensor())).square().sum().backward()
    for a, b in zip(net.parameters(), twin.parameters()):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


def test_copies_and_pickles(name):
    net, tensor, read = made(name)
    want = read(net(tensor()))
    for one in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        for x in (tensor(), copy.deepcopy(tensor()), pickle.loads(pickle.dumps(tensor()))):
            assert torch.equal(read(one(x)), want)


def test_weights_changed_through_data_are_seen(name):
    net, tensor, read = made(name)
    with torch.no_grad():
        net(tensor())
        for values in (*net.parameters(), *net.buffers()):
            if values.is_floating_point():
                values.data.mul_(0.7).add_(0.1)
        assert torch.equal(read(net(tensor())), read(copy.deepcopy(net)(tensor())))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_strides(name, dtype):
    net, _, read = made(name)
    tensor = NAMES[name][1]
    features = FEATURES.t().contiguous().t()
    assert not features.is_contiguous()
    want = read(net(tensor(features, INDICES)))
    assert torch.equal(want, read(net(tensor(FEATURES, INDICES))))
    got = read(net.to(dtype)(tensor(features.to(dtype), INDICES)))
    assert got.dtype == dtype
    assert float((got.double() - want.double()).abs().max()) < 0.02 * float(want.abs().max())


def test_no_voxel(name):
    net, _, read = made(name)
    assert read(net(NAMES[name][1](FEATURES[:0], INDICES[:0]))).shape == (0, 4)


@pytest.mark.parametrize("trace", [lambda f, *given: torch.jit.trace(f, given), lambda f, *given: make_fx(f)(*given)])
def test_tracers_that_record_tensors_are_refused(name, trace):
    """They would keep the example's maps."""
    make, tensor, read = NAMES[name]
    net = make().eval()
    with pytest.raises(RuntimeError, match=r"use torch\.export"):
        trace(lambda f, i: read(net(tensor(f, i))), FEATURES, INDICES)
