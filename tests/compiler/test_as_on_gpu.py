"""What compiled programs do on a GPU, without one: arrays of fixed capacity whose rows only the device counts, maps of
grids of fixed size, norms over live rows. Only the recording is left out: a region's operations run at each call."""

from __future__ import annotations

import pytest
import torch

import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.compiler import fused_operators, operators, program
from tests.compiler import test_backend, test_faces


@pytest.fixture(autouse=True)
def _as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, settle, zeros = program.Pass._stages, program.Region.settle, torch.zeros

    def staged(self):
        self.on_gpu = True
        return stages(self)

    def settled(self, run):
        self.on_gpu = False  # nothing to wait for
        settle(self, run)
        self.on_gpu = True

    def is_over_arrays(x):
        return getattr(operators.running, "fixed", False)

    torch._dynamo.reset()
    monkeypatch.setattr(program.Pass, "_stages", staged)
    monkeypatch.setattr(program.Pass, "_is_on_cpu", lambda self, node: False)
    monkeypatch.setattr(program.Region, "settle", settled)
    monkeypatch.setattr(program.Region, "_capture", lambda self, run: None)
    monkeypatch.setattr(program._Run, "_stays", lambda self, node: False)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, pin_memory=False, **options: zeros(*sizes, **options))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (operators, fused_operators):
        monkeypatch.setattr(module, "has_dead_rows", is_over_arrays)


class OfVoxels(torch.nn.Module):
    """Returns tensors of grids that the program makes: the scene's, in a shape, and one that a window reaches."""

    def __init__(self):
        super().__init__()
        self.same = spconv.SubMConv3d(4, 8, 3, indice_key="a")
        self.down = spconv.SparseConv3d(8, 8, 3, 2, 1, indice_key="b")

    def forward(self, features, coords):
        x = self.same(spconv.SparseConvTensor(features, coords, test_faces.SHAPE, 2))
        y = self.down(x)
        return x.features, y.dense(), x, y


@pytest.mark.parametrize("training", [True, False])
def test_tensors_that_leave_have_the_voxels_of_the_scene(training):
    net = OfVoxels()
    test_faces.compare(net, training=training)
    compiled = torch.compile(net, backend="sparseconv")
    for number in range(3):
        features, coords = test_faces.scene(number)
        with torch.no_grad():
            *_, x, y = compiled(features, coords)
            *_, x2, y2 = net(features, coords)
        assert torch.equal(x.indices, x2.indices)
        assert torch.equal(y.indices, y2.indices)
        torch.testing.assert_close(y.dense(), y2.dense())


@pytest.mark.parametrize("training", [True, False])
def test_networks(training):
    test_faces.compare(test_faces.OfSpconv(), training=training)
    test_backend.compare(lambda: nn.UNet(4, 3, channels=(8, 16)), trains=training)


@pytest.mark.parametrize("name", test_backend.LOOKS)
def test_what_looks_at_voxels_runs_eagerly(name):
    test_backend.test_what_looks_at_voxels_runs_eagerly(name)


def test_coordinates_of_64_bits_run_as_they_are():
    test_backend.test_grids_are_made_of_a_programs_grids("refine")
