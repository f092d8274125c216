"""Modules whose calls are replayed: the same results and gradients as eager calls, for scenes of any size.

Without a card a stand-in of the graphs runs what was captured again at every replay, into the same memory.
"""

from __future__ import annotations

import copy

import pytest
import torch

import sparseconv as sc
import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.nn import graphs
from sparseconv.nn.capturing import module as capturing
from sparseconv.nn.capturing.recording import Recording

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class RunAgain(Recording):
    """Replays by running the call again, into the memory of the first results."""

    def _capture(self):
        self._keep_buffers()
        self.answer = self.run()
        if self.trains:
            self._gather(self._find(self.answer))
        answer = self.answer
        self._finish()
        self.results = [t.detach().clone() for t in answer.tensors] or [t.clone() for t in self.results]

    def _replay_forward(self):
        with torch.inference_mode(False), torch.set_grad_enabled(self.trains):
            self._again = self.run()
        for kept, new in zip(self.results, self._again.tensors, strict=True):
            kept.copy_(new.detach())
        for number, grid in self._again.voxels.items():
            self._voxels[number].coords.copy_(grid.coords)

    def _replay_backward(self):
        with torch.enable_grad():
            self._gather(self._find(self._again))


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(graphs, "has_graphs", lambda device: True)
        monkeypatch.setattr(capturing, "RECORDING", RunAgain)


def coords_of(seed, voxels, items=2, extent=12, shift=0):
    gen = torch.Generator().manual_seed(seed)
    found = torch.cat(
        [torch.randint(0, items, (voxels, 1), generator=gen), torch.randint(0, extent, (voxels, 3), generator=gen)], 1
    )
    found = torch.unique(found, dim=0)
    found[:, 1:] += shift
    return found[torch.randperm(len(found), generator=gen)].int().to(DEVICE)


def features_of(seed, coords, channels=4):
    return torch.randn(len(coords), channels, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Block(spconv.SparseModule):
    def __init__(self, channels, key):
        super().__init__()
        self.conv1 = spconv.SubMConv3d(channels, channels, 3, padding=1, bias=False, indice_key=key)
        self.bn1 = torch.nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)
        self.relu = torch.nn.ReLU()
        self.conv2 = spconv.SubMConv3d(channels, channels, 3, padding=1, bias=True, indice_key=key)
        self.bn2 = torch.nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)

    def forward(self, x):
        out = self.conv1(x)
        out = out.replace_feature(self.bn1(out.features))
        out = out.replace_feature(self.relu(out.features))
        out = self.conv2(out)
        out = out.replace_feature(self.bn2(out.features))
        out = out.replace_feature(out.features + x.features)
        return out.replace_feature(self.relu(out.features))


def layer(conv, channels):
    return spconv.SparseSequential(conv, torch.nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01), torch.nn.ReLU())


class Detector(torch.nn.Module):
    """As detectors are written: a dict in, the same dict out with tensors on several grids."""

    def __init__(self):
        super().__init__()
        self.shape = [12, 12, 12]
        self.first = layer(spconv.SubMConv3d(4, 8, 3, padding=1, bias=False, indice_key="a"), 8)
        self.down = layer(spconv.SparseConv3d(8, 12, 3, 2, padding=1, bias=False, indice_key="b"), 12)
        self.block = Block(12, "c")
        self.out = layer(spconv.SparseConv3d(12, 16, (3, 1, 1), (2, 1, 1), bias=False, indice_key="d"), 16)

    def forward(self, batch):
        x = spconv.SparseConvTensor(batch["features"], batch["coords"].int(), self.shape, batch["batch_size"])
        x1 = self.first(x)
        x2 = self.block(self.down(x1))
        batch["encoded"] = self.out(x2)
        batch.update({"stride": 4, "scales": {"x1": x1, "x2": x2}})
        return batch


class Segmenter(torch.nn.Module):
    """As segmenters are written: sizes are read on the host first, and the shape differs from scene to scene."""

    def __init__(self):
        super().__init__()
        self.first = layer(spconv.SubMConv3d(4, 8, 5, padding=1, bias=False, indice_key="stem"), 8)
        self.down = layer(spconv.SparseConv3d(8, 12, 2, 2, bias=False, indice_key="down"), 12)
        self.block = Block(12, "low")
        self.up = layer(spconv.SparseInverseConv3d(12, 8, 2, bias=False, indice_key="down"), 8)
        self.last = spconv.SubMConv3d(16, 3, 1, padding=1, bias=True)

    def forward(self, coords, features):
        shape = torch.add(coords[:, 1:].max(0).values, self.margin).tolist()
        x = spconv.SparseConvTensor(features, coords.int().contiguous(), shape, coords[:, 0].max().item() + 1)
        x = self.first(x)
        y = self.up(self.block(self.down(x)))
        y = y.replace_feature(torch.cat((y.features, x.features), 1))
        return self.last(y).features

    margin = 9


