"""Schedules on the GPU in four steps: sort the keys of the rows, permute the table, list live taps, rank the tiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from sparseconv.backends.triton_implicit_gemm.schedule import LOOKAHEAD, SLOT_ALIGNMENT, Schedule, tap_significance
from sparseconv.geometry.aside import building, current
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.geometry.triton_cube import corners, look_at_plane
from sparseconv.geometry.triton_launch import Arena, Launcher, Pointer, ceil_div, on_device, pointer, power_of_2
from sparseconv.geometry.triton_neighbors import WindowSearch, row_keys, search_table
from sparseconv.geometry.triton_order import SORTED_ROWS, sort_rows
from sparseconv.geometry.triton_pairs import FoundEdges, ReversedEdges
from sparseconv.geometry.triton_search import SEARCH_TYPES
from sparseconv.geometry.triton_window import KEY_BITS, entry_of, look, take

#: rows up to which a search keeps its scratch memory, some 50 bytes a row: small maps are wanted in two orders of rows
#: (taps split in groups or not), and to search again costs the host more than to build a schedule
KEPT_ROWS = 65_536


def schedule_on_gpu(
    kernel_map: KernelMap,
    block_m: int,
    groups: Sequence[Sequence[int]] | None = None,
    chunk_rows: int | None = None,
) -> Schedule:
    """The schedule of a kernel map on a GPU: from the search that found its edges, else from its table."""
    if isinstance(kernel_map.source, FoundEdges):
        schedule = build_schedule(kernel_map.source.search, block_m, groups=groups, chunk_rows=chunk_rows)
        if kernel_map.num_out > KEPT_ROWS:
            kernel_map.source.wrote("schedule")
        return schedule
    significance = tap_significance(kernel_map.num_taps)
    turned = kernel_map.source.found.search if isinstance(kernel_map.source, ReversedEdges) else None
    search = search_table(kernel_map.neighbors, None if turned is None else turned.unseen)
    if turned is not None:
        turned.kept.append(search.window.data)
        search.kept = turned.kept
    return build_schedule(search, block_m, significance=significance, groups=groups, chunk_rows=chunk_rows)


def schedule_ahead(kernel_map: KernelMap, block_m: int) -> None:
    """Start to compile what the schedule of a 3 x 3 x 3 map takes."""
    source = kernel_map.source
    if not isinstance(source, FoundEdges) or not source.search.is_cube:
        return
    n, lines = kernel_map.num_out, kernel_map.num_taps
    tiles = _CUBE_TILES if n <= SORTED_ROWS else _CUBE_TILES_64
    tiles.ahead(source.device, (block_m, power_of_2(lines + LOOKAHEAD)))
    _RANK.ahead(source.device, _rank_constants(lines, ceil_div(n, block_m)))


def build_schedule(
    search: WindowSearch,
    block_m: int,
    *,
    significance: Sequence[int] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    chunk_rows: int | None = None,
) -> Schedule:
    """The schedule of what a window sees, without waiting for the device.

    Args:
        search: the window's search.
        block_m: rows of a tile; a power of two that divides 256.
        significance: taps from the most to the least significant bit of a row's mask; default: `tap_order`.
        groups: taps cut into groups with a row order of their own each; default: all in one.
        chunk_rows: sort only inside runs of about this many neighbouring rows, for locality; keys then lose their last
            bits, and the launch order is the order of the tiles.

    Returns:
        A `Schedule` whose slots are padded to a multiple of 256 in each group.
    """
    if block_m < 1 or SLOT_ALIGNMENT % block_m:
        raise ValueError(f"block_m must divide {SLOT_ALIGNMENT}; got {block_m}")
    taps = search.window.num_taps
    parts = search.window.all_taps if groups is None else tuple(tuple(group) for group in groups)
    if groups is not None and sorted(tap for part in parts for tap in part) != list(range(taps)):
        raise ValueError(f"groups must hold each of the {taps} taps exactly once; got {parts}")
    plain = significance is None and groups is None and chunk_rows is None
    if plain and search.table is not None and taps <= KEY_BITS:
        order = search.order
    else:
        with building():
            order = sort_rows(row_keys(search, parts, significance, chunk_rows), search.unseen)
    schedule = make_tiles(search, order, parts, block_m, chunk_rows is not None)
    aside = current()
    if aside is not None and isinstance(order, torch.Tensor):
        aside.retire(order)
    return schedule


def make_tiles(
    search: WindowSearch,
    order: torch.Tensor | Pointer,
    parts: tuple[tuple[int, ...], ...],
    block_m: int,
    in_order: bool = False,
) -> Schedule:
    """The schedule of rows in the ``order`` of each group: (G, N_out) integers, or the place of (N_out,) int32."""
    n, device, taps = search.coords.shape[0], search.coords.device, search.window.num_taps
    lines = max(map(len, parts), default=0)
    padded = -(-n // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    slots, room = len(parts) * padded, lines + LOOKAHEAD
    tiles = slots // block_m
    split, plain = len(parts) > 1, parts == search.window.all_taps
    cube = search.is_cube and plain
    sizes = (lines + 1) * slots, slots, tiles, tiles * room, (1 + cube) * tiles * room, tiles, split * len(parts) * n
    arena = Arena(device, [(torch.int32, size) for size in sizes])
    schedule = PackedSchedule(block_m, arena, (lines + 1, tiles, room), len(parts) if split else 0)
    if tiles:
        line_of, weight_taps = _encode_parts(parts, device)
        search.kept += (line_of, weight_taps)
        wide = isinstance(order, torch.Tensor) and order.dtype == torch.int64
        table, out_rows, counts, tile_rows, tile_taps, launch_order, slots_of = map(arena.__getitem__, range(7))
        args = (
            *search.pointers, pointer(order) if isinstance(order, torch.Tensor) else order, pointer(line_of),
            pointer(weight_taps), table, out_rows, slots_of if split else out_rows, counts, tile_rows, tile_taps,
            n, search.window.num_runs, taps, search.capacity, slots, padded // block_m, lines, room,
        )  # fmt: skip
        with on_device(device):
            if cube:
                (_CUBE_TILES_64 if wide else _CUBE_TILES)(device, (tiles,), args, (block_m, power_of_2(room)))
            else:
                constants = (*search.constants, block_m, power_of_2(room), split, taps <= 32, plain)
                (_TILES_64 if wide else _TILES)(device, (tiles,), args, constants)
            if in_order:
                torch.arange(tiles, dtype=torch.int32, device=device, out=schedule.tile_order)
            else:
                _rank(counts, launch_order, tiles, lines, device)
    return schedule


class PackedSchedule(Schedule):
    """A schedule in one allocation, whose arrays become tensors when they are asked for: each costs the host its time.

    Args:
        block_m: rows of a tile.
        arena: its arrays in the order of `ARRAYS`; of ``tile_taps``, those of the reversed edges behind the others,
            where they were written.
        shape: rows of the table, tiles, and the length of a tile's lists.
        groups: of taps, where there are several.
        turned: of the reversed edges.
    """

    _arena: Arena
    _shape: tuple[int, int, int]
    _groups: int
    _turned: bool
    ARRAYS = ("neighbors", "out_rows", "tile_counts", "tile_rows", "tile_taps", "tile_order", "slots")

    def __init__(
        self, block_m: int, arena: Arena, shape: tuple[int, int, int], groups: int = 0, turned: bool = False
    ) -> None:
        self.__dict__.update(block_m=block_m, _arena=arena, _shape=shape, _groups=groups, _turned=turned)

    def reversed(self) -> PackedSchedule | None:
        """That of the reversed edges; None where their taps were not written."""
        _, tiles, room = self._shape
        if self._arena.length_of(4) == tiles * room:
            return None
        return PackedSchedule(self.block_m, self._arena, self._shape, self._groups, not self._turned)

    @property
    def num_tiles(self) -> int:
        return self._shape[1]

    @property
    def slots(self) -> torch.Tensor | None:  # type: ignore[override]
        return self._arena.tensor(6).view(self._groups, -1) if self._groups else None

    @property
    def turned_taps(self) -> torch.Tensor | None:  # type: ignore[override]
        return None if (turned := self.reversed()) is None else turned.tile_taps

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in self.ARRAYS:
            raise AttributeError(name)
        array = self._arena.tensor(self.ARRAYS.index(name))
        height, tiles, room = self._shape
        if name == "neighbors":
            array = array.view(height, -1)
        elif name == "tile_taps":
            array = array.narrow(0, tiles * room * self._turned, tiles * room).view(tiles, room)
        elif name == "tile_rows":
            array = array.view(tiles, room)
        self.__dict__[name] = array
        return array


def rank_tiles(counts: torch.Tensor, order: torch.Tensor, lines: int) -> None:
    """Write the order of launch (T,) int32 of tiles with ``counts`` (T,) int32 live taps each, ``lines`` at most."""
    _rank(pointer(counts), pointer(order), counts.shape[0], lines, counts.device)


def _rank(counts: Pointer, order: Pointer, tiles: int, lines: int, device: torch.device) -> None:
    constants = _rank_constants(lines, tiles)
    _RANK(device, (ceil_div(tiles, constants[1]),), (counts, order, tiles), constants)


def _rank_constants(lines: int, tiles: int) -> tuple[int, int, int]:
    return power_of_2(lines + 2), 64 if tiles <= 4096 else 256, 1024  # many tiles are read by fewer programs


@lru_cache(maxsize=512)
def _encode_parts(parts: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(G, K) int32 table row of each tap in each group and (G, R) int32 tap of each table row; -1 for none."""
    line_of = torch.full((len(parts), sum(map(len, parts))), -1, dtype=torch.int32)
    weight_taps = torch.full((len(parts), max(map(len, parts), default=0)), -1, dtype=torch.int32)
    for index, part in enumerate(parts):
        for line, tap in enumerate(part):
            line_of[index, tap] = line
            weight_taps[index, line] = tap
    return line_of.to(device), weight_taps.to(device)


