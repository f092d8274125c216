"""The work list of the implicit GEMM: rows in tiles of like taps, and for each tile the taps that live in it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import torch

from sparseconv.gpu.program import Fixed

#: pairs of one job are a multiple of this
JOB_QUANTUM = 128


@dataclass(frozen=True)
class Jobs:
    """J runs of pairs; job j sums pairs [begin[j], end[j]) of one tap; jobs of a tap are neighbors in number.

    Of a map that `is_halved`, begin and end of the taps behind the middle one are -1 less those of the same pairs in
    the list of the mirrored tap: they are read with input and output exchanged.

    J is known without reading the counts of the taps: jobs from ``tap_jobs[K]`` on are empty and belong to no tap.
    """

    begin: torch.Tensor  # (J,) int64
    end: torch.Tensor  # (J,) int64
    order: torch.Tensor  # (J,) int32: the order of launch; jobs over the same rows of different taps run together
    tap_jobs: torch.Tensor  # (K + 1,) int32: tap k owns the jobs [tap_jobs[k], tap_jobs[k + 1])

    @property
    def count(self) -> int:
        """J."""
        return self.begin.shape[0]

    @property
    def one_each(self) -> bool:
        """Whether every tap has exactly one job, so that a job's sum is the gradient and nothing is left to reduce."""
        return self.count == self.tap_jobs.shape[0] - 1

    def fixed(self, in_rows: torch.Tensor, out_rows: torch.Tensor) -> Fixed:
        """What a launch over the jobs of these pairs takes."""
        return Fixed((in_rows, out_rows, self.begin, self.end, self.order))


def most_jobs(num_taps: int, num_pairs: int, max_jobs: int, quantum: int) -> int:
    """J: no more than asked for, than there are runs of a quantum of pairs, and than there are taps."""
    return max(num_taps, min(max_jobs, num_taps + num_pairs // quantum))


#: slots are padded to a multiple of this: to whole tiles of any size
SLOT_ALIGNMENT = 256
#: list columns beyond the last live tap that a kernel may read ahead
LOOKAHEAD = 4
#: above a table row in a tile's list: this bit, whether the first half of the tile's rows has a neighbor there, and
#: the next, whether the second has
HALF_BIT = 28
ROW_BITS = (1 << HALF_BIT) - 1


@dataclass(frozen=True)
class Schedule:
    """A kernel map's rows cut into T tiles of ``block_m`` rows; NP = T * block_m slots, R tap rows in the table.

    Rows are permuted so that the rows of a tile share most of their taps; a tile then runs over its own list of live
    taps only. Where taps are split in groups, a row has a slot in each group, and ``slots`` says which where it has a
    live tap, so that the partial sums can be added in a fixed order.
    """

    block_m: int
    neighbors: torch.Tensor  # (R + 1, NP) int32: input row of a slot by table row; -1 absent; the last row all -1
    out_rows: torch.Tensor  # (NP,) int32: the output row of a slot; -1 for padding
    tile_counts: torch.Tensor  # (T,) int32: live taps of a tile
    tile_rows: torch.Tensor  # (T, S) int32: table rows of a tile's live taps, with HALF_BITs; then R; S >= R + 4
    tile_taps: torch.Tensor  # (T, S) int32: the weight tap of each of them; 0 beyond tile_counts
    tile_order: torch.Tensor  # (T,) int32: the order of launch, most taps first
    slots: torch.Tensor | None = None  # (G, N_out) int32: a row's slot in each group of taps, -1 none; None: one group

    @property
    def num_tiles(self) -> int:
        return self.tile_counts.shape[0]

    @property
    def num_slots(self) -> int:
        return self.out_rows.shape[0]

    @cached_property
    def fixed(self) -> Fixed:
        """What a launch over the tiles takes."""
        lists = (self.tile_counts, self.tile_rows, self.tile_taps, self.tile_order)
        return Fixed((self.neighbors, self.out_rows, *lists), (self.num_slots, self.tile_rows.shape[1]))


@cache
def tap_significance(num_taps: int) -> tuple[int, ...]:
    """Taps from the most to the least significant bit of a row's mask: farthest from the kernel's center first.

    A far tap (a corner) is the rarest, and a rare tap costs most when the rows that have it are spread over many tiles.
    The box is taken to be the cube, else the square, else the line with this many taps.
    """
    for rank in (3, 2):
        side = round(num_taps ** (1 / rank))
        if side**rank == num_taps:
            break
    else:
        rank, side = 1, num_taps

    def distance(tap: int) -> int:
        total = 0
        for _ in range(rank):
            tap, digit = divmod(tap, side)
            total += abs(2 * digit - (side - 1))
        return total

    return tuple(sorted(range(num_taps), key=lambda tap: -distance(tap)))


def plane_groups(num_taps: int, parts: int = 3) -> tuple[tuple[int, ...], ...]:
    """Taps cut into ``parts`` runs of neighboring tap numbers: the planes along the first axis of a cube."""
    edges = [round(part * num_taps / parts) for part in range(parts + 1)]
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges) if b > a)


class ScheduleForm(NamedTuple):
    """What tells the schedules of one map apart, see `work_lists.schedule_of`."""

    block_m: int
    transposed: bool = False
    split: int = 1
    chunked: bool = False


@dataclass(eq=False)
class WorkLists:
    """The schedules and jobs of one map, by what was asked for."""

    schedules: dict[ScheduleForm, Schedule] = field(default_factory=dict)
    jobs: dict[int, Jobs] = field(default_factory=dict)
    mirror: torch.Tensor | None = None  # (K,) int32, read by a graph's launches
