"""Interpolation and splatting: against loops over corners, their gradients, each other, and the corners of the idea."""

from __future__ import annotations

import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F

import sparseconv as sc
from sparseconv import ops
from sparseconv.geometry import FixedGrid
from sparseconv.geometry.fixed_grid_io import fault_of
from tests.cases import TOLERANCE, Case, error, random_grid

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIZES = {1: 9, 2: 6, 3: 4, 4: 3}
VOXEL, ORIGIN = (0.5, 0.25, 2.0, 1.0), (0.3, -1.0, 0.0, 7.0)


def scene(rank, voxels=40, points=60, device="cpu", seed=0):
    """A grid with voxel sizes and an origin of its own, three batch items, one empty; points in and around it."""
    given = random_grid(Case("scene", rank=rank, voxels=voxels, extent=SIZES[rank]), seed)
    grid = sc.VoxelGrid(given.coords, given.batch_size, VOXEL[:rank], ORIGIN[:rank]).to(device)
    gen = torch.Generator().manual_seed(seed)
    size = torch.tensor(VOXEL[:rank], dtype=torch.float64)
    at = (torch.rand(points, rank, generator=gen, dtype=torch.float64) - 0.5) * (SIZES[rank] + 2)
    batch = torch.randint(0, 3, (points,), generator=gen)
    return grid, (at * size + torch.tensor(ORIGIN[:rank])).to(device), batch.to(device)


def loops(grid, points, batch, mode, renormalize):
    """The weights (M, N), found corner by corner."""
    rows = {tuple(c): i for i, c in enumerate(grid.coords.tolist())}
    weights = torch.zeros(len(points), len(grid), dtype=torch.float64)
    for p, (point, item) in enumerate(zip(points.double().tolist(), batch.tolist(), strict=True)):
        u = [(x - o) / s for x, o, s in zip(point, grid.origin, grid.voxel_size, strict=True)]
        if mode == "nearest":
            row = rows.get((item, *(math.floor(v) for v in u)))
            if row is not None:
                weights[p, row] = 1
            continue
        low = [math.floor(v - 0.5) for v in u]
        for corner in itertools.product((0, 1), repeat=grid.rank):
            cell = [a + c for a, c in zip(low, corner, strict=True)]
            row = rows.get((item, *cell))
            if row is not None:
                weights[p, row] = math.prod(1 - abs(v - 0.5 - c) for v, c in zip(u, cell, strict=True))
    if renormalize:
        total = weights.sum(1, keepdim=True)
        weights /= torch.where(total > 0, total, 1)
    return weights


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mode", "renormalize"), [("linear", False), ("linear", True), ("nearest", False)])
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_against_loops(rank, mode, renormalize, dtype, device):
    grid, points, batch = scene(rank, device=device)
    weights = loops(grid, points, batch, mode, renormalize)
    assert 0 < int((weights.sum(1) == 0).sum()) < len(points)
    x = torch.randn(len(grid), 5).to(dtype).to(device)
    values = torch.randn(len(points), 5).to(dtype).to(device)
    plan = ops.Interpolation(grid, points, batch, mode=mode, renormalize=renormalize)
    moving = points.clone().requires_grad_()
    options = {"batch": batch, "renormalize": renormalize}
    for got in (plan.interpolate(x), plan.interpolate(x, moving), ops.interpolate(x, grid, points, mode, **options)):
        assert got.dtype == dtype
        assert error(got, weights @ x.double().cpu()) < TOLERANCE[dtype]
    for got in (plan.splat(values), plan.splat(values, moving), ops.splat(values, grid, points, mode, **options)):
        assert got.dtype == dtype
        assert error(got, weights.t() @ values.double().cpu()) < TOLERANCE[dtype]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_gradients_to_features_and_positions_to_the_second_order(rank, renormalize):
    grid, points, batch = scene(rank, voxels=15, points=6)
    points = points.requires_grad_()
    x = torch.randn(len(grid), 2, dtype=torch.float64, requires_grad=True)
    values = torch.randn(len(points), 2, dtype=torch.float64, requires_grad=True)
    plan = ops.Interpolation(grid, points, batch, renormalize=renormalize)
    for function, given in (
        (plan.interpolate, (x,)),
        (plan.splat, (values,)),
        (plan.interpolate, (x, points)),
        (plan.splat, (values, points)),
        (lambda x, p: ops.interpolate(x, grid, p, batch=batch, renormalize=renormalize), (x, points)),
    ):
        assert torch.autograd.gradcheck(function, given, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, given, fast_mode=True)