# ---- kernels


@triton.jit
def tiles_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    order_ptr, line_of_ptr, weight_taps_ptr, out_ptr, out_rows_ptr, slots_ptr, counts_ptr, tile_rows_ptr, tile_taps_ptr,
    n, num_runs, num_taps, capacity, num_slots, tiles_per_group, num_lines, room,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, BLOCKED: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, LENGTH: tl.constexpr, BLOCK_M: tl.constexpr, ROOM: tl.constexpr, SPLIT: tl.constexpr,
    MASKED: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """One program makes one tile: its columns of the permuted table, its output rows and its list of live taps.

    Rows are looked up anew in their new order: cheaper than to gather single words of a table in the old one.
    """
    tile = tl.program_id(0)
    group = tile // tiles_per_group
    place = (tile % tiles_per_group) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = place < n
    row = tl.load(order_ptr + group.to(tl.int64) * n + place, mask=real, other=0).to(tl.int32)
    entry = entry_of(row, real, entries_ptr, SIDES)
    alive = tl.zeros((BLOCK_M,), tl.int32)
    count = tl.zeros((), tl.int32)
    lists = tile.to(tl.int64) * room
    line_of_ptr += group * num_taps
    runs_ptr = window_ptr + 3 * RANK
    for run in range(0, num_runs, 3):  # all loads of three runs before any store: they are on their way together
        tap_a, length_a, a0, a1, a2, a3 = look_and_take(
            runs_ptr, run, num_runs, row, entry, real, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr,
            rows_ptr, around_ptr, window_ptr, capacity, RANK, SHIFTS, PLACES, BLOCKED, PERIODIC, SIDES, LENGTH,
        )  # fmt: skip
        tap_b, length_b, b0, b1, b2, b3 = look_and_take(
            runs_ptr, run + 1, num_runs, row, entry, real, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr,
            rows_ptr, around_ptr, window_ptr, capacity, RANK, SHIFTS, PLACES, BLOCKED, PERIODIC, SIDES, LENGTH,
        )  # fmt: skip
        tap_c, length_c, c0, c1, c2, c3 = look_and_take(
            runs_ptr, run + 2, num_runs, row, entry, real, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr,
            rows_ptr, around_ptr, window_ptr, capacity, RANK, SHIFTS, PLACES, BLOCKED, PERIODIC, SIDES, LENGTH,
        )  # fmt: skip
        for part in tl.static_range(3):
            tap = tap_a if part == 0 else tap_b if part == 1 else tap_c
            length = length_a if part == 0 else length_b if part == 1 else length_c
            for step in tl.static_range(LENGTH):
                if part == 0:
                    found = a0 if step == 0 else a1 if step == 1 else a2 if step == 2 else a3
                elif part == 1:
                    found = b0 if step == 0 else b1 if step == 1 else b2 if step == 2 else b3
                else:
                    found = c0 if step == 0 else c1 if step == 1 else c2 if step == 2 else c3
                if PLAIN:
                    line = tl.where(length > step, tap + step, -1)
                else:
                    line = tl.load(line_of_ptr + tap + step, mask=length > step, other=-1)
                target = out_ptr + line.to(tl.int64) * num_slots + slot
                tl.store(target, found, mask=slot < tl.where(line >= 0, num_slots, 0))
                if PLAIN and MASKED:
                    alive |= (found >= 0).to(tl.int32) << (tap + step)
                elif MASKED:
                    alive |= tl.where(line >= 0, (found >= 0).to(tl.int32) << (tap + step), 0)
                else:
                    live = tl.where(line >= 0, tl.max((found >= 0).to(tl.int32), 0), 0)
                    alive |= tl.where(line >= 0, (found >= 0).to(tl.int32), 0)
                    tl.store(tile_rows_ptr + lists + count, line, mask=live > 0)
                    tl.store(tile_taps_ptr + lists + count, tap + step, mask=live > 0)
                    count += live
    if MASKED:
        count = list_live(alive, line_of_ptr, tile_rows_ptr + lists, tile_taps_ptr + lists)
    end_lists(count, tile_rows_ptr + lists, tile_taps_ptr + lists, num_lines, room, ROOM)
    tl.store(out_ptr + num_lines.to(tl.int64) * num_slots + slot, -1)
    tl.store(counts_ptr + tile, count)
    if SPLIT:
        for line in range(num_lines):  # a shorter group leaves rows of the table to nobody else
            tap = tl.load(weight_taps_ptr + group * num_lines + line)
            tl.store(out_ptr + slot, -1, mask=slot < tl.where(tap < 0, num_slots, 0))
            out_ptr += num_slots
        tl.store(out_rows_ptr + slot, tl.where(real & (alive != 0), row, -1))
        tl.store(slots_ptr + group.to(tl.int64) * n + row, tl.where(alive != 0, slot, -1), mask=real)
    else:
        tl.store(out_rows_ptr + slot, tl.where(real, row, -1))


