"""Pooling: against loops, against torch's dense pooling, gradients to the second order, and the corners."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sparseconv as sc
from sparseconv import ops
from sparseconv.ops.items import join_items, split_items
from tests.backends.test_every_backend import edges_of
from tests.cases import CASES, TOLERANCE, Case, build, error, operands, random_grid

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DENSE = {1: (F.max_pool1d, F.avg_pool1d), 2: (F.max_pool2d, F.avg_pool2d), 3: (F.max_pool3d, F.avg_pool3d)}
POOLING = [case for case in CASES if case.groups == 1]
TWICE = [
    case
    for case in POOLING
    if case.name in ("no_voxels", "no_pairs", "line", "submanifold", "strided_overlap", "periodic", "cross", "inverse")
]
TINY_TORUS = Case("tiny_torus", extent=2, voxels=9, options={"boundary": sc.Boundary.periodic((2, 2, 2))})


def pooled(x, edges, num_out):
    """Sum, mean and maximum of each output's inputs, in loops; zero where there is none."""
    seen = [[x[i] for _, i, o in edges if o == out] for out in range(num_out)]
    zero = x.new_zeros(x.shape[1])
    total = [sum(rows, zero) for rows in seen]
    mean = [t / max(1, len(rows)) for t, rows in zip(total, seen)]
    most = [torch.stack(rows).amax(0) if rows else zero for rows in seen]
    return [torch.stack(rows) if rows else x.new_zeros(0, x.shape[1]) for rows in (total, mean, most)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*POOLING, TINY_TORUS], ids=lambda c: c.name)
def test_against_loops(case, dtype, device):
    plan = build(case, device)
    x = operands(plan, case, dtype)[0]
    total, mean, most = pooled(x.double().cpu(), edges_of(plan), plan.kernel_map.num_out)
    y, winners = ops.max_pool(x, plan)
    assert torch.equal(y.double().cpu(), most)
    assert torch.equal(winners.cpu() < 0, torch.tensor(degrees(plan) == 0)[:, None].expand_as(winners))
    for got, want in ((ops.sum_pool(x, plan), total), (ops.avg_pool(x, plan), mean)):
        assert got.dtype == dtype
        assert error(got, want) < TOLERANCE[dtype]
    assert error(ops.avg_pool(x, plan, count_absent=True), total / plan.num_taps) < TOLERANCE[dtype]


def degrees(plan):
    degree = torch.zeros(plan.kernel_map.num_out, dtype=torch.int64)
    for _, _, out in edges_of(plan):
        degree[out] += 1
    return degree.numpy()


@pytest.mark.parametrize("case", [*TWICE, TINY_TORUS], ids=lambda c: c.name)
def test_gradients_to_the_second_order(case):
    plan = build(Case(**{**case.__dict__, "voxels": min(case.voxels, 12)}))
    back = plan.transpose()
    x = operands(plan, case)[0][:, :3].contiguous().requires_grad_()
    y = torch.randn(plan.kernel_map.num_out, 3, dtype=torch.float64, requires_grad=True)
    winners = ops.max_pool(x.detach(), plan)[1]
    for function, given in (
        (lambda t: ops.sum_pool(t, plan), x),
        (lambda t: ops.avg_pool(t, plan), x),
        (lambda t: ops.max_pool(t, plan)[0], x),
        (lambda t: ops.max_pool(t, plan)[0].square(), x),
        (lambda t: ops.unpool(t, back), y),
        (lambda t: ops.max_unpool(t, winners, back), y),
        (lambda t: ops.global_max_pool(t, plan.source).square(), x),
        (lambda t: ops.global_avg_pool(t, plan.source).square(), x),
    ):
        assert torch.autograd.gradcheck(function, (given,), fast_mode=True)
        assert torch.autograd.gradgradcheck(function, (given,), fast_mode=True)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(2, 2, 1), (3, 2, 1), (3, 1, 1), (2, 3, 2)])
