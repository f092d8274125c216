"""The edges of a kernel map on a GPU: found by a search, written down by tap or as a table when they are asked for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from sparseconv.geometry.gpu.hash_table.table import CoordinateTable
from sparseconv.geometry.gpu.pairs.pair_lists import confine, half_pairs_of, pairs_of, reverse_neighbors, table_of_pairs
from sparseconv.geometry.gpu.window.counts import PendingCounts
from sparseconv.geometry.gpu.window.found import WindowSearch
from sparseconv.geometry.gpu.window.neighbor_table import neighbor_table
from sparseconv.geometry.gpu.window.search import search_window
from sparseconv.geometry.gpu.window.taps import TapWindow, encode_window
from sparseconv.geometry.ranges import IndexRange, Ints
from sparseconv.gpu.streams import Moment, current


class Rows(Protocol):
    """A grid, as far as its edges ask: its rows, and the table and search that it keeps of them."""

    coords: torch.Tensor

    @property
    def cells(self) -> CoordinateTable: ...

    @property
    def num_voxels(self) -> int: ...


class Taps(Protocol):
    """A window, as far as its edges ask; ``encoded`` keeps it as kernels on a device read it, on no torus."""

    @property
    def offsets(self) -> tuple[Ints, ...]: ...

    @property
    def stride(self) -> Ints: ...

    @property
    def encoded(self) -> dict[int, TapWindow]: ...


def find_edges_on_gpu(
    fine: Rows, coords: torch.Tensor, window: Taps, torus: IndexRange | None, most: int | None = None
) -> FoundEdges:
    """The edges that a window joins: fine = stride * coords + offsets[k], folded into the torus if there is one.

    The table of the fine rows is the one that their grid keeps. ``most``: see `pairs_of`.
    """
    table, index = fine.cells, coords.get_device()
    taps = None if torus is not None else window.encoded.get(index)
    if taps is None:
        folded = None if torus is None else (torus.start, torus.shape)
        taps = encode_window(window.offsets, window.stride, folded, coords.device)
        if torus is None:
            window.encoded[index] = taps
    rows = table.coords if coords is fine.coords else coords
    return FoundEdges(search_window(table, rows, taps), fine.num_voxels, most)


@dataclass(eq=False)
class FoundEdges:
    """The edges of one window on a GPU, counted but not written down: an `EdgeSource` of a kernel map.

    It owns the search, and lets its scratch memory go once all lists were made (`wrote`).
    """

    search: WindowSearch
    num_in: int
    most: int | None = None  # places for pairs, where their number is not known to the host
    written: set[str] = field(default_factory=set)  # the forms that were made

    @property
    def device(self) -> torch.device:
        return self.search.coords.device

    @property
    def padded(self) -> bool:
        """Whether more pairs are written than there are edges, whose number the host does not know."""
        return self.search.device_count is not None

    @property
    def moment(self) -> Moment | None:
        """When the search was launched, in a run whose maps have streams of their own."""
        return self.search.moment

    def searched(self) -> WindowSearch:
        """The search with its scratch memory: made anew where that was given back."""
        old = self.search
        if old.is_released and old.table is not None:
            self.search = search_window(old.table, old.coords, old.window)
            self.search.kept.extend(old.kept)
        return self.search

    @cached_property
    def neighbors(self) -> torch.Tensor:
        """(K, N_out) int32, -1 where there is none."""
        return self.look_up()

    def look_up(self) -> torch.Tensor:
        """`neighbors`, made anew where they were not kept."""
        kept = self.__dict__.get("neighbors", self.search.neighbors)
        return neighbor_table(self.searched()) if kept is None else kept

    @property
    def counted(self) -> PendingCounts:
        """The counts of the edges, on their way to the host."""
        if self.search.pending is None:
            raise ValueError("edges that were given as a table are not counted")
        return self.search.pending

    @property
    def is_halved(self) -> bool:
        """Whether there are `half_pairs`."""
        return self.search.is_cube

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """in_rows, out_rows and tap_offsets; waits for the counts alone."""
        in_rows, out_rows, _ = pairs_of(self.searched(), self.most)
        self.wrote("pairs")
        return in_rows, out_rows, self.counted.offsets

    def table_of(
        self, in_rows: torch.Tensor, out_rows: torch.Tensor, offsets: torch.Tensor, num_out: int
    ) -> torch.Tensor:
        """`neighbors` of edges that were written down, without a search."""
        return table_of_pairs(in_rows, out_rows, offsets, num_out)

    def half_pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """in_rows and out_rows of the first HALF taps, and the tap_offsets of all; waits for the counts alone."""
        in_rows, out_rows = half_pairs_of(self.searched(), self.most)
        self.wrote("pairs")
        return in_rows, out_rows, self.counted.offsets

    def offsets(self) -> torch.Tensor:
        """tap_offsets; writes no edges down."""
        confine(self.search, self.search.most_edges if self.most is None else self.most)
        return self.counted.offsets

    def counts(self) -> tuple[int, ...]:
        """The edges of each tap, on the host; waits for them."""
        return tuple(b - a for a, b in itertools.pairwise(self.counted.read()))

    def total(self) -> int:
        """The number of edges; waits for the counts."""
        return self.counted.read()[-1]

    def reversed(self) -> ReversedEdges:
        """The same edges with input and output exchanged."""
        return ReversedEdges(self)

    def wrote(self, form: str) -> None:
        """Note that a form was made; with pairs and a schedule a step has all, and scratch memory goes back."""
        self.written.add(form)
        if {"pairs", "schedule"} <= self.written:
            side = current()
            if side is not None and self.search.scratch is not None:
                side.retire((self.search.scratch, self.search.counters))
            self.search = self.search.released()


@dataclass(frozen=True, eq=False)
class ReversedEdges:
    """Found edges with input and output exchanged: an `EdgeSource` too."""

    found: FoundEdges

    @property
    def device(self) -> torch.device:
        return self.found.device

    @property
    def padded(self) -> bool:
        """Whether more pairs are written than there are edges."""
        return self.found.padded

    @property
    def moment(self) -> Moment | None:
        """When the search was launched, in a run whose maps have streams of their own."""
        return self.found.moment

    @property
    def neighbors(self) -> torch.Tensor:
        """(K, N_in) int32, -1 where there is none; the table of the found edges is not kept."""
        return reverse_neighbors(self.found.look_up(), self.found.num_in)

    @property
    def is_halved(self) -> bool:
        """As of the found edges."""
        return self.found.is_halved

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output rows of the found edges, their input rows, and the tap_offsets."""
        in_rows, out_rows, offsets = self.found.pairs()
        return out_rows, in_rows, offsets

    def table_of(
        self, in_rows: torch.Tensor, out_rows: torch.Tensor, offsets: torch.Tensor, num_out: int
    ) -> torch.Tensor:
        """As of the found edges."""
        return table_of_pairs(in_rows, out_rows, offsets, num_out)

    def half_pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same of `FoundEdges.half_pairs`."""
        in_rows, out_rows, offsets = self.found.half_pairs()
        return out_rows, in_rows, offsets

    def offsets(self) -> torch.Tensor:
        """tap_offsets; writes no edges down."""
        return self.found.offsets()

    def counts(self) -> tuple[int, ...]:
        """The edges of each tap, on the host."""
        return self.found.counts()

    def total(self) -> int:
        """The number of edges."""
        return self.found.total()

    def reversed(self) -> FoundEdges:
        """The found edges."""
        return self.found
