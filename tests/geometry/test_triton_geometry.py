"""The kernels of the GPU geometry against brute force, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sparseconv import VoxelGrid
from sparseconv.geometry.edges import Window, coarse_grid, fine_grid
from sparseconv.geometry.gpu.edge_lists import FoundEdges, pairs_of, reverse_neighbors
from sparseconv.geometry.gpu.reached import reach
from sparseconv.geometry.gpu.row_order import row_keys
from sparseconv.geometry.gpu.search import neighbor_table, search_window
from sparseconv.geometry.gpu.table import build_table, decode_ranges, encode_ranges, lookup, read_table
from sparseconv.geometry.gpu.taps import encode_window, tap_order
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.geometry.ranges import Boundary, IndexRange
from sparseconv.gpu import launcher
from sparseconv.gpu.radix_sort import sort_rows
from tests.geometry.triton_cases import CASES, SLOW_CASES, Case, box
from tests.twins import chunks_torch, find_neighbors_torch, lookup_torch, pairs_torch

SORTED_LONG = [
    pytest.param(66_000, 2**31, 31, marks=pytest.mark.slow),
    pytest.param(300_000, 2**27, 27, marks=pytest.mark.slow),
]
DEVICE = "cpu" if launcher.INTERPRETED else "cuda"
EVERY_CASE = [pytest.param(case, id=case.name) for case in CASES] + [
    pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in SLOW_CASES
]
pytestmark = pytest.mark.skipif(
    not launcher.INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)


@pytest.mark.parametrize("case", EVERY_CASE)
def test_edges_are_those_of_brute_force(case: Case) -> None:
    source = case.source(device=DEVICE)
    target = case.target(source)
    stride = (case.stride,) * case.rank
    want = find_neighbors_torch(source.cpu(), target.cpu(), case.offsets, stride, case.torus)
    table = build_table(source)
    window = encode_window(case.offsets, stride, case.torus, source.device)
    search = search_window(table, target, window)
    pending = search.pending
    assert torch.equal(neighbor_table(search).cpu(), want)
    assert torch.equal(search.counts.sum(1).cpu(), (want >= 0).sum(1))
    in_rows, out_rows, offsets = pairs_of(search)
    want_in, want_out, want_offsets = pairs_torch(want, search.is_local and window.is_symmetric)
    assert torch.equal(in_rows.cpu(), want_in)
    assert torch.equal(out_rows.cpu(), want_out)
    assert list(offsets) == want_offsets.tolist() == pending.offsets.tolist()


@pytest.mark.parametrize("case", [CASES[3], CASES[0]], ids=lambda case: case.name)
def test_looking_around_blocks_and_looking_up_keys_agree(case: Case) -> None:
    source = case.source(seed=1, device=DEVICE)
    table = build_table(source)
    window = encode_window(case.offsets, (1,) * case.rank, None, source.device)
    around, by_key = search_window(table, table.coords, window), search_window(table, source.clone(), window)
    assert around.is_local
    assert not by_key.is_local
    assert torch.equal(neighbor_table(around), neighbor_table(by_key))
    assert torch.equal(around.counts, by_key.counts)
    assert torch.equal(around.keys, by_key.keys)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_lookup(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    coords = torch.unique(torch.randint(-7, 7, (90, 1 + rank), generator=generator, dtype=torch.int32), dim=0)
    coords = coords[torch.randperm(len(coords), generator=generator)].to(DEVICE)
    queries = torch.randint(-9, 9, (130, 1 + rank), generator=generator, dtype=torch.int32).to(DEVICE)
    table = build_table(coords)
    assert decode_ranges(table.ranges) == (tuple(coords.amin(0).tolist()), tuple(coords.amax(0).tolist()))
    assert torch.equal(lookup(table, coords).cpu(), torch.arange(len(coords), dtype=torch.int32))
    assert torch.equal(lookup(table, queries), lookup_torch(coords, queries))
    known = build_table(coords, encode_ranges(coords.amin(0).tolist(), coords.amax(0).tolist()).to(DEVICE))
    assert torch.equal(lookup(known, queries[::2]), lookup_torch(coords, queries[::2]))  # not contiguous


def test_ranges_and_duplicates_are_read_at_once() -> None:
    coords = torch.tensor([[0, -3, 7], [2, 5, -1], [1, 0, 0], [2, 5, -1]], dtype=torch.int32, device=DEVICE)
    for rows, repeated in ((coords, True), (coords[:3], False)):
        table = build_table(rows)
        assert read_table(table) == (tuple(rows.amin(0).tolist()), tuple(rows.amax(0).tolist()))
        assert table.has_duplicates is repeated


def test_reversed_edges() -> None:
    case = CASES[4]
    source = case.source(device=DEVICE)
    target = case.target(source)
    table = build_table(source)
    search = search_window(table, target, encode_window(case.offsets, (2, 2, 2), None, source.device))
    back = reverse_neighbors(neighbor_table(search), len(source))
    for tap in range(len(case.offsets)):
        want = torch.full((len(source),), -1, dtype=torch.int32, device=source.device)
        seen = neighbor_table(search)[tap] >= 0
        want[neighbor_table(search)[tap][seen].long()] = seen.nonzero()[:, 0].int()
        assert torch.equal(back[tap], want)
    found = FoundEdges(search, len(source))
    in_rows, out_rows, offsets = found.pairs()
    there, here = KernelMap(len(source), len(target), len(case.offsets), source=found), neighbor_table(search)
    assert all(torch.equal(a, b) for a, b in zip(there.pairs, (in_rows, out_rows, offsets)))
    assert torch.equal(there.neighbors, here)
    assert torch.equal(there.reverse().neighbors, back)


def test_a_map_turned_round_after_its_pairs_were_written_is_the_same() -> None:
    case = CASES[4]
    source = case.source(device=DEVICE)
    target = case.target(source)
    maps = []
    for writes_first in (False, True):
        search = search_window(build_table(source), target, encode_window(case.offsets, (2, 2, 2), None, source.device))
        edges = FoundEdges(search, len(source))
        forward = KernelMap(len(source), len(target), len(case.offsets), source=edges)
        if writes_first:
            assert len(forward.in_rows) == forward.num_pairs
        maps.append((forward, forward.reverse()))
    (_, early), (_, late) = maps
    assert torch.equal(early.neighbors, late.neighbors)
    assert torch.equal(early.in_rows, late.in_rows)
    assert early.tap_counts == late.tap_counts


def test_duplicate_rows_are_named_without_a_wait_of_their_own() -> None:
    coords = torch.tensor([[0, 1, 1, 1], [0, 5, 5, 5], [0, 2, 2, 2], [0, 5, 5, 5]], dtype=torch.int32, device=DEVICE)
    table = build_table(coords)
    window = encode_window(((0, 0, 0),), (1, 1, 1), None, coords.device)
    pending = search_window(table, table.coords, window).pending
    with pytest.raises(ValueError, match=r"rows 1 and 3 of coords are the same voxel \(0, 5, 5, 5\)"):
        pending.read()


def test_an_extent_past_64_bits_is_named() -> None:
    far = 2**31 - 1
    coords = torch.tensor([[0, -far, -far, -far], [9, far, far, far]], dtype=torch.int32, device=DEVICE)
    table = build_table(coords)
    window = encode_window(((0, 0, 0),), (1, 1, 1), None, coords.device)
    pending = search_window(table, table.coords, window).pending
    with pytest.raises(ValueError, match="too large for 64-bit keys"):
        pending.read()


def test_no_rows_and_no_edges() -> None:
    empty = torch.empty(0, 4, dtype=torch.int32, device=DEVICE)
    some = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32, device=DEVICE)
    window = encode_window(CASES[3].offsets, (1, 1, 1), None, some.device)
    for source, target in ((empty, empty), (empty, some), (some, empty), (some, some + 40)):
        table = build_table(source)
        search = search_window(table, target, window)
        in_rows, out_rows, offsets = pairs_of(search)
        assert neighbor_table(search).shape == (27, len(target))
        assert (neighbor_table(search) == -1).all()
        assert len(in_rows) == len(out_rows) == 0
        assert offsets == (0,) * 28


def test_keys_order_rows_by_gray_code() -> None:
    case = CASES[3]
    source = case.source(seed=2, device=DEVICE)
    table = build_table(source)
    search = search_window(table, table.coords, encode_window(case.offsets, (1, 1, 1), None, source.device))
    ranked = tap_order(case.offsets)
    assert [case.offsets[tap] for tap in ranked[:2]] == [(-1, -1, -1), (-1, -1, 1)]
    live = (neighbor_table(search) >= 0).long().cpu()
    code = sum(live[tap] << (26 - place) for place, tap in enumerate(ranked))
    assert torch.equal(search.keys[0].long().cpu() ^ (search.keys[0].long().cpu() >> 1), code)  # rank -> code
    assert torch.equal(row_keys(search, (tuple(range(27)),)), search.keys)


@pytest.mark.parametrize(("rank", "spread", "batches"), [(3, 40, 1), (3, 300, 3), (2, 60, 1), (4, 30, 2), (1, 900, 5)])
def test_runs_of_neighbours(rank: int, spread: int, batches: int) -> None:
    generator = torch.Generator().manual_seed(spread)
    coords = torch.randint(-spread, spread, (300, 1 + rank), generator=generator)
    coords[:, 0] %= batches
    coords = torch.unique(coords, dim=0)
    coords = coords[torch.randperm(len(coords), generator=generator)].int().to(DEVICE)
    table = build_table(coords)
    offsets = box(-1, 2, rank) if rank < 4 else box(0, 2, rank)
    search = search_window(table, table.coords, encode_window(offsets, (1,) * rank, None, coords.device))
    plain, taps = search.keys[0].cpu(), len(offsets)
    chunks = chunks_torch(coords.cpu(), 64)
    assert chunks.max() > 1
    bits = (-(-len(coords) // 64) - 1).bit_length()
    room = 31 - bits
    lost = max(0, taps - room)
    want = torch.where(plain == 2**31 - 1, 2**room - 1, plain >> lost) | (chunks.int() << room)
    assert torch.equal(row_keys(search, (tuple(range(taps)),), chunk_rows=64)[0].cpu(), want)


def test_runs_of_rows_where_rows_are_not_the_table_s() -> None:
    case = CASES[3]
    source = case.source(seed=2, device=DEVICE)
    search = search_window(
        build_table(source), source.clone(), encode_window(case.offsets, (1,) * 3, None, source.device)
    )
    chunked = row_keys(search, (tuple(range(27)),), chunk_rows=64)
    assert torch.equal(chunked[0].cpu() >> 29, torch.arange(len(source), dtype=torch.int32) // 64)


@pytest.mark.parametrize(
    ("rows", "values", "bits"),
    [(1, 5, 31), (1000, 3, 2), (1500, 2**31, 31), (700, 2**27, 27), (1100, 40, 9), *SORTED_LONG],
)
def test_sorting_rows(rows: int, values: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    keys = torch.randint(0, values, (1, rows), generator=generator).int().to(DEVICE)
    assert torch.equal(sort_rows(keys, bits=bits).long(), torch.sort(keys, stable=True).indices)


def test_rows_without_a_tap_come_last() -> None:
    keys = torch.tensor([[2**31 - 1, 2**27 - 1, 3, 2**31 - 1, 0]], dtype=torch.int32, device=DEVICE)
    assert sort_rows(keys, bits=28).tolist() == [[4, 2, 1, 0, 3]]


@pytest.mark.parametrize("first", ["counts", "pairs", "reversed table"])
def test_a_map_writes_its_edges_when_they_are_asked_for(first: str) -> None:
    case = CASES[4]
    source = case.source(device=DEVICE)
    target = case.target(source)
    search = search_window(build_table(source), target, encode_window(case.offsets, (2, 2, 2), None, source.device))
    found = FoundEdges(search, len(source))
    sizes = len(source), len(target), len(case.offsets)
    lazy, want = KernelMap(*sizes, source=found), KernelMap(*sizes, neighbors=neighbor_table(search))
    if first == "pairs":
        assert lazy.in_rows is lazy.reverse().out_rows
    if first == "reversed table":
        assert torch.equal(lazy.reverse().neighbors, want.reverse().neighbors)
    assert lazy.num_pairs == lazy.reverse().num_pairs == want.num_pairs
    assert lazy.tap_counts == lazy.reverse().tap_counts == want.tap_counts
    assert ("pairs" in found.written) is (first == "pairs")
    assert lazy.reverse().reverse() is lazy
    assert lazy.reverse().out_rows is lazy.in_rows
    assert lazy.reverse().in_rows is lazy.out_rows
    for here, there in ((lazy, want), (lazy.reverse(), want.reverse())):
        assert torch.equal(here.neighbors, there.neighbors)
        for one, other in zip(here.pairs, there.pairs):
            assert torch.equal(one, other)
    kept = lazy.reverse()
    del lazy
    assert torch.equal(kept.reverse().in_rows, want.in_rows)  # a map that outlives the one it reverses


def test_scratch_memory_goes_and_comes_back() -> None:
    case = CASES[3]
    source = case.source(seed=5, device=DEVICE)
    table = build_table(source)
    search = search_window(table, table.coords, encode_window(case.offsets, (1, 1, 1), None, source.device))
    keys, counts, first = search.keys.clone(), search.counts.clone(), pairs_of(search)
    source_of_edges = FoundEdges(search.released(), len(source))
    assert source_of_edges.search.is_released
    search = source_of_edges.searched()
    again = pairs_of(search)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(first, again))
    assert torch.equal(search.keys, keys)
    assert torch.equal(search.counts, counts)


@pytest.mark.parametrize(("kernel", "dilation"), [((3, 2, 1), 1), ((2, 2, 2), 1), ((3, 1, 2), 2)])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kind", ["absent", "periodic", "forbid"])
def test_what_a_window_reaches(kind: str, stride: int, kernel: tuple[int, ...], dilation: int) -> None:
    coords = Case("any", 3, (), rows=20, spread=6).source(seed=stride)
    grid, window = VoxelGrid(coords, 4), Window.of(3, kernel, stride, dilation, (1, 0, 2))
    torus = IndexRange((-6, -6, -6), (6, 6, 6)) if kind == "periodic" else None
    edge = Boundary.periodic(torus) if torus is not None else Boundary("absent")
    where = grid.coords.to(DEVICE), grid.extent, 4, window.offsets, window.stride
    found = reach(*where, window.coarse_torus(torus), to_fine=False)
    assert torch.equal(found.cpu(), coarse_grid(grid, window, edge).coords)
    within = None
    if kind == "forbid":
        within = IndexRange((-5, -4, -6), (9, 5, 5))
        edge = Boundary.forbid(within)
    coarse = window.coarse_torus(torus)
    if coarse is not None:  # coarse voxels off their torus are refused
        low, high = torch.tensor(coarse.start), torch.tensor(coarse.end)
        grid = grid.subset(((grid.coords[:, 1:] >= low) & (grid.coords[:, 1:] < high)).all(1))
        where = grid.coords.to(DEVICE), grid.extent, 4, window.offsets, window.stride
    found = reach(*where, torus, to_fine=True, within=within)
    assert torch.equal(found.cpu(), fine_grid(grid, window, edge).coords)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_what_a_window_reaches_in_other_ranks(rank: int) -> None:
    coords = Case("any", rank, (), rows=20, spread=5).source(seed=rank)
    grid = VoxelGrid(coords, 4)
    for window in (
        Window.of(rank, 2, 2),
        Window.of(rank, (3,) + (1,) * (rank - 1), 2),
        Window.of(rank, None, 1, taps=[(0,) * rank, (3,) * rank]),
    ):
        where = grid.coords.to(DEVICE), grid.extent, 4, window.offsets, window.stride, None
        for to_fine, found in ((False, coarse_grid), (True, fine_grid)):
            want = found(grid, window, Boundary("absent")).coords
            assert torch.equal(reach(*where, to_fine=to_fine).cpu(), want)


def test_what_a_window_reaches_in_long_lines() -> None:
    """Many words and lines of them, and runs of cells that cross both."""
    line = torch.cat([torch.arange(500), torch.arange(4000, 4200), torch.tensor([70_000, 262_143])])
    coords = torch.stack([line * 0, line * 0, line], 1).int().to(DEVICE)
    extent = IndexRange((0, 0), (1, 262_144))
    for factor in (1, 2):
        found = reach(coords, extent, 1, ((0, 0),), (1, factor), None, to_fine=False)
        want = line if factor == 1 else line[line % 2 == 0] // 2
        assert torch.equal(found[:, 2].cpu().long(), want)


def test_what_keys_cannot_number_is_left_to_others() -> None:
    far = 2**31 - 2
    coords = torch.tensor([[0, -far, -far, -far], [0, far, far, far]], dtype=torch.int32, device=DEVICE)
    extent = IndexRange((-far,) * 3, (far + 1,) * 3)
    assert reach(coords, extent, 1, ((0, 0, 0),), (1, 1, 1), None, to_fine=False) is None