@triton.jit
def look_and_take(
    runs_ptr, run, num_runs, row, entry, live, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr,
    around_ptr, window_ptr, capacity,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, BLOCKED: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """First tap, length and up to four found rows of a run; beyond the last run the length is 0."""
    EDGE: tl.constexpr = 1 << ((SHIFTS >> (4 * RANK)) & 15)
    run_ptr = runs_ptr + tl.minimum(run, num_runs - 1) * (2 + RANK)
    tap = tl.load(run_ptr)
    length = tl.where(run < num_runs, tl.load(run_ptr + 1), 0)
    seen, near, far, cell = look(
        row, entry, live, run_ptr, length, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, around_ptr,
        window_ptr, capacity, RANK, SHIFTS, PLACES, BLOCKED, PERIODIC, SIDES,
    )  # fmt: skip
    found0, near, far = take(rows_ptr, seen, near, far, cell, 0, EDGE, BLOCKED)
    found1 = found0
    found2 = found0
    found3 = found0
    if LENGTH > 1:
        found1, near, far = take(rows_ptr, seen, near, far, cell, 1, EDGE, BLOCKED)
    if LENGTH > 2:
        found2, near, far = take(rows_ptr, seen, near, far, cell, 2, EDGE, BLOCKED)
    if LENGTH > 3:
        found3, near, far = take(rows_ptr, seen, near, far, cell, 3, EDGE, BLOCKED)
    return tap, length, found0, found1, found2, found3


@triton.jit
def list_live(alive, line_of_ptr, rows_ptr, taps_ptr):
    """Write the live taps of a tile and their table rows, from the masks of its rows; returns their number."""
    taps = tl.arange(0, 32)
    here = (tl.reduce(alive, 0, either) >> taps) & 1
    line = tl.load(line_of_ptr + taps, mask=here > 0, other=-1)
    at = tl.cumsum(here, 0) - here
    tl.store(rows_ptr + at, line, mask=here > 0)
    tl.store(taps_ptr + at, taps, mask=here > 0)
    return tl.sum(here, 0)


@triton.jit
def end_lists(count, rows_ptr, taps_ptr, num_lines, room, ROOM: tl.constexpr):
    """Fill what lies behind a tile's live taps: the table's empty row, and tap 0."""
    rest = tl.arange(0, ROOM)
    tl.store(rows_ptr + rest, num_lines, mask=(rest >= count) & (rest < room))
    tl.store(taps_ptr + rest, 0, mask=(rest >= count) & (rest < room))


@triton.jit
def cube_tiles_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    order_ptr, line_of_ptr, weight_taps_ptr, out_ptr, out_rows_ptr, slots_ptr, counts_ptr, tile_rows_ptr, tile_taps_ptr,
    n, num_runs, num_taps, capacity, num_slots, tiles_per_group, num_lines, room,
    BLOCK_M: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """`tiles_kernel` for the 27 cells around rows, in one group of taps."""
    tile = tl.program_id(0)
    slot = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = slot < n
    row = tl.load(order_ptr + slot, mask=real, other=0).to(tl.int32)
    entry = tl.load(entries_ptr + row, mask=real, other=-1)
    bit, a, b, c, d, e, f, g, h = corners(entry, real, info_ptr, around_ptr)
    # all rows are read before any is stored: they are on their way together
    found0, found1, found2, found3, found4, found5, found6, found7, found8 = look_at_plane(
        bit, a, b, c, d, e, f, g, h, rows_ptr, 0
    )  # fmt: skip
    found9, found10, found11, found12, found13, found14, found15, found16, found17 = look_at_plane(
        bit, a, b, c, d, e, f, g, h, rows_ptr, 1
    )  # fmt: skip
    found18, found19, found20, found21, found22, found23, found24, found25, found26 = look_at_plane(
        bit, a, b, c, d, e, f, g, h, rows_ptr, 2
    )  # fmt: skip
    alive = store_plane(
        out_ptr, slot, num_slots, found0, found1, found2, found3, found4, found5, found6, found7, found8, 0
    )  # fmt: skip
    alive |= store_plane(
        out_ptr, slot, num_slots, found9, found10, found11, found12, found13, found14, found15, found16, found17, 9
    )  # fmt: skip
    alive |= store_plane(
        out_ptr, slot, num_slots, found18, found19, found20, found21, found22, found23, found24, found25, found26, 18
    )  # fmt: skip
    lists = tile.to(tl.int64) * room
    count = list_live(alive, line_of_ptr, tile_rows_ptr + lists, tile_taps_ptr + lists)
    end_lists(count, tile_rows_ptr + lists, tile_taps_ptr + lists, num_lines, room, ROOM)
    turned_ptr = tile_taps_ptr + tl.num_programs(0).to(tl.int64) * room + lists
    taps = tl.arange(0, 32)
    here = (tl.reduce(alive, 0, either) >> taps) & 1
    tl.store(turned_ptr + (tl.cumsum(here, 0) - here), 26 - taps, mask=here > 0)
    rest = tl.arange(0, ROOM)
    tl.store(turned_ptr + rest, 26, mask=(rest >= count) & (rest < room))
    tl.store(out_ptr + num_lines.to(tl.int64) * num_slots + slot, -1)
    tl.store(counts_ptr + tile, count)
    tl.store(out_rows_ptr + slot, tl.where(real, row, -1))


@triton.jit
def store_plane(
    out_ptr, slot, num_slots, found0, found1, found2, found3, found4, found5, found6, found7, found8,
    TAP: tl.constexpr,
):  # fmt: skip
    """Write nine rows of the table from TAP on; returns a bit for each of them that is not -1."""
    out_ptr += TAP * num_slots.to(tl.int64)
    alive = tl.zeros(slot.shape, tl.int32)
    for tap in tl.static_range(9):
        if tap < 3:
            found = found0 if tap == 0 else found1 if tap == 1 else found2
        elif tap < 6:
            found = found3 if tap == 3 else found4 if tap == 4 else found5
        else:
            found = found6 if tap == 6 else found7 if tap == 7 else found8
        tl.store(out_ptr + slot, found)
        out_ptr += num_slots
        alive |= (found >= 0).to(tl.int32) << (TAP + tap)
    return alive


@triton.jit
def either(a, b):
    """Bitwise or."""
    return a | b


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
_TILES = Launcher(tiles_kernel, (*SEARCH_TYPES, *(_I32,) * 9, *(int,) * 8))
_TILES_64 = Launcher(tiles_kernel, (*SEARCH_TYPES, _I64, *(_I32,) * 8, *(int,) * 8))
_CUBE_TILES = Launcher(cube_tiles_kernel, (*SEARCH_TYPES, *(_I32,) * 9, *(int,) * 8))
_CUBE_TILES_64 = Launcher(cube_tiles_kernel, (*SEARCH_TYPES, _I64, *(_I32,) * 8, *(int,) * 8))
_RANK = Launcher(rank_kernel, (_I32, _I32, int))
