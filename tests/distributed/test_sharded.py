"""Sharded equals unsharded: values and all gradients, for every kind of plan, over odd numbers of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import sparseconv as sc
from sparseconv.distributed import ShardedConvolutionPlan, shard
from sparseconv.pointwise import relu
from tests.cases import CASES, Case, build, named, random_grid
from tests.ranks import on_ranks

ORDERS = ["morton", "slab", "kd"]


def scenes() -> list[Case]:
    """Every geometry of the shared cases, with voxels enough that shards touch."""
    return [c for c in CASES if c.name not in ("odd_channels", "wide")]


def held(grid: sc.VoxelGrid, how: str) -> torch.Tensor:
    """The rows of a scene that this rank holds before sharding."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(len(grid))
    if how == "one rank":
        return rows if rank == world - 1 else rows[:0]
    if how == "twice":  # neighbours in the ring hold a row both
        return rows[(rows % world == rank) | (rows % world == (rank + 1) % world)]
    return rows[rows % world == rank]


def sharded_plan(case: Case, source, **more):
    options = {**case.options, "groups": case.groups, **more}
    if case.kind == "transposed":
        return ShardedConvolutionPlan.transposed(source, case.kernel, **options)
    plan = ShardedConvolutionPlan(source, case.kernel, **options)
    return plan.transpose() if case.kind == "transpose" else plan


def same(case: Case, order: str, how: str) -> list[str]:
    """Compare one case on this rank with the unsharded plan that it builds for itself; what differs, in words."""
    torch.manual_seed(7)
    grid = random_grid(case)
    if case.options.get("boundary") == "forbid" and not len(grid):
        return []
    plan = build(case)
    mine = held(grid, how)
    source = shard(sc.VoxelGrid(grid.coords[mine], grid.batch_size), by=order)
    sharded = sharded_plan(case, source)
    wrong = []
    if case.kind == "transpose":
        source = sharded.source
    x = torch.randint(-2, 3, (plan.kernel_map.num_in, case.c_in)).double()
    w = torch.randint(-2, 3, (plan.num_taps, case.c_in // case.groups, case.c_out)).double().requires_grad_()
    b = torch.randint(-2, 3, (case.c_out,)).double().requires_grad_()
    g = torch.randint(-2, 3, (plan.kernel_map.num_out, case.c_out)).double()
    rows_in, rows_out = plan.source.lookup(source.coords), plan.target.lookup(sharded.target.coords)
    if bool((rows_in < 0).any()) or bool((rows_out < 0).any()):
        return [f"{case} {order} {how}: voxels that the scene has not"]
    if sum(sharded.target.counts) != len(plan.target) or sum(source.counts) != len(plan.source):
        return [f"{case} {order} {how}: {sharded.target.counts} voxels instead of {len(plan.target)}"]
    whole = x.clone().requires_grad_()
    part = x[rows_in].requires_grad_()

    def derivatives(run, x, g):
        y = run(x, w, b)
        first = torch.autograd.grad((y * g).sum() + y.square().sum(), (x, w, b), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), (x, w))
        return y, *first, *second

    want = derivatives(plan.execute, whole, g)
    got = derivatives(sharded.execute, part, g[rows_out])
    of_rows = {0: rows_out, 1: rows_in, 4: rows_in}
    for i, name in enumerate(["y", "dx", "dw", "db", "ddx", "ddw"]):
        expected = want[i][of_rows[i]] if i in of_rows else want[i]
        if not torch.equal(got[i], expected):
            wrong.append(f"{case} {order} {how}: {name} differs on rank {dist.get_rank()}")
    return wrong


def every_case(pairs: list[tuple[str, str]], cases: list[Case] | None = None) -> list[str]:
    return [line for case in cases or scenes() for order, how in pairs for line in same(case, order, how)]


HOWS = ["one rank", "each its own", "twice"]


@pytest.mark.parametrize(
    ("world", "order", "how"), [pytest.param(1, "morton", 0, marks=pytest.mark.slow), (2, "slab", 1), (3, "kd", 2)]
)
def test_sharded_equals_unsharded_to_the_bit(world, order, how):
    """Integer features: every kind of plan, each order of space, scenes born on one rank, on all, and held twice."""
    assert not [line for lines in on_ranks(world, every_case, [(order, HOWS[how])]) for line in lines]


@pytest.mark.slow
def test_more_ranks_than_neighbours():
    """Five ranks, shards that do not touch and empty ones: a scene of each kind of plan, boundary and exchange, of
    which the slow test runs all."""
    some = named(
        *("no_voxels", "one_voxel", "submanifold", "dilated", "strided_overlap", "forbid", "periodic_strided"),
        *("grouped", "transposed_submanifold", "generative_overlap"),
    )
    assert not [line for lines in on_ranks(5, every_case, [("morton", "one rank")], some) for line in lines]


def with_residual_and_epilogue() -> list[str]:
    """Residual and activation after a sharded convolution, against those of the whole scene."""
    (case,) = named("submanifold")
    grid, plan = random_grid(case), build(case)
    shards = shard(sc.VoxelGrid(grid.coords[held(grid, "twice")], grid.batch_size), by="kd")
    sharded = sharded_plan(case, shards)
    rows = grid.lookup(shards.coords)
    torch.manual_seed(3)
    operands = [
        torch.randint(-2, 3, (n, c)).double().requires_grad_()
        for n, c in [(len(grid), case.c_in), (len(grid), case.c_out)]
    ]
    w = torch.randint(-2, 3, (plan.num_taps, case.c_in, case.c_out)).double()
    want = plan.execute(operands[0], w, residual=operands[1], epilogue=relu)
    parts = [t.detach()[rows].requires_grad_() for t in operands]
    got = sharded.execute(parts[0], w, residual=parts[1], epilogue=relu)
    wrong = [] if torch.equal(got, want[rows]) else ["y"]
    pairs = zip(torch.autograd.grad(got.square().sum(), parts), torch.autograd.grad(want.square().sum(), operands))
    return wrong + [f"gradient {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b[rows])]


def test_residual_and_epilogue():
    assert not [line for lines in on_ranks(2, with_residual_and_epilogue) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # eight processes on two cores take four minutes
@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 7, 8])
def test_all_orders_and_origins(world):
    pairs = [(order, how) for order in ORDERS for how in HOWS]
    assert not [line for lines in on_ranks(world, every_case, pairs) for line in lines]
