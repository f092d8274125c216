"""Grids of fixed size: live rows as on an ordinary grid, dead rows met by nothing, faults said, graphs replayed."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import given, settings
from hypothesis import strategies as st

from sparseconv import Boundary, ConvolutionPlan, IndexRange, VoxelGrid
from sparseconv.backends.registry import BACKENDS, backend
from sparseconv.geometry.edges import Window, fine_grid
from sparseconv.geometry.fixed_grid import FixedGrid
from sparseconv.geometry.fixed_grid_io import fault_of, put_scene
from sparseconv.geometry.gpu.edge_lists import find_edges_on_gpu
from sparseconv.geometry.gpu.fixed_grid_io import put_scene_on_gpu
from sparseconv.geometry.gpu.lists import ROW_BITS, Schedule
from sparseconv.geometry.gpu.reached import reach_fixed
from sparseconv.geometry.gpu.schedule import meets_once, one_tap_schedule, schedule_on_gpu
from sparseconv.geometry.gpu.table import lookup
from sparseconv.geometry.gpu.work_lists import schedule_of
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.launcher import INTERPRETED
from sparseconv.ops import avg_pool, max_pool, max_unpool, sum_pool, unpool
from sparseconv.ops.pooling import _degrees, _Max, _WinnerSum, edge_sum
from sparseconv.plan.within import plan_within
from tests.waits import nothing_waits

ABSENT = Boundary.absent()
KERNELS = [(3, 1), (2, 2), (3, 2), (1, 2)]


def scene(rows: int, spread: int, seed: int, batches: int = 2, device: str = "cpu") -> torch.Tensor:
    """Distinct rows in a random order, some coordinates negative; the last batch item is empty now and then."""
    generator = torch.Generator().manual_seed(seed)
    coords = torch.randint(-spread, spread, (rows, 4), generator=generator, dtype=torch.int32)
    coords[:, 0] = coords[:, 0].abs() % batches
    coords = torch.unique(coords, dim=0)
    return coords[torch.randperm(len(coords), generator=generator)].contiguous().to(device)


def padded(coords: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates followed by dead rows, and their count."""
    dead = coords.new_full((rows - len(coords), coords.shape[1]), -1)
    return torch.cat([coords, dead]), torch.tensor([len(coords)], dtype=torch.int32, device=coords.device)


def fixed(coords: torch.Tensor, rows: int, like: VoxelGrid, **options) -> FixedGrid:
    return FixedGrid(*padded(coords, rows), like, **options)


def as_on_a_card(fine: FixedGrid, coarse: FixedGrid, window: Window) -> KernelMap:
    """The map that a card would build, through the interpreter on the CPU."""
    source = find_edges_on_gpu(fine, coarse.coords, window, None)
    found = KernelMap(len(fine), len(coarse), len(window.offsets), source=source)
    found.num_pairs, found.meets_all = len(fine), window.is_tiling
    return found


def edges_of(in_rows: torch.Tensor, out_rows: torch.Tensor, offsets: torch.Tensor) -> list[set[tuple[int, int]]]:
    """The pairs of each tap."""
    ends = offsets.tolist()
    return [set(zip(in_rows[i:j].tolist(), out_rows[i:j].tolist())) for i, j in itertools.pairwise(ends)]


