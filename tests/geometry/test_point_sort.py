"""Points put into voxels by two launches, beside torch's operations; in the interpreter or on a card."""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import sparseconv as sc
from sparseconv.geometry.cpu.sorted_table import KeySpace
from sparseconv.geometry.gpu import point_sort
from sparseconv.geometry.gpu.point_sort import sort_points, sort_points_kernel
from sparseconv.geometry.ranges import IndexRange
from sparseconv.gpu import launcher, warp_asm
from sparseconv.gpu.radix_sort.sort import Passes, most_together, ticket_behind
from tests.geometry.concurrent_programs import beside
from tests.launches import counted

DEVICE = "cpu" if launcher.INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not launcher.INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)
#: the module, whose name is that of its function in the package
VOXELIZE: Any = importlib.import_module("sparseconv.geometry.voxelize")
Sizes = tuple[float, ...]


def check(points: torch.Tensor, batch: torch.Tensor | None, size: Sizes, corner: Sizes) -> None:
    """The same bounds, voxels and rows as by torch."""
    want, got = VOXELIZE._Cells(points, batch, size, corner), sort_points(points, batch, size, corner)
    assert got is not None
    assert (got.low, got.high) == (want.low, want.high)
    low, high = ([int(v) for v in ends] for ends in (got.low, got.high))
    space = KeySpace.covering(IndexRange((0, *low[1:]), [v + 1 for v in high]))
    for mine, other in zip(got.merge(space), want.merge(space)):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


