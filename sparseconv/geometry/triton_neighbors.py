"""The neighbour table of a window on the GPU, with what is cheap to know on the way: sort keys and counts of edges."""

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
#: bits of a row's tap mask that a sort key holds: the most significant taps where there are more
KEY_BITS = 31
WIDE_KEY_BITS = 62


@dataclass(frozen=True)
class TapWindow:
    """Taps as the kernels read them: fine = stride * coarse + offsets[k], folded into a torus if there is one.

    Taps that follow one another in number and along the last axis make a run: its cells lie in at most two blocks.

        data = [stride, start, size] of each axis (size 0: no torus),
               [first tap, length, offset of the first tap on each axis] of each run,
               [bit in the sort key, -1 for none] of each tap

    Example: the 27 taps of a 3 x 3 x 3 window are 9 runs of 3.
    """

    data: torch.Tensor  # int32 on the device
    num_taps: int
    num_runs: int
    run_length: int  # of the longest run
    periodic: bool
    key_bits: int  # bits in use in a sort key


@lru_cache(maxsize=256)
def encode_window(
    offsets: tuple[Ints, ...],
    stride: Ints,
    torus: tuple[Ints, Ints] | None,
    longest_run: int,
    significance: Ints | None,
    device: torch.device,
) -> TapWindow:
    """The taps ``offsets`` (K, D) for a device; ``torus`` is (start, size) an axis; a run has at most longest_run taps.

    ``significance`` lists taps from the most to the least significant bit of the sort key (default: `tap_order`).
    """
    rank = len(stride)
    runs: list[list[int]] = []
    for tap, offset in enumerate(offsets):
        if runs and tap > 0 and runs[-1][1] < longest_run:
            before = offsets[tap - 1]
            if before[:-1] == offset[:-1] and before[-1] + 1 == offset[-1]:
                runs[-1][1] += 1
                continue
        runs.append([tap, 1, *offset])
    order = tap_order(offsets) if significance is None else significance
    kept = order[: KEY_BITS if len(order) <= KEY_BITS else WIDE_KEY_BITS]
    bits = [-1] * len(offsets)
    for place, tap in enumerate(kept):
        bits[tap] = len(kept) - 1 - place
    start, size = torus or ((0,) * rank, (0,) * rank)
    data = [v for axis in zip(stride, start, size) for v in axis] + [v for run in runs for v in run] + bits
    if max(map(abs, data), default=0) >= 2**31:
        raise ValueError(f"strides, offsets and extents must fit in 32 bits; got {max(map(abs, data))}")
    return TapWindow(
        torch.tensor(data, dtype=torch.int32).to(device),
        len(offsets),
        len(runs),
        max((run[1] for run in runs), default=1),
        torus is not None,
        len(kept),
    )


@lru_cache(maxsize=256)
def tap_order(offsets: tuple[Ints, ...]) -> Ints:
    """Taps from the farthest from the window's centre to the nearest: a far tap (a corner) is the rarest."""
    if not offsets:
        return ()
    centre = [min(column) + max(column) for column in zip(*offsets)]
    distance = [sum(abs(2 * o - c) for o, c in zip(offset, centre)) for offset in offsets]
    return tuple(sorted(range(len(offsets)), key=lambda tap: -distance[tap]))


@dataclass(frozen=True)
class NeighborTable:
    """What one pass over the target rows finds; sizes are known beforehand, so nothing is read back.

    ``keys`` are the ranks of the rows' tap masks in the Gray sequence: rows sorted by them change taps one at a time;
    rows without a tap come last. ``counts[k, c]`` are the edges of tap k among the rows [c, c + 1) * chunk_rows.
    """

    neighbors: torch.Tensor  # (K, N_out) int32: the source row of each target row through each tap; -1 absent
    keys: torch.Tensor | None  # (N_out,) int32 (int64 above 31 taps), not negative
    counts: torch.Tensor | None  # (K, C) int32
    chunk_rows: int