@pytest.mark.skipif(not INTERPRETED, reason="looks behind the arrays of the interpreter")
@pytest.mark.parametrize(
    ("case", "missing"),
    # what fits and what misses by one, on every way that edges are written; by many, where pairs have kernels of their
    # own and where they are those of a tiling
    [*itertools.product([*KERNELS, (5, 1)], [0, 1]), ((3, 1), 50), ((2, 2), 50)],
)
def test_more_edges_than_places_are_a_fault_and_leave_other_memory_alone(
    case: tuple, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 100 if case[0] == 5 else 300
    real = scene(rows, 4, 0)
    grid = fixed(real, rows, VoxelGrid(real, 2))
    window = Window.of(3, case[0], case[1])
    coarse = grid if case[1] == 1 else ConvolutionPlan(grid, case[0], stride=case[1]).target
    total = as_on_a_card(grid, coarse, window).tap_offsets[-1].item()
    most = max(total - missing, len(coarse))
    guard, made, empty = 4096, [], torch.empty

    def guarded(*size, **options):
        if size != (most,):
            return empty(*size, **options)
        made.append(torch.full((most + guard,), -7, dtype=torch.int32))
        return made[-1][:most]

    monkeypatch.setattr(torch, "empty", guarded)
    monkeypatch.setattr(torch, "empty_like", lambda like: guarded(*like.shape, dtype=like.dtype))
    source = find_edges_on_gpu(grid, coarse.coords, window, None, most)
    in_rows, out_rows, offsets = source.pairs()
    assert len(in_rows) == len(out_rows) == most
    assert len(made) == 2
    assert all(bool((memory[most:] == -7).all()) for memory in made)
    fits = total <= most
    assert grid.fault.item() == (0 if fits else 4)
    assert offsets[-1].item() == (total if fits else 0)
    assert fits or "edges" in fault_of(4)


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("twice", [False, True])
def test_half_of_the_edges_of_rows_that_occur_twice_do_not_leave_their_places(twice: bool) -> None:
    line = torch.tensor([[0, 5 + i, 5, 5] for i in range(10)], dtype=torch.int32)
    real = torch.tensor([[0, 5, 5, 5]] + [[0, 6, 5, 5]] * 9, dtype=torch.int32) if twice else line
    grid = fixed(real, 10, VoxelGrid(line))
    every = find_edges_on_gpu(grid, grid.coords, Window.of(3, 3, 1), None, None).offsets()
    source = find_edges_on_gpu(grid, grid.coords, Window.of(3, 3, 1), None, int(every[-1]))
    in_rows, out_rows, offsets = source.half_pairs()
    assert len(in_rows) == len(out_rows) == (int(every[-1]) + 11) // 2
    assert torch.equal(offsets, every * (not twice))  # nine rows see one, which sees one of them
    assert bool(grid.fault & 4) == twice
    assert offsets[14] <= len(in_rows)
    assert twice or int(offsets[14]) == 19


def test_places_for_edges_follow_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseconv.geometry.fixed_grid.EDGES", 1)
    real = scene(900, 6, 0)
    grid, window = fixed(real, 1000, VoxelGrid(real, 2), room=1.5), Window.of(3, 3)
    edges = ConvolutionPlan(VoxelGrid(real, 2), 3).kernel_map.num_pairs
    assert edges < grid.most_pairs(grid, window, ABSENT) < 1.5 * 1.5 * edges
    assert fixed(real, 1000, VoxelGrid(real, 2), room=90.0).most_pairs(grid, window, ABSENT) == 27_000
    coarse = ConvolutionPlan(grid, 2, stride=2).target
    assert grid.most_pairs(coarse, Window.of(3, 2, 2), ABSENT) == len(grid)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 999), rows=st.integers(1, 80), example=st.integers(1, 80), spare=st.integers(0, 40),
    case=st.sampled_from([*KERNELS, (5, 1), (2, 3), ((3, 1, 2), 2)]),
)  # fmt: skip
def test_real_rows_meet_as_on_an_ordinary_grid(seed: int, rows: int, example: int, spare: int, case: tuple) -> None:
    kernel, stride = case
    real, like = scene(rows, 4, seed), VoxelGrid(scene(example, 4, seed + 1), 2)
    grid, ordinary = fixed(real, len(real) + spare, like, room=100.0), VoxelGrid(real, 2)
    plan, want = ConvolutionPlan(grid, kernel, stride=stride), ConvolutionPlan(ordinary, kernel, stride=stride)
    coarse, n = plan.target, len(want.target)
    assert isinstance(coarse, FixedGrid)
    assert coarse.fault is grid.fault
    assert grid.fault.tolist() == [0]
    assert coarse.count.tolist() == [n]
    assert torch.equal(coarse.coords[:n], want.target.coords)
    assert bool((coarse.coords[n:, 0] == -1).all())
    assert coarse.extent.encloses(want.target.extent)
    assert torch.equal(coarse.batch_counts, want.target.batch_counts)
    for here, there in ((plan.kernel_map, want.kernel_map), (plan.transpose().kernel_map, want.kernel_map.reverse())):
        assert torch.equal(here.neighbors[:, : there.num_out], there.neighbors)
        assert bool((here.neighbors[:, there.num_out :] == -1).all())
        sides = here.in_rows, here.out_rows, here.tap_offsets
        assert edges_of(*sides) == edges_of(there.in_rows, there.out_rows, there.tap_offsets)
    back, there = fine_grid(coarse, plan.window, ABSENT), fine_grid(want.target, want.window, ABSENT)
    assert torch.equal(back.coords[: len(there)], there.coords)
    assert back.count.tolist() == [len(there)]
    assert torch.equal(grid.lookup(real), torch.arange(len(real)))
    assert bool((grid.lookup(grid.coords)[len(real) :] == -1).all())


