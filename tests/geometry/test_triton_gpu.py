"""The GPU geometry on a card: sizes past one program, the same maps as on the CPU, and no wait for the device."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import pytest
import torch

from sparseconv import Boundary, ConvolutionPlan, IndexRange, VoxelGrid, voxelize
from sparseconv.geometry.edges import Window, coarse_grid
from tests.waits import nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUBE = tuple(itertools.product((-1, 0, 1), repeat=3))


def scattered(count: int, spread: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    coords = torch.randint(-spread, spread, (count, 4), generator=generator, dtype=torch.int32)
    coords[:, 0] = coords[:, 0].abs() % 3
    coords = torch.unique(coords, dim=0)
    return coords[torch.randperm(len(coords), generator=generator)].contiguous()


@pytest.mark.parametrize("count", [1, 1000, 300_000])
@pytest.mark.parametrize("size", [0.1, (0.3, 0.1, 0.7)])  # where a tenth times ten is no whole number
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_points_get_the_voxels_of_the_cpu(count: int, size: float | tuple, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    points = (torch.randint(-90, 90, (count, 3), generator=generator) / 10).to(dtype)  # upon the faces, or nearly
    batch = torch.randint(0, 3, (count,), generator=generator)
    for items in (None, batch):
        cpu, rows = voxelize(points, size, items, origin=(0.0, 0.1, 0.0))
        for _ in range(2):
            gpu, there = voxelize(points.cuda(), size, None if items is None else items.cuda(), origin=(0.0, 0.1, 0.0))
            assert torch.equal(gpu.coords.cpu(), cpu.coords)
            assert torch.equal(there.cpu(), rows)
            assert (gpu.extent, gpu.batch_size) == (cpu.extent, cpu.batch_size)
        found = ConvolutionPlan(gpu, 3).kernel_map.neighbors
        assert torch.equal(found.cpu(), ConvolutionPlan(cpu, 3).kernel_map.neighbors)


@pytest.mark.parametrize("spread", [30, 3000])  # a bitmap of blocks, a hash table of blocks
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (2, 2), (3, 2), (5, 1)])
def test_maps_are_those_of_the_cpu(kernel: int, stride: int, spread: int) -> None:
    coords = scattered(50_000, spread)
    cpu = ConvolutionPlan(VoxelGrid(coords), kernel, stride=stride)
    gpu = ConvolutionPlan(VoxelGrid(coords.cuda()), kernel, stride=stride)
    assert torch.equal(gpu.target.coords.cpu(), cpu.target.coords)
    for here, there in ((gpu.kernel_map, cpu.kernel_map), (gpu.kernel_map.reverse(), cpu.kernel_map.reverse())):
        assert torch.equal(here.neighbors.cpu(), there.neighbors)
        assert here.tap_counts == there.tap_counts
        assert torch.equal(here.tap_offsets.cpu(), there.tap_offsets)


def test_two_builds_give_the_same_bits_and_wait_for_nothing() -> None:
    from sparseconv.geometry.gpu.edge_lists import pairs_of
    from sparseconv.geometry.gpu.lists import Schedule
    from sparseconv.geometry.gpu.schedule import build_schedule
    from sparseconv.geometry.gpu.search import search_window
    from sparseconv.geometry.gpu.table import build_table
    from sparseconv.geometry.gpu.taps import encode_window

    coords = scattered(300_000, 60).cuda()
    window = encode_window(CUBE, (1, 1, 1), None, coords.device)

    def build() -> tuple:
        table = build_table(coords)
        search = search_window(table, table.coords, window)
        return search, build_schedule(search, 128)

    build()  # compiles, and copies the constants of the window
    with nothing_waits():
        builds = [build() for _ in range(2)]
    names = [field.name for field in dataclasses.fields(Schedule)]
    first, second = (
        (*pairs_of(search)[:2], *(getattr(schedule, name) for name in names)) for search, schedule in builds
    )
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("count", [1, 40_000, 200_000, 700_000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_grid_keeps_a_copy_that_its_launch_has_made(count: int, dtype: torch.dtype) -> None:
    want = scattered(count, 60).to(dtype)
    cpu = ConvolutionPlan(VoxelGrid(want), 3).kernel_map
    for _ in range(3):  # launch by launch, then at once
        for given in (want.cuda(), torch.cat([want.view(-1)[:1], want.view(-1)]).cuda()[1:].view_as(want)):
            grid = VoxelGrid(given)
            given.zero_()
            plan = ConvolutionPlan(grid, 3)
            assert torch.equal(grid.coords.cpu(), want.int())
            assert torch.equal(plan.kernel_map.neighbors.cpu(), cpu.neighbors)


@pytest.mark.parametrize("kernel", [3, 5, 2])
def test_the_second_grid_of_a_kind_finds_the_same_edges(kernel: int) -> None:
    for seed, count in enumerate((30_000, 12_345, 90_000, 1)):
        coords = scattered(count, 25, seed)
        cpu = ConvolutionPlan(VoxelGrid(coords), kernel).kernel_map
        ConvolutionPlan(VoxelGrid(coords.cuda()), kernel)
        grid = VoxelGrid(coords.cuda())
        gpu = ConvolutionPlan(grid, kernel).kernel_map  # the plan before went through the same window
        assert gpu.tap_counts == cpu.tap_counts
        assert torch.equal(gpu.neighbors.cpu(), cpu.neighbors)
        assert gpu.in_rows.shape == cpu.in_rows.shape


@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (2, 2), (1, 2), ((3, 1, 1), (2, 1, 1))])
def test_reached_voxels_within_a_box_are_those_of_the_cpu(kernel, stride) -> None:
    coords, window = scattered(20_000, 30), Window.of(3, kernel, stride, 1, 1)
    there, here = VoxelGrid(coords), VoxelGrid(coords.cuda())
    boxes = [
        IndexRange((-9, -9, -9), (9, 9, 9)),
        IndexRange((-8, -2, 0), (4, 5, 3)),
        None,
        IndexRange((5,) * 3, (7,) * 3),
    ]
    for box in boxes:  # grids of grids: what is known of the first without a look serves the second
        there, here = (coarse_grid(grid, window, Boundary.absent(), box) for grid in (there, here))
        assert torch.equal(here.coords.cpu(), there.coords)
        assert here.known_box[0].encloses(there.extent) or len(there) == 0
        assert here.voxel_size == there.voxel_size
        plans = [ConvolutionPlan(grid, 3).kernel_map for grid in (here, there)]
        assert plans[0].tap_counts == plans[1].tap_counts
    assert here.extent == there.extent


def test_a_grid_that_is_refused_leaves_nothing_to_the_next() -> None:
    coords = scattered(20_000, 25).cuda()
    for _ in range(2):
        ConvolutionPlan(VoxelGrid(coords), 3)
        with pytest.raises(ValueError, match="the same voxel"):
            VoxelGrid(torch.cat([coords, coords[7:8]]))
        grid = VoxelGrid(coords)
        assert ConvolutionPlan(grid, 3).kernel_map.tap_counts[13] == len(coords)
    ConvolutionPlan(VoxelGrid(coords), 3)
    twice = torch.cat([coords, coords[7:8]])
    assert torch.equal(VoxelGrid(twice, duplicates="first").coords, coords)


def ball(edge: int, seed: int) -> torch.Tensor:
    """Most cells of a cube in any order, (N, 4) int32: more rows than are put into a table by one launch."""
    generator = torch.Generator("cuda").manual_seed(seed)
    cells = torch.randperm(edge**3, generator=generator, device="cuda")[: edge**3 * 7 // 8 + seed]
    return torch.stack([cells * 0, cells // edge**2, cells // edge % edge, cells % edge], 1).int()


def ends_of(kernel_map) -> torch.Tensor:
    return sorted_ends(kernel_map.in_rows, kernel_map.out_rows, kernel_map.tap_offsets)


def sorted_ends(in_rows: torch.Tensor, out_rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The edges by tap and target row: lists of the second half of the taps are by source row on a card."""
    tap = torch.repeat_interleave(torch.arange(len(offsets) - 1, device="cuda"), offsets.diff())
    return ((tap << 44) | (out_rows.long() << 22) | in_rows.long()).sort().values


