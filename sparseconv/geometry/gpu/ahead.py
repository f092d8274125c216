"""Kernels of maps that are not made yet: compiled ahead, from sizes that are known about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sparseconv.geometry.gpu.hash_table.kernels import CLEAR, INFO, INSERT, PLACE, TABLE
from sparseconv.geometry.gpu.hash_table.table import (
    CELL_BITS,
    FUSED_ROWS,
    LEAST_SHIFT,
    NUMBERED,
    pack_shifts,
    rows_per_chunk,
    shifts_of,
    width_of,
)
from sparseconv.geometry.gpu.order.morton_runs import COUNT_CELLS, NUMBER_CELLS, RUN_KEYS
from sparseconv.geometry.gpu.pairs.pair_lists import PAIRS, REVERSE, REVERSED, SCATTER
from sparseconv.geometry.gpu.pairs.pair_lists_3x3x3 import CUBE_PAIRS
from sparseconv.geometry.gpu.reached.kernels import EMIT, MARK
from sparseconv.geometry.gpu.reached.output_coords import MOST_PROGRAMS, ROWS
from sparseconv.geometry.gpu.tiles.build import RANKED_AT_LAST, bins_of, rank_constants
from sparseconv.geometry.gpu.tiles.kernels import CUBE_TILES, RANKS, TILES, TILES_64
from sparseconv.geometry.gpu.tiles.schedule import LOOKAHEAD, SLOT_ALIGNMENT, plane_groups
from sparseconv.geometry.gpu.tiles.sortless import ONE_TAP
from sparseconv.geometry.gpu.window.counts import SCAN, SCAN_BLOCK
from sparseconv.geometry.gpu.window.neighbor_table import COUNT, PLANE_KEYS, PLANE_KEYS_WIDE, PLANES
from sparseconv.geometry.gpu.window.passes import (
    AROUND,
    CUBE_MASKS,
    MASKS,
    SEARCH,
    around_constants,
    search_constants,
    search_programs,
)
from sparseconv.geometry.gpu.window.search import looks_of
from sparseconv.geometry.gpu.window.taps import GIVEN, KEY_BITS, TapWindow, encode_window
from sparseconv.geometry.ranges import Ints
from sparseconv.gpu.cooperative import NUM_BARRIERS
from sparseconv.gpu.launcher import ceil_div, power_of_2
from sparseconv.gpu.radix_sort.sort import sort_ahead


@dataclass(frozen=True)
class ExpectedMap:
    """A kernel map before there is one: its window, and about how many rows and pairs it will have.

    ``same``: outputs are the input's voxels.
    """

    offsets: tuple[Ints, ...]
    stride: Ints
    same: bool
    num_in: int
    num_out: int
    num_pairs: int

    @property
    def num_taps(self) -> int:
        return len(self.offsets)

    @cached_property
    def is_halved(self) -> bool:
        return self._looks[1]

    @cached_property
    def meets_once(self) -> bool:
        """Whether the reversed map meets every output row once."""
        return not self.same and self._window.meets_once

    @cached_property
    def _window(self) -> TapWindow:
        return encode_window(self.offsets, self.stride, None, torch.device("cpu"))

    @cached_property
    def _looks(self) -> tuple[bool, bool, tuple]:
        return looks_of(self._window, shifts_of(len(self.stride) + 1), self.same)

    def ahead(self, device: torch.device) -> None:
        """Start to compile what finds the edges, and their lists."""
        n, taps, window = self.num_out, self.num_taps, self._window
        is_local, is_cube, looks = self._looks
        chunk_rows, narrow = rows_per_chunk(n), taps <= KEY_BITS
        if not self.same:
            rank = len(self.stride)
            MARK.ahead(device, (rank, True, ROWS, 512, MOST_PROGRAMS, NUM_BARRIERS))
            EMIT.ahead(device, (rank, 32))
        if narrow and n <= FUSED_ROWS:
            together = search_programs(device, taps, n, is_cube)[2]
            bits = window.key_bits if is_cube else 0
            SEARCH.ahead(device, search_constants(looks, taps, n, bits, together))
            if not together:
                sort_ahead(device, window.key_bits, counted=is_cube)
        else:  # a launch a pass
            if is_local:
                AROUND.ahead(device, around_constants(shifts_of(len(self.stride) + 1)))
            SCAN.ahead(device, (4 * SCAN_BLOCK,))
            if narrow:
                self._masks_ahead(device, 1, counted=True)
                sort_ahead(device, window.key_bits)
            else:
                PLANES.ahead(device, (*looks, 128))
                COUNT.ahead(device, (chunk_rows, 128))
                PLANE_KEYS_WIDE.ahead(device, (True, 128))
        if is_cube:
            CUBE_PAIRS.ahead(device, (chunk_rows, True))
        else:
            PAIRS.ahead(device, (*looks, is_local and window.is_symmetric, chunk_rows, 128))

    def tiles_ahead(self, device: torch.device, block_m: int, in_runs: bool = False) -> None:
        """Start to compile what makes the schedule of the forward, in one group of taps. ``in_runs``: of neighbouring
        rows, each sorted by itself."""
        lines, (_, is_cube, looks) = self.num_taps, self._looks
        tiles = ceil_div(self.num_out, SLOT_ALIGNMENT) * (SLOT_ALIGNMENT // block_m)
        room = power_of_2(lines + LOOKAHEAD)
        if in_runs and lines <= KEY_BITS:
            self._runs_ahead(device)
        sorted_with = is_cube and self.num_out <= FUSED_ROWS and search_programs(device, lines, self.num_out, True)[2]
        bins = -1 if in_runs else bins_of(lines) if sorted_with and tiles <= RANKED_AT_LAST else 0
        if is_cube:
            CUBE_TILES.ahead(device, (block_m, room, bins))
        else:
            launcher = TILES if lines <= KEY_BITS else TILES_64
            launcher.ahead(device, (*looks, block_m, room, False, lines <= 32, True, bins))
        if not bins:
            RANKS.ahead(device, rank_constants(lines, tiles))

    def _runs_ahead(self, device: torch.device) -> None:
        columns = len(self.stride) + 1
        if self._looks[0]:
            if self.num_out <= FUSED_ROWS:  # else the table counts its cells
                COUNT_CELLS.ahead(device, (columns, pack_shifts(shifts_of(columns)), CELL_BITS, LEAST_SHIFT, 256))
                NUMBER_CELLS.ahead(device, (CELL_BITS, NUMBERED))
            RUN_KEYS.ahead(device, (512,))
        else:
            self._masks_ahead(device, 1, counted=False)
        sort_ahead(device, KEY_BITS)

    def split_ahead(self, device: torch.device, block_m: int, groups: int) -> None:
        """Start to compile what makes the schedule of the forward, in so many groups of taps."""
        _, is_cube, looks = self._looks
        if self.num_taps <= KEY_BITS:
            self._masks_ahead(device, groups, counted=False)
        sorted_with = is_cube and search_programs(device, self.num_taps, self.num_out, True)[2]
        self._groups_ahead(device, block_m, groups, looks, self.num_out, sorted_with)

    def _masks_ahead(self, device: torch.device, groups: int, counted: bool) -> None:
        _, is_cube, looks = self._looks
        constants = (*looks, groups, counted, power_of_2(self.num_taps), rows_per_chunk(self.num_out), 128, is_cube)
        (CUBE_MASKS if is_cube else MASKS).ahead(device, constants)

    def turned_split_ahead(self, device: torch.device, block_m: int, groups: int) -> None:
        """Start to compile what makes the schedule of the reversed edges, in so many groups of taps."""
        if self.same:
            return self.split_ahead(device, block_m, groups)
        if self.meets_once:
            return self.turned_ahead(device, block_m)
        self._turned_tables_ahead(device)
        PLANE_KEYS.ahead(device, (False, 128))
        return self._groups_ahead(device, block_m, groups, (1, 0, 0, False, GIVEN, 1), self.num_in, False)

    def _turned_tables_ahead(self, device: torch.device) -> None:
        """Start to compile what turns the edges round: of the table, or of the pairs where those were written first."""
        PLANES.ahead(device, (*self._looks[2], 128))
        REVERSE.ahead(device, (REVERSED,))
        SCATTER.ahead(device, (REVERSED,))

    def _groups_ahead(
        self, device: torch.device, block_m: int, groups: int, looks: tuple, rows: int, has_ticket: bool
    ) -> None:
        lines = max(map(len, plane_groups(self.num_taps, groups)))
        tiles = groups * ceil_div(rows, SLOT_ALIGNMENT) * (SLOT_ALIGNMENT // block_m)
        bins = bins_of(lines) if has_ticket and tiles <= RANKED_AT_LAST else 0
        room = power_of_2(lines + LOOKAHEAD)
        # the order of several groups of rows is int64
        TILES_64.ahead(device, (*looks, block_m, room, True, self.num_taps <= 32, False, bins))
        if not bins:
            RANKS.ahead(device, rank_constants(lines, tiles))

    def turned_ahead(self, device: torch.device, block_m: int) -> None:
        """Start to compile what makes the schedule of the reversed edges."""
        lines = self.num_taps
        if self.same:
            return self.tiles_ahead(device, block_m)
        if self.meets_once:
            each, room = SLOT_ALIGNMENT // block_m, 1 + LOOKAHEAD
            constants = (power_of_2(lines), SLOT_ALIGNMENT, block_m, each, room, power_of_2(room), False)
            return ONE_TAP.ahead(device, constants)
        tiles = ceil_div(self.num_in, SLOT_ALIGNMENT) * (SLOT_ALIGNMENT // block_m)
        self._turned_tables_ahead(device)
        narrow = lines <= KEY_BITS
        (PLANE_KEYS if narrow else PLANE_KEYS_WIDE).ahead(device, (not narrow, 128))
        given = (1, 0, 0, False, GIVEN, 1)
        (TILES if narrow else TILES_64).ahead(
            device, (*given, block_m, power_of_2(lines + LOOKAHEAD), False, lines <= 32, True, 0)
        )
        RANKS.ahead(device, rank_constants(lines, tiles))
        if narrow:
            sort_ahead(device, KEY_BITS)
        return None


def tables_ahead(device: torch.device, columns: int, rows: int) -> None:
    """Start to compile what makes the tables of so many given rows, and of those that plans make."""
    width, shifts = width_of(columns), pack_shifts(shifts_of(columns))
    TABLE.ahead(device, (columns, width, shifts, False, True, False, 128, 128, NUM_BARRIERS))
    if rows > FUSED_ROWS:  # a launch a pass
        CLEAR.ahead(device, (columns, width, 1024, NUM_BARRIERS))
        INSERT.ahead(device, (columns, shifts, False, 256))
        INFO.ahead(device, (columns, shifts, CELL_BITS, LEAST_SHIFT, 512))
        PLACE.ahead(device, (columns, width, True, False, CELL_BITS, NUMBERED, 256))
