"""torch.compile(..., backend="sparseconv") beside eager on a GPU, in CUDA graphs: scenes that are replayed one after
another, and what must not become part of a graph."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import sparseconv as sc
import sparseconv.interop.spconv.pytorch as spconv
from sparseconv import nn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs are of a GPU")

#: scenes that fit, one that does not, and small ones
SIZES = (600, 580, 610, 560, 900, 860, 40, 700)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def scene(number: int, voxels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (N, 4) and coords (N, 4), the batch item first."""
    generator = torch.Generator().manual_seed(number)
    columns = [torch.randint(0, n, (voxels, 1), generator=generator) for n in (2, 14, 14, 14)]
    coords = torch.unique(torch.cat(columns, 1), dim=0).int()
    return torch.randn(len(coords), 4, generator=generator).cuda(), coords.cuda()


def step(module: torch.nn.Module, call: Any, number: int, voxels: int, trains: bool) -> list[torch.Tensor]:
    features, coords = scene(number, voxels)
    features.requires_grad_(trains)
    module.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(trains):
        y = call(features, coords)
    if trains:
        (y * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)).sum().backward()
    grads = [features.grad, *(p.grad for p in module.parameters())] if trains else []
    return [y.detach(), *(g for g in grads if g is not None), *(b.clone() for b in module.buffers())]


def compare(
    module: torch.nn.Module, trains: bool, sizes: tuple[int, ...] = SIZES, change: Any = None, replays: bool = True
) -> None:
    module = module.cuda().train(trains)
    other = copy.deepcopy(module)
    compiled = torch.compile(module, backend="sparseconv")
    for number, voxels in enumerate(sizes):
        for m in (module, other) if change is not None else ():
            change(m, number)
        found = step(module, compiled, number, voxels, trains)
        wanted = step(other, other, number, voxels, trains)
        scale = max(
            1.0, *(float(t.abs().max()) for t in wanted if t.numel())
        )  # gradients of what a norm undoes are noise
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5 * scale)
    assert ("replayed" in nn.explain(module)) == replays, nn.explain(module)


class Scenes(torch.nn.Module):
    """A network of this library's modules, called with features and coords."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        return self.net(sc.SparseTensor(sc.VoxelGrid(coords, 2), features)).features


class OfSpconv(torch.nn.Module):
    """A strided layer and its inverse, and a dense volume, all with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = spconv.SubMConv3d(4, 8, 3, indice_key="fine")
        self.norm = torch.nn.BatchNorm1d(8)
        self.down = spconv.SparseConv3d(8, 8, 3, 2, 1, indice_key="down")
        self.up = spconv.SparseInverseConv3d(8, 4, 3, indice_key="down")

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        x = self.fine(spconv.SparseConvTensor(features, coords, [14, 14, 14], 2))
        x = x.replace_feature(torch.relu(self.norm(x.features)))
        coarse = self.down(x)
        return torch.cat([self.up(coarse).features.mean(0), coarse.dense().sum((0, 2, 3, 4))])


@pytest.mark.parametrize("trains", [False, True])
def test_unet(trains: bool) -> None:
    compare(Scenes(nn.UNet(4, 3, channels=(8, 16))), trains)


