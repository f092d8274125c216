"""What a search has found: plain data that the stages after it read. Nothing in here launches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sparseconv.geometry.gpu.hash_table.table import CoordinateTable
from sparseconv.geometry.gpu.window.counts import Counters, PendingCounts
from sparseconv.geometry.gpu.window.taps import KEY_BITS, TapWindow
from sparseconv.gpu.arena import Arena
from sparseconv.gpu.cooperative import DeviceCount
from sparseconv.gpu.launcher import Pointer
from sparseconv.gpu.radix_sort.sort import Passes
from sparseconv.gpu.streams import Moment

#: the arrays of a search's scratch: edges of tap k before chunk c, sort keys, the blocks around a block, and a sort's
STARTS, SORT_KEYS, AROUND, LINES, ORDER = range(5)
_I32, _I64 = torch.int32, torch.int64
SCRATCH = (_I32, _I32, _I32, _I64, _I32)


@dataclass(eq=False)
class WindowSearch:
    """The edges between the rows of a table and target rows, found but not written down.

    Nobody writes to a search that others have. It is not frozen all the same: Python would set each of its fields by a
    call, which takes the host as long as a launch.

    Of the voxels x = 0, 1 and 5 of a line, rows 0, 1 and 2, through a window of three taps:

        masks   row 0: 0b110 (taps 1 and 2), row 1: 0b011 (taps 0 and 1), row 2: 0b010 (tap 1)
        counts  [[1], [3], [1]]: edges of each tap in the one chunk of rows
        starts  [[0], [0], [0]]: edges of a tap in the chunks before; pending.offsets [0, 1, 4, 5]
        keys    [[2, 6, 1]]

    Sort keys are the Gray ranks of the masks, so that rows sorted by them change taps one at a time. The scratch memory
    goes back when all that is wanted was made of it (`released`); whoever wants more searches again.
    """

    coords: torch.Tensor  # (N_out, 1+D) int32: the target rows; none where the edges were given as a table
    window: TapWindow
    table: CoordinateTable | None  # the source rows; None where the edges were given as a table
    device_count: DeviceCount | None  # of rows whose number the host does not know
    rows: int  # N_out
    capacity: int  # slots of the table; of a given one, the length of its rows
    constants: tuple  # RANK, SHIFTS, PLACES, PERIODIC, SIDES and LENGTH of the kernels
    is_local: bool = False  # whether the target rows are the table's own: a row's block tells the blocks around it
    is_cube: bool = False  # whether each row looks at the 27 cells around it, for which there are kernels of their own
    chunk_rows: int = 1  # rows whose edges are counted together
    chunks: int = 0
    counters: Counters | None = None
    pending: PendingCounts | None = None  # the counts of the edges, on their way to the host
    scratch: Arena | None = None
    passes: Passes | None = None  # of the sort of its rows, whose digits its launch may have counted
    neighbors: torch.Tensor | None = None  # (K, N_out) int32, where it was given, and of more than 31 taps
    pointers: tuple[Pointer, ...] = ()  # what kernels take to look rows up: see `passes.SEARCH_TYPES`
    moment: Moment | None = None  # when it was launched, in a run whose maps have streams of their own
    #: constants on the device that launches read: kept as long as a graph that holds those launches may run
    kept: list[torch.Tensor] = field(default_factory=list)

    def released(self) -> WindowSearch:
        """The same without its scratch memory."""
        rest = object.__new__(WindowSearch)
        rest.__dict__.update(self.__dict__, scratch=None, counters=None, pointers=())
        return rest

    @property
    def is_released(self) -> bool:
        """Whether there is nothing left to read."""
        return self.scratch is None and self.table is not None

    @property
    def found(self) -> tuple[CoordinateTable, Arena, PendingCounts]:
        """Table, scratch memory and counts of the search of a table; an error where edges were given, or released."""
        if self.table is None or self.scratch is None or self.pending is None:
            raise ValueError("this search has no scratch memory: its edges were given, or it was released")
        return self.table, self.scratch, self.pending

    @property
    def counts(self) -> torch.Tensor:
        """(K, C) int32: the edges of tap k among the target rows [c, c + 1) * chunk_rows."""
        if self.counters is None:
            raise ValueError("the counts of this search were released")
        return self.counters.counts

    @property
    def keys(self) -> torch.Tensor | None:
        """(1, N_out) int32 sort keys, see `row_keys`; None above 31 taps and for given edges."""
        if self.table is None or self.window.num_taps > KEY_BITS:
            return None
        return self.found[1].tensor(SORT_KEYS)[: self.rows].view(1, -1)

    @property
    def around(self) -> torch.Tensor | None:
        """(B, 3^D) int32: the blocks around each block, if there are so many; None where rows are looked up by key."""
        return self.found[1].tensor(AROUND).view(-1, 3 ** (self.coords.shape[1] - 1)) if self.is_local else None

    @property
    def most_edges(self) -> int:
        """A number that the edges cannot exceed, whatever rows occur twice; known without a look at the device."""
        return self.rows * self.window.num_taps