def test_equal_to_torch_on_a_full_grid(rank, kernel, stride, dilation):
    torch.manual_seed(0)
    dense = torch.randn(2, 3, *(7,) * rank, dtype=torch.float64, requires_grad=True)
    grid = sc.VoxelGrid(torch.ones_like(dense[:, 0]).nonzero())
    features = dense.movedim(1, -1).reshape(-1, 3)
    plan = sc.ConvolutionPlan(grid, kernel, stride=stride, dilation=dilation, padding=0, boundary="forbid")
    dense_max, dense_avg = DENSE[rank]
    pairs = [(ops.max_pool(features, plan)[0], dense_max(dense, kernel, stride, dilation=dilation))]
    if dilation == 1:
        pairs.append((ops.avg_pool(features, plan), dense_avg(dense, kernel, stride)))
    for got, want in pairs:
        got = plan.target.to_dense(got, want.shape[2:])
        assert error(got, want) < 1e-12
        grad = torch.randn_like(want)
        ours, theirs = (torch.autograd.grad(y, dense, grad, retain_graph=True)[0] for y in (got, want))
        assert error(ours, theirs) < 1e-12


def test_unpooling_equals_torch_on_a_full_grid():
    dense = torch.randn(2, 3, 6, 6)
    x = sc.SparseTensor.from_dense(dense)
    plan = sc.ConvolutionPlan(x.grid, 2, stride=2)
    y, winners = ops.max_pool(x.features, plan)
    values, indices = F.max_pool2d(dense, 2, return_indices=True)
    back = x.with_features(ops.max_unpool(y, winners, plan.transpose()))
    assert torch.equal(back.to_dense(), F.max_unpool2d(values, indices, 2))
    copied = x.with_features(ops.unpool(y, plan.transpose()))
    assert torch.equal(copied.to_dense(), F.interpolate(values, scale_factor=2))
    shared = x.with_features(ops.avg_pool(y, plan.transpose(), count_absent=True))
    assert torch.equal(shared.to_dense(), F.interpolate(values, scale_factor=2) / 4)


def test_an_output_without_edges_is_zero_and_takes_no_gradient():
    grid = sc.VoxelGrid(torch.tensor([[0, 0], [0, 1]]))
    target = sc.VoxelGrid(torch.tensor([[0, 0], [0, 9]]))
    plan = sc.ConvolutionPlan(grid, 2, stride=2, target=target)
    x = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
    y, winners = ops.max_pool(x, plan)
    assert y.tolist() == [[-1.0], [0.0]]
    assert winners.tolist() == [[0], [-1]]
    y.backward(torch.ones_like(y))
    assert x.grad.tolist() == [[1.0], [0.0]]
    assert ops.avg_pool(x, plan).tolist() == [[-1.5], [0.0]]


def test_the_first_of_equal_ones_wins_and_nan_wins_over_all():
    grid = sc.VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 2], [0, 3]]))
    plan = sc.ConvolutionPlan(grid, 2, stride=2)
    x = torch.tensor([[5.0, 1.0], [5.0, float("nan")], [0.0, float("nan")], [7.0, 2.0]])
    y, winners = ops.max_pool(x, plan)
    assert winners.tolist() == [[0, 1], [1, 0]]
    assert y[:, 1].isnan().all()
    assert y[:, 0].tolist() == [5.0, 7.0]


def test_infinite_values_are_pooled_and_routed_like_others():
    grid = sc.VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 2], [0, 3]]))
    plan = sc.ConvolutionPlan(grid, 2, stride=2)
    x = torch.tensor([[1.0], [-torch.inf], [-torch.inf], [-torch.inf]], requires_grad=True)
    y, winners = ops.max_pool(x, plan)
    assert y.tolist() == [[1.0], [-torch.inf]]
    assert winners.tolist() == [[0], [0]]
    y.backward(torch.tensor([[torch.inf], [torch.nan]]))
    assert x.grad[[0, 1, 3], 0].tolist() == [torch.inf, 0.0, 0.0]
    assert x.grad[2].isnan()