def reached_on_gpu(grid, window, within, ends, rows: int, to_fine: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Voxels and their number as a GPU would find them, through the interpreter on the CPU."""
    size, limits = (
        (grid.batch_size, window.offsets, window.stride, None),
        {"within": within, "rows": rows, "ends": ends},
    )
    found = reach_fixed(grid.coords, grid.extent, *size, to_fine=to_fine, **limits, device_count=grid.device_count)
    assert found is not None
    return found[:2]


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (2, 2), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_maps_of_a_card_through_the_interpreter(kernel: int, stride: int) -> None:
    real, like, window = scene(60, 4, 3), VoxelGrid(scene(100, 4, 4), 2), Window.of(3, kernel, stride)
    grid = fixed(real, 150, like)
    want = ConvolutionPlan(VoxelGrid(real, 2), kernel, stride=stride).kernel_map
    grid._make_hash_table(checked=True)
    coarse, n = grid, want.num_out
    if stride > 1:
        coarse = grid.reached(window, ABSENT, to_fine=False)
        coords, count = reached_on_gpu(grid, window, coarse.extent, None, len(coarse), False)
        assert torch.equal(coords, coarse.coords)
        assert count.tolist() == coarse.count.tolist() == [n]
        ends = coarse.coords[: coarse.count, 1:].amax(0).int()  # the last voxels along each axis go
        ended = grid.reached(window, ABSENT, None, ends, to_fine=False)
        coords, count = reached_on_gpu(grid, window, ended.extent, ends, len(ended), False)
        assert 0 < ended.count < n
        assert torch.equal(coords, ended.coords)
        assert count.tolist() == ended.count.tolist()
        back = grid.reached(window, ABSENT, to_fine=True)
        coords, count = reached_on_gpu(grid, window, back.extent, None, len(back), True)
        assert torch.equal(coords, back.coords)
        assert count.tolist() == back.count.tolist()
    assert grid.fault.tolist() == [0]
    assert torch.equal(lookup(grid.hash_table, grid.coords).long(), grid.lookup(grid.coords))
    edges = as_on_a_card(grid, coarse, window)
    assert torch.equal(edges.neighbors[:, :n], want.neighbors)
    assert bool((edges.neighbors[:, n:] == -1).all())
    assert torch.equal(edges.tap_offsets, want.tap_offsets)
    sides = edges_of(edges.in_rows, edges.out_rows, edges.tap_offsets)
    assert sides == edges_of(want.in_rows, want.out_rows, want.tap_offsets)
    assert meets_once(edges.reverse()) == (window.is_tiling and stride > 1)
    for each in (edges, edges.reverse()):
        if meets_once(each):
            schedules = [one_tap_schedule(each, 64), one_tap_schedule(each, 256)]
        elif stride == 1:
            schedules = [schedule_on_gpu(each, 64, chunk_rows=40)]
        else:
            schedules = [schedule_on_gpu(each, 64)]
        for schedule in schedules:
            check_schedule(schedule, each.neighbors)
    for ask in (lambda: edges.tap_counts, lambda: edges.coverage, lambda: edges.pair_taps, edges.product_infos):
        with pytest.raises(RuntimeError, match="counted on the device alone"):
            ask()


def check_schedule(schedule: Schedule, neighbors: torch.Tensor) -> None:
    """Every output row, dead ones included, is in one slot, and its tile's list says what it sees."""
    out_rows = schedule.out_rows
    assert sorted(out_rows[out_rows >= 0].tolist()) == list(range(neighbors.shape[1]))
    assert sorted(schedule.tile_order.tolist()) == list(range(schedule.num_tiles))
    found = torch.full_like(neighbors, -1)
    for tile, count in enumerate(schedule.tile_counts.tolist()):
        slots = torch.arange(tile * schedule.block_m, (tile + 1) * schedule.block_m)
        slots = slots[out_rows[slots] >= 0]
        rows = schedule.tile_rows[tile, :count] & ROW_BITS
        for row, tap in zip(rows.tolist(), schedule.tile_taps[tile, :count].tolist()):
            found[tap, out_rows[slots].long()] = schedule.neighbors[row, slots]
    assert torch.equal(found, neighbors)


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (2, 2), (3, 2)])
def test_pooling_over_edges_that_nobody_counts(kernel: int, stride: int) -> None:
    real, like, window = scene(90, 4, 3), VoxelGrid(scene(100, 4, 4), 2), Window.of(3, kernel, stride)
    grid = fixed(real, 200, like)
    coarse = grid if stride == 1 else grid.reached(window, ABSENT, to_fine=False)
    plan, edges = ConvolutionPlan(VoxelGrid(real, 2), kernel, stride=stride), as_on_a_card(grid, coarse, window)
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    x[5, 1], x[7, 0] = torch.nan, -torch.inf
    n, m = len(real), plan.kernel_map.num_out
    y, winners = _Max.apply(x, edges)
    best, taps = max_pool(x[:n], plan)
    assert torch.equal(y[:m].nan_to_num(9), best.nan_to_num(9))
    assert torch.equal(winners[:m], taps)
    assert bool((winners[m:] == -1).all() and (y[m:] == 0).all())
    y = y.nan_to_num(1, neginf=1)
    back = _WinnerSum.apply(y, winners, edges.reverse(), False, False)
    assert torch.equal(back[:n], max_unpool(y[:m], winners[:m], plan.transpose()))
    x = x.nan_to_num(1, neginf=1).requires_grad_()
    torch.testing.assert_close(edge_sum(x, edges)[:m], sum_pool(x[:n], plan))
    torch.testing.assert_close((edge_sum(x, edges) / _degrees(edges))[:m], avg_pool(x[:n], plan))
    torch.testing.assert_close(
        (edge_sum(y, edges.reverse()) / _degrees(edges.reverse()))[:n], unpool(y[:m], plan.transpose())
    )
    grads = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (
        lambda x: edge_sum(x, edges), lambda x: sum_pool(x[:n], plan),
        lambda x: _Max.apply(x, edges)[0], lambda x: max_pool(x[:n], plan)[0],
    )]  # fmt: skip
    torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(grads[2], grads[3])


