"""Schedules and job lists: every pair exactly once, tiles that list what lives in them, little waste."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseconv.geometry.gpu.lists import (
    HALF_BIT,
    LOOKAHEAD,
    ROW_BITS,
    Schedule,
    most_jobs,
    plane_groups,
    tap_significance,
)
from tests.twins import build_schedule, cut_jobs, gray_rank


def table(num_taps: int, rows: int, density: float, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    neighbors = torch.randint(0, 1000, (num_taps, rows), generator=gen, dtype=torch.int32)
    return neighbors.masked_fill(torch.rand(num_taps, rows, generator=gen) >= density, -1)


def edges_of(schedule: Schedule) -> list[tuple[int, int, int]]:
    """(tap, input row, output row) as a kernel walks them."""
    found = []
    for tile in range(schedule.num_tiles):
        for k in range(int(schedule.tile_counts[tile])):
            row, tap = int(schedule.tile_rows[tile, k]), int(schedule.tile_taps[tile, k])
            row, halves = row & ROW_BITS, row >> HALF_BIT
            for slot in range(tile * schedule.block_m, (tile + 1) * schedule.block_m):
                half = 2 * (slot - tile * schedule.block_m) // schedule.block_m
                if halves >> half & 1 and schedule.neighbors[row, slot] >= 0:
                    found.append((tap, int(schedule.neighbors[row, slot]), int(schedule.out_rows[slot])))
    return sorted(found)


def edges_of_table(neighbors: torch.Tensor) -> list[tuple[int, int, int]]:
    return sorted((int(k), int(neighbors[k, o]), int(o)) for k, o in (neighbors >= 0).nonzero())


@settings(max_examples=25, deadline=None)
@given(
    num_taps=st.sampled_from([1, 5, 9, 27, 70, 125]),
    rows=st.integers(0, 300),
    density=st.floats(0, 1),
    block_m=st.sampled_from([16, 64, 128, 256]),
    split=st.sampled_from([1, 2, 3]),
    chunk=st.sampled_from([None, 50]),
    seed=st.integers(0, 10),
)
def test_every_pair_once(num_taps, rows, density, block_m, split, chunk, seed):
    neighbors = table(num_taps, rows, density, seed)
    groups = plane_groups(num_taps, split) if split > 1 else None
    schedule = build_schedule(neighbors, num_taps, block_m, chunk_rows=chunk, groups=groups)
    assert edges_of(schedule) == edges_of_table(neighbors)
    num_rows = schedule.neighbors.shape[0] - 1
    assert bool((schedule.neighbors[-1] == -1).all())
    assert schedule.tile_rows.shape[1] >= num_rows + LOOKAHEAD
    listed = torch.arange(schedule.tile_rows.shape[1]) < schedule.tile_counts[:, None]
    assert bool((schedule.tile_rows[~listed] == num_rows).all())
    assert bool((schedule.tile_taps[~listed] == 0).all())
    table_rows, halves = schedule.tile_rows & ROW_BITS, schedule.tile_rows >> HALF_BIT
    met = schedule.neighbors.view(num_rows + 1, schedule.num_tiles, 2, block_m // 2).ge(0).any(3).int()
    met = (met[..., 0] + 2 * met[..., 1]).t()
    assert torch.equal(halves, met.gather(1, table_rows.long()))
    slots = schedule.neighbors[:-1].view(num_rows, -1, block_m) >= 0
    assert int(schedule.tile_counts.sum()) == int(slots.any(2).sum())
    assert sorted(schedule.tile_order.tolist()) == list(range(schedule.num_tiles))
    assert bool((schedule.tile_counts[schedule.tile_order.long()].diff() <= 0).all())
    if schedule.slots is None:
        assert sorted(schedule.out_rows[schedule.out_rows >= 0].tolist()) == list(range(rows))
    else:
        for row in range(rows):
            slots = schedule.slots[:, row]
            assert all(int(schedule.out_rows[slot]) == row for slot in slots[slots >= 0])


def test_a_tile_runs_over_its_live_taps_only():
    neighbors = torch.full((27, 512), -1, dtype=torch.int32)
    neighbors[3, :256] = 1
    neighbors[20, 256:] = 2
    neighbors = neighbors[:, torch.randperm(512, generator=torch.Generator().manual_seed(0))]
    schedule = build_schedule(neighbors, 27, 128)
    assert schedule.tile_counts.tolist() == [1, 1, 1, 1]
    assert build_schedule(neighbors, 27, 128, chunk_rows=1).tile_counts.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("num_taps", [3, 27, 70])
def test_gray_ranks_put_masks_a_bit_apart_next_to_each_other(num_taps):
    """Walking the Gray sequence flips one bit a step; its ranks must come out in order, across words too."""
    steps = 200
    start = (1 << num_taps) - steps if num_taps < 60 else (1 << 62) - 100
    codes = [n ^ (n >> 1) for n in range(max(1, start), max(1, start) + min(steps, (1 << num_taps) - max(1, start)))]
    masks = torch.tensor([[(code >> (num_taps - 1 - tap)) & 1 for code in codes] for tap in range(num_taps)])
    words = gray_rank((masks.int() - 1), tuple(range(num_taps)))
    ranks = [
        sum(int(w[i]) << (max(0, num_taps - 62) if k == 0 else 0) for k, w in enumerate(words))
        for i in range(len(codes))
    ]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(codes)


def test_far_taps_are_most_significant():
    order = tap_significance(27)
    assert set(order[:8]) == {0, 2, 6, 8, 18, 20, 24, 26}
    assert order[-1] == 13
    assert tap_significance(9)[-1] == 4
    assert tap_significance(5)[-1] == 2


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 3000), min_size=1, max_size=30), max_jobs=st.integers(1, 200))
def test_jobs_cover_every_pair_once(counts, max_jobs):
    most = most_jobs(len(counts), sum(counts), max_jobs, 128)
    jobs = cut_jobs(counts, most, 128)
    assert jobs.count == most
    start = 0
    for tap, count in enumerate(counts):
        mine = range(int(jobs.tap_jobs[tap]), int(jobs.tap_jobs[tap + 1]))
        assert len(mine) >= 1
        at = start
        for job in mine:
            assert int(jobs.begin[job]) == at
            assert at <= int(jobs.end[job]) <= start + count
            at = int(jobs.end[job])
        start += count
        assert at == start
    rest = slice(int(jobs.tap_jobs[-1]), None)
    assert torch.equal(jobs.begin[rest], jobs.end[rest])
    assert sorted(jobs.order.tolist()) == list(range(jobs.count))
    assert jobs.count <= max(max_jobs, len(counts))
    assert jobs.one_each == (jobs.count == len(counts))


def test_schedule_refuses_what_it_cannot_cut():
    neighbors = table(27, 10, 0.5, 0)
    with pytest.raises(ValueError, match="must divide"):
        build_schedule(neighbors, 27, 96)
    with pytest.raises(ValueError, match="shape"):
        build_schedule(neighbors, 26, 128)
    with pytest.raises(ValueError, match="exactly once"):
        build_schedule(neighbors, 27, 128, groups=[range(26)])