def test_layers_in_float64_run_as_they_are() -> None:
    class Double(Scenes):
        def forward(self, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
            return super().forward(features.double(), coords).float()

    compare(Double(nn.UNet(4, 3, channels=(8, 16)).double()), True, replays=False)


def test_minkunet() -> None:
    compare(Scenes(nn.MinkUNet(4, 3)), False)


@pytest.mark.parametrize("trains", [False, True])
def test_strides_inverses_and_volumes(trains: bool) -> None:
    compare(OfSpconv(), trains)


class OfRows(torch.nn.Module):
    """A layer norm that learns, and a mean over rows: neither may see rows that are no voxels, nor their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.SubmanifoldConv(4, 8, 3), torch.nn.LayerNorm(8)
        self.second = nn.SubmanifoldConv(8, 8, 3)

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        x = self.first(sc.SparseTensor(sc.VoxelGrid(coords, 2), features))
        rows = self.norm(x.features)
        y = self.second(x.with_features(rows - rows.mean(0))).features
        return torch.cat([y, y.softmax(0), rows.mean(0, keepdim=True)])


@pytest.mark.parametrize("trains", [False, True])
def test_norms_and_means_over_rows(trains: bool) -> None:
    compare(OfRows(), trains)


class OfNumber(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.factors = nn.SubmanifoldConv(4, 8, 3), np.ones(4)

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        y = self.conv(sc.SparseTensor(sc.VoxelGrid(coords, 2), features)).features
        return y * float(self.factors[0])


def test_a_number_on_the_cpu_is_read_at_every_call() -> None:
    def change(module: Any, number: int) -> None:
        module.factors[0] = 1 + number // 3

    compare(OfNumber(), False, change=change)


def test_single_voxels_and_none() -> None:
    compare(
        Scenes(torch.nn.Sequential(nn.SubmanifoldConv(4, 8, 3), nn.BatchNorm(8))), True, (600, 580, 1, 560, 2, 1, 600)
    )


def test_a_forward_pass_between_another_and_its_gradients() -> None:
    net = Scenes(nn.UNet(4, 3, channels=(8, 16))).cuda()
    other = copy.deepcopy(net)
    compiled = torch.compile(net, backend="sparseconv")
    for _ in range(4):
        grads = []
        for m, call in ((net, compiled), (other, other)):
            m.zero_grad()
            first, second = call(*scene(1, 600)), call(*scene(2, 580))
            (first.square().sum() + second.square().sum()).backward()
            grads.append([p.grad for p in m.parameters()])
        scale = max(float(g.abs().max()) for g in grads[1])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5 * scale)


class InShape(torch.nn.Module):
    """Strided layers of spconv's names within a shape that each scene reads from its coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spconv.SubMConv3d(4, 8, 3, indice_key="a")
        self.down = spconv.SparseConv3d(8, 8, 3, 2, 1, indice_key="b")
        self.lower = spconv.SparseConv3d(8, 8, 3, 2, 1)

    def forward(self, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        shape = (coords[:, 1:].amax(0) + 1).tolist()
        x = self.down(self.first(spconv.SparseConvTensor(features, coords, shape, 2)))
        return torch.cat([x.features, self.lower(x).features])


@pytest.mark.parametrize("trains", [True, False])
def test_spatial_shapes_that_change_are_replayed(trains: bool) -> None:
    module = InShape().cuda().train(trains)
    other = copy.deepcopy(module)
    compiled = torch.compile(module, backend="sparseconv")

    def within(call: Any, cells: int) -> Any:
        """Scenes that end after so many cells, odd and even."""
        return lambda features, coords: call(*(t[(coords[:, 1:] < cells).all(1)] for t in (features, coords)))

    for number, cells in enumerate((14, 13, 12, 14, 11, 13, 12, 10)):
        found = step(module, within(compiled, cells), number, 900, trains)
        for a, b in zip(found, step(other, within(other, cells), number, 900, trains), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-3)
    assert "7 of 8 calls replayed, recorded once" in nn.explain(module), nn.explain(module)


def test_voxels_outside_of_the_shape_are_an_error_on_every_call() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = spconv.SparseConv3d(4, 8, 3, 2, 1)

        def forward(self, features: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
            return self.conv(spconv.SparseConvTensor(features, coords, [12, 14, 14], 2)).features

    module = Net().cuda().eval()
    compiled = torch.compile(module, backend="sparseconv")
    with torch.no_grad():
        for number in range(4):
            features, coords = scene(number, 500)
            fits = coords[:, 1] < 12
            torch.testing.assert_close(compiled(features[fits], coords[fits]), module(features[fits], coords[fits]))
            with pytest.raises(ValueError, match="within spatial_shape"):
                compiled(features, coords)


@pytest.mark.parametrize("trains", [True, False])
def test_an_accelerated_model_is_replayed(trains: bool) -> None:
    model = Scenes(nn.UNet(4, 3, channels=(8, 16))).cuda().train(trains)
    other = copy.deepcopy(model)
    assert sc.accelerate(model) is model
    for number, voxels in enumerate(SIZES):
        found = step(model, model, number, voxels, trains)
        wanted = step(other, other, number, voxels, trains)
        scale = max(1.0, *(float(t.abs().max()) for t in wanted))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5 * scale)
    assert "calls replayed" in nn.explain(model)
    assert list(model.state_dict()) == list(other.state_dict())
    nn.release(model)
    assert nn.explain(copy.deepcopy(model)) == "nothing is compiled: see sc.accelerate"
    found, wanted = step(model, model, 9, 500, trains), step(other, other, 9, 500, trains)
    torch.testing.assert_close(found[0], wanted[0])


def test_what_an_accelerated_model_notices() -> None:
    """Guards that `sc.accelerate` leaves out are not those on a model's own state."""
    model = Scenes(nn.UNet(4, 3, channels=(8, 16))).cuda().eval()
    other = copy.deepcopy(model)
    sc.accelerate(model)

    def momentum(m: Any) -> None:
        for part in m.modules():
            if isinstance(part, nn.BatchNorm):
                part.eps = 0.5

    def hook(m: Any) -> None:
        m.net.register_forward_hook(lambda module, args, y: y.with_features(2 * y.features))

    def replaced(m: Any) -> None:
        m.net.head = nn.Linear(8, 5).cuda()
        torch.nn.init.ones_(m.net.head.weight)
        torch.nn.init.zeros_(m.net.head.bias)

    def patched(m: Any) -> None:
        forward = m.net.head.forward
        m.net.head.forward = lambda x: forward(x).with_features(-forward(x).features)

    changes = [None, None, momentum, hook, replaced, patched]
    with torch.no_grad():
        for number, change in enumerate(changes):
            for m in (model, other) if change is not None else ():
                change(m)
            for voxels in (500, 480, 510):
                features, coords = scene(number, voxels)
                torch.testing.assert_close(model(features, coords), other(features, coords), rtol=2e-4, atol=2e-4)
