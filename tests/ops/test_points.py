"""Points to voxels: against loops, gradients to the second order, ties, NaN, empty voxels and points without one."""

from __future__ import annotations

import pytest
import torch

import sparseconv as sc
from sparseconv import ops
from tests.cases import TOLERANCE, error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
HOWS = ["mean", "sum", "max"]


def looped(features, rows, num_voxels, how):
    """Voxel by voxel; zero where there is no point."""
    out = features.new_zeros(num_voxels, features.shape[1])
    for voxel in range(num_voxels):
        held = features[rows == voxel]
        if len(held):
            out[voxel] = held.amax(0) if how == "max" else held.sum(0) if how == "sum" else held.mean(0)
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lowest", [-1, 0, 2])
def test_against_loops(lowest, dtype, index, device):
    gen = torch.Generator().manual_seed(3)
    rows = torch.randint(lowest, 9, (50,), generator=gen).to(index)
    features = torch.randn(50, 4, generator=gen).to(dtype)
    groups = ops.PointGroups(rows.to(device), 11)
    assert groups.counts.tolist() == [int((rows == v).sum()) for v in range(11)]
    for how in HOWS:
        got = groups.reduce(features.to(device), how)
        assert got.dtype == dtype
        assert error(got, looped(features.double(), rows, 11, how)) < TOLERANCE[dtype]
        assert torch.equal(got, ops.voxelize_features(features.to(device), rows.to(device), 11, how))
    x = torch.randn(11, 4).to(dtype)
    want = torch.where(rows[:, None] < 0, 0, x[rows.long().clamp_min(0)])
    assert torch.equal(groups.spread(x.to(device)).cpu(), want)


@pytest.mark.parametrize(("points", "voxels"), [(12, 5), (12, 0), (0, 5), (0, 0)])
def test_gradients_to_the_second_order(points, voxels):
    rows = torch.randint(-1, max(1, voxels - 1), (points,)) if voxels else torch.full((points,), -1)
    groups = ops.PointGroups(rows, voxels)
    features = torch.randn(points, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(voxels, 3, dtype=torch.float64, requires_grad=True)
    functions = [(lambda t, how=how: groups.reduce(t, how).square(), features) for how in HOWS]
    for function, given in (*functions, (lambda t: groups.spread(t).square(), x)):
        y = function(given)
        grad = torch.autograd.grad(y.sum(), given)[0]
        assert grad.shape == given.shape
        if points and voxels:
            assert torch.autograd.gradcheck(function, (given,))
            assert torch.autograd.gradgradcheck(function, (given,))


def test_the_first_of_equal_ones_takes_the_gradient_and_nan_wins():
    nan, low = torch.nan, -torch.inf
    features = torch.tensor([[2.0, low], [2.0, nan], [5.0, nan], [1.0, low]], requires_grad=True)
    y = ops.voxelize_features(features, torch.tensor([1, 1, 1, 0]), 3, "max")
    assert y[:, 0].tolist() == [1.0, 5.0, 0.0]
    assert y[1, 1].isnan()
    assert y[[0, 2], 1].tolist() == [low, 0.0]
    y = ops.voxelize_features(features[:2], torch.tensor([0, 0]), 1, "max")
    assert torch.autograd.grad(y.sum(), features)[0].tolist() == [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def test_halves_are_accumulated_in_fp32_whatever_autocast_says():
    features = torch.full((4000, 1), 40.0, dtype=torch.float16)
    groups = ops.PointGroups(torch.zeros(4000, dtype=torch.int64), 1)
    assert groups.reduce(features).item() == 40.0
    assert groups.reduce(torch.ones(4000, 1).bfloat16(), "sum").item() == 4000.0
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.full((4000, 1), 1.001)
        assert groups.reduce(x).item() == pytest.approx(1.001, abs=1e-4)


def test_the_same_bits_in_every_run_and_together_with_voxelize():
    points = torch.rand(500, 3)
    grid, rows = sc.voxelize(points, 0.25)
    groups = ops.PointGroups(rows, len(grid))

    def run(points):
        x = points.detach().requires_grad_()
        y = torch.cat([groups.reduce(x, how) for how in HOWS], 1)
        return y, *torch.autograd.grad(y.square().sum(), x)

    for first, again, apart in zip(run(points), run(points), run(points.t().contiguous().t()), strict=True):
        assert torch.equal(first, again)
        assert torch.equal(first, apart)
    within = (groups.reduce(points) - grid.positions()).abs()
    assert float(within.max()) <= 0.125 + 1e-6


def test_errors_say_what_to_do():
    rows = torch.tensor([0, 1, 4])
    groups = ops.PointGroups(rows, 5)
    for match, kind, call in (
        ("must be integers", TypeError, lambda: ops.PointGroups(rows.float(), 5)),
        ("one row per point", ValueError, lambda: ops.PointGroups(rows[None], 5)),
        (r"within -1 \(no voxel\) .. 3", ValueError, lambda: ops.PointGroups(rows, 4)),
        (r"got -2 .. 2", ValueError, lambda: ops.PointGroups(rows - 2, 4)),
        ("'mean', 'sum', 'max', but it is 'min'", ValueError, lambda: groups.reduce(torch.zeros(3, 1), "min")),
        (r"features must be \(3, C\)", ValueError, lambda: groups.reduce(torch.zeros(2, 1))),
        (r"x must be \(5, C\)", ValueError, lambda: groups.spread(torch.zeros(2, 1))),
        ("floating point", TypeError, lambda: groups.reduce(torch.zeros(3, 1).int())),
        ("the plan is on cpu", ValueError, lambda: groups.reduce(torch.zeros(3, 1, device="meta"))),
    ):
        with pytest.raises(kind, match=match):
            call()


@pytest.mark.parametrize("how", HOWS)
def test_batches_under_vmap(how):
    groups = ops.PointGroups(torch.tensor([2, 0, -1, 2, 2, 0]), 4)
    several = torch.randn(3, 6, 2, dtype=torch.float64)
    got = torch.func.vmap(lambda features: groups.reduce(features, how))(several)
    torch.testing.assert_close(got, torch.stack([groups.reduce(features, how) for features in several]))


def test_rows_written_to_afterwards_change_nothing():
    rows, x = torch.tensor([2, 0, 2]), torch.tensor([[1.0], [2.0], [5.0]])
    groups = ops.PointGroups(rows, 3)
    rows.zero_()
    assert groups.reduce(x, "max").flatten().tolist() == [2.0, 0.0, 5.0]
    assert groups.reduce(x, "sum").flatten().tolist() == [2.0, 0.0, 6.0]
    assert groups.spread(x).flatten().tolist() == [5.0, 1.0, 5.0]
