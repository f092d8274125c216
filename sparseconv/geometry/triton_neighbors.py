"""The rows that a window sees on the GPU, with what is cheap to know on the way: sort keys and counts of edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_launch import Launcher, on_device, pointer
from sparseconv.geometry.triton_table import (
    CoordinateTable,
    add_axis,
    aligned,
    axis_range,
    below,
    count_blocks,
    find,
    pack_shifts,
    popcount,
    table_pointers,
)

Ints = tuple[int, ...]
#: bits of a row's tap mask that a narrow sort key holds
KEY_BITS = 31
#: taps of a run at most: with a block's edge of 4, a run lies in two blocks
LONGEST_RUN = 4


@dataclass(frozen=True, eq=False)
class TapWindow:
    """Taps as the kernels read them: fine = stride * coarse + offsets[k], folded into a torus if there is one.

    Taps that follow one another in number and along the last axis make a run. Each run has ``step`` columns of a row,
    a power of two, so the 27 taps of a 3 x 3 x 3 window are 9 runs in 36 columns, every fourth of them empty.

        data = [stride, start, size] of each axis (size 0: no torus),
               [first tap, length, offset of the first tap on each axis] of each run,
               [tap] of each column, -1 for none,
               [256 words] for each byte of a mask: their xor is the mask's key (none above 31 taps)
    """

    data: torch.Tensor  # int32 on the device
    offsets: tuple[Ints, ...]
    column_of: Ints  # column of each tap
    num_runs: int
    step: int
    run_length: int  # of the longest run
    periodic: bool

    @property
    def num_taps(self) -> int:
        return len(self.offsets)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.num_runs * self.step

    @property
    def columns_at(self) -> int:
        """Where the taps of the columns begin in ``data``."""
        rank = len(self.offsets[0]) if self.offsets else 0
        return 3 * rank + self.num_runs * (2 + rank)


@lru_cache(maxsize=512)
def encode_window(
    offsets: tuple[Ints, ...],
    stride: Ints,
    torus: tuple[Ints, Ints] | None,
    device: torch.device,
    split: bool = False,
) -> TapWindow:
    """The taps ``offsets`` (K, D) for a device; ``torus`` is (start, size) an axis; ``split``: every tap a run."""
    rank = len(stride)
    longest = 1 if split or torus is not None else LONGEST_RUN
    runs: list[list[int]] = []
    for tap, offset in enumerate(offsets):
        if runs and runs[-1][1] < longest:
            before = offsets[tap - 1]
            if before[:-1] == offset[:-1] and before[-1] + 1 == offset[-1]:
                runs[-1][1] += 1
                continue
        runs.append([tap, 1, *offset])
    length = max((run[1] for run in runs), default=1)
    step = triton.next_power_of_2(length)
    column_of = tuple(index * step + i for index, run in enumerate(runs) for i in range(run[1]))
    columns = [-1] * (len(runs) * step)
    for tap, column in enumerate(column_of):
        columns[column] = tap
    start, size = torus or ((0,) * rank, (0,) * rank)
    data = [v for axis in zip(stride, start, size) for v in axis] + [v for run in runs for v in run] + columns
    if max(map(abs, data), default=0) >= 2**31:
        raise ValueError(f"strides, offsets and extents must fit in 32 bits; got {max(map(abs, data))}")
    if len(offsets) <= KEY_BITS:
        data += key_words(tap_order(offsets))
    encoded = torch.tensor(data, dtype=torch.int32).to(device)
    return TapWindow(encoded, offsets, column_of, len(runs), step, length, torus is not None)


@lru_cache(maxsize=512)
def tap_order(offsets: tuple[Ints, ...]) -> Ints:
    """Taps from the farthest from the window's centre to the nearest: a far tap (a corner) is the rarest."""
    if not offsets:
        return ()
    centre = [min(column) + max(column) for column in zip(*offsets)]
    distance = [sum(abs(2 * o - c) for o, c in zip(offset, centre)) for offset in offsets]
    return tuple(sorted(range(len(offsets)), key=lambda tap: -distance[tap]))


def key_words(significance: Sequence[int]) -> list[int]:
    """The Gray rank of a mask of up to 31 taps as the xor of one word for each of its bytes (both maps are linear).

    ``significance`` lists the taps from the most to the least significant bit of the Gray code.
    """
    rank_of_tap = {}
    for place, tap in enumerate(significance):
        rank_of_tap[tap] = (1 << (len(significance) - place)) - 1  # a bit flips every rank bit from its place down
    words = []
    for byte in range(4):
        for value in range(256):
            word = 0
            for bit in range(8):
                if value >> bit & 1:
                    word ^= rank_of_tap.get(8 * byte + bit, 0)
            words.append(word)
    return words


