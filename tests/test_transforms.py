"""Geometry made within transforms of torch.func: none of it follows them, and what is kept outlives them.

A tensor that is made within a transform is wrapped for it, whatever it holds: no kernel on a card reads such a one, and
a grid that keeps it would hand it to the next call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import sparseconv as sc
from sparseconv import nn, ops, transforms
from sparseconv.products import SparseScaleInfo, sparse_scale
from tests.test_forward_mode import CASES, CHANNELS, DEVICES, Scene, by_dual, module

#: those whose layers are not made with their scene
LAYERLESS = [name for name in CASES if not CASES[name].__qualname__.startswith(module.__qualname__)]


def tensors_held(held: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in what this library holds, and where they lie."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, torch.Tensor):
        yield path, held
    elif isinstance(held, list | tuple | set):
        for place, value in enumerate(held):
            yield from tensors_held(value, f"{path}[{place}]", seen)
    elif isinstance(held, dict):
        for key, value in held.items():
            yield from tensors_held(value, f"{path}[{key!r}]", seen)
    elif type(held).__module__.startswith("sparseconv"):
        slots = {name: getattr(held, name, None) for name in getattr(type(held), "__slots__", ())}
        yield from tensors_held({**getattr(held, "__dict__", {}), **slots}, f"{path}.{type(held).__name__}", seen)


def wrapped(held: Any) -> list[str]:
    """Where tensors lie, in what this library holds, that a transform has wrapped."""
    found = tensors_held(held, "", set())
    return [path for path, tensor in found if torch._C._functorch.is_functorch_wrapped_tensor(tensor)]


def geometry(s: Scene) -> list[Any]:
    return [s.grid, s.plan, s.down, s.infos, s.groups]


def close(got, want):
    """As exact as the dtype: on a card, fp32 by whichever kernel is the first one's choice and the next one's."""
    least = 1e-9 if got.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(got, want, rtol=least, atol=least * max(1.0, float(want.detach().abs().max())))


def by_jvp(run, x):
    return jvp(run, (x,), (torch.ones_like(x),))[1]


def by_grad(run, x):
    return grad(lambda x: run(x).square().sum())(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", [by_jvp, by_grad])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_kept_that_a_transform_has_wrapped(name, way, device):
    s = Scene(device)
    run = CASES[name](s)
    first = way(run, s.x)
    assert wrapped(geometry(s)) == []
    close(way(run, s.x), first)
    leaf = s.x.clone().requires_grad_()
    torch.autograd.grad(run(leaf).square().sum(), leaf)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", [by_jvp, by_grad])
@pytest.mark.parametrize("name", LAYERLESS)
def test_a_scene_made_within_a_transform_is_that_made_outside(name, way, device):
    outside, made = Scene(device), []

    def run(x):
        made.append(Scene(device))
        return CASES[name](made[-1])(x)

    got, want = way(run, outside.x), way(CASES[name](outside), outside.x)
    close(got, want)
    assert wrapped([geometry(s) for s in made]) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", [by_jvp, by_grad, lambda run, x: vmap(run)(torch.stack([x, 2 * x])),
                                 lambda run, x: grad(lambda x: by_grad(run, x).sum())(x)],
                         ids=["jvp", "grad", "vmap", "grad of grad"])  # fmt: skip
def test_a_network_over_a_grid_made_within_a_transform(way, device):
    s = Scene(device)
    torch.manual_seed(0)
    net = nn.UNet(CHANNELS, 3).to(s.x.device, s.dtype).eval()

    def over(grid):
        return lambda x: net(sc.SparseTensor(grid(), x)).features

    got = way(over(lambda: sc.VoxelGrid(s.grid.coords.flip(0).flip(0))), s.x)
    close(got, way(over(lambda: s.grid), s.x))


@pytest.mark.parametrize("device", DEVICES)
def test_voxels_chosen_by_features_that_a_transform_follows(device):
    s = Scene(device)

    def run(x):
        kept = x[:, 0] > 0
        grid = s.grid.subset(kept)
        rows = s.grid.lookup(grid.coords)
        other, of_points = sc.voxelize(s.points + x[:, :3], 2.0)
        near = ops.PointGroups(of_points, len(other)).reduce(x, "mean")
        return sc.ConvolutionPlan(grid, 3).execute(x[rows], s.weight).sum() + near.square().sum()

    found = grad(run)(s.x)
    leaf = s.x.clone().requires_grad_()
    close(found, torch.autograd.grad(run(leaf), leaf)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", [by_jvp, by_grad])
def test_structures_made_within_a_transform(way, device):
    made = []

    def run(x):
        scale, columns = x.new_full((3,), 2.0), [([0, 1, 1], [0, 2, 3]), ([0, 0, 1], [0, 1, 3])]
        made.append([SparseScaleInfo(scale, *(torch.tensor(v, device=device) for v in c), None, 2) for c in columns])
        return sparse_scale(x, *made[-1])

    x = torch.tensor([[1.0], [3.0]], device=device)
    want = {by_jvp: [[4.0], [2.0]], by_grad: [[32.0], [56.0]]}[way]
    torch.testing.assert_close(way(run, x).tolist(), want)
    assert wrapped([info.terms for infos in made for info in infos]) == []


def test_who_follows_a_tensor():
    """What a transform wraps alone, having been made within it or detached there, it does not follow."""
    said = []

    def run(x):
        said.append([transforms.followed(t) for t in (x, 2 * x, x.detach(), torch.ones(2), outside)])
        return (2 * x).sum()

    outside, x = torch.ones(2), torch.ones(2)
    grad(run)(x)
    jvp(run, (x,), (x,))
    grad(lambda a: jvp(run, (x,), (x,))[1] * a.sum())(x)  # an inner jvp, which the outer gradient goes past
    jvp(lambda a: grad(run)(a), (x,), (x,))
    by_dual(run, x, x)
    assert said == [[True, True, False, False, False]] * 5
    vmap(run)(x[None])
    assert said[-1] == [True, True, True, False, False]


def test_scenes_of_a_batch_that_vmap_splits_are_refused():
    coords = torch.stack([torch.tensor([[0, 0, 0], [0, 0, i]]) for i in (1, 2)])
    with pytest.raises(ValueError, match="cannot differ along a batch"):
        vmap(lambda c: sc.VoxelGrid(c).positions())(coords)
    grid = sc.VoxelGrid(coords[0])
    with pytest.raises(ValueError, match="batch column"):
        vmap(lambda p: ops.interpolate(torch.ones(2, 1), grid, p))(torch.rand(2, 5, 2))


# ---- tracers that record tensors


def _recorded() -> dict[str, Any]:
    coords = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 3, 3], [1, 0, 2]])
    grid = sc.VoxelGrid(coords)
    plan, conv, pool = sc.ConvolutionPlan(grid, 3), nn.SubmanifoldConv(3, 4, 3, rank=2), nn.MaxPool(2, rank=2)
    weight, groups = torch.randn(9, 3, 4), ops.PointGroups(torch.tensor([0, 1, 1, 0]), 2)
    return {
        "a grid of traced coords": lambda x, c: conv(sc.SparseTensor(sc.VoxelGrid(c), x)).features,
        "a layer": lambda x, c: conv(sc.SparseTensor(grid, x)).features,
        "a plan": lambda x, c: plan.execute(x, weight),
        "a pool": lambda x, c: pool(sc.SparseTensor(grid, x)).features,
        "a global pool": lambda x, c: nn.GlobalAvgPool()(sc.SparseTensor(grid, x)),
        "groups of points": lambda x, c: groups.reduce(x),
        "a dense array": lambda x, c: sc.SparseTensor(grid, x).to_dense((4, 4)),
        "voxels of points": lambda x, c: sc.voxelize(x[:, :2], 0.5)[0].coords,
    }


@pytest.mark.parametrize("name", _recorded())
@pytest.mark.parametrize("tracer", ["jit", "real", "fake"])
def test_what_records_tensors_alone_is_refused(name, tracer):
    """It would keep the kernel map of the example's voxels, and run it on any other scene without a word."""
    function, given = _recorded()[name], (torch.randn(4, 3), torch.tensor([[0, 1, 1], [0, 1, 2], [0, 3, 3], [1, 0, 2]]))
    function(*given)
    by_proxies = None if tracer == "jit" else make_fx(function, tracing_mode=tracer, _allow_non_fake_inputs=True)
    with pytest.raises(RuntimeError, match=r"use torch\.export"):
        by_proxies(*given) if by_proxies else torch.jit.trace(function, given, check_trace=False)
    function(*given)  # nothing of the attempt is left


def test_an_export_to_onnx_by_torch_jit_trace_is_refused(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.SubmanifoldConv(3, 4, 3, rank=2)

        def forward(self, x: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
            return self.conv(sc.SparseTensor(sc.VoxelGrid(coords), x)).features

    given = torch.randn(2, 3), torch.tensor([[0, 1, 1], [0, 1, 2]])
    with pytest.raises(RuntimeError, match=r"use torch\.export"):
        torch.onnx.export(Net(), given, str(tmp_path / "net.onnx"), dynamo=False)
