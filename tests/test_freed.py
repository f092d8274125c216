"""What a call made goes with the last who holds it: memory, a card's above all, waits for no collection of Python's."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.plan import PlanSet

TENSORS = (torch.Tensor, torch.nn.Parameter)


def scene() -> sc.SparseTensor:
    gen = torch.Generator().manual_seed(0)
    coords = torch.unique(torch.randint(0, 14, (400, 3), generator=gen), dim=0)
    grid = sc.VoxelGrid(torch.nn.functional.pad(coords, (1, 0)).int())
    return sc.SparseTensor(grid, torch.randn(len(grid), 4))


def unet() -> torch.nn.Module:
    return nn.UNet(4, 3, channels=(8, 12))


def a_step() -> None:
    unet()(scene()).features.sum().backward()


def torchs_functions() -> None:
    x = scene()
    torch.cat([torch.relu(x), torch.nn.functional.gelu(x)], 1)


def a_stream() -> None:
    sc.stream(unet().eval(), scene(), 10_000_000)


def a_streamed_step() -> None:
    x = scene()
    sc.stream(unet(), x.with_features(x.features.requires_grad_()), 10_000_000).features.sum().backward()


def plans_that_travel() -> None:
    x = scene()
    pickle.loads(pickle.dumps(PlanSet.of(unet(), x.grid).to("cpu")))


def higher_gradients() -> None:
    x = scene()
    plan, w = sc.ConvolutionPlan(x.grid, 3), torch.randn(27, 4, 8, requires_grad=True)
    (found,) = torch.autograd.grad(plan.execute(x.features, w).square().sum(), w, create_graph=True)
    found.square().sum().backward()


def pools() -> None:
    x = scene()
    net = torch.nn.Sequential(nn.MaxPool(2), nn.AvgPool(2), nn.GlobalMaxPool())
    net(x.with_features(x.features.requires_grad_())).sum().backward()


@pytest.mark.parametrize(
    "call",
    [a_step, torchs_functions, a_stream, a_streamed_step, plans_that_travel, higher_gradients, pools],
)
def test_nothing_is_left(call):
    """Some functions that called themselves by name were held by it, with the scene, the maps or the weights."""
    call()  # what is imported and kept once
    gc.collect()
    gc.disable()
    try:
        before = {id(t) for t in gc.get_objects() if type(t) in TENSORS}
        call()
        assert [tuple(t.shape) for t in gc.get_objects() if type(t) in TENSORS and id(t) not in before] == []
    finally:
        gc.enable()