@dataclass(frozen=True)
class RowTable:
    """What a window sees, one line a target row; sizes are known beforehand, so nothing is read back.

    ``keys`` are the ranks of the rows' tap masks in the Gray sequence: rows sorted by them change taps one at a time;
    rows without a tap come last. ``counts[k, c]`` are the edges of tap k among the rows [c, c + 1) * chunk_rows.
    """

    window: TapWindow
    rows: torch.Tensor  # (N_out, width) int32: the source row in the column of each tap; -1 absent
    keys: torch.Tensor | None  # (N_out,) int32, not negative; None above 31 taps
    counts: torch.Tensor  # (K, C) int32
    chunk_rows: int

    def neighbors(self) -> torch.Tensor:
        """(K, N_out) int32, contiguous: the same rows by tap."""
        n, taps = self.rows.shape[0], self.window.num_taps
        table = torch.empty(taps, n, dtype=torch.int32, device=self.rows.device)
        if n and taps:
            with on_device(table.device):
                args = (pointer(self.rows), pointer(self.window.data), pointer(table), n, self.window.columns_at)
                width = self.window.width
                lanes = min(64, triton.next_power_of_2(width))
                grid = (triton.cdiv(n, 64), triton.cdiv(width, lanes))
                _TRANSPOSE(table.device, grid, args, (width, lanes, 64))
        return table


