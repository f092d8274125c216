"""Schedules built by kernels against their readable twin, in Triton's interpreter or on a card."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sparseconv.geometry.gpu import schedule as tile_building
from sparseconv.geometry.gpu.lists import Schedule
from sparseconv.geometry.gpu.search import neighbor_table, search_table, search_window
from sparseconv.geometry.gpu.table import build_table
from sparseconv.geometry.gpu.taps import encode_window, tap_order
from sparseconv.gpu import launcher
from tests import twins as twin
from tests.geometry.triton_cases import CASES, Case
from tests.twins import chunks_torch

DEVICE = "cpu" if launcher.INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not launcher.INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)
CUBE, STRIDED, EMPTY = CASES[3], CASES[4], Case("no rows", 3, CASES[3].offsets, rows=0)
FIELDS = ("neighbors", "out_rows", "tile_counts", "tile_rows", "tile_taps", "tile_order", "slots")


def same(got: Schedule, want: Schedule) -> None:
    for field in FIELDS:
        a, b = getattr(got, field), getattr(want, field)
        assert (a is None) == (b is None), field
        assert a is None or torch.equal(a, b), field


@pytest.mark.parametrize("groups", [None, ((0, 1, 2, 5), tuple(k for k in range(27) if k not in (0, 1, 2, 5)))])
@pytest.mark.parametrize("block_m", [64, 128])
def test_a_cube(block_m: int, groups: tuple[tuple[int, ...], ...] | None) -> None:
    source = CUBE.source(seed=3, device=DEVICE)
    table = build_table(source)
    search = search_window(table, table.coords, encode_window(CUBE.offsets, (1, 1, 1), None, source.device))
    want = twin.build_schedule(neighbor_table(search), 27, block_m, groups=groups)
    got = tile_building.build_schedule(search, block_m, groups=groups)
    same(got, want)
    same(tile_building.build_schedule(search, block_m, groups=groups), want)


@pytest.mark.parametrize("case", [STRIDED, EMPTY], ids=lambda case: case.name)
def test_other_windows_and_given_tables(case: Case) -> None:
    source = case.source(device=DEVICE)
    target = case.target(source)
    table = build_table(source)
    search = search_window(table, target, encode_window(case.offsets, (case.stride,) * 3, None, source.device))
    ranked = tap_order(case.offsets)
    want = twin.build_schedule(neighbor_table(search), len(case.offsets), 64, significance=ranked)
    same(tile_building.build_schedule(search, 64), want)
    same(tile_building.build_schedule(search_table(neighbor_table(search)), 64, significance=ranked), want)


def test_runs_of_neighbouring_rows() -> None:
    case = Case("wide cube", 3, CUBE.offsets, rows=250, spread=30)
    source = case.source(seed=4, device=DEVICE)
    table = build_table(source)
    search = search_window(table, table.coords, encode_window(CUBE.offsets, (1, 1, 1), None, source.device))
    got = tile_building.build_schedule(search, 64, chunk_rows=64)
    order = got.out_rows[: len(source)].long().cpu()
    assert torch.equal(order.sort().values, torch.arange(len(source)))
    chunks = chunks_torch(source.cpu(), 64)[order]
    assert (chunks.diff() >= 0).all()
    assert chunks[-1] > 1
    assert torch.equal(got.neighbors[:-1, : len(source)].cpu(), neighbor_table(search).cpu()[:, order])
    assert torch.equal(got.tile_order.cpu(), torch.arange(got.num_tiles, dtype=torch.int32))
