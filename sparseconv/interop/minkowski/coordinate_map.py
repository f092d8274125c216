"""Sets of voxels as MinkowskiEngine has them, coordinates being multiples of a tensor stride, over grids.

A grid counts in units of the tensor stride and holds the axes backwards: MinkowskiEngine numbers taps with the first
axis fastest, plans with the last one. So a kernel's taps are those of a plan's box, in the plan's own order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch

from sparseconv.geometry.arguments import bounds, row
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.keys import KeySpace
from sparseconv.geometry.ranges import IndexRange, Ints
from sparseconv.interop.arguments import lower_corners, scaled
from sparseconv.ops.points import PointGroups


def backwards(values: Sequence[int]) -> Ints:
    """One integer an axis, in the other order."""
    return tuple(reversed(values))


def flipped(coords: torch.Tensor) -> torch.Tensor:
    """Coords (N, 1+D) with the axes in the other order, the batch still first; a copy."""
    return torch.cat([coords[:, :1], coords[:, 1:].flip(1)], 1)


def divided(stride: Sequence[int], steps: Sequence[int]) -> Ints:
    """The tensor stride of the finer side of a transposed layer, which divides without a remainder."""
    if any(t % s for t, s in zip(stride, steps)):
        raise ValueError(
            "a transposed layer divides the tensor stride, which must be a multiple of its own stride "
            f"{list(steps)} on every axis; got {list(stride)}"
        )
    return tuple(t // s for t, s in zip(stride, steps))


def common_unit(units: Sequence[Ints]) -> Ints:
    """The largest unit that divides all of these, an axis."""
    return tuple(math.gcd(*axis) for axis in zip(*units))


def first_rows(coords: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first row of each distinct row of coords (N, C), ascending, and the number of each row among them.

    Returns:
        (rows (M,), numbers (N,)), int64: ``coords[rows][numbers] == coords``.
    """
    low, high = bounds(coords)
    if not low:
        return (torch.zeros(0, dtype=torch.int64, device=coords.device),) * 2
    try:
        keys = KeySpace(IndexRange(low, tuple(h + 1 for h in high))).keys(coords.long())
        distinct, numbers = torch.unique(keys, return_inverse=True)
    except ValueError:  # wider than 63 bits
        distinct, numbers = torch.unique(coords, dim=0, return_inverse=True)
    return _in_order_of_rows(numbers, len(distinct))


def _in_order_of_rows(numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups renumbered by their first row: the first rows, ascending, and the new numbers."""
    rows = torch.arange(len(numbers), device=numbers.device)
    first = torch.full((count,), len(numbers), device=numbers.device).scatter_reduce_(0, numbers, rows, "amin")
    ordered, order = torch.sort(first)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(count, device=order.device))
    return ordered, place[numbers]


class CoordinateMap:
    """The voxels of one key.

    Args:
        grid: the voxels in units, axes backwards.
        unit: cells of the coordinates in one of the grid's, an axis, backwards.
        stride: the tensor stride, backwards; 0 on every axis for the origins of the batch items.

    The unit is the tensor stride, except where coordinates were given that are no multiples of it.
    """

    def __init__(self, grid: VoxelGrid, unit: Ints, stride: Ints) -> None:
        self.grid, self.unit, self.stride = grid, unit, stride
        self._others: dict[tuple[Ints, int], VoxelGrid] = {}

    @classmethod
    def of(cls, coords: torch.Tensor, stride: Ints) -> tuple[CoordinateMap, torch.Tensor, torch.Tensor]:
        """Coordinates (N, 1+D) int32, repeated ones among them -> their map, and the two results of `first_rows`."""
        turned = flipped(coords)
        unit = stride
        if any(s != 1 for s in stride):
            steps = row((1, *stride), turned)
            if bool((turned % steps == 0).all()):
                turned = torch.div(turned, steps, rounding_mode="floor").int()
            else:
                unit = (1,) * len(stride)
        grid = VoxelGrid(turned, duplicates="first")
        if len(grid) == len(coords):
            rows = torch.arange(len(coords), device=coords.device)
            return cls(grid, unit, stride), rows, rows
        numbers = grid.lookup(turned)
        return cls(grid, unit, stride), *_in_order_of_rows(numbers, len(grid))

    @property
    def rank(self) -> int:
        return self.grid.rank

    def __len__(self) -> int:
        return len(self.grid)

    def coordinates(self) -> torch.Tensor:
        """(N, 1+D) int32 as a user knows them; the caller's own."""
        return flipped(scaled(self.grid, self.unit))

    def at(self, unit: Ints, batch_size: int) -> VoxelGrid:
        """The same voxels in a unit that divides this one's, in a batch of at least as many items; made once."""
        if unit == self.unit and batch_size == self.grid.batch_size:
            return self.grid
        grid = self._others.get((unit, batch_size))
        if grid is None:
            scale = tuple(a // b for a, b in zip(self.unit, unit))
            grid = VoxelGrid(scaled(self.grid, scale), batch_size)
            self._others[unit, batch_size] = grid
        return grid

    def rows(self, coords: torch.Tensor) -> torch.Tensor:
        """The rows (M,) int64 of coordinates (M, 1+D) of any integer dtype, -1 where there is no such voxel."""
        turned, steps = flipped(coords), row((1, *self.unit), coords)
        if all(u == 1 for u in self.unit):
            return self.grid.lookup(turned)
        whole = (turned % steps == 0).all(1)
        rows = self.grid.lookup(torch.div(turned, steps, rounding_mode="floor").to(coords.dtype))
        return torch.where(whole, rows, -1)

    @cached_property
    def items(self) -> PointGroups:
        """The rows of each batch item."""
        return PointGroups(self.grid.coords[:, 0], self.grid.batch_size)

    def item_rows(self) -> list[torch.Tensor]:
        """The rows (N_b,) int64 of each batch item."""
        rows = self.grid.batch_rows
        if rows is None:
            rows = torch.arange(len(self.grid), device=self.grid.device)
        return list(rows.split(self.grid.batch_counts.tolist()))


class FieldMap:
    """The points of one key: coordinates (N, 1+D) floating point, anywhere."""

    def __init__(self, coords: torch.Tensor, stride: Ints) -> None:
        self.coords, self.stride = coords, stride

    def __len__(self) -> int:
        return len(self.coords)

    @cached_property
    def batch(self) -> torch.Tensor:
        """(N,) int64: the batch item of each point."""
        return self.coords[:, 0].round().long()

    @cached_property
    def items(self) -> PointGroups:
        """The points of each batch item."""
        count = int(self.batch.max()) + 1 if len(self) else 1
        return PointGroups(self.batch, count)

    def item_rows(self) -> list[torch.Tensor]:
        """The rows (N_b,) int64 of each batch item."""
        return list(torch.argsort(self.batch, stable=True).split(self.items.counts.tolist()))

    def quantized(self, stride: Sequence[int]) -> torch.Tensor:
        """(N, 1+D) int32: the lower corner of the cell of this stride that holds each point."""
        steps = self.coords.new_tensor(stride)
        cells = torch.floor(self.coords[:, 1:] / steps) * steps
        return lower_corners("coordinates", torch.cat([self.batch[:, None].to(cells.dtype), cells], 1))