def test_halves_are_accumulated_in_fp32():
    grid = sc.VoxelGrid(torch.cartesian_prod(torch.zeros(1).long(), *(torch.arange(14),) * 3))
    plan = sc.ConvolutionPlan(grid, 14, stride=14, padding=0)
    x = torch.full((len(grid), 1), 40.0, dtype=torch.float16)
    assert ops.avg_pool(x, plan).item() == 40.0  # the sum itself is past the largest half
    ones = torch.ones(len(grid), 1, dtype=torch.bfloat16)
    assert ops.sum_pool(ones, plan).item() == 2752.0  # 2744 to the nearest bf16; added in bf16 it stops at 256


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_global_pooling_per_item(shuffle, device):
    grid = random_grid(Case("items", voxels=40, batch=3), shuffle=shuffle).to(device)
    x = torch.randn(len(grid), 5, device=device)
    items = [x[grid.coords[:, 0] == b] for b in range(grid.batch_size)]
    assert len(items[-1]) == 0
    zero = x.new_zeros(5)
    for function, reduce in (
        (ops.global_sum_pool, lambda t: t.sum(0)),
        (ops.global_avg_pool, lambda t: t.mean(0) if len(t) else zero),
        (ops.global_max_pool, lambda t: t.amax(0) if len(t) else zero),
    ):
        assert error(function(x, grid), torch.stack([reduce(item) for item in items]).double().cpu()) < 2e-5
    assert torch.equal(join_items(split_items(x, grid), grid), x)


@pytest.mark.parametrize("batch_size", [0, 2])
def test_global_pooling_without_voxels(batch_size):
    grid = sc.VoxelGrid(torch.zeros(0, 4, dtype=torch.int32), batch_size)
    for function in (ops.global_sum_pool, ops.global_avg_pool, ops.global_max_pool):
        assert function(torch.zeros(0, 3), grid).tolist() == [[0.0] * 3] * batch_size


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_in_every_run_and_from_any_strides(device):
    plan = build(Case("overlap", voxels=60, options={"stride": 2}), device)
    x = torch.randn(plan.kernel_map.num_in, 6, device=device)

    def run(x):
        x = x.detach().requires_grad_()
        y = ops.avg_pool(x, plan) + ops.max_pool(x, plan)[0]
        return y, *torch.autograd.grad(y.square().sum(), x)

    for first, again, apart in zip(run(x), run(x), run(x.t().contiguous().t())):
        assert torch.equal(first, again)
        assert torch.equal(first, apart)


def test_errors_say_what_to_do():
    plan = build(Case("small", voxels=10))
    with pytest.raises(ValueError, match=r"x must be \(10, C\)"):
        ops.sum_pool(torch.zeros(9, 2), plan)
    with pytest.raises(TypeError, match="floating point"):
        ops.max_pool(torch.zeros(10, 2, dtype=torch.int64), plan)
    with pytest.raises(TypeError, match="integers that max_pool returned"):
        ops.max_unpool(torch.zeros(10, 2), torch.zeros(10, 2), plan)
    with pytest.raises(ValueError, match="winners must be"):
        ops.max_unpool(torch.zeros(10, 2), torch.zeros(10, 3, dtype=torch.int16), plan)
    with pytest.raises(ValueError, match="one row per voxel of the grid"):
        ops.global_sum_pool(torch.zeros(9, 2), plan.source)
    with pytest.raises(ValueError, match="the plan is on cpu"):
        ops.sum_pool(torch.zeros(10, 2, device="meta"), plan)
    with pytest.raises(TypeError, match=r"of 16 bits or more; got torch\.float8_e5m2"):
        ops.max_pool(torch.zeros(10, 2, dtype=torch.float8_e5m2), plan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_items_under_autocast_of_another_dtype(dtype):
    """Torch's stack and cat take no float16 under autocast to bfloat16."""
    grid = sc.VoxelGrid(torch.tensor([[0, 0], [1, 0], [0, 1]]))
    x = torch.tensor([[1.0], [3.0], [5.0]], dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.global_avg_pool(x, grid)
        joined = join_items(split_items(x, grid), grid)
    assert found.dtype == joined.dtype == dtype
    assert found.tolist() == [[3.0], [3.0]]
    assert torch.equal(joined, x)