class Step:
    """Maps and convolutions of every kind over one grid, and all gradients."""

    def __init__(
        self, channels: int, device: str = "cpu", dtype: torch.dtype = torch.float32, backend: str = "auto"
    ) -> None:
        self.backend = backend
        generator = torch.Generator().manual_seed(1)
        self.weights = [
            (torch.randn(taps, channels, channels, generator=generator) / 8).to(device, dtype).requires_grad_()
            for taps in (27, 8, 27, 27, 27, 8)
        ]
        self.bias = torch.randn(channels, generator=generator).to(device, dtype).requires_grad_()

    def __call__(self, grid: VoxelGrid, x: torch.Tensor, cotangent: torch.Tensor) -> list[torch.Tensor]:
        """z, then the gradients of x, the weights and the bias; ``cotangent`` is 0 in dead rows."""
        some = {"backend": self.backend}
        same, down = ConvolutionPlan(grid, 3, **some), ConvolutionPlan(grid, 2, stride=2, **some)
        below, wide = ConvolutionPlan(down.target, 3, **some), ConvolutionPlan(down.target, 3, stride=2, **some)
        a, b, c, d, e, f = self.weights
        y = same.execute(x, a, self.bias)
        h = below.execute(down.execute(y, b) + max_pool(x, down)[0] + avg_pool(y, down), c, self.bias)
        h = h + wide.transpose().execute(wide.execute(h, d), e, self.bias)
        z = down.transpose().execute(h, f, self.bias) + unpool(h, down.transpose()) + y
        self.plans = same, down, below, wide  # a graph's constants live with them
        return [z, *torch.autograd.grad((z * cotangent).sum(), (x, *self.weights, self.bias))]


@pytest.mark.parametrize("backend", ["auto", pytest.param("triton_implicit_gemm", marks=pytest.mark.slow)])
def test_a_step_gives_what_it_gives_on_an_ordinary_grid(backend: str) -> None:
    if backend != "auto" and not INTERPRETED:
        pytest.skip("needs the interpreter")
    real, like = scene(60, 4, 5), VoxelGrid(scene(50, 4, 6), 2)
    n, rows, step = len(real), len(real) + 30, Step(4, backend=backend)
    x, cotangent = torch.randn(2, rows, 4, generator=torch.Generator().manual_seed(2))
    cotangent[n:] = 0
    got = step(fixed(real, rows, like, room=3), x.requires_grad_(), cotangent)
    want = step(VoxelGrid(real, 2), x.detach()[:n].requires_grad_(), cotangent[:n])
    for index, (a, b) in enumerate(zip(got, want)):
        assert bool(torch.isfinite(a).all())
        torch.testing.assert_close(a[:n] if index < 2 else a, b)
    assert bool((got[1][n:] == 0).all())


