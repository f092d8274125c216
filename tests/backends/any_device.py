"""The eager path on a device type of torch that is neither a CPU nor CUDA, and that has no fp64: see `fake_device`."""

from __future__ import annotations

import copy

import pytest
import torch

import sparseconv as sc
from sparseconv import nn, ops
from sparseconv.backends.registry import choose
from sparseconv.geometry.fixed_grid import FixedGrid
from tests import fake_device
from tests.cases import CASES, build, named, operands, random_grid


@pytest.fixture(scope="module")
def device() -> torch.device:
    return fake_device.set_up()


def both(device, run, *tensors):
    """What a function gives, and the gradients of its tensors, on the CPU and on the device."""
    found = []
    for place in ("cpu", device):
        inputs = [t.detach().to(place).requires_grad_() for t in tensors]
        y = run(*inputs)
        grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(place, y.dtype)
        grads = torch.autograd.grad(y, inputs, grad)
        assert all(t.device == inputs[0].device for t in (y, *grads))
        found.append([t.detach().cpu() for t in (y, *grads)])
    return found


def check(device, run, *tensors):
    for mine, theirs in zip(*both(device, run, *tensors)):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case(device, case):
    here, there = build(case), build(case, device)
    assert there.kernel_map.device == there.target.device == there.source.device == device
    assert torch.equal(there.target.coords.cpu(), here.target.coords)
    x, w, _ = operands(here, case, torch.float32)
    plans = {"cpu": here, "fake": there}
    check(device, lambda x, w: plans[x.device.type].execute(x, w), x, w)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", named("submanifold", "strided_overlap", "grouped", "inverse"), ids=str)
def test_integers_and_second_derivatives(device, case, dtype):
    found = []
    for place in ("cpu", device):
        plan = build(case, place, backend="torch_gather_scatter")
        x, w, g = (t.requires_grad_() for t in operands(plan, case, dtype, integers=True))
        first = torch.autograd.grad(plan.execute(x, w), (x, w), g, create_graph=True)
        second = torch.autograd.grad(first, (x, w, g), tuple(torch.ones_like(t) for t in first))
        found.append([t.detach().cpu() for t in (*first, *second)])
    for mine, theirs in zip(*found):
        assert torch.equal(mine, theirs)


def test_what_the_device_lacks_is_refused_by_name(device):
    case = named("submanifold")[0]
    plan = build(case, device)
    request = plan.request(case.c_in, case.c_out, torch.float64)
    with pytest.raises(ValueError, match=r"torch_gather_scatter: fake:0 does not compute torch.float64.*has no torch"):
        choose(request)
    with pytest.raises(ValueError, match=r"torch\.int8, which is computed in torch\.float64, with"):
        choose(plan.request(case.c_in, case.c_out, torch.int8))
    with pytest.raises(ValueError, match=r"a grid of fixed size needs this package's kernels on fake:0.*CUDA devices"):
        FixedGrid(plan.source.coords, torch.ones(1, dtype=torch.int32).to(device), plan.source)


def test_grids(device):
    here = random_grid(named("submanifold")[0])
    there = here.to(device)
    assert there.device == device
    assert there.to("cpu") is here
    assert there.to(device) is there
    mask = torch.arange(len(here)) % 3 > 0
    other = here.subset(mask)
    made = sc.VoxelGrid(here.coords.to(device), here.batch_size)
    for grid in (there, made, copy.copy(there)):  # what a file holds of it, too
        theirs = grid.subset(mask.to(device))
        pairs = [
            (grid.coarsen(2), here.coarsen(2)),
            (grid.refine(2), here.refine(2)),
            (grid.dilate(1), here.dilate(1)),
            (theirs, other),
            (theirs.union(grid), other.union(here)),
            (grid.difference(theirs), here.difference(other)),
            (grid.intersection(theirs), here.intersection(other)),
            (sc.VoxelGrid.cat([grid, theirs]), sc.VoxelGrid.cat([here, other])),
            *((grid.sorted(order)[0], here.sorted(order)[0]) for order in ("morton", "lexicographic")),
        ]
        for got, want in pairs:
            assert got.device == device
            assert torch.equal(got.coords.cpu(), want.coords)
            assert (got.batch_size, got.voxel_size, got.extent) == (want.batch_size, want.voxel_size, want.extent)
        assert torch.equal(grid.lookup(other.coords.to(device)).cpu(), here.lookup(other.coords))
        assert torch.equal(grid.batch_counts.cpu(), here.batch_counts)
        assert torch.equal(grid.positions().cpu(), here.positions())
    with pytest.raises(ValueError, match="rows 0 and 1 of coords are the same voxel"):
        sc.VoxelGrid(torch.zeros(2, 4, dtype=torch.int32).to(device))
    empty = sc.VoxelGrid(torch.zeros(0, 4, dtype=torch.int32).to(device))
    assert len(sc.ConvolutionPlan(empty, 2, stride=2).target) == 0


