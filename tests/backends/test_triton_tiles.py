"""Work lists made by kernels without a sort or a wait, against their readable twins: jobs, one-tap tiles, new tiles."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from sparseconv.geometry.gpu import schedule as sortless
from sparseconv.geometry.gpu.edge_lists import FoundEdges
from sparseconv.geometry.gpu.lists import most_jobs
from sparseconv.geometry.gpu.search import search_window
from sparseconv.geometry.gpu.table import build_table
from sparseconv.geometry.gpu.taps import encode_window
from sparseconv.geometry.gpu.wgrad_splits import cut_jobs_on_device
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu import launcher
from tests.backends.test_triton_build import FIELDS
from tests.backends.test_triton_schedule import edges_of, edges_of_table
from tests.geometry.triton_cases import Case, box
from tests.twins import cut_jobs

DEVICE = "cpu" if launcher.INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not launcher.INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)


@settings(max_examples=25)
@given(
    counts=st.lists(st.sampled_from([0, 1, 127, 128, 129, 1000, 2999]), min_size=1, max_size=40),
    asked=st.integers(1, 200),
    halved=st.booleans(),
)
def test_jobs_cut_on_the_device_are_those_of_the_twin(counts: list[int], asked: int, halved: bool) -> None:
    count = most_jobs(len(counts), sum(counts), asked, 128)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], device=DEVICE)
    got, want = cut_jobs_on_device(offsets, count, 128, halved), cut_jobs(counts, count, 128, halved)
    for field in ("begin", "end", "order", "tap_jobs"):
        assert torch.equal(getattr(got, field).cpu(), getattr(want, field)), field
        assert getattr(got, field).data_ptr() % 16 == 0


def downsampling(case: Case, seed: int = 0) -> KernelMap:
    """Fine rows -> coarse rows, as a GPU's search leaves it."""
    source = case.source(seed, DEVICE)
    target = torch.unique(torch.cat([source[:, :1], source[:, 1:] // case.stride], 1), dim=0).contiguous()
    window = encode_window(case.offsets, (case.stride,) * case.rank, None, source.device)
    search = search_window(build_table(source), target, window)
    found = FoundEdges(search, len(source))
    return KernelMap(len(source), len(target), len(case.offsets), source=found)


@pytest.mark.parametrize("block_m", [16, 64, 128, 256])
@pytest.mark.parametrize(
    "case",
    [
        Case("halved", 3, box(0, 2, 3), stride=2, rows=500, spread=8),
        Case("thirds of a plane", 2, box(0, 3, 2), stride=3, rows=300, spread=20),
        Case("one row", 3, box(0, 2, 3), stride=2, rows=1),
    ],
    ids=lambda case: case.name,
)
def test_edges_that_meet_an_output_once_need_no_sort(case: Case, block_m: int) -> None:
    kernel_map = downsampling(case)
    reverse = kernel_map.reverse()
    assert sortless.meets_once(reverse)
    assert not sortless.meets_once(kernel_map)
    schedule = sortless.one_tap_schedule(reverse, block_m)
    assert edges_of(schedule) == edges_of_table(reverse.neighbors)
    assert sorted(schedule.out_rows[schedule.out_rows >= 0].tolist()) == list(range(reverse.num_out))
    assert set(schedule.tile_counts.tolist()) <= {0, 1}
    assert sorted(schedule.tile_order.tolist()) == list(range(schedule.num_tiles))
    assert bool((schedule.neighbors[-1] == -1).all())
    listed = torch.arange(schedule.tile_rows.shape[1], device=DEVICE) < schedule.tile_counts[:, None]
    assert bool((schedule.tile_rows[~listed] == 1).all() and (schedule.tile_taps[~listed] == 0).all())
    assert all(getattr(schedule, field).data_ptr() % 16 == 0 for field in FIELDS[:-1])


@pytest.mark.parametrize(
    ("offsets", "stride"), [(box(-1, 2, 3), 2), (box(0, 2, 3), 1), (((0, 0, 0), (0, 0, 2)), 2)], ids=str
)
def test_other_windows_may_meet_an_output_twice(offsets: tuple[tuple[int, ...], ...], stride: int) -> None:
    assert not sortless.meets_once(downsampling(Case("", 3, offsets, stride=stride, rows=200)).reverse())


def test_a_target_that_leaves_rows_without_an_edge() -> None:
    case = Case("halved", 3, box(0, 2, 3), stride=2, rows=100)
    source = case.source(0, DEVICE)
    window = encode_window(case.offsets, (2, 2, 2), None, source.device)
    search = search_window(build_table(source), (source[:5] // 2).contiguous().unique(dim=0), window)
    kernel_map = KernelMap(len(source), len(search.coords), 8, source=FoundEdges(search, len(source)))
    assert kernel_map.num_pairs < len(source)
    assert not sortless.meets_once(kernel_map.reverse())


def test_runs_over_the_same_rows_are_launched_together() -> None:
    """Tap 0 has three runs of 256 slots and tap 1 one: their tiles are interleaved in proportion."""
    ins = torch.arange(1000, dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 750, 1000], device=DEVICE)
    schedule = sortless.one_tap_schedule(KernelMap(1000, 1000, 2, pairs=(ins, ins, offsets)), 256)
    assert schedule.tile_order.tolist() == [0, 3, 1, 2, 4]
    assert schedule.tile_taps[:, 0].tolist() == [0, 0, 0, 1, 0]
    assert schedule.tile_counts.tolist() == [1, 1, 1, 1, 0]