def cloud(count: int, rank: int, extent: float, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return ((torch.rand(count, rank, generator=made) - 0.5) * extent).to(DEVICE)


@given(
    count=st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 1280])),
    kind=st.sampled_from(
        [(1, torch.bfloat16), (2, torch.float16), (2, torch.float64), (3, torch.float32), (4, torch.float64)]
    ),
    extent=st.sampled_from([0.0, 3.0, 40.0, 300.0]),
    batched=st.sampled_from([None, torch.uint8, torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15)
def test_voxels_and_rows_are_those_of_torch(
    count: int, kind: tuple[int, torch.dtype], extent: float, batched: torch.dtype | None, seed: int
) -> None:
    rank, dtype = kind
    points = cloud(count, rank, extent, seed).to(dtype)
    batch = None if batched is None else (torch.arange(count, device=DEVICE) * 7 % 3 + 1).to(batched)
    check(points, batch, (0.5, 0.1, 0.7, 1.0)[:rank], (0.1, 0.0, -0.3, 1.0)[:rank])


@pytest.mark.parametrize("bits", [2, 9, 18, 27, 31, 32, 36, 42])
@pytest.mark.parametrize("more", [0, 1])
def test_keys_of_each_number_of_digits(bits: int, more: int) -> None:
    """As many cells as a power of two, or a few more."""
    sides = torch.tensor([2 ** (bits // 2), 2 ** (bits - bits // 2) + more], dtype=torch.float64, device=DEVICE)
    points = (cloud(200, 2, 1.0, bits).double() * sides * 0.999).repeat(2, 1)
    points[0], points[-1] = -(sides // 2), -(sides // 2) + sides - 1
    check(points, None, (1.0, 1.0), (0.0, 0.0))


def test_points_upon_the_faces_of_voxels() -> None:
    """Where a tenth times ten is no whole number, a product with the inverse would be another cell."""
    points = torch.arange(-600, 600, device=DEVICE)[:, None] / 10
    for size in (0.1, 0.3, 0.7, 1 / 3):
        check(points.float(), None, (size,), (0.0,))
        check(points.double(), None, (size,), (0.1,))


def test_the_outermost_voxels_within_32_bits() -> None:
    for last in (2.0**31 - 2, -(2.0**31) + 2):
        points = torch.tensor([[last, 0.0], [last, 1.0], [last, 0.0]], dtype=torch.float64, device=DEVICE)
        check(points, torch.tensor([2**31 - 2] * 3, device=DEVICE), (1.0, 1.0), (0.0, 0.0))


def test_views_of_wider_arrays() -> None:
    scan = cloud(300, 5, 9.0)
    items = torch.arange(600, device=DEVICE)[::2] % 2
    check(scan[:, :3], items, (1.0,) * 3, (0.0,) * 3)
    check(scan[1:, 1:3], items[1:], (1.0,) * 2, (0.0,) * 2)
    check(scan.flatten()[1:901].view(300, 3), items, (1.0,) * 3, (0.0,) * 3)


@pytest.mark.parametrize(
    ("points", "batch"),
    [
        ([[0.0, float("nan")]], None),
        ([[float("-inf"), 0.0]], None),
        ([[2.0**31 - 1, 0.0]], None),
        ([[-(2.0**31) + 1, 0.0]], None),
        ([[0.0, 0.0]], [-1]),
        ([[0.0, 0.0]], [2**31 - 1]),
        ([[0.0, 0.0]], [2**32]),
        ([[-(2.0**30), 0.0], [2.0**30, 0.0]], None),  # an axis of 2^31 cells
        ([[-(2.0**24), 0.0], [0.0, 2.0**24]], None),  # 2^48 keys
    ],
)
def test_what_has_no_keys_is_left_to_torch(points: list, batch: list | None) -> None:
    where = torch.tensor([[3.0, 4.0]] * 40 + points, dtype=torch.float64, device=DEVICE)
    items = None if batch is None else torch.tensor([0] * 40 + batch, device=DEVICE)
    for _ in range(2):  # what the first launch left is no harm
        check(where[:40], None if items is None else items[:40], (1.0, 1.0), (0.0, 0.0))
        assert sort_points(where, items, (1.0, 1.0), (0.0, 0.0)) is None


def test_as_many_points_as_programs_sort_together() -> None:
    most = most_together(1 if launcher.INTERPRETED else point_sort.programs_at_once(torch.device("cuda", 0), 1 << 30))
    assert most < 1 << point_sort.ROW_BITS
    assert -(-most // point_sort.TILE) <= point_sort.MOST_TILES
    check(cloud(most, 3, 30.0), None, (1.0,) * 3, (0.0,) * 3)
    assert sort_points(cloud(most + 1, 3, 30.0), None, (1.0,) * 3, (0.0,) * 3) is None


def test_two_launches_and_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    points = cloud(60, 3, 9.0)
    sort_points(points, None, (1.0,) * 3, (0.0,) * 3)
    want = sc.voxelize(points, 1.0)
    by_torch = VOXELIZE._Cells
    monkeypatch.setattr(VOXELIZE, "_Cells", lambda *args: sort_points(*args) or by_torch(*args))  # on a CPU too
    with counted() as (launches, waits):
        grid, rows = sc.voxelize(points, 1.0)
    assert dict(launches) == {"sort_points_kernel": 1, "write_kernel": 1}
    assert dict(waits) == {"report": 1}
    assert torch.equal(grid.coords, want[0].coords)
    assert torch.equal(rows, want[1])
    assert (grid.extent, grid.batch_size, grid.voxel_size) == (want[0].extent, 1, (1.0,) * 3)
    assert grid.is_placed
    with pytest.raises(ValueError, match=r"point 3 .* not finite"):
        sc.voxelize(points.index_fill(0, torch.tensor([3], device=DEVICE), float("nan")), 1.0)


# ---- programs beside each other


@triton.jit
def several_kernel(
    points_ptr, batch_ptr, keys_ptr, lines_ptr, order_ptr, starts_ptr, ranges_ptr, status_ptr, barriers_ptr, report_ptr,
    n, share, words, PROGRAMS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    sort_beside(
        PROGRAMS, words, points_ptr, batch_ptr, keys_ptr, lines_ptr, order_ptr, starts_ptr, ranges_ptr, status_ptr,
        barriers_ptr, report_ptr, n, share, PROGRAMS, RANK,
    )  # fmt: skip


def sort_beside(programs: int, words: Any, *args: Any) -> None:
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    mine = threading.local()

    def work(own: int) -> None:
        mine.number = own
        sort_points_kernel(*args[:-1], *(tl.load(words + i) for i in range(16)), args[-1], True)

    def number(axis: int) -> Any:
        return TensorHandle(np.array([mine.number if axis == 0 else 0], dtype=np.int32), tl.int32)

    with patch.object(interpreter_builder, "create_get_program_id", number):
        beside(programs, work)


@pytest.mark.skipif(not launcher.INTERPRETED, reason="on a card all launches are of several programs")
@pytest.mark.parametrize(("n", "programs", "extent"), [(5, 3, 4.0), (600, 5, 9.0), (1500, 3, 1000.0), (2100, 2, 6.0)])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_programs_sort_together(n: int, programs: int, extent: float, is_wrong: bool) -> None:
    points, batch = cloud(n, 3, extent), torch.arange(n) % 2
    if is_wrong:
        points[n - 1, 1] = float("nan")
    passes, rank = Passes(n, point_sort.KEY_BITS, programs, together=True), 3
    words = torch.tensor(point_sort._halves((1.0,) * rank, (0.0,) * rank), dtype=torch.int32)
    keys = torch.full((n,), -1, dtype=torch.int64)
    scratch = torch.zeros(passes.words + programs * warp_asm.ROOM // 8, dtype=torch.int64)
    order = torch.full((ticket_behind(n) + 1,), -1, dtype=torch.int32)
    starts = torch.full((-(-n // point_sort.TILE),), -1, dtype=torch.int32)
    ranges, status = torch.full((16,), -1, dtype=torch.int32), torch.full((2,), -1, dtype=torch.int64)
    barriers, report = torch.zeros(11, dtype=torch.int32), torch.full((10,), -1, dtype=torch.int64)
    several_kernel[(1,)](
        points, batch, keys, scratch, order, starts, ranges, status, barriers, report, n, passes.share, words,
        programs, rank,
    )  # fmt: skip
    assert not barriers.any()  # the next launch finds zeros
    assert int(report[1]) == is_wrong
    if is_wrong:
        return
    cells = torch.cat([batch[:, None], points.floor().long()], 1)
    found, rows = torch.unique(cells, dim=0, return_inverse=True)
    assert int(report[0]) & 0xFFFFFFFF == len(found) == int(starts.sum())
    assert torch.equal(order[:n].long(), torch.sort(rows, stable=True).indices)
    assert point_sort.bounds_of(report[2:].tolist()) == (tuple(cells.amin(0).tolist()), tuple(cells.amax(0).tolist()))
