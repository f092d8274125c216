"""Work lists of a map on a GPU: half of the edges, jobs over them, and searches that were let go."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sparseconv.backends.base import Request
from sparseconv.backends.triton_implicit_gemm.backend import problem_size
from sparseconv.backends.triton_implicit_gemm.config import weight_grad_candidates
from sparseconv.backends.triton_implicit_gemm.recipe import WeightGradSpec
from sparseconv.geometry.gpu.edge_lists import FoundEdges, half_pairs_of, pairs_of
from sparseconv.geometry.gpu.schedule import build_schedule
from sparseconv.geometry.gpu.search import WindowSearch, search_window
from sparseconv.geometry.gpu.table import build_table, lookup, read_table
from sparseconv.geometry.gpu.taps import encode_window
from sparseconv.geometry.gpu.window_3x3x3 import CUBE
from sparseconv.geometry.gpu.work_lists import jobs_of, schedule_of
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu import launcher
from tests.launches import counted
from tests.twins import cut_jobs

DEVICE = torch.device("cpu") if launcher.INTERPRETED else torch.device("cuda", 0)
LISTS = "neighbors", "out_rows", "tile_counts", "tile_rows", "tile_taps", "tile_order"
pytestmark = pytest.mark.skipif(
    not launcher.INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """So many distinct voxels of two scenes in a random order, half of the cells of a box around the origin."""
    generator = torch.Generator().manual_seed(seed)
    side = 2 + round(count ** (1 / 3))
    cells = torch.randperm(2 * side**3, generator=generator)[:count]
    places = torch.stack([cells // side**3, cells // side**2 % side, cells // side % side, cells % side], 1)
    return (places - torch.tensor([0, 2, 1, side])).int().contiguous().to(DEVICE)


def map_of(search: WindowSearch) -> KernelMap:
    return KernelMap(search.rows, search.rows, 27, source=FoundEdges(search, search.rows))


def searched(coords: torch.Tensor) -> WindowSearch:
    return search_window(build_table(coords), coords, encode_window(CUBE[0], (1, 1, 1), None, DEVICE))


@pytest.mark.parametrize("jobs", [27, 40])
def test_half_of_the_edges_say_it_all(jobs: int) -> None:
    search = searched(rows(500))
    edges, offsets = pairs_of(search), search.pending.read()
    half = half_pairs_of(search)
    assert len(half[0]) == len(half[1]) == offsets[14] < offsets[-1]
    for some, every in zip(half, edges):
        assert torch.equal(some, every[: offsets[14]])
    counts = tuple(b - a for a, b in itertools.pairwise(offsets))
    straight, folded = cut_jobs(counts, jobs, 16), cut_jobs(counts, jobs, 16, halved=True)
    assert torch.equal(straight.order, folded.order)
    turned = 0
    for want, (begin, end) in zip(zip(straight.begin, straight.end), zip(folded.begin, folded.end)):
        sides = half
        if begin < 0:
            begin, end, sides, turned = -1 - begin, -1 - end, half[::-1], turned + 1
        for some, every in zip(sides, edges):
            assert torch.equal(some[begin:end], every[slice(*want)])
    assert 13 <= turned < jobs


@pytest.mark.parametrize("groups", [1, 2])
def test_a_weight_gradient_reads_half_of_the_edges_to_the_same_bits(groups: int) -> None:
    edges = map_of(searched(rows(300)))
    every = KernelMap(300, 300, 27, pairs=(edges.in_rows, edges.out_rows, edges.tap_offsets))
    generator = torch.Generator().manual_seed(groups)
    x, g = (torch.randn(300, 8 * groups, generator=generator).to(DEVICE) for _ in range(2))
    assert edges.is_halved
    assert not every.is_halved
    edges.__dict__.pop("pairs")
    grads = []
    for kernel_map in (edges, edges.reverse(), every):
        work = problem_size(Request(kernel_map, DEVICE, x.dtype, 8 * groups, 8 * groups, groups), True)
        for config in weight_grad_candidates(work)[:1]:
            out = torch.full((27, 8, 8 * groups), float("nan"), device=DEVICE)
            WeightGradSpec(config, work, x, g, 27).bind(kernel_map)(x, g, out)
            grads.append(out)
    assert "pairs" not in edges.__dict__
    assert edges.half_pairs[0] is edges.reverse().half_pairs[1]
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], grads[0].flip(0))  # the mirrored taps, by the same pairs


def test_jobs_after_all_lists_make_no_search_anew() -> None:
    search = searched(rows(300))
    edges, want = map_of(search), search.pending.read()
    schedule_of(edges, 128)
    for form in ("schedule", "pairs"):
        edges.source.mark_built(form)
    assert edges.source.search.is_released
    jobs = jobs_of(edges, 30)
    assert edges.source.search.is_released
    assert jobs.count == 30
    assert edges.source.offsets().tolist() == list(want)


def test_a_search_is_made_anew_after_its_release() -> None:
    search = searched(rows(300))
    before, schedule = pairs_of(search), build_schedule(search, 128)
    source = FoundEdges(search.released(), search.rows)
    lists = build_schedule(source.searched(), 128)
    for name in LISTS:
        assert torch.equal(getattr(schedule, name), getattr(lists, name)), name
    assert torch.equal(pairs_of(source.search)[0], before[0])


def test_rows_that_occur_twice_are_found() -> None:
    coords = rows(200)
    coords[150] = coords[7]
    search = searched(coords)
    read_table(search.table)
    assert search.table.has_duplicates
    with pytest.raises(ValueError, match="rows 7 and 150 of coords are the same voxel"):
        search.pending.read()


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_the_launch_that_reads_given_rows_copies_them(rank: int) -> None:
    cells = torch.randperm(7 ** (1 + rank), generator=torch.Generator().manual_seed(rank))[:45]
    coords = torch.stack([cells // 7**axis % 7 - 3 * (axis > 0) for axis in range(1 + rank)], 1).int()
    want = coords.unique(dim=0).to(DEVICE)
    for given in (want.clone(), torch.cat([want.view(-1)[:1], want.view(-1)])[1:].view_as(want)):  # and not aligned
        copy = torch.full_like(want, 77)
        with counted() as (launches, _):
            table = build_table(given, copy=copy)
        assert launches.total() == 1
        assert torch.equal(copy, want)
        assert table.coords is copy
        given.zero_()  # once all is launched, its owner may write to it
        assert torch.equal(lookup(table, copy).cpu(), torch.arange(len(want), dtype=torch.int32))
