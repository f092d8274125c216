"""Rows of a new grid's search sorted before somebody asks: as those of the last schedule of so many rows were."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparseconv.geometry.gpu.hash_table.table import Cells, CoordinateTable
from sparseconv.geometry.gpu.order.morton_runs import cells_of_blocks
from sparseconv.geometry.gpu.order.row_keys import key_room
from sparseconv.geometry.gpu.window.counts import Counters
from sparseconv.geometry.gpu.window.passes import LINES, ORDER, SCRATCH, SORT_KEYS, launch_masks, launch_sums
from sparseconv.geometry.gpu.window.taps import KEY_BITS
from sparseconv.gpu.arena import Arena, Kinds
from sparseconv.gpu.radix_sort.sort import Passes

if TYPE_CHECKING:
    from sparseconv.geometry.gpu.window.search import WindowSearch

#: rows of the runs that the last schedule of more than FUSED_ROWS rows was sorted by, by device, until an order began
#: that nobody had asked for
_sorted: dict[int | None, int | None] = {}
#: the arrays of a search whose rows are sorted ahead: keys of runs behind the others
SORTED_SCRATCH, _RUN_KEYS = Kinds((*SCRATCH, torch.int32)), len(SCRATCH)


def expect_sorted(index: int | None, chunk_rows: int | None) -> None:
    """Have the next new grid's rows on a device, if they are many, sorted by keys of runs of so many; -1: not."""
    _sorted[index] = chunk_rows


class SortAhead:
    """The order that the last schedule of so many rows asked for, begun before somebody asks for it here."""

    def __init__(self, search: WindowSearch, table: CoordinateTable, chunk_rows: int | None) -> None:
        n, window = search.rows, search.window
        self.chunk_rows, bits = chunk_rows, window.key_bits
        self._cells: tuple[Cells, torch.Tensor | None] | None = None
        self._key_room = n, KEY_BITS, 0
        if chunk_rows is not None:
            self._key_room, bits = key_room(n, window.num_taps, chunk_rows, KEY_BITS), KEY_BITS
            self._cells = cells_of_blocks(table)
        self._passes = Passes(n, bits)
        #: of the last arrays of the scratch memory
        self.lengths = self._passes.words, n, 0 if chunk_rows is None else n

    @classmethod
    def of(cls, search: WindowSearch) -> SortAhead | None:
        """That of a search for its table's own rows; None where no schedule asked."""
        if not search.is_local or search.table is None or not 0 < search.window.num_taps <= KEY_BITS:
            return None
        chunk_rows = _sorted.pop(search.coords.device.index, -1)  # -1: nobody asked
        if chunk_rows is not None and not 0 < chunk_rows < search.rows:
            return None
        return cls(search, search.table, chunk_rows)

    def launch(self, search: WindowSearch, table: CoordinateTable, scratch: Arena, counters: Counters) -> None:
        """Masks, sums of their counts, and the rows in order, once there are the blocks around the blocks."""
        keys, cells = scratch[SORT_KEYS], None
        if self._cells is not None:
            keys, cells = scratch[_RUN_KEYS], self._cells[0]
        launch_masks(search, search.window.key_words, keys, counters, *self._key_room, cells=cells)
        counting = launch_sums(table, scratch, counters, search.pending, self._passes, keys)
        self._passes.launch(keys, scratch[LINES], scratch[ORDER], table.coords.device, counting)