def test_points_to_voxels_and_dense_arrays(device):
    points = torch.rand(300, 3) * 4
    batch = (torch.arange(300) > 200).long()
    want, rows = sc.voxelize(points, 0.5, batch)
    grid, found = sc.voxelize(points.to(device), 0.5, batch.to(device))
    assert torch.equal(grid.coords.cpu(), want.coords)
    assert torch.equal(found.cpu(), rows)
    grids = {"cpu": want, "fake": grid}
    check(device, lambda x: grids[x.device.type].to_dense(x), torch.randn(len(want), 3))
    row_of = {"cpu": rows, "fake": found}
    features = torch.randn(300, 3)
    check(device, lambda x: ops.voxelize_features(x, row_of[x.device.type], len(want)), features)


NETWORKS = {
    "unet": lambda: nn.UNet(4, 6, channels=(8, 12)),
    "pools": lambda: nn.Sequential(nn.MaxPool(2, stride=2), nn.AvgPool(3, stride=2)),
    "norms": lambda: nn.Sequential(nn.SubmanifoldConv(4, 8, 3), nn.LayerNorm(8), torch.nn.GELU(), nn.GlobalAvgPool()),
    "depthwise": lambda: nn.Sequential(nn.SubmanifoldConv(4, 4, 3, groups=4), torch.nn.SiLU(), nn.GlobalMaxPool()),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(device, name):
    torch.manual_seed(0)
    grid = random_grid(named("submanifold")[0])
    x, net = torch.randn(len(grid), 4), NETWORKS[name]()
    results = []
    for place in (torch.device("cpu"), device):
        mine = copy.deepcopy(net).to(place)
        features = x.detach().to(place).requires_grad_()
        y = mine(sc.SparseTensor(grid.to(place), features))
        y = y.features if isinstance(y, sc.SparseTensor) else y
        y.square().sum().backward()
        inputs = [features, *mine.parameters()]
        assert all(t.grad.device == place for t in inputs)
        results.append([y.detach().cpu(), *(t.grad.cpu() for t in inputs)])
    for here, there in zip(*results):
        assert float((here - there).abs().max()) <= 1e-3 * float(here.abs().max()) + 1e-6


def test_autocast(device):
    case = named("submanifold")[0]
    plan = build(case, device)
    x, w, g = (t.requires_grad_() for t in operands(plan, case, torch.float32, integers=True))
    with torch.autocast(device.type, torch.bfloat16):
        y = plan.execute(x, w)
    assert y.dtype == torch.bfloat16
    assert [t.dtype for t in torch.autograd.grad(y, (x, w), g.bfloat16())] == [torch.float32] * 2


def test_no_kernel_of_this_package_is_asked(device):
    """All that runs there are torch's own operators."""
    fake_device.asked.clear()
    case = named("strided")[0]
    plan = build(case, device)
    x, w, _ = operands(plan, case, torch.float32)
    plan.execute(x, w)
    assert {"aten.index_select.out", "aten.mm.out", "aten.index_add.out"} <= set(fake_device.asked)
    assert all(name.startswith("aten.") for name in fake_device.asked)
    assert "torch_gather_scatter: chosen" in str(plan.explain(x, w))