WRONG = ["outside", "far outside", "batch", "twice", "count", "hole", "late"]
SAID = [
    *((wrong, "torch") for wrong in WRONG),
    *(pytest.param(w, "kernels", marks=() if w == "far outside" else pytest.mark.slow) for w in WRONG),
]


@pytest.mark.parametrize(("wrong", "way"), SAID)
def test_what_does_not_fit_is_said(wrong: str, way: str) -> None:
    if way == "kernels" and not INTERPRETED:
        pytest.skip("needs the interpreter")
    real, like = scene(40, 4, 7), VoxelGrid(scene(40, 4, 8), 2)
    coords, count = padded(real, len(real) + 5)
    if wrong == "outside":
        coords[3, 2] = 20
    elif wrong == "far outside":
        coords[3, 1:] = torch.tensor([2**31 - 1, -(2**31), 2**30])
    elif wrong == "batch":
        coords[3, 0] = 2
    elif wrong == "twice":
        coords[3] = coords[9]
    elif wrong == "count":
        count += 1
    elif wrong == "hole":
        coords[len(real)], coords[3] = coords[3].clone(), -1
    else:
        coords[-1], coords[len(real) - 1] = coords[len(real) - 1].clone(), -1
    grid = FixedGrid(coords, count, like)
    if way == "kernels":
        grid.fault.fill_(6)  # of an earlier replay
        grid._make_hash_table(checked=True)
    assert grid.fault.tolist() == [1]
    assert "outside of the extent" in (fault_of(1) or "")
    for kernel, stride in ((3, 1), (2, 2)):  # and all goes on
        plan = ConvolutionPlan(grid, kernel, stride=stride)
        plan.execute(torch.ones(len(grid), 1), torch.ones(plan.num_taps, 1, 1))
        if way == "torch":
            continue
        edges = as_on_a_card(grid, plan.target, plan.window)
        assert edges.in_rows.shape == edges.out_rows.shape
        if stride == 1:
            schedule = schedule_on_gpu(edges, 64, chunk_rows=20)
        else:
            reached_on_gpu(grid, plan.window, plan.target.extent, None, len(plan.target), False)
            schedule = one_tap_schedule(edges.reverse(), 64)
        assert sorted(schedule.tile_order.tolist()) == list(range(schedule.num_tiles))


@pytest.mark.parametrize("way", ["torch", "kernels"])
def test_a_derived_grid_that_is_too_small_is_said(way: str) -> None:
    if way == "kernels" and not INTERPRETED:
        pytest.skip("needs the interpreter")
    like = VoxelGrid(torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]]))
    every = torch.cartesian_prod(torch.arange(2), *[torch.arange(-14, 15, 4)] * 3).int()
    grid = fixed(every, 1100, like)
    plan = ConvolutionPlan(grid, 2, stride=2)
    assert len(plan.target) == 256  # the example's 2 rows, with room, and rounded up
    if way == "kernels":
        grid.fault.zero_()
        coords, count = reached_on_gpu(grid, plan.window, plan.target.extent, None, 256, False)
        assert torch.equal(coords, plan.target.coords)
        assert count.tolist() == [256]
        one_tap_schedule(as_on_a_card(grid, plan.target, plan.window).reverse(), 64)
    assert grid.fault.tolist() == [2]
    assert bool((plan.target.coords[:, 0] >= 0).all())
    assert "more room" in (fault_of(2) or "")
    assert fault_of(0) is None
    roomy = fixed(every, 1100, like, room=600)
    assert int(ConvolutionPlan(roomy, 2, stride=2).target.count) == len(every)
    assert roomy.fault.tolist() == [0]


