"""The edges of a search written down as a table, one row of it a tap; their counts and sort keys from it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.window.found import WindowSearch
from sparseconv.geometry.gpu.window.passes import SEARCH_TYPES
from sparseconv.geometry.gpu.window.taps import entry_of, look, take
from sparseconv.gpu.launcher import Launcher, ceil_div, pointer


def neighbor_table(search: WindowSearch) -> torch.Tensor:
    """(K, N_out) int32: the source row of each target row through each tap; -1 absent."""
    if search.neighbors is not None:
        return search.neighbors
    n, taps = search.rows, search.window.num_taps
    planes = torch.empty(taps, n, dtype=torch.int32, device=search.coords.device)
    if n and taps:
        args = (*search.pointers, pointer(planes), n, search.capacity)
        PLANES(planes.device, (ceil_div(n, 128), search.window.num_runs), args, (*search.constants, 128))
    return planes


# ---- kernels


@triton.jit
def planes_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    planes_ptr, n, capacity,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """planes[tap, row] = source row, for BLOCK rows and one run of taps."""
    EDGE: tl.constexpr = 1 << ((SHIFTS >> (4 * RANK)) & 15)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < n
    run_ptr = window_ptr + 3 * RANK + tl.program_id(1) * (2 + RANK)
    tap = tl.load(run_ptr)
    length = tl.load(run_ptr + 1)
    entry = entry_of(row, live, entries_ptr, SIDES)
    seen, near, far, cell = look(
        row, entry, live, run_ptr, length, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, around_ptr,
        window_ptr, capacity, RANK, SHIFTS, PLACES, PERIODIC, SIDES,
    )  # fmt: skip
    for step in tl.static_range(LENGTH):
        found, near, far = take(rows_ptr, seen, near, far, cell, step, EDGE, SIDES)
        tl.store(planes_ptr + (tap + step).to(tl.int64) * n + row, found, mask=row < tl.where(length > step, n, 0))


@triton.jit
def count_kernel(planes_ptr, counts_ptr, totals_ptr, n, num_chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """counts[tap, chunk] = entries that are not negative; totals[tap] likewise."""
    chunk = tl.program_id(0)
    tap = tl.program_id(1)
    live = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, CHUNK, BLOCK):
        row = chunk * CHUNK + start + tl.arange(0, BLOCK)
        found = tl.load(planes_ptr + tap.to(tl.int64) * n + row, mask=row < n, other=-1)
        live += (found >= 0).to(tl.int32)
    tl.store(counts_ptr + tap * num_chunks + chunk, tl.sum(live, 0))
    tl.atomic_add(totals_ptr + tap, tl.sum(live, 0).to(tl.int64), sem="relaxed")


@triton.jit
def plane_keys_kernel(
    planes_ptr, bits_ptr, keys_ptr, n, num_taps, key_chunk, room, lost, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Sort keys of BLOCK rows in one group of taps, from the table."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    mask = tl.zeros((BLOCK,), keys_ptr.dtype.element_ty)
    one = tl.full((BLOCK,), 1, keys_ptr.dtype.element_ty)
    for tap in range(num_taps):
        bit = tl.load(bits_ptr + group * num_taps + tap)
        found = tl.load(planes_ptr + row, mask=row < tl.where(bit >= 0, n, 0), other=-1)
        mask |= tl.where(found >= 0, one << tl.maximum(bit, 0), 0)
        planes_ptr += n
    key = mask ^ (mask >> 1)  # Gray code to its rank: the parity of the bits above
    key ^= key >> 2
    key ^= key >> 4
    key ^= key >> 8
    key ^= key >> 16
    if WIDE:
        key ^= key >> 32
    key = tl.where(mask == 0, (((one << (room - 1)) - 1) << 1) | 1, key >> lost)
    key |= (row // key_chunk).to(keys_ptr.dtype.element_ty) << room
    tl.store(keys_ptr + group.to(tl.int64) * n + row, key, mask=row < n)


_I32, _I64 = torch.int32, torch.int64
PLANES = Launcher(planes_kernel, (*SEARCH_TYPES, _I32, int, int), num_warps=1)
COUNT = Launcher(count_kernel, (_I32, _I32, _I64, int, int))
PLANE_KEYS = Launcher(plane_keys_kernel, (_I32, _I32, _I32, *(int,) * 5))
PLANE_KEYS_WIDE = Launcher(plane_keys_kernel, (_I32, _I32, _I64, *(int,) * 5))
