"""Schedules on the GPU in four steps: sort the keys of the rows, permute the table, list live taps, rank the tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from sparseconv.backends.triton_implicit_gemm.schedule import Schedule
from sparseconv.geometry.triton_launch import Launcher, on_device, pointer
from sparseconv.geometry.triton_neighbors import KEY_BITS, RowTable, TapWindow, tap_order

#: slots are padded to a multiple of this, so that schedules of every block size share one table
SLOT_ALIGNMENT = 256
#: list columns beyond the last live tap that a kernel may read ahead
LOOKAHEAD = 4
#: bits of a row's tap mask that a sort key holds: the most significant taps where there are more
WIDE_KEY_BITS = 62


def build_schedule(
    found: RowTable,
    block_m: int,
    *,
    significance: Sequence[int] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    chunk_rows: int | None = None,
) -> Schedule:
    """The schedule of what a window sees, without waiting for the device.

    Args:
        found: the rows and keys of `find_rows`, or of `rows_from_neighbors`.
        block_m: rows of a tile; a power of two that divides 256.
        significance: taps from the most to the least significant bit of a row's mask; default: `tap_order`.
        groups: taps cut into groups with a row order of their own each; default: all in one.
        chunk_rows: sort only inside runs of this many rows, for locality; keys then lose their last bits.

    Returns:
        A `Schedule` whose slots are padded to a multiple of 256 in each group.
    """
    if block_m < 1 or SLOT_ALIGNMENT % block_m:
        raise ValueError(f"block_m must divide {SLOT_ALIGNMENT}; got {block_m}")
    taps = found.window.num_taps
    parts = (tuple(range(taps)),) if groups is None else tuple(tuple(group) for group in groups)
    if groups is not None and sorted(tap for part in parts for tap in part) != list(range(taps)):
        raise ValueError(f"groups must hold each of the {taps} taps exactly once; got {parts}")
    keys = found.keys
    if keys is None or significance is not None or groups is not None or chunk_rows is not None:
        ranked = tap_order(found.window.offsets) if significance is None else tuple(significance)
        keys = row_keys(found, ranked, parts, chunk_rows)
    order = torch.sort(keys, dim=-1, stable=True).indices
    return tile_rows(found, order, parts, block_m)


def row_keys(
    found: RowTable, significance: tuple[int, ...], parts: tuple[tuple[int, ...], ...], chunk_rows: int | None
) -> torch.Tensor:
    """(G, N_out) sort keys: the Gray rank of each row's mask of the taps of a group; rows without a tap come last."""
    n, width = found.rows.shape
    device = found.rows.device
    largest = max(map(len, parts), default=0)
    wide = largest > KEY_BITS
    keys = torch.empty(len(parts), n, dtype=torch.int64 if wide else torch.int32, device=device)
    chunk_bits, chunk = 0, max(n, 1)
    if chunk_rows is not None and n > chunk_rows:
        chunk, chunk_bits = chunk_rows, (-(-n // chunk_rows) - 1).bit_length()
    if n and width:
        bits = _encode_parts(found.window, parts, significance).bits
        room = (WIDE_KEY_BITS if wide else KEY_BITS) - chunk_bits
        lost = max(0, min(largest, WIDE_KEY_BITS) - room)
        args = (pointer(found.rows), pointer(bits), pointer(keys), n, width, chunk, room, lost)
        with on_device(device):
            _keys_launcher(wide)(device, (triton.cdiv(n, 128), len(parts)), args, (wide, chunk_bits > 0, 128))
    return keys


def tile_rows(
    found: RowTable, order: torch.Tensor, parts: tuple[tuple[int, ...], ...], block_m: int
) -> Schedule:
    """The schedule whose rows go in ``order`` (G, N_out) or (N_out,) int64 in each group of taps."""
    n, width = found.rows.shape
    device = found.rows.device
    lines = max(map(len, parts), default=0)
    padded = -(-n // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    slots, room = len(parts) * padded, lines + LOOKAHEAD
    tiles = slots // block_m
    split = len(parts) > 1
    sizes = [slots, tiles * room, tiles * room, _even(tiles), _even(tiles), len(parts) * n if split else 0]
    table = torch.empty(lines + 1, slots, dtype=torch.int32, device=device)
    arrays = torch.empty(sum(map(_even, sizes)), dtype=torch.int32, device=device).split([_even(s) for s in sizes])
    out_rows, rows_list, taps_list, counts, launch_order, slots_of = arrays
    if tiles:
        encoded = _encode_parts(found.window, parts, None)
        args = (
            pointer(found.rows), pointer(order), pointer(encoded.lines), pointer(encoded.weight_taps), pointer(table),
            *map(pointer, (out_rows, slots_of, counts, rows_list, taps_list)), n, slots, padded // block_m, lines, room,
        )  # fmt: skip
        lanes = min(64, triton.next_power_of_2(width))
        with on_device(device):
            constants = (width, block_m, lanes, triton.next_power_of_2(room), split)
            _TILES(device, (tiles,), args, constants)
            ranked = (pointer(counts), pointer(launch_order), tiles)
            _RANK(device, (triton.cdiv(tiles, 256),), ranked, (triton.next_power_of_2(lines + 2), 256, 1024))
    more: dict[str, Any] = {"slots": slots_of[: len(parts) * n].view(len(parts), n)} if split else {}
    return Schedule(
        block_m,
        table,
        out_rows[:slots],
        counts[:tiles],
        rows_list[: tiles * room].view(tiles, room),
        taps_list[: tiles * room].view(tiles, room),
        launch_order[:tiles],
        **more,
    )


@dataclass(frozen=True)
class _Parts:
    bits: torch.Tensor  # (G, width) int32: key bit of the tap of a column, -1 for none
    lines: torch.Tensor  # (G, width) int32: table row of the tap of a column, -1 for none
    weight_taps: torch.Tensor  # (G, R) int32: weight tap of a table row, -1 for none


@lru_cache(maxsize=512)
def _encode_parts(
    window: TapWindow, parts: tuple[tuple[int, ...], ...], significance: tuple[int, ...] | None
) -> _Parts:
    """Groups of taps as the kernels read them."""
    lines = torch.full((len(parts), window.width), -1, dtype=torch.int32)
    bits = torch.full((len(parts), window.width), -1, dtype=torch.int32)
    weight_taps = torch.full((len(parts), max(map(len, parts), default=0)), -1, dtype=torch.int32)
    wide = weight_taps.shape[1] > KEY_BITS
    for index, part in enumerate(parts):
        for line, tap in enumerate(part):
            lines[index, window.column_of[tap]] = line
            weight_taps[index, line] = tap
        kept = [tap for tap in significance or () if tap in part][: WIDE_KEY_BITS if wide else KEY_BITS]
        for place, tap in enumerate(kept):
            bits[index, window.column_of[tap]] = len(kept) - 1 - place
    device = window.data.device
    return _Parts(bits.to(device), lines.to(device), weight_taps.to(device))


def _even(size: int) -> int:
    """The size, rounded up so that what follows it is aligned to 128 bytes."""
    return (size + 31) & -32


# ---- kernels


@triton.jit
def keys_kernel(
    rows_ptr, bits_ptr, keys_ptr, n, width, chunk, room, lost,
    WIDE: tl.constexpr, CHUNKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gray ranks of the masks of BLOCK rows in one group of taps, under the number of their chunk of rows."""
    LAST_KEY: tl.constexpr = 0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    mask = tl.zeros((BLOCK,), keys_ptr.dtype.element_ty)
    one = tl.full((BLOCK,), 1, keys_ptr.dtype.element_ty)
    line_ptr = rows_ptr + row.to(tl.int64) * width
    for column in range(0, width):
        bit = tl.load(bits_ptr + group * width + column)
        found = tl.load(line_ptr + column, mask=row < tl.where(bit >= 0, n, 0), other=-1)
        mask |= tl.where(found >= 0, one << tl.maximum(bit, 0), 0)
    key = mask ^ (mask >> 1)  # Gray code to its rank: the parity of the bits above
    key ^= key >> 2
    key ^= key >> 4
    key ^= key >> 8
    key ^= key >> 16
    if WIDE:
        key ^= key >> 32
    if CHUNKED:
        last = (one << room) - 1
        key = tl.where(mask == 0, last, key >> lost) | ((row // chunk).to(keys_ptr.dtype.element_ty) << room)
    else:
        key = tl.where(mask == 0, LAST_KEY, key)
    tl.store(keys_ptr + group.to(tl.int64) * n + row, key, mask=row < n)


@triton.jit
def tiles_kernel(
    rows_ptr, order_ptr, lines_ptr, taps_ptr, table_ptr, out_rows_ptr, slots_ptr, counts_ptr, tile_rows_ptr,
    tile_taps_ptr, n, num_slots, tiles_per_group, num_lines, room,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, LANES: tl.constexpr, ROOM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program makes one tile: its columns of the permuted table, its output rows and its list of live taps."""
    tile = tl.program_id(0)
    group = tile // tiles_per_group
    place = (tile % tiles_per_group) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = place < n
    row = tl.load(order_ptr + group.to(tl.int64) * n + place, mask=real, other=0)
    alive = tl.zeros((BLOCK_M,), tl.int32)
    count = tl.zeros((), tl.int32)
    lists = tile.to(tl.int64) * room
    for start in range(0, WIDTH, LANES):
        column = start + tl.arange(0, LANES)
        line = tl.load(lines_ptr + group * WIDTH + column, mask=column < WIDTH, other=-1)
        wanted = real[:, None] & (line >= 0)[None, :]
        found = tl.load(rows_ptr + row[:, None] * WIDTH + column[None, :], mask=wanted, other=-1)
        live = tl.max((found >= 0).to(tl.int32), 0)
        alive = tl.maximum(alive, tl.max((found >= 0).to(tl.int32), 1))
        target = table_ptr + line.to(tl.int64)[:, None] * num_slots + slot[None, :]
        tl.store(target, tl.trans(found), mask=(line >= 0)[:, None] & (slot >= 0)[None, :])
        at = count + tl.cumsum(live, 0) - live
        tl.store(tile_rows_ptr + lists + at, line, mask=live > 0)
        tap = tl.load(taps_ptr + group * num_lines + line, mask=live > 0, other=0)
        tl.store(tile_taps_ptr + lists + at, tap, mask=live > 0)
        count += tl.sum(live, 0)
    rest = tl.arange(0, ROOM)
    tl.store(tile_rows_ptr + lists + rest, num_lines, mask=(rest >= count) & (rest < room))
    tl.store(tile_taps_ptr + lists + rest, 0, mask=(rest >= count) & (rest < room))
    tl.store(table_ptr + num_lines.to(tl.int64) * num_slots + slot, -1)
    tl.store(counts_ptr + tile, count)
    if SPLIT:
        for line in range(0, num_lines):  # a shorter group leaves rows of the table to nobody else
            tap = tl.load(taps_ptr + group * num_lines + line)
            tl.store(table_ptr + slot, -1, mask=slot < tl.where(tap < 0, num_slots, 0))
            table_ptr += num_slots
        tl.store(out_rows_ptr + slot, tl.where(real & (alive > 0), row.to(tl.int32), -1))
        tl.store(slots_ptr + group.to(tl.int64) * n + row, tl.where(alive > 0, slot, -1), mask=real)
    else:
        tl.store(out_rows_ptr + slot, tl.where(real, row.to(tl.int32), -1))


@triton.jit
def rank_kernel(counts_ptr, order_ptr, num_tiles, BINS: tl.constexpr, MINE: tl.constexpr, BLOCK: tl.constexpr):
    """order[number of tiles that go before a tile] = tile: more taps first, then the lower number."""
    first = tl.program_id(0) * MINE
    tile = first + tl.arange(0, MINE)
    bin_of = tl.arange(0, BINS)
    mine = BINS - 1 - tl.load(counts_ptr + tile, mask=tile < num_tiles, other=0)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_tiles, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = BINS - 1 - tl.load(counts_ptr + other, mask=other < num_tiles, other=BINS - 1)
        total += tl.histogram(theirs, BINS)  # what lies beyond the last tile goes to bin 0, where no tile is
        before += tl.histogram(tl.where(other < first, theirs, 0), BINS)
    total = tl.where(bin_of == 0, 0, total)
    base = tl.cumsum(total, 0) - total + tl.where(bin_of == 0, 0, before)
    rank = tl.sum(tl.where(bin_of[None, :] == mine[:, None], base[None, :], 0), 1)
    same = (mine[None, :] == mine[:, None]) & (tile[None, :] < tile[:, None])
    tl.store(order_ptr + rank + tl.sum(same.to(tl.int32), 1), tile, mask=tile < num_tiles)


_I32, _I64 = torch.int32, torch.int64
_TILES = Launcher(tiles_kernel, (_I32, _I64, *(_I32,) * 8, int, int, int, int, int))
_RANK = Launcher(rank_kernel, (_I32, _I32, int))


@lru_cache(maxsize=None)
def _keys_launcher(wide: bool) -> Launcher:
    return Launcher(keys_kernel, (_I32, _I32, _I64 if wide else _I32, int, int, int, int, int))