@pytest.mark.parametrize("way", ["torch", "kernels"])
@pytest.mark.parametrize("beyond", [0, 1])
def test_a_derived_grid_may_be_full(beyond: int, way: str) -> None:
    if way == "kernels" and not INTERPRETED:
        pytest.skip("needs the interpreter")
    like = VoxelGrid(torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]]))
    every = torch.cartesian_prod(torch.arange(2), *[torch.arange(-14, 15, 4)] * 3).int()
    grid = fixed(every[: 256 + beyond], 300, like)
    plan = ConvolutionPlan(grid, 2, stride=2)
    assert len(plan.target) == 256
    if way == "kernels":
        grid.fault.zero_()
        reached_on_gpu(grid, plan.window, plan.target.extent, None, 256, False)
    assert plan.target.count.tolist() == [256]
    assert grid.fault.tolist() == [2 * beyond]


@pytest.mark.parametrize("ends", [(3, 5), (2, 5), (3, 4), (4, 4)], ids=str)
def test_a_voxel_at_the_end_is_a_fault(ends: tuple[int, int]) -> None:
    like = VoxelGrid(torch.tensor([[0, 0, 0], [0, 2, 4]]))
    grid = fixed(like.coords, 5, like)
    grid.end_at(torch.tensor(ends, dtype=torch.int32))
    assert grid.fault.tolist() == [0 if ends == (3, 5) else 8]


def test_outputs_within_a_box() -> None:
    real = scene(60, 4, 9, batches=1)
    real = real[(real[:, 1:] >= 0).all(1)]
    like = VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 3, 3, 3]]))
    grid, ordinary = fixed(real, 70, like), VoxelGrid(real)
    got, want = (plan_within(g, (1, 2, 1), 3, stride=2, padding=1) for g in (grid, ordinary))
    n = len(want.target)
    assert got.target.coords[:n].tolist() == want.target.coords.tolist()
    assert got.target.count.tolist() == [n]
    torus = Boundary.periodic(IndexRange((-20,) * 3, (20,) * 3))
    got, want = (ConvolutionPlan(g, 3, stride=2, boundary=torus) for g in (grid, ordinary))
    n = len(want.target)
    assert got.target.coords[:n].tolist() == want.target.coords.tolist()
    assert torch.equal(got.kernel_map.neighbors[:, :n], want.kernel_map.neighbors)


def test_errors() -> None:
    real = scene(20, 4, 1)
    like = VoxelGrid(real, 2)
    coords, count = padded(real, 30)
    grid = FixedGrid(coords, count, like)
    for wrong, error in (
        ((coords.long(), count, like), ValueError),
        ((coords[:, :3], count, like), ValueError),
        ((coords[:0], count, like), ValueError),
        ((coords, count.long(), like), ValueError),
        ((coords, count.repeat(2), like), ValueError),
        ((coords, count, grid), TypeError),
        ((coords, count, coords), TypeError),
    ):
        with pytest.raises(error):
            FixedGrid(*wrong)
    with pytest.raises(ValueError, match="room"):
        FixedGrid(coords, count, like, room=0)
    with pytest.raises(ValueError, match="extent"):
        FixedGrid(coords, count, like, extent=(4, 0, 4))
    for ask in (
        lambda: grid.coarsen(2), lambda: grid.batch_rows, lambda: grid.union(like),
        lambda: ConvolutionPlan(grid, 3, boundary="forbid"),
        lambda: ConvolutionPlan(grid, 3, stride=2, boundary="forbid"), lambda: ConvolutionPlan(grid, 3, target=like),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="fixed size"):
            ask()
    assert grid.to("cpu") is grid


def test_a_dense_array_leaves_out_the_rows_that_are_no_voxels():
    like = VoxelGrid(torch.tensor([[0, 1, 2], [1, 0, 3]]))
    coords = torch.tensor([[0, 1, 2], [1, 0, 3], [-1, -1, -1]], dtype=torch.int32)
    features = torch.tensor([[1.0], [2.0], [float("nan")]])
    grid = FixedGrid(coords, torch.tensor([2], dtype=torch.int32), like)
    assert torch.equal(grid.to_dense(features, (2, 4)), like.to_dense(features[:2], (2, 4)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "spread"), [(3000, 12), (60_000, 25), (900_000, 120)])