def test_equal_to_grid_sample_with_both_gradients():
    torch.manual_seed(0)
    dense = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    grid = sc.VoxelGrid(torch.ones_like(dense[:, 0]).nonzero())
    points = torch.rand(40, 3, dtype=torch.float64) * torch.tensor([5.0, 6.0, 7.0]) - 0.5
    batch = torch.arange(40) % 2
    points.requires_grad_()
    got = ops.interpolate(dense.movedim(1, -1).reshape(-1, 3), grid, points, batch=batch)
    unit = (2 * points / torch.tensor([4.0, 5.0, 6.0]) - 1).flip(1)
    want = torch.stack(
        [
            F.grid_sample(dense[b : b + 1], unit[None, None, None, p : p + 1], align_corners=False).flatten()
            for p, b in enumerate(batch.tolist())
        ]
    )
    assert error(got, want) < 1e-12
    grad = torch.randn_like(want)
    for ours, theirs in zip(*(torch.autograd.grad(y, (dense, points), grad) for y in (got, want)), strict=True):
        assert error(ours, theirs) < 1e-10


def test_at_the_centres_features_come_back_bit_for_bit():
    grid, _, _ = scene(3)
    at = grid.positions()
    x = torch.randn(len(grid), 4)
    for mode in ("linear", "nearest"):
        plan = ops.Interpolation(grid, at.double(), grid.coords[:, 0], mode=mode)
        assert torch.allclose(plan.interpolate(x), x, rtol=1e-5, atol=1e-5)
    unit = sc.VoxelGrid(grid.coords, grid.batch_size)
    plan = ops.Interpolation(unit, unit.positions(), unit.coords[:, 0])
    assert torch.equal(plan.interpolate(x), x)
    assert torch.equal(plan.splat(x), x)


def test_the_nearest_voxel_is_the_one_that_voxelize_chose():
    points, batch = torch.randn(200, 3), torch.randint(0, 3, (200,))
    grid, rows = sc.voxelize(points, 0.37, batch, origin=0.1)
    x = torch.randn(len(grid), 3)
    assert torch.equal(ops.interpolate(x, grid, points, "nearest", batch=batch), x[rows])


def test_a_constant_stays_one_and_a_linear_function_is_met_exactly():
    grid = sc.VoxelGrid(torch.cartesian_prod(torch.zeros(1).long(), *(torch.arange(-3, 4),) * 3), voxel_size=0.5)
    points = torch.rand(50, 3, dtype=torch.float64) * 3 - 1.5
    at = grid.positions().double()
    inside = points.abs().amax(1) < 1.4
    slope = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    points = points[inside] + 0.25
    assert error(ops.interpolate(at @ slope + 3, grid, points, renormalize=False), points @ slope + 3) < 1e-12
    holes = grid.subset(torch.rand(len(grid)) < 0.6)
    plan = ops.Interpolation(holes, points, renormalize=True)
    y = plan.interpolate(torch.full((len(holes), 1), 7.0, dtype=torch.float64))
    assert error(y, torch.full_like(y, 7.0)) < 1e-12
    total = plan.splat(torch.ones(len(points), 1, dtype=torch.float64)).sum()
    assert total.item() == pytest.approx(len(points))


def test_points_far_away_and_extreme_voxels():
    ends = torch.iinfo(torch.int32)
    grid = sc.VoxelGrid(torch.tensor([[0, ends.min], [0, 0], [0, ends.max - 1]]))
    far = torch.tensor([[-1e300], [1e300], [ends.min + 0.5], [ends.max - 0.5], [0.5]], dtype=torch.float64)
    y, points = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64), far.requires_grad_()
    got = ops.interpolate(y, grid, points)
    assert got[:, 0].tolist() == [0, 0, 1, 4, 2]
    assert torch.autograd.grad(got.sum(), points)[0].isfinite().all()


@pytest.mark.parametrize(("voxels", "points"), [(0, 5), (4, 0), (0, 0)])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_empty(voxels, points, mode):
    grid = sc.VoxelGrid(torch.arange(voxels)[:, None] * torch.tensor([[0, 1, 0]]))
    at, x = torch.zeros(points, 2, requires_grad=True), torch.ones(voxels, 3, requires_grad=True)
    y = ops.interpolate(x, grid, at, mode)
    assert y.shape == (points, 3)
    back = ops.splat(y, grid, at, mode)
    assert back.shape == (voxels, 3)
    assert torch.autograd.grad(back.sum() + y.sum(), x)[0].shape == x.shape


def test_the_same_bits_in_every_run_from_any_strides_and_after_pickling():
    grid, points, batch = scene(3, points=400)
    plan = ops.Interpolation(grid, points.float(), batch)
    again = pickle.loads(pickle.dumps(plan))
    x, moving = torch.randn(len(grid), 6), points.float().requires_grad_()
    first = torch.autograd.grad(plan.interpolate(x, moving).square().sum(), moving)[0]
    assert torch.equal(first, torch.autograd.grad(again.interpolate(x, moving).square().sum(), moving)[0])
    assert torch.equal(plan.interpolate(x), again.interpolate(x.t().contiguous().t()))


