"""Schedules on the GPU in four steps: sort the keys of the rows, permute the table, list live taps, rank the tiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from sparseconv.backends.triton_implicit_gemm.build_kernels import CUBE_TILES, RANKS, TILES, TILES_64
from sparseconv.backends.triton_implicit_gemm.schedule import LOOKAHEAD, SLOT_ALIGNMENT, Schedule, tap_significance
from sparseconv.geometry.aside import building, current
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.geometry.triton_launch import Arena, Kinds, Pointer, ceil_div, pointer, power_of_2
from sparseconv.geometry.triton_neighbors import WindowSearch, row_keys, search_table
from sparseconv.geometry.triton_order import sort_rows
from sparseconv.geometry.triton_pairs import FoundEdges, ReversedEdges
from sparseconv.geometry.triton_window import KEY_BITS

#: rows up to which a search keeps its scratch memory, some 50 bytes a row: small maps are wanted in two orders of rows
#: (taps split in groups or not), and to search again costs the host more than to build a schedule
KEPT_ROWS = 65_536
#: tiles up to which the last of their programs ranks them alone: a launch less for the host
RANKED_AT_LAST = 1024
_KINDS = Kinds((torch.int32,) * 7)


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
    tiles = ceil_div(n, SLOT_ALIGNMENT) * (SLOT_ALIGNMENT // block_m)
    bins = _bins(lines) if tiles <= RANKED_AT_LAST else 0
    CUBE_TILES.ahead(source.device, (block_m, power_of_2(lines + LOOKAHEAD), bins))
    if not bins:
        RANKS.ahead(source.device, _rank_constants(lines, tiles))


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
            order = sort_rows(row_keys(search, parts, significance, chunk_rows))
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
    n, device, window = search.rows, search.coords.device, search.window
    taps, plain = window.num_taps, parts == window.all_taps
    lines = taps if plain else max(map(len, parts), default=0)
    padded = -(-n // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    slots, room = len(parts) * padded, lines + LOOKAHEAD
    tiles = slots // block_m
    split, cube = len(parts) > 1, plain and search.is_cube
    lists = tiles * room
    lengths = (lines + 1) * slots, slots, tiles, lists, (1 + cube) * lists, tiles
    arena = Arena(device, _KINDS, (*lengths, len(parts) * n) if split else lengths)
    schedule = PackedSchedule(block_m, arena, (lines + 1, tiles, room), len(parts) if split else 0)
    if tiles:
        line_of, weight_taps = _encode_parts(parts, device)
        search.kept += (line_of, weight_taps)
        wide = isinstance(order, torch.Tensor) and order.dtype == torch.int64
        table, out_rows, counts, tile_rows, tile_taps, launch_order, *slots_of = arena
        ticket = None if in_order or tiles > RANKED_AT_LAST else search.ticket
        bins = 0 if ticket is None else _bins(lines)
        args = (
            *search.pointers, pointer(order) if isinstance(order, torch.Tensor) else order, pointer(line_of),
            pointer(weight_taps), table, out_rows, *(slots_of or (out_rows,)), counts, tile_rows, tile_taps,
            launch_order, counts if ticket is None else ticket,
            n, window.num_runs, taps, search.capacity, slots, padded // block_m, lines, room,
        )  # fmt: skip
        if cube:
            CUBE_TILES(device, (tiles,), args, (block_m, power_of_2(room), bins))
        else:
            constants = (*search.constants, block_m, power_of_2(room), split, taps <= 32, plain, bins)
            (TILES_64 if wide else TILES)(device, (tiles,), args, constants)
        if in_order:
            torch.arange(tiles, dtype=torch.int32, device=device, out=schedule.tile_order)
        elif ticket is None:
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
    RANKS(device, (ceil_div(tiles, constants[1]),), (counts, order, tiles), constants)


def _bins(lines: int) -> int:
    """Numbers of live taps that a tile may have, and one for no tile."""
    return power_of_2(lines + 2)


def _rank_constants(lines: int, tiles: int) -> tuple[int, int, int]:
    return _bins(lines), 64 if tiles <= 4096 else 256, 1024  # many tiles are read by fewer programs


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