def test_a_captured_step_serves_other_scenes(rows: int, spread: int, dtype: torch.dtype) -> None:
    step, like = Step(32, "cuda", dtype), VoxelGrid(scene(rows, spread, 0, device="cuda"))
    capacity = len(like) * 5 // 4
    coords, count = padded(like.coords, capacity)
    x = torch.zeros(capacity, 32, device="cuda", dtype=dtype, requires_grad=True)
    cotangent = torch.zeros(capacity, 32, device="cuda", dtype=dtype)

    def run() -> tuple[FixedGrid, list[torch.Tensor]]:
        grid = FixedGrid(coords, count, like)
        return grid, step(grid, x, cotangent)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        with nothing_waits():
            run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        grid, results = run()
    for seed, part in enumerate((1.0, 0.6, 1.15, 0.05), 1):
        real = scene(int(rows * part), spread, seed, device="cuda")[:capacity]
        ordinary, generator = VoxelGrid(real, 2), torch.Generator("cuda").manual_seed(seed)
        rows_of, n = torch.randn(capacity, 64, generator=generator, device="cuda").to(dtype), len(real)
        with torch.no_grad():
            coords.fill_(-1)[:n] = real
            count.fill_(n)
            x.copy_(rows_of[:, :32])  # whatever the dead rows hold
            cotangent.zero_()[:n] = rows_of[:n, 32:]
        for buffer in results:
            buffer.fill_(float("nan"))
        graph.replay()
        assert grid.fault.item() == 0
        want = Step(32, "cuda", dtype)(ordinary, x.detach()[:n].clone().requires_grad_(), rows_of[:n, 32:])
        for index, (a, b) in enumerate(zip(results, want)):
            assert bool(torch.isfinite(a).all()), index
            if index < 2:
                assert bool((a[n:] == 0).all()) or index == 0
                a = a[:n]
            error = (a.detach().double() - b.detach().double()).norm() / b.detach().double().norm()
            assert float(error) < (5e-3 if dtype == torch.float16 else 1e-5)
    with torch.no_grad():
        coords[0, 1] = 10_000
    graph.replay()
    assert grid.fault.item() == 1
    with torch.no_grad():
        coords[0, 1] = real[0, 1]
    graph.replay()
    assert grid.fault.item() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [4000, 90_000])