def find_rows(table: CoordinateTable, coords: torch.Tensor, window: TapWindow) -> RowTable:
    """The rows of ``table`` that the rows of coords (N_out, 1+D) int32, in any order, see through a window.

        rows[r, column of k] = row of (stride * coords[r] + offsets[k], folded into the torus)
    """
    coords = aligned(coords)
    device, (n, columns) = coords.device, coords.shape
    taps, width = window.num_taps, window.width
    keyed = taps <= KEY_BITS
    chunk_rows = rows_per_chunk(n)
    rows = torch.empty(n, width, dtype=torch.int32, device=device)
    keys = torch.empty(n, dtype=torch.int32, device=device) if keyed else None
    counts = torch.zeros(taps, max(1, -(-n // chunk_rows)), dtype=torch.int32, device=device)
    if n and taps:
        block = 32 if n <= 131072 else 128
        args = (
            pointer(coords), *table_pointers(table), pointer(window.data), pointer(rows),
            pointer(counts) if keys is None else pointer(keys), pointer(counts),
            n, window.num_runs, taps, table.capacity, counts.shape[1],
        )  # fmt: skip
        constants = (
            columns, pack_shifts(table.shifts), table.blocked, window.periodic, window.run_length, window.step,
            keyed, triton.next_power_of_2(min(taps, 32)), chunk_rows, block,
        )  # fmt: skip
        with on_device(device):
            _FIND(device, (triton.cdiv(n, block),), args, constants)
            if not keyed:
                count_edges(rows, window, counts, chunk_rows)
    return RowTable(window, rows, keys, counts, chunk_rows)


def rows_from_neighbors(neighbors: torch.Tensor, window: TapWindow) -> RowTable:
    """A `RowTable` of a table (K, N_out) int32 made elsewhere; ``window`` has one tap a run (``split=True``)."""
    taps, n = neighbors.shape
    chunk_rows = rows_per_chunk(n)
    rows = neighbors.t().contiguous()
    counts = torch.zeros(taps, max(1, -(-n // chunk_rows)), dtype=torch.int32, device=neighbors.device)
    if n and taps:
        with on_device(neighbors.device):
            count_edges(rows, window, counts, chunk_rows)
    return RowTable(window, rows, None, counts, chunk_rows)


def count_edges(rows: torch.Tensor, window: TapWindow, counts: torch.Tensor, chunk_rows: int) -> None:
    """Fill counts (K, C)."""
    n, width = rows.shape
    lanes = min(64, triton.next_power_of_2(width))
    args = (pointer(rows), pointer(window.data), pointer(counts), n, window.columns_at, counts.shape[1])
    _COUNT(rows.device, (counts.shape[1], triton.cdiv(width, lanes)), args, (width, lanes, chunk_rows, 64))


def rows_per_chunk(n: int) -> int:
    """Rows whose edges are counted together: at most about two thousand chunks."""
    return max(128, triton.next_power_of_2(n) // 2048)


# ---- kernels


@triton.jit
def find_rows_kernel(
    coords_ptr, ranges_ptr, table_ptr, base_ptr, rows_ptr, window_ptr, out_ptr, keys_ptr, counts_ptr,
    n, num_runs, num_taps, capacity, num_chunks,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, BLOCKED: tl.constexpr, PERIODIC: tl.constexpr,
    LENGTH: tl.constexpr, STEP: tl.constexpr, KEYED: tl.constexpr, TAPS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program finds all taps of BLOCK rows, one run of taps at a time."""
    RANK: tl.constexpr = COLUMNS - 1
    SHIFT: tl.constexpr = (SHIFTS >> (4 * RANK)) & 15
    EDGE: tl.constexpr = 1 << SHIFT
    first_row = tl.program_id(0) * BLOCK
    row = first_row + tl.arange(0, BLOCK)
    live = row < n
    place = coords_ptr + row.to(tl.int64) * COLUMNS
    run_ptr = window_ptr + 3 * RANK
    volume = count_blocks(ranges_ptr, COLUMNS, SHIFTS)
    last_low, last_extent = axis_range(ranges_ptr, RANK)
    last_count = ((last_extent - 1) >> SHIFT) + 1
    line_out_ptr = out_ptr + row.to(tl.int64) * (num_runs * STEP)
    mask = tl.zeros((BLOCK,), tl.int32)
    for run in range(0, num_runs):
        tap = tl.load(run_ptr)
        length = tl.load(run_ptr + 1)
        key = tl.zeros((BLOCK,), tl.int64)
        bit = tl.zeros((BLOCK,), tl.int32)
        inside = live
        batch = tl.load(place, mask=live, other=0).to(tl.int64)
        key, bit, inside = add_axis(key, bit, inside, batch, ranges_ptr, 0, 0)
        fine = key
        for axis in tl.static_range(RANK):
            stride = tl.load(window_ptr + 3 * axis).to(tl.int64)
            offset = tl.load(run_ptr + 2 + axis).to(tl.int64)
            fine = tl.load(place + 1 + axis, mask=live, other=0).to(tl.int64) * stride + offset
            if PERIODIC:
                low = tl.load(window_ptr + 3 * axis + 1).to(tl.int64)
                size = tl.load(window_ptr + 3 * axis + 2).to(tl.int64)
                turned = (fine - low) % size
                fine = low + tl.where(turned < 0, turned + size, turned)
            if axis < RANK - 1:
                key, bit, inside = add_axis(
                    key, bit, inside, fine, ranges_ptr, axis + 1, (SHIFTS >> (4 * (axis + 1))) & 15
                )
        q = fine - last_low
        block = q >> SHIFT
        key = key * last_count + block
        slot, hit = find(table_ptr, key, inside & (block >= 0) & (block < last_count), capacity, volume)
        word = tl.load(table_ptr + 2 * slot + 1, mask=hit, other=0)
        if BLOCKED:
            cell = (q & (EDGE - 1)).to(tl.int32)
            line = bit << SHIFT
            near = tl.load(base_ptr + slot, mask=hit, other=0) + popcount(word & below(line + cell))
            crosses = inside & (block >= -1) & (block < last_count - 1) & (cell + length > EDGE)
            next_slot, next_hit = find(table_ptr, key + 1, crosses, capacity, volume)
            next_word = tl.load(table_ptr + 2 * next_slot + 1, mask=next_hit, other=0)
            seen = (word >> line.to(tl.int64)).to(tl.int32) & ((1 << EDGE) - 1)
            next_seen = (next_word >> line.to(tl.int64)).to(tl.int32) & ((1 << EDGE) - 1)
            seen = ((seen | (next_seen << EDGE)) >> cell) & ((1 << length) - 1)  # one bit a tap of the run
            # far: where the list of rows of the next block would begin if it held the run's near cells too
            far = tl.load(base_ptr + next_slot, mask=next_hit, other=0) + popcount(next_word & below(line))
            far -= popcount((seen & ((1 << (EDGE - cell)) - 1)).to(tl.int64))
            found0, near, far = take(rows_ptr, seen, near, far, cell, EDGE, 0)
            found1 = found0
            found2 = found0
            found3 = found0
            if LENGTH > 1:
                found1, near, far = take(rows_ptr, seen, near, far, cell, EDGE, 1)
            if LENGTH > 2:
                found2, near, far = take(rows_ptr, seen, near, far, cell, EDGE, 2)
            if LENGTH > 3:
                found3, near, far = take(rows_ptr, seen, near, far, cell, EDGE, 3)
            if STEP == 1:
                tl.store(line_out_ptr, found0, mask=live)
            if STEP == 2:
                both = tl.join(found0, found1)
                tl.store(line_out_ptr[:, None] + tl.arange(0, 2)[None, :], both, mask=live[:, None])
            if STEP == 4:
                all_four = tl.reshape(tl.join(tl.join(found0, found2), tl.join(found1, found3)), (BLOCK, 4))
                tl.store(line_out_ptr[:, None] + tl.arange(0, 4)[None, :], all_four, mask=live[:, None])
        else:
            seen = hit.to(tl.int32)
            tl.store(line_out_ptr, tl.where(hit, word.to(tl.int32) - 1, -1), mask=live)
        if KEYED:
            mask |= seen << tap
        run_ptr += 2 + RANK
        line_out_ptr += STEP
    if KEYED:
        words_ptr = run_ptr + num_runs * STEP
        key = tl.load(words_ptr + (mask & 255)) ^ tl.load(words_ptr + 256 + ((mask >> 8) & 255))
        key = key ^ tl.load(words_ptr + 512 + ((mask >> 16) & 255)) ^ tl.load(words_ptr + 768 + ((mask >> 24) & 255))
        tl.store(keys_ptr + row, tl.where(mask == 0, 0x7FFFFFFF, key), mask=live)
        lane = tl.arange(0, TAPS)
        edges = tl.sum((mask[None, :] >> lane[:, None]) & 1, 1)
        tl.atomic_add(counts_ptr + lane * num_chunks + first_row // CHUNK, edges, mask=lane < num_taps, sem="relaxed")


@triton.jit
def take(rows_ptr, seen, near, far, cell, EDGE: tl.constexpr, INDEX: tl.constexpr):
    """The row of one cell of a run, -1 if it is empty; both cursors move on past it."""
    there = ((seen >> INDEX) & 1) != 0
    found = tl.load(rows_ptr + tl.where(cell + INDEX < EDGE, near, far), mask=there, other=-1)
    return found, near + there.to(tl.int32), far + there.to(tl.int32)


@triton.jit
def count_kernel(
    rows_ptr, window_ptr, counts_ptr, n, columns_at, num_chunks,
    WIDTH: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts[tap, chunk] = entries that are not negative."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * LANES + tl.arange(0, LANES)
    tap = tl.load(window_ptr + columns_at + column, mask=column < WIDTH, other=-1)
    edges = tl.zeros((LANES,), tl.int32)
    for start in range(0, CHUNK, BLOCK):
        row = chunk * CHUNK + start + tl.arange(0, BLOCK)
        wanted = (row < n)[:, None] & (tap >= 0)[None, :]
        found = tl.load(rows_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=wanted, other=-1)
        edges += tl.sum((found >= 0).to(tl.int32), 0)
    tl.store(counts_ptr + tap * num_chunks + chunk, edges, mask=tap >= 0)


@triton.jit
def transpose_kernel(
    rows_ptr, window_ptr, table_ptr, n, columns_at, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr
):
    """table[tap of a column, row] = rows[row, column]."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * LANES + tl.arange(0, LANES)
    tap = tl.load(window_ptr + columns_at + column, mask=column < WIDTH, other=-1)
    wanted = (tap >= 0)[:, None] & (row < n)[None, :]
    found = tl.load(rows_ptr + row.to(tl.int64)[None, :] * WIDTH + column[:, None], mask=wanted, other=-1)
    tl.store(table_ptr + tap.to(tl.int64)[:, None] * n + row[None, :], found, mask=wanted)


_I32, _I64 = torch.int32, torch.int64
_FIND = Launcher(
    find_rows_kernel, (_I32, _I32, _I64, _I32, _I32, _I32, _I32, _I32, _I32, int, int, int, int, int), num_warps=1
)
_COUNT = Launcher(count_kernel, (_I32, _I32, _I32, int, int, int))
_TRANSPOSE = Launcher(transpose_kernel, (_I32, _I32, _I32, int, int))


# ---- readable twin


def find_neighbors_torch(
    source: torch.Tensor,
    coords: torch.Tensor,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
    torus: tuple[Sequence[int], Sequence[int]] | None = None,
) -> torch.Tensor:
    """(K, N_out): the neighbours that `find_rows` finds, by comparing every row with every row."""
    found = torch.empty(len(offsets), len(coords), dtype=torch.int32)
    for tap, offset in enumerate(offsets):
        fine = coords.long() * torch.tensor([1, *stride]) + torch.tensor([0, *offset])
        if torus is not None:
            start, size = (torch.tensor(v) for v in torus)
            fine[:, 1:] = (fine[:, 1:] - start) % size + start
        same = (fine[:, None] == source[None].long()).all(-1)
        found[tap] = torch.where(same.any(1), same.int().argmax(1), -1).int()
    return found
