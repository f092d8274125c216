"""A scene that was validated under torch.inference_mode is trained on: nothing that it keeps is torch's for inference.

No gradient may save a tensor of inference, and nobody is told of writes to one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from tests.nn.test_ptv3 import SMALL
from tests.test_forward_mode import CASES, CHANNELS, DEVICES, Scene
from tests.test_transforms import LAYERLESS, close, geometry, tensors_held

C = CHANNELS
NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "instance norm": lambda: nn.InstanceNorm(C, affine=True),
    "group norm": lambda: nn.GroupNorm(2, C),
    "batch norm": lambda: nn.BatchNorm(C),
    "global pools": lambda: nn.Sequential(nn.SubmanifoldConv(C, C, 3), nn.GlobalMaxPool()),
    "generated": lambda: nn.Sequential(nn.Conv(C, C, 3, stride=2), nn.ConvTranspose(C, C, 3, stride=2)),
    "pools": lambda: nn.Sequential(nn.Linear(C, C), nn.MaxPool(3, stride=2), nn.AvgPool(2), nn.SumPool(2)),
    "windows": lambda: nn.WindowAttention(C, 2, 4),
    "serialized": lambda: nn.SerializedAttention(C, 2, 16),
    "positions": lambda: nn.ConditionalPositionalEncoding(C),
    "dense": lambda: nn.Sequential(nn.SubmanifoldConv(C, C, 3), nn.ToDense()),
    "unet": lambda: nn.UNet(C, 3),
    "convnext": lambda: nn.ConvNeXtUNet(C, 3),
    "minkunet": lambda: nn.MinkUNet(C, 3),
    "spunet": lambda: nn.SpUNet(C, 3),
    "second": lambda: nn.SecondEncoder(C, (41, 16, 16)),
    "ptv3": lambda: nn.PointTransformerV3(C, **SMALL),
}


def of_inference(held: Any) -> list[str]:
    return [path for path, tensor in tensors_held(held, "", set()) if tensor.is_inference()]


def slope(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(run(leaf).square().sum(), leaf)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_a_validated_scene_is_trained_on(name, device):
    s = Scene(device)
    run = CASES[name](s)
    with torch.inference_mode():
        run(s.x)
    assert of_inference(geometry(s)) == []
    close(slope(run, s.x), slope(CASES[name](fresh := Scene(device)), fresh.x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERLESS)
def test_a_scene_made_in_inference_mode_is_trained_on(name, device):
    with torch.inference_mode():
        s = Scene(device)
        CASES[name](s)(s.x)
    assert of_inference(geometry(s)) == []
    vars(s).update({key: held.clone() for key, held in vars(s).items() if isinstance(held, torch.Tensor)})
    close(slope(CASES[name](s), s.x), slope(CASES[name](fresh := Scene(device)), fresh.x))


def two_items(made: Any) -> sc.SparseTensor:
    """Two batch items, the second as long as the first; ``made`` is the context that their grid is made in."""
    gen = torch.Generator().manual_seed(2)
    cells = torch.unique(torch.randint(0, 16, (150, 3), generator=gen), dim=0)
    coords = torch.cat([torch.nn.functional.pad(cells, (1, 0), value=item) for item in range(2)])
    with made:
        grid = sc.VoxelGrid(coords.int())
    return sc.SparseTensor(grid, torch.randn(len(coords), C, generator=gen))


def result(y: Any) -> torch.Tensor:
    return y.features if isinstance(y, sc.SparseTensor) else y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("made", [nullcontext, torch.inference_mode])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_after_its_validation(name, made, device):
    torch.manual_seed(0)
    net = NETWORKS[name]().to(device)
    x, fresh = two_items(made()).to(device), two_items(nullcontext()).to(device)
    with torch.inference_mode():
        result(net.eval()(x))
    assert of_inference([x.grid, net]) == []
    net.train()
    torch.manual_seed(1)
    result(net(x)).square().sum().backward()
    got = [p.grad for p in net.parameters()]
    net.zero_grad()
    torch.manual_seed(1)
    result(net(fresh)).square().sum().backward()
    for value, p in zip(got, net.parameters()):
        assert (value is None) == (p.grad is None)
        if value is not None:
            torch.testing.assert_close(value, p.grad, rtol=1e-3, atol=1e-4 * max(1.0, float(p.grad.abs().max())))
