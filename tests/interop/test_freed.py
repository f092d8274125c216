"""A network and all that its steps made go with the last who holds them: a card's memory waits for no collection."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv.interop import minkowski, torchsparse
from tests.interop.scenes import scene

ITEMS, TENSORS = 2, (torch.Tensor, torch.nn.Parameter)


def through_spconv():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = spconv.SparseSequential(
                spconv.SubMConv3d(4, 8, 3, padding=1, indice_key="a"), torch.nn.BatchNorm1d(8), torch.nn.ReLU()
            )
            self.down = spconv.SparseConv3d(8, 8, 3, stride=2, padding=1, indice_key="b", record_voxel_count=True)
            self.pool = spconv.SparseMaxPool3d(2, 2)
            self.up = spconv.SparseInverseConv3d(8, 4, 3, indice_key="b")
            self.dense = spconv.ToDense()

        def forward(self, coords, features):
            x = self.stem(spconv.SparseConvTensor(features, coords, [32] * 3, ITEMS))
            low = self.down(x)
            return self.up(low).features.mean() + self.dense(self.pool(low)).mean()

    return Net()


def through_minkowski():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = minkowski.MinkowskiConvolution(4, 8, kernel_size=3, dimension=3)
            self.norm, self.relu = minkowski.MinkowskiBatchNorm(8), minkowski.MinkowskiReLU()
            self.down = minkowski.MinkowskiConvolution(8, 8, kernel_size=2, stride=2, dimension=3)
            self.up = minkowski.MinkowskiConvolutionTranspose(8, 4, kernel_size=2, stride=2, dimension=3)
            self.pool = minkowski.MinkowskiGlobalMaxPooling()

        def forward(self, coords, features):
            x = minkowski.SparseTensor(features, coordinates=coords)
            return self.pool(self.up(self.down(self.relu(self.norm(self.stem(x)))))).F.mean()

    return Net()


def through_torchsparse():
    nn = torchsparse.nn

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = torch.nn.Sequential(nn.Conv3d(4, 8, 3), nn.BatchNorm(8), nn.ReLU(True))
            self.down, self.up = nn.Conv3d(8, 8, 2, stride=2), nn.Conv3d(8, 4, 2, stride=2, transposed=True)

        def forward(self, coords, features):
            return self.up(self.down(self.stem(torchsparse.SparseTensor(features, coords)))).feats.mean()

    return Net()


@pytest.mark.parametrize("make", [through_spconv, through_minkowski, through_torchsparse])
def test_a_network_goes_at_once(make):
    """Layers of spconv's names held themselves by a hook: a model's weights stayed until Python collected."""

    def lived() -> list[weakref.ref]:
        net = make()
        for seed in range(2):
            features, coords, _, _ = scene(extent=16, batch=ITEMS, channels=4, seed=seed)
            net(coords, features).backward()
        net.eval()
        with torch.inference_mode():
            net(coords, features)
        return [weakref.ref(tensor) for p in net.parameters() for tensor in (p, p.grad)]

    lived()  # what is imported and kept once
    gc.collect()
    gc.disable()
    try:
        before = {id(t) for t in gc.get_objects() if type(t) in TENSORS}
        assert [seen() for seen in lived()] == [None] * len(lived())
        left = [t.shape for t in gc.get_objects() if type(t) in TENSORS and id(t) not in before]
        assert left == []
    finally:
        gc.enable()