def find_neighbors(
    table: CoordinateTable,
    coords: torch.Tensor,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
    torus: tuple[Sequence[int], Sequence[int]] | None = None,
    *,
    keyed: bool = False,
    counted: bool = False,
    significance: Sequence[int] | None = None,
    tile: tuple[int, int, int] | None = None,
) -> NeighborTable:
    """The rows of ``table`` that the rows of coords (N_out, 1+D) int32 see through a window.

        neighbors[k, r] = row of (stride * coords[r] + offsets[k], folded into the torus)

    Args:
        table: the source rows.
        coords: (N_out, 1+D) int32 on the same device, any row order; column 0 is the batch.
        offsets: (K, D) integers.
        stride: D integers.
        torus: (start, size) of a periodic extent, D integers each.
        keyed: also make sort keys.
        counted: also count the edges.
        significance: taps from the most to the least significant bit of the keys.
        tile: (runs, rows, warps) of a program, for measurements; default: `choose_tile`.

    Returns:
        A `NeighborTable`.
    """
    coords = aligned(coords)
    device, (n, columns) = coords.device, coords.shape
    periodic = None if torus is None else (tuple(torus[0]), tuple(torus[1]))
    longest = 2 ** table.shifts[-1] + 1 if table.blocked and periodic is None else 1
    ranked = None if significance is None else tuple(significance)
    window = encode_window(tuple(map(tuple, offsets)), tuple(stride), periodic, longest, ranked, device)
    taps = window.num_taps
    chunk_rows = rows_per_chunk(n)
    chunks = -(-n // chunk_rows)
    neighbors = torch.empty(taps, n, dtype=torch.int32, device=device)
    wide = taps > KEY_BITS
    keys = torch.empty(n, dtype=torch.int64 if wide else torch.int32, device=device) if keyed else None
    counts = torch.zeros(taps, chunks, dtype=torch.int32, device=device) if counted else None
    if n and taps:
        launch_neighbors(table, coords, window, neighbors, keys, counts, chunk_rows, tile)
    return NeighborTable(neighbors, keys, counts, chunk_rows)


def rows_per_chunk(n: int) -> int:
    """Rows whose edges are counted together: at most about two thousand chunks."""
    return max(512, triton.next_power_of_2(n) // 2048)


def choose_tile(n: int, runs: int) -> tuple[int, int, int]:
    """(runs, rows, warps) of a program: few rows and all runs at once where rows are few, so that the card is full."""
    if n <= 65536:
        return min(16, triton.next_power_of_2(runs)), 16, 2
    return 1, 128, 1


def launch_neighbors(
    table: CoordinateTable,
    coords: torch.Tensor,
    window: TapWindow,
    neighbors: torch.Tensor,
    keys: torch.Tensor | None,
    counts: torch.Tensor | None,
    chunk_rows: int,
    tile: tuple[int, int, int] | None = None,
) -> None:
    """Fill the given tensors; ``counts`` must be zeros."""
    n, columns = coords.shape
    runs, rows, warps = tile or choose_tile(n, window.num_runs)
    unused = pointer(window.data)
    args = (
        pointer(coords), *table_pointers(table), pointer(window.data), pointer(neighbors),
        unused if keys is None else pointer(keys), unused if counts is None else pointer(counts),
        n, window.num_runs, table.capacity, 0 if counts is None else counts.shape[1],
    )  # fmt: skip
    constants = (
        columns, pack_shifts(table.shifts), table.blocked, window.periodic, window.run_length,
        0 if keys is None else window.key_bits, counts is not None, chunk_rows, runs, rows,
    )  # fmt: skip
    launcher = _launcher(keys is not None and keys.dtype == torch.int64, warps)
    with on_device(coords.device):
        launcher(coords.device, (triton.cdiv(n, rows),), args, constants)


# ---- kernels


@triton.jit
def neighbors_kernel(
    coords_ptr, ranges_ptr, table_ptr, base_ptr, rows_ptr, window_ptr, neighbors_ptr, keys_ptr, counts_ptr,
    n, num_runs, capacity, num_chunks,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, BLOCKED: tl.constexpr, PERIODIC: tl.constexpr,
    LENGTH: tl.constexpr, KEY_BITS: tl.constexpr, COUNTED: tl.constexpr, CHUNK: tl.constexpr,
    RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program finds all taps of BLOCK rows, RUNS runs of taps at a time."""
    RANK: tl.constexpr = COLUMNS - 1
    SHIFT: tl.constexpr = (SHIFTS >> (4 * RANK)) & 15
    first_row = tl.program_id(0) * BLOCK
    row = first_row + tl.arange(0, BLOCK)[None, :]
    live = row < n
    place = coords_ptr + row.to(tl.int64) * COLUMNS
    runs_ptr = window_ptr + 3 * RANK
    bits_ptr = runs_ptr + (2 + RANK) * num_runs
    volume = count_blocks(ranges_ptr, COLUMNS, SHIFTS)
    last_low, last_extent = axis_range(ranges_ptr, RANK)
    last_count = ((last_extent - 1) >> SHIFT) + 1
    mask = tl.zeros((BLOCK,), keys_ptr.dtype.element_ty)
    for start in range(0, num_runs, RUNS):
        run = start + tl.arange(0, RUNS)[:, None]
        real = run < num_runs
        run_ptr = runs_ptr + run * (2 + RANK)
        tap = tl.load(run_ptr, mask=real, other=0)
        length = tl.load(run_ptr + 1, mask=real, other=0)
        here = live & real
        key = tl.zeros((RUNS, BLOCK), tl.int64)
        bit = tl.zeros((RUNS, BLOCK), tl.int32)
        inside = here
        batch = tl.load(place, mask=live, other=0).to(tl.int64)
        key, bit, inside = add_axis(key, bit, inside, batch, ranges_ptr, 0, 0)
        fine = key
        for axis in tl.static_range(RANK):
            stride = tl.load(window_ptr + 3 * axis).to(tl.int64)
            offset = tl.load(run_ptr + 2 + axis, mask=real, other=0).to(tl.int64)
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
            cell = (q & ((1 << SHIFT) - 1)).to(tl.int32)
            line = bit << SHIFT
            rank = tl.load(base_ptr + slot, mask=hit, other=0) + popcount(word & below(line + cell))
            crosses = inside & (block >= -1) & (block < last_count - 1) & (cell + length > (1 << SHIFT))
            next_slot, next_hit = find(table_ptr, key + 1, crosses, capacity, volume)
            next_word = tl.load(table_ptr + 2 * next_slot + 1, mask=next_hit, other=0)
            next_rank = tl.load(base_ptr + next_slot, mask=next_hit, other=0) + popcount(next_word & below(line))
        for step in tl.static_range(LENGTH):
            wanted = here & (length > step)
            if BLOCKED:
                at = cell + step
                near = at < (1 << SHIFT)
                bits = tl.where(near, word, next_word) >> (line + (at & ((1 << SHIFT) - 1))).to(tl.int64)
                there = wanted & ((bits & 1) != 0)
                found = tl.load(rows_ptr + tl.where(near, rank, next_rank), mask=there, other=-1)
                rank += (there & near).to(tl.int32)
                next_rank += (there & (at >= (1 << SHIFT))).to(tl.int32)
            else:
                there = hit
                found = tl.where(there, word.to(tl.int32) - 1, -1)
            tl.store(neighbors_ptr + (tap + step).to(tl.int64) * n + row, found, mask=wanted)
            if KEY_BITS > 0:
                key_bit = tl.load(bits_ptr + tap + step, mask=real & (length > step), other=-1)
                flag = tl.full((RUNS, 1), 1, keys_ptr.dtype.element_ty) << tl.maximum(key_bit, 0)
                mask += tl.sum(tl.where(there & (key_bit >= 0), flag, 0), 0)  # bits of different taps: a sum is an or
            if COUNTED:
                edges = tl.sum(there.to(tl.int32), 1)[:, None]
                counter = counts_ptr + (tap + step) * num_chunks + first_row // CHUNK
                tl.atomic_add(counter, edges, mask=real & (length > step), sem="relaxed")
    if KEY_BITS > 0:
        mask ^= mask >> 1  # Gray code to its rank: the parity of the bits above
        mask ^= mask >> 2
        mask ^= mask >> 4
        mask ^= mask >> 8
        mask ^= mask >> 16
        if KEY_BITS > 31:
            mask ^= mask >> 32
        LAST_KEY: tl.constexpr = 0x7FFFFFFFFFFFFFFF if KEY_BITS > 31 else 0x7FFFFFFF  # rows without a tap
        where = first_row + tl.arange(0, BLOCK)
        tl.store(keys_ptr + where, tl.where(mask == 0, LAST_KEY, mask), mask=where < n)


@lru_cache(maxsize=None)
def _launcher(wide_keys: bool, warps: int) -> Launcher:
    i32, i64 = torch.int32, torch.int64
    types = (i32, i32, i64, i32, i32, i32, i32, i64 if wide_keys else i32, i32, int, int, int, int)
    return Launcher(neighbors_kernel, types, num_warps=warps)


# ---- readable twin


def find_neighbors_torch(
    source: torch.Tensor,
    coords: torch.Tensor,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
    torus: tuple[Sequence[int], Sequence[int]] | None = None,
) -> torch.Tensor:
    """The neighbours of `find_neighbors`, by comparing every row with every row."""
    found = torch.empty(len(offsets), len(coords), dtype=torch.int32)
    for tap, offset in enumerate(offsets):
        fine = coords.long() * torch.tensor([1, *stride]) + torch.tensor([0, *offset])
        if torus is not None:
            start, size = (torch.tensor(v) for v in torus)
            fine[:, 1:] = (fine[:, 1:] - start) % size + start
        same = (fine[:, None] == source[None].long()).all(-1)
        found[tap] = torch.where(same.any(1), same.int().argmax(1), -1).int()
    return found