def detect(net, seed, voxels=300, **where):
    coords = coords_of(seed, voxels, **where)
    batch = {"features": features_of(seed, coords), "coords": coords, "batch_size": 2, "name": "scene"}
    out = net(batch)
    assert out is batch
    assert out["stride"] == 4
    assert out["name"] == "scene"
    return [out["encoded"].features, out["scales"]["x1"].features, out["scales"]["x2"].features, out["encoded"].dense()]


def segment(net, seed, voxels=300, **where):
    coords = coords_of(seed, voxels, **where)
    return [net(coords, features_of(seed, coords))]


def own(net, seed, voxels=300, **where):
    coords = coords_of(seed, voxels, **where)
    return [net(sc.SparseTensor(sc.VoxelGrid(coords, 2), features_of(seed, coords))).features]


def make(kind):
    torch.manual_seed(0)
    if kind == "unet":
        return nn.UNet(4, 3, channels=(8, 12)).to(DEVICE)
    return {"detector": Detector, "segmenter": Segmenter}[kind]().to(DEVICE)


CALLS = {"detector": detect, "segmenter": segment, "unet": own}
KINDS = list(CALLS)


def step(net, call, seed, voxels=300, **where):
    """Results, gradients and buffers of a training step."""
    net.zero_grad(set_to_none=True)
    out = call(net, seed, voxels, **where)
    out[0].square().mean().backward()
    return [*(t.detach() for t in out), *(p.grad for p in net.parameters()), *(b.clone() for b in net.buffers())]


def same(got, want, limit=2e-3):
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert float((a.double() - b.double()).abs().max()) <= limit * max(1.0, float(b.double().abs().max()))


def forward_of(net):
    return net.__dict__["forward"]


def replays(net):
    return sum(kind.replays for kind in forward_of(net)._kinds.values())


@pytest.mark.parametrize("kind", KINDS)
def test_training_steps_on_scenes_of_many_sizes_equal_eager_ones(kind):
    net, call = make(kind), CALLS[kind]
    twin = copy.deepcopy(net)
    assert nn.capture(net) is net
    assert list(net.state_dict()) == list(twin.state_dict())
    for seed, voxels in enumerate([300, 280, 310, 150, 330, 300]):
        same(step(net, call, seed, voxels), step(twin, call, seed, voxels))
    assert replays(net) == 4, nn.explain(net)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_equals_eager_and_sees_every_change_of_a_weight(kind):
    net, call = make(kind).eval(), CALLS[kind]
    twin = copy.deepcopy(net)
    nn.capture(net)
    for seed in range(5):
        with torch.inference_mode() if seed % 2 else torch.no_grad():
            same(call(net, seed, 300 - 20 * seed), call(twin, seed, 300 - 20 * seed))
        for one, other in zip(net.parameters(), twin.parameters(), strict=True):
            one.data.mul_(1.1)
            other.data.mul_(1.1)
    assert replays(net) >= 2, nn.explain(net)


# ---- what no graph can hold


class Counts(Detector):
    """A network that reads a number in its middle."""

    def forward(self, batch):
        x = spconv.SparseConvTensor(batch["features"], batch["coords"].int(), self.shape, batch["batch_size"])
        x = self.first(x)
        batch["encoded"] = self.block(self.down(x))
        batch["stride"] = 4 if x.features.sum().item() > -1e9 else 5
        batch["scales"] = {"x1": x, "x2": batch["encoded"]}
        return batch


def test_what_waits_in_the_middle_is_named_and_its_parts_are_captured_instead():
    torch.manual_seed(0)
    net = Counts().to(DEVICE)
    twin = copy.deepcopy(net)
    assert nn.accelerate(net) is net
    for seed in range(7):
        same(step(net, detect, seed), step(twin, detect, seed))
    said = nn.explain(net)
    assert "_local_scalar_dense waits for the device, at test_capture_module.py" in said
    assert 'batch["stride"]' in said
    assert sum(replays(part) for part in (net.first, net.down, net.block)) >= 6, said
