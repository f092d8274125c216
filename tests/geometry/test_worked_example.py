"""The numbers in the docstrings of the stages of a GPU's map: three voxels on a line, a window of three taps."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sparseconv.geometry.gpu.edge_lists import pairs_of
from sparseconv.geometry.gpu.reached import reach
from sparseconv.geometry.gpu.row_order import row_order
from sparseconv.geometry.gpu.schedule import build_schedule
from sparseconv.geometry.gpu.search import ORDER, neighbor_table, search_window
from sparseconv.geometry.gpu.table import INFOS, ROWS, build_table
from sparseconv.geometry.gpu.taps import encode_window
from sparseconv.geometry.gpu.wgrad_splits import cut_jobs_on_device
from sparseconv.geometry.ranges import IndexRange
from sparseconv.gpu import launcher

DEVICE = torch.device("cpu") if launcher.INTERPRETED else torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    not launcher.INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)


def test_three_voxels_on_a_line_through_every_stage() -> None:
    coords = torch.tensor([[0, 0], [0, 1], [0, 5]], dtype=torch.int32, device=DEVICE)
    table = build_table(coords)
    assert int(table.arena.tensor(INFOS)[0]) & 0xFFFFFFFF == 0b100011
    assert table.arena.tensor(ROWS).tolist() == [0, 1, 2]
    search = search_window(table, coords, encode_window(((-1,), (0,), (1,)), (1,), None, DEVICE))
    assert search.keys is not None
    assert search.pending is not None
    assert search.counts.tolist() == [[1], [3], [1]]
    assert search.pending.read() == (0, 1, 4, 5)
    assert search.keys.tolist() == [[2, 6, 1]]
    row_order(search)
    assert search.found[1].tensor(ORDER)[:3].tolist() == [2, 0, 1]
    assert neighbor_table(search).tolist() == [[-1, 0, -1], [0, 1, 2], [1, -1, -1]]
    schedule = build_schedule(search, 16)
    assert schedule.out_rows[:4].tolist() == [2, 0, 1, -1]
    assert schedule.neighbors[:3, :4].tolist() == [[-1, -1, 0, -1], [2, 0, 1, -1], [-1, 1, -1, -1]]
    in_rows, out_rows, _ = pairs_of(search)
    assert (in_rows.tolist(), out_rows.tolist()) == ([0, 0, 1, 2, 1], [1, 0, 1, 2, 0])
    jobs = cut_jobs_on_device(search.pending.offsets, 4, 2)
    assert (jobs.begin.tolist(), jobs.end.tolist()) == ([0, 1, 3, 4], [1, 3, 4, 5])
    assert (jobs.tap_jobs.tolist(), jobs.order.tolist()) == ([0, 1, 3, 4], [0, 1, 3, 2])
    found = reach(coords, IndexRange((0,), (6,)), 1, ((0,), (1,)), (2,), None, to_fine=False)
    assert found is not None
    assert found.tolist() == [[0, 0], [0, 2]]