@pytest.mark.parametrize("chunked", [False, True])
def test_edges_of_many_rows_on_streams_and_threads_of_their_own(chunked: bool) -> None:
    from sparseconv.geometry.gpu.work_lists import schedule_of

    coords = ball(90, 5)
    want = ConvolutionPlan(VoxelGrid(coords), 3).kernel_map
    edges = ends_of(want)
    torch.cuda.synchronize()
    good = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(6):
                kernel_map = ConvolutionPlan(VoxelGrid(coords), 3).kernel_map
                schedule_of(kernel_map, 128, False, 1, chunked)
                good.append(torch.equal(ends_of(kernel_map), edges))
            early = ConvolutionPlan(VoxelGrid(coords), 3).kernel_map
            stream.synchronize()
        good.append(torch.equal(ends_of(early), edges))  # of another stream than its search's
        torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [True] * 21


def test_a_grid_of_many_rows_that_is_refused_leaves_nothing_behind() -> None:
    from sparseconv.geometry.gpu.work_lists import schedule_of

    coords = ball(90, 3)
    for chunked in (False, True):
        want = ConvolutionPlan(VoxelGrid(coords), 3).kernel_map
        rows = schedule_of(want, 128, False, 1, chunked).out_rows
        with pytest.raises(ValueError, match="the same voxel"):
            VoxelGrid(torch.cat([coords, coords[7:8]]))
        for _ in range(2):
            got = ConvolutionPlan(VoxelGrid(coords), 3).kernel_map
            assert torch.equal(schedule_of(got, 128, False, 1, chunked).out_rows, rows)
            assert got.tap_counts == want.tap_counts


