"""Schedules that lie in one allocation, whose arrays become tensors when they are asked for."""

from __future__ import annotations

from functools import cached_property

import torch

from sparseconv.geometry.gpu.tiles.schedule import LOOKAHEAD, Schedule
from sparseconv.gpu.arena import Arena, Kinds
from sparseconv.gpu.launcher import INTERPRETED
from sparseconv.gpu.program import Fixed

_I32 = torch.int32
#: the arrays of a schedule, as `PackedSchedule.ARRAYS`
SCHEDULE_KINDS = Kinds((_I32,) * 7)


def schedule_lengths(lines: int, slots: int, tiles: int, turned: bool) -> tuple[int, ...]:
    """Those of a schedule's arrays but the last, for so many ``lines`` of its table; ``turned``: both directions."""
    lists = tiles * (lines + LOOKAHEAD)
    return (lines + 1) * slots, slots, tiles, lists, turned * aligned_length(lists) + lists, tiles


def aligned_length(length: int) -> int:
    """int32 numbers from an array's begin to the next place at a multiple of 16 bytes, behind so many of them."""
    return (length + 3) & -4


class PackedSchedule(Schedule):
    """A schedule in one allocation, whose arrays become tensors when they are asked for: each costs the host its time.

    Args:
        block_m: rows of a tile.
        arena: its arrays in the order of `ARRAYS`; of ``tile_taps``, those of the reversed edges behind the others,
            where they were written.
        shape: rows of the table, tiles, and the length of a tile's lists.
        groups: of taps, where there are several.
        turned: of the reversed edges.
        first: the place of the first in an arena that others share.
    """

    _arena: Arena
    _shape: tuple[int, int, int]
    _groups: int
    _turned: bool
    _first: int
    ARRAYS = ("neighbors", "out_rows", "tile_counts", "tile_rows", "tile_taps", "tile_order", "slots")

    def __init__(
        self,
        block_m: int,
        arena: Arena,
        shape: tuple[int, int, int],
        groups: int = 0,
        turned: bool = False,
        first: int = 0,
    ) -> None:
        self.__dict__.update(block_m=block_m, _arena=arena, _shape=shape, _groups=groups, _turned=turned, _first=first)

    def reversed(self) -> PackedSchedule | None:
        """That of the reversed edges; None where their taps were not written."""
        _, tiles, room = self._shape
        if self._arena.length_of(self._first + 4) == tiles * room:
            return None
        return PackedSchedule(self.block_m, self._arena, self._shape, self._groups, not self._turned, self._first)

    @property
    def num_tiles(self) -> int:
        return self._shape[1]

    @property
    def num_slots(self) -> int:
        return self._arena.length_of(self._first + 1)

    @property
    def table_size(self) -> int:
        return self._arena.length_of(self._first)

    @cached_property
    def fixed(self) -> Fixed:
        if INTERPRETED:
            return self._launched_in(self.tile_order)
        addresses = self._arena[self._first : self._first + 6]
        addresses[4] += 4 * self._turned * aligned_length(self._shape[1] * self._shape[2])
        again = PackedSchedule(self.block_m, self._arena, self._shape, self._groups, self._turned, self._first)
        numbers = self.num_slots, self._shape[2]
        return Fixed.at(addresses, numbers, lambda: again._launched_in(again.tile_order))  # not self: no circle

    @cached_property
    def slots(self) -> torch.Tensor | None:  # type: ignore[override]
        return self._arena.tensor(self._first + 6).view(self._groups, -1) if self._groups else None

    @property
    def turned_taps(self) -> torch.Tensor | None:  # type: ignore[override]
        return None if (turned := self.reversed()) is None else turned.tile_taps

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in self.ARRAYS:
            raise AttributeError(name)
        array = self._arena.tensor(self._first + self.ARRAYS.index(name))
        height, tiles, room = self._shape
        if name == "neighbors":
            array = array.view(height, -1)
        elif name == "tile_taps":
            array = array.narrow(0, self._turned * aligned_length(tiles * room), tiles * room).view(tiles, room)
        elif name == "tile_rows":
            array = array.view(tiles, room)
        self.__dict__[name] = array
        return array