def test_captured_maps_of_every_window_are_those_of_the_cpu(rows: int) -> None:
    spread, torus = round(rows ** (1 / 3)), Boundary.periodic(IndexRange((-240,) * 3, (240,) * 3))
    windows: list[dict] = [
        {"kernel_size": 5}, {"kernel_size": 3, "dilation": 2}, {"kernel_size": 3, "target": "full"},
        {"taps": ((0, 0, 0), (0, 0, 5), (0, -5, 0), (3, 0, 0), (0, 0, 1)), "target": "full"},
        {"kernel_size": 4, "stride": 2, "padding": 1}, {"kernel_size": 3, "stride": 3}, {"kernel_size": 1, "stride": 2},
        {"kernel_size": (3, 1, 2), "stride": 2}, {"kernel_size": 3, "boundary": torus},
        {"kernel_size": 2, "stride": 2, "boundary": torus},
    ]  # fmt: skip
    like = VoxelGrid(scene(rows, spread, 0))
    capacity = len(like) * 5 // 4
    coords, count = (t.cuda() for t in padded(like.coords, capacity))
    example = VoxelGrid(like.coords.cuda(), like.batch_size)

    def run(grid: FixedGrid) -> list[ConvolutionPlan]:
        plans = [ConvolutionPlan(grid, **window) for window in windows]
        plans.append(ConvolutionPlan.transposed(plans[4].target, 2, stride=2))
        for plan in plans:
            for edges in (plan.kernel_map, plan.kernel_map.reverse()):
                edges.neighbors, edges.in_rows
                if edges.device.type == "cuda":
                    for split, chunked in ((1, False), (3, False), (1, True)):
                        schedule_of(edges, 64, split=split, chunked=chunked)
        return plans

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(FixedGrid(coords, count, example))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        grid = FixedGrid(coords, count, example)
        plans = run(grid)
    real = scene(rows * 3 // 4, spread, 1)
    new, number = padded(real, capacity)
    coords.copy_(new)
    count.copy_(number)
    graph.replay()
    on_cpu = FixedGrid(new, number, like)
    for plan, want in zip(plans, run(on_cpu)):
        assert torch.equal(plan.target.coords.cpu(), want.target.coords)
        assert plan.target.extent == want.target.extent
        for here, there in ((plan.kernel_map, want.kernel_map), (plan.kernel_map.reverse(), want.kernel_map.reverse())):
            assert torch.equal(here.neighbors.cpu(), there.neighbors)
            assert torch.equal(here.tap_offsets.cpu(), there.tap_offsets)
            for tap, (i, j) in enumerate(itertools.pairwise(there.tap_offsets.tolist())):
                mine = here.in_rows[i:j].long() * 2**31 + here.out_rows[i:j]
                theirs = there.in_rows[i:j].long() * 2**31 + there.out_rows[i:j]
                assert torch.equal(mine.cpu().sort().values, theirs.sort().values), tap
            schedule = schedule_of(here, 64)
            assert torch.equal(
                schedule.out_rows[schedule.out_rows >= 0].sort().values.cpu(), torch.arange(there.num_out)
            )
    assert grid.fault.item() == on_cpu.fault.item() == 0


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("channels", [8, 64, 96])
def test_no_gradient_of_a_weight_sees_dead_rows_on_a_cpu(channels: int, name: str) -> None:
    coords = scene(60, 4, 0)
    live, grid = len(coords), fixed(coords, len(coords) + 20, VoxelGrid(coords, 2))
    plan, want = (ConvolutionPlan(g, 3, backend=name) for g in (grid, VoxelGrid(coords, 2)))
    sentence = backend(name).unsupported(plan.request(channels, channels, torch.float32))
    if sentence is not None or (name == "triton_implicit_gemm" and channels > 8):
        pytest.skip(sentence or "the interpreter is slow, and its kernels are the same")
    w = torch.randn(27, channels, channels)
    x, g = torch.full((live + 20, channels), float("nan")), torch.full((live + 20, channels), float("nan"))
    x[:live], g[:live] = torch.randn(live, channels), torch.randn(live, channels)
    found = []
    for p, rows in ((plan, live + 20), (want, live)):
        for wanted in (True, False):  # both gradients together, and one alone
            leaves = x[:rows].clone().requires_grad_(wanted), w.clone().requires_grad_()
            p.execute(*leaves).backward(g[:rows])
            found.append(leaves[1].grad)
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


@pytest.mark.parametrize("columns", [2, 4, 5])
@pytest.mark.parametrize(("voxels", "filled"), [(0, 0), (0, 700), (3, 0), (700, 3), (3, 700), (900, 900)])
@pytest.mark.parametrize("put", [put_scene, put_scene_on_gpu])
def test_a_scene_takes_the_place_of_the_last_one(put, columns: int, voxels: int, filled: int) -> None:
    device = "cpu" if INTERPRETED else "cuda"
    scene = torch.randint(0, 99, (voxels, columns), dtype=torch.int32, device=device)
    rows = torch.full((900, columns), -1, dtype=torch.int32, device=device)
    rows[:filled] = 7
    count = torch.full((1,), filled, dtype=torch.int32, device=device)
    put(scene, rows, count, filled)
    assert torch.equal(rows[:voxels], scene)
    assert (rows[voxels:] == -1).all()
    assert count.tolist() == [voxels]


def test_coordinates_of_another_kind_are_put_in_place_too() -> None:
    device = "cpu" if INTERPRETED else "cuda"
    rows, count = torch.full((9, 4), -1, dtype=torch.int32, device=device), torch.zeros(1).int().to(device)
    wide = torch.arange(40, device=device).view(5, 8)
    for scene in (wide[:, ::2], wide[:, 1:5].int(), wide[1:, :4].float().cpu()):
        put_scene(scene, rows, count, int(count))
        assert torch.equal(rows[: len(scene)], scene.int().to(device))
        assert (rows[len(scene) :] == -1).all()
        assert int(count) == len(scene)


def test_a_fixed_grid_made_in_inference_mode_notes_faults_outside_of_it():
    with torch.inference_mode():
        grid = VoxelGrid(torch.tensor([[0, 0], [0, 1]]))
        fixed = FixedGrid(torch.tensor([[0, 0], [-1, 0]], dtype=torch.int32), torch.ones(1, dtype=torch.int32), grid)
    fixed.end_at(torch.tensor([1], dtype=torch.int32))
    assert fixed.fault.tolist() == [0]


def test_there_are_barriers_enough_for_grids_of_fixed_size() -> None:
    from sparseconv.geometry.fixed_grid import BARRIERS
    from sparseconv.gpu.cooperative import NUM_BARRIERS

    assert NUM_BARRIERS + 1 <= BARRIERS
