"""Schedules on the GPU in four steps: sort the keys of the rows, permute the table, list live taps, rank the tiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from sparseconv.backends.triton_implicit_gemm.schedule import Schedule
from sparseconv.geometry.triton_launch import Arena, Launcher, on_device, pointer
from sparseconv.geometry.triton_neighbors import KEY_BITS, WIDE_KEY_BITS

#: slots are padded to a multiple of this, so that schedules of every block size share one table
SLOT_ALIGNMENT = 256
#: list columns beyond the last live tap that a kernel may read ahead
LOOKAHEAD = 4
#: up to this many tiles are ranked by comparing each with each, in one launch
RANKED_TILES = 8192


def build_schedule(
    neighbors: torch.Tensor,
    block_m: int,
    significance: Sequence[int],
    *,
    keys: torch.Tensor | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    chunk_rows: int | None = None,
) -> Schedule:
    """The schedule of a neighbour table, without waiting for the device.

    Args:
        neighbors: (K, N_out) int32, contiguous, on a GPU.
        block_m: rows of a tile; a power of two that divides 256.
        significance: taps from the most to the least significant bit of a row's mask.
        keys: the sort keys that `find_neighbors` made with the same significance, to save a pass; one group only.
        groups: taps cut into groups with a row order of their own each; default: all in one.
        chunk_rows: sort only inside runs of this many rows, for locality; keys then lose their last bits.

    Returns:
        A `Schedule` whose slots are padded to a multiple of 256 in each group.
    """
    taps, n = neighbors.shape
    device = neighbors.device
    if block_m < 1 or SLOT_ALIGNMENT % block_m:
        raise ValueError(f"block_m must divide {SLOT_ALIGNMENT}; got {block_m}")
    parts = (tuple(range(taps)),) if groups is None else tuple(tuple(group) for group in groups)
    if sorted(tap for part in parts for tap in part) != list(range(taps)):
        raise ValueError(f"groups must hold each of the {taps} taps exactly once; got {parts}")
    if keys is None or groups is not None or chunk_rows is not None:
        keys = row_keys(neighbors, significance, parts, chunk_rows)
    order = torch.sort(keys, dim=-1, stable=True).indices
    return tile_rows(neighbors, order, parts, block_m)


def row_keys(
    neighbors: torch.Tensor, significance: Sequence[int], parts: tuple[tuple[int, ...], ...], chunk_rows: int | None
) -> torch.Tensor:
    """(G, N_out) sort keys: the Gray rank of each row's mask of the taps of a group; rows without a tap come last."""
    taps, n = neighbors.shape
    width = max(map(len, parts), default=0)
    wide = width > KEY_BITS
    keys = torch.empty(len(parts), n, dtype=torch.int64 if wide else torch.int32, device=neighbors.device)
    chunk_bits, chunk = 0, max(n, 1)
    if chunk_rows is not None and n > chunk_rows:
        chunk, chunk_bits = chunk_rows, (-(-n // chunk_rows) - 1).bit_length()
    if n and taps:
        held = _encode_parts(parts, tuple(significance), neighbors.device)[0]
        bits = min(width, WIDE_KEY_BITS if wide else KEY_BITS)
        place = (WIDE_KEY_BITS if wide else KEY_BITS) - chunk_bits
        lost = max(0, bits - place)
        with on_device(neighbors.device):
            args = (pointer(neighbors), pointer(held), pointer(keys), n, taps, chunk, place, lost)
            _keys_launcher(wide)(neighbors.device, (triton.cdiv(n, 128), len(parts)), args, (wide, chunk_bits > 0, 128))
    return keys


def tile_rows(
    neighbors: torch.Tensor, order: torch.Tensor, parts: tuple[tuple[int, ...], ...], block_m: int
) -> Schedule:
    """The schedule of a table whose rows go in ``order`` (G, N_out) or (N_out,) int64 in each group of taps."""
    taps, n = neighbors.shape
    device = neighbors.device
    rows = max(map(len, parts), default=0)
    padded = -(-n // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    slots, width = len(parts) * padded, rows + LOOKAHEAD
    tiles = slots // block_m
    i32 = torch.int32
    arena = Arena(
        device, [(i32, slots), (i32, tiles), (i32, tiles * width), (i32, tiles * width), (i32, tiles), (i32, len(parts) * n)]
    )  # fmt: skip
    table = torch.empty(rows + 1, slots, dtype=i32, device=device)
    split = len(parts) > 1
    if tiles:
        with on_device(device):
            weight_taps = _encode_parts(parts, None, device)[1]
            args = (
                pointer(neighbors), pointer(order), pointer(weight_taps), pointer(table), arena[0], arena[5],
                arena[1], arena[2], arena[3], n, slots, padded // block_m, rows, width,
            )  # fmt: skip
            lanes = min(32, triton.next_power_of_2(max(rows, 1)))
            _TILES(device, (tiles,), args, (block_m, lanes, triton.next_power_of_2(width), split))
            if tiles <= RANKED_TILES:
                _RANK(device, (triton.cdiv(tiles, 32),), (arena[1], arena[4], tiles), (32, 256))
    counts = arena.tensor(1)
    launch_order = arena.tensor(4)
    if tiles > RANKED_TILES:
        launch_order = torch.sort(counts, descending=True, stable=True).indices.int()
    more: dict[str, Any] = {"slots": arena.tensor(5).view(len(parts), n)} if split else {}
    return Schedule(
        block_m,
        table,
        arena.tensor(0),
        counts,
        arena.tensor(2).view(tiles, width),
        arena.tensor(3).view(tiles, width),
        launch_order,
        **more,
    )


@lru_cache(maxsize=256)
def _encode_parts(
    parts: tuple[tuple[int, ...], ...], significance: tuple[int, ...] | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(G, K) int32 key bit of each tap in each group, -1 for none; (G, R) int32 weight tap of each table row."""
    taps, rows = sum(map(len, parts)), max(map(len, parts), default=0)
    bits = torch.full((len(parts), taps), -1, dtype=torch.int32)
    weight_taps = torch.full((len(parts), rows), -1, dtype=torch.int32)
    for index, part in enumerate(parts):
        weight_taps[index, : len(part)] = torch.tensor(part, dtype=torch.int32)
        ranked = [tap for tap in significance or () if tap in part]
        kept = ranked[: KEY_BITS if rows <= KEY_BITS else WIDE_KEY_BITS]
        for place, tap in enumerate(kept):
            bits[index, tap] = len(kept) - 1 - place
    return bits.to(device), weight_taps.to(device)


# ---- kernels


@triton.jit
def keys_kernel(
    neighbors_ptr, bits_ptr, keys_ptr, n, num_taps, chunk, place, lost,
    WIDE: tl.constexpr, CHUNKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gray ranks of the masks of BLOCK rows in one group of taps, under the number of their chunk of rows."""
    LAST_KEY: tl.constexpr = 0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    mask = tl.zeros((BLOCK,), keys_ptr.dtype.element_ty)
    one = tl.full((BLOCK,), 1, keys_ptr.dtype.element_ty)
    for tap in range(0, num_taps):
        bit = tl.load(bits_ptr + group * num_taps + tap)
        found = tl.load(neighbors_ptr + row, mask=row < tl.where(bit >= 0, n, 0), other=-1)
        mask |= tl.where(found >= 0, one << tl.maximum(bit, 0), 0)
        neighbors_ptr += n
    key = mask ^ (mask >> 1)
    key ^= key >> 2
    key ^= key >> 4
    key ^= key >> 8
    key ^= key >> 16
    if WIDE:
        key ^= key >> 32
    if CHUNKED:
        last = (one << place) - 1
        key = tl.where(mask == 0, last, key >> lost) | ((row // chunk).to(keys_ptr.dtype.element_ty) << place)
    else:
        key = tl.where(mask == 0, LAST_KEY, key)
    tl.store(keys_ptr + group.to(tl.int64) * n + row, key, mask=row < n)


@triton.jit
def tiles_kernel(
    neighbors_ptr, order_ptr, taps_ptr, table_ptr, out_rows_ptr, slots_ptr, counts_ptr, tile_rows_ptr, tile_taps_ptr,
    n, num_slots, tiles_per_group, num_rows, width,
    BLOCK_M: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
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
    lists = tile.to(tl.int64) * width
    for start in range(0, num_rows, TAPS):
        line = start + tl.arange(0, TAPS)
        tap = tl.load(taps_ptr + group * num_rows + line, mask=line < num_rows, other=-1)
        source = neighbors_ptr + tap.to(tl.int64)[:, None] * n + row[None, :]
        found = tl.load(source, mask=(tap >= 0)[:, None] & real[None, :], other=-1)
        target = table_ptr + line.to(tl.int64)[:, None] * num_slots + slot[None, :]
        tl.store(target, found, mask=(line < num_rows)[:, None] & (slot >= 0)[None, :])
        live = tl.max((found >= 0).to(tl.int32), 1)
        alive = tl.maximum(alive, tl.max((found >= 0).to(tl.int32), 0))
        at = count + tl.cumsum(live, 0) - live
        tl.store(tile_rows_ptr + lists + at, line, mask=live > 0)
        tl.store(tile_taps_ptr + lists + at, tap, mask=live > 0)
        count += tl.sum(live, 0)
    rest = tl.arange(0, WIDTH)
    tl.store(tile_rows_ptr + lists + rest, num_rows, mask=(rest >= count) & (rest < width))
    tl.store(tile_taps_ptr + lists + rest, 0, mask=(rest >= count) & (rest < width))
    tl.store(table_ptr + num_rows.to(tl.int64) * num_slots + slot, -1)
    tl.store(counts_ptr + tile, count)
    if SPLIT:
        tl.store(out_rows_ptr + slot, tl.where(real & (alive > 0), row.to(tl.int32), -1))
        tl.store(slots_ptr + group.to(tl.int64) * n + row, tl.where(alive > 0, slot, -1), mask=real)
    else:
        tl.store(out_rows_ptr + slot, tl.where(real, row.to(tl.int32), -1))


@triton.jit
def rank_kernel(counts_ptr, order_ptr, num_tiles, MINE: tl.constexpr, BLOCK: tl.constexpr):
    """order[number of tiles that go before a tile] = tile: more taps first, then the lower number."""
    tile = tl.program_id(0) * MINE + tl.arange(0, MINE)
    mine = tl.load(counts_ptr + tile, mask=tile < num_tiles, other=0)
    rank = tl.zeros((MINE,), tl.int32)
    for start in range(0, num_tiles, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = tl.load(counts_ptr + other, mask=other < num_tiles, other=-1)
        tie = (theirs[None, :] == mine[:, None]) & (other[None, :] < tile[:, None])
        rank += tl.sum(((theirs[None, :] > mine[:, None]) | tie).to(tl.int32), 1)
    tl.store(order_ptr + rank, tile, mask=tile < num_tiles)


_I32, _I64 = torch.int32, torch.int64
_TILES = Launcher(tiles_kernel, (_I32, _I64, *(_I32,) * 7, int, int, int, int, int))
_RANK = Launcher(rank_kernel, (_I32, _I32, int))


@lru_cache(maxsize=None)
def _keys_launcher(wide: bool) -> Launcher:
    return Launcher(keys_kernel, (_I32, _I32, _I64 if wide else _I32, int, int, int, int, int))