def test_a_ready_plan_compiles_as_one_graph_and_keeps_fp32_under_autocast():
    grid, points, batch = scene(2)
    plan = ops.Interpolation(grid, points, batch)
    x = torch.randn(len(grid), 3, requires_grad=True)

    def layer(x):
        return plan.splat(plan.interpolate(x).sin())

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, layer(x))
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (got, layer(x))]
    assert torch.equal(*grads)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), got)


def test_errors_say_what_to_do():
    grid, points, batch = scene(2)
    plan = ops.Interpolation(grid, points, batch)
    x = torch.zeros(len(grid), 3)
    for match, kind, call in (
        ("give batch", ValueError, lambda: ops.interpolate(x, grid, points)),
        ("'linear', 'nearest', but", ValueError, lambda: ops.interpolate(x, grid, points, "cubic", batch=batch)),
        (r"points must be \(M, 2\)", ValueError, lambda: ops.splat(x, grid, points[:, :1], batch=batch)),
        ("floating point, in the unit", TypeError, lambda: ops.interpolate(x, grid, points.long(), batch=batch)),
        ("point 0 is", ValueError, lambda: ops.interpolate(x, grid, points * torch.nan, batch=batch)),
        ("batch must be integers", TypeError, lambda: ops.interpolate(x, grid, points, batch=batch.float())),
        (r"batch must be \(60,\)", ValueError, lambda: ops.interpolate(x, grid, points, batch=batch[1:])),
        (r"within 0 .. 2; got", ValueError, lambda: ops.interpolate(x, grid, points, batch=batch + 1)),
        ("one row per voxel of the grid", ValueError, lambda: plan.interpolate(x[1:])),
        ("one row per point", ValueError, lambda: plan.splat(x)),
        ("x must be floating point", TypeError, lambda: plan.interpolate(x.int())),
        ("points must be those of the plan", ValueError, lambda: plan.interpolate(x, points[1:])),
        ("points must be those of the plan", ValueError, lambda: plan.weights(points[:1])),
        ("the plan is on cpu", ValueError, lambda: plan.interpolate(x.to("meta"))),
    ):
        with pytest.raises(kind, match=match):
            call()


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 3, 200])
@pytest.mark.parametrize("device", DEVICES)
def test_on_a_grid_of_fixed_size_dead_rows_and_absent_corners_have_no_part(rank, mode, count, device):
    """NaN in dead rows, on both sides; as on the ordinary grid."""
    gen = torch.Generator().manual_seed(rank)
    coords = torch.unique(torch.randint(0, 6, (40, rank + 1), generator=gen).clamp_max_(5), dim=0).int()
    coords[:, 0] %= 2
    coords = torch.unique(coords, dim=0)
    whole = sc.VoxelGrid(coords.to(device), 2, 0.5)
    live, rows = len(coords), 300
    dead = torch.full((rows - live, rank + 1), -1, dtype=torch.int32)
    padded, number = torch.cat([coords, dead]).to(device), torch.tensor([live], dtype=torch.int32, device=device)
    fixed = FixedGrid(padded, number, whole)
    points = (torch.rand(count, rank, generator=gen) * 4 - 0.5).to(device)
    items = torch.randint(0, 2, (count,), generator=gen).to(device)
    x = torch.randn(rows, 3, generator=gen).to(device)
    x[live:] = torch.nan
    values, found = torch.randn(count, 3, generator=gen).to(device), []
    for grid, given in ((fixed, x), (whole, x[:live])):
        given = given.clone().requires_grad_()
        y = ops.interpolate(given, grid, points, mode, batch=items)
        (grad,) = torch.autograd.grad(y, given, torch.ones_like(y))
        spread = ops.splat(values, grid, points, mode, batch=items)
        assert not spread[live:].any()
        assert not grad[live:].any()
        found.append([y.detach(), grad[:live], spread[:live]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert fixed.fault.tolist() == [0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_grid_of_fixed_size_notes_points_that_are_an_error(device):
    whole = sc.VoxelGrid(torch.tensor([[0, 1, 1]], dtype=torch.int32, device=device))
    count = torch.ones(1, dtype=torch.int32, device=device)
    for points, items in (([[0.5, torch.inf]], [0]), ([[0.5, 0.5]], [1]), ([[0.5, 0.5]], [-1])):
        fixed = FixedGrid(whole.coords, count, whole)
        batch = torch.tensor(items, device=device)
        ops.interpolate(torch.ones(1, 1, device=device), fixed, torch.tensor(points, device=device), batch=batch)
        assert fault_of(int(fixed.fault)) == "a point is not finite, or is of a batch item that the grid lacks"
    fixed = FixedGrid(whole.coords, count, whole)
    points = torch.tensor([[0.5, 0.5]], device=device, requires_grad=True)
    with pytest.raises(ValueError, match="detach the points"):
        ops.interpolate(torch.ones(1, 1, device=device), fixed, points)