def test_a_schedule_may_be_built_while_a_graph_is_captured() -> None:
    coords = scattered(20_000, 25).cuda()
    x, w = torch.randn(len(coords), 32, device="cuda").half(), torch.randn(27, 32, 32, device="cuda").half()
    plan = ConvolutionPlan(VoxelGrid(coords), 3)
    want = plan.execute(x, w)  # compiled, tried and kept
    fresh = ConvolutionPlan(VoxelGrid(coords), 3)
    assert fresh.kernel_map.num_pairs == plan.kernel_map.num_pairs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fresh.execute(x, w)
    for _ in range(2):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def test_counts_that_nobody_reads_leave_the_next_ones_right() -> None:
    coords = scattered(20_000, 25)
    cpu, gpu = VoxelGrid(coords), VoxelGrid(coords.cuda())
    kept = []
    for turn in range(12):
        kernel = 1 + turn % 4
        ConvolutionPlan(gpu, kernel)  # dropped before its counts have arrived
        kept.append((kernel, ConvolutionPlan(gpu, kernel, stride=1 + turn % 2)))
    for kernel, plan in kept:
        want = ConvolutionPlan(cpu, kernel, stride=plan.window.stride)
        assert plan.target.extent == want.target.extent
        assert plan.kernel_map.tap_counts == want.kernel_map.tap_counts
        assert plan.kernel_map.num_pairs == want.kernel_map.num_pairs == len(plan.kernel_map.in_rows)
        assert torch.equal(plan.kernel_map.reverse().neighbors.cpu(), want.kernel_map.reverse().neighbors)


@pytest.mark.parametrize("spread", [30, 3000, 150_000])  # bits for every cell, for few of them, and a sort of keys
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (1, 2), (2, 3), (3, 1)])
def test_reached_grids_are_those_of_the_cpu(kernel: int, stride: int, spread: int) -> None:
    from sparseconv.geometry.edges import Window, coarse_grid, fine_grid
    from sparseconv.geometry.ranges import Boundary

    coords, window = scattered(30_000, spread), Window.of(3, kernel, stride)
    for reached in (coarse_grid, fine_grid):
        want = reached(VoxelGrid(coords), window, Boundary.absent())
        got = reached(VoxelGrid(coords.cuda()), window, Boundary.absent())
        assert torch.equal(got.coords.cpu(), want.coords)
        assert got.extent == want.extent
        assert (got.batch_size, got.voxel_size, got.origin) == (want.batch_size, want.voxel_size, want.origin)
        some = want.coords[:: max(1, len(want) // 100)]
        assert torch.equal(got.lookup(some.cuda()).cpu(), want.lookup(some))


@pytest.mark.parametrize("bits", [27, 31])
@pytest.mark.parametrize("n", [1, 160_001, 1_026_536, 4_113_056])
def test_a_captured_sort_is_stable_for_other_keys(n: int, bits: int) -> None:
    from sparseconv.gpu.launcher import pointer
    from sparseconv.gpu.radix_sort import Passes

    generator = torch.Generator("cuda").manual_seed(n)
    keys = torch.zeros(n, dtype=torch.int32, device="cuda")
    order, passes = torch.empty_like(keys), Passes(n, bits, keys.device)
    scratch = torch.empty(passes.words, dtype=torch.int64, device="cuda")

    def sort() -> None:
        passes.launch(pointer(keys), pointer(scratch), pointer(order), keys.device)

    sort()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sort()
    for values in (1, 300, 2**bits):
        few = torch.randint(0, 2**bits, (min(values, 2 * n),), generator=generator, device="cuda")
        keys.copy_(few[torch.randint(0, len(few), (n,), generator=generator, device="cuda")])
        for _ in range(3):
            order.fill_(-1)
            graph.replay()
            assert torch.equal(order.long(), torch.sort(keys, stable=True).indices)


@pytest.mark.parametrize("n", [1, 128, 129, 15_192, 64_128, 64_129, 256_512, 256_513, 600_000])
def test_a_search_sorts_its_rows_each_time(n: int) -> None:
    from sparseconv.geometry.gpu.row_order import row_order
    from sparseconv.geometry.gpu.search import ORDER, search_window
    from sparseconv.geometry.gpu.table import build_table
    from sparseconv.geometry.gpu.taps import encode_window

    side = max(4, round((2 * n) ** (1 / 3)))  # half of the cells, so that masks differ
    cells = torch.randperm(side**3, generator=torch.Generator().manual_seed(n))[:n].sort().values
    coords = torch.stack([cells & 0, cells // side**2, cells // side % side, cells % side], 1).int().cuda()
    offsets = tuple((x, y, z) for x in (-1, 0, 1) for y in (-1, 0, 1) for z in (-1, 0, 1))
    table = build_table(coords)
    window = encode_window(offsets, (1,) * 3, None, coords.device)
    for _ in range(20):
        search = search_window(table, table.coords, window)
        row_order(search)
        order, keys = search.found[1].tensor(ORDER), search.keys[0]
        assert torch.equal(order[:n].long(), torch.sort(keys, stable=True).indices)
