"""Voxels made of voxels: coarser ones, finer ones, those near by; each refused before it leaves 32 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from sparseconv.checks import INT32, bounds, check_rows, row
from sparseconv.geometry.keys import KeySpace
from sparseconv.geometry.ranges import IndexRange, Ints, check_box, per_axis
from sparseconv.geometry.window import Window


def unique_coords(coords: torch.Tensor) -> torch.Tensor:
    """The distinct rows of coords (M, 1+D) of any integer dtype, int32 in lexicographic order."""
    low, high = bounds(coords)
    if not low:
        return coords
    box = IndexRange(low, tuple(h + 1 for h in high))
    check_box(box, "voxels")
    return KeySpace(box).coords(torch.unique(KeySpace(box).keys(coords)))


def reached(
    coords: torch.Tensor,
    window: Window,
    *,
    to_fine: bool,
    torus: IndexRange | None = None,
    within: IndexRange | None = None,
) -> torch.Tensor:
    """The voxels that coords (N, 1+D) reach through the taps of a window, (M, 1+D) int64, each as often as it is.

        to_fine      stride * c + offset
        otherwise    (c - offset) / stride, where that is whole

    They are folded into ``torus``, and those outside of ``within`` are left out. Taps with the same offsets along the
    first axes go together.

    >>> window = Window.of(1, (3,), (2,), (1,), None)  # offsets -1, 0, 1
    >>> reached(torch.tensor([[0, 4], [0, 7]]), window, to_fine=False).tolist()
    [[0, 4], [0, 2], [0, 3]]
    """

    def along(axis: int, columns: list[torch.Tensor], taps: list[Ints]) -> Iterator[list[torch.Tensor]]:
        """The columns of what is reached through these taps; those before ``axis`` are there already."""
        if axis == len(window.stride):
            yield columns
            return
        for offset, group in groupby(taps, key=lambda tap: tap[axis]):
            places, valid = _moved(columns[axis + 1], offset, window.stride[axis], to_fine)
            if torus is not None:
                places = (places - torus.start[axis]) % torus.shape[axis] + torus.start[axis]
            if within is not None:
                inside = (places >= within.start[axis]) & (places < within.end[axis])
                valid = inside if valid is None else inside & valid
            found = [*columns[: axis + 1], places, *columns[axis + 2 :]]
            if valid is not None:
                kept = valid.nonzero().squeeze(1)
                found = [column.index_select(0, kept) for column in found]
            yield from along(axis + 1, found, list(group))

    columns = list(coords.T.to(torch.int64, memory_format=torch.contiguous_format))
    return torch.cat([torch.stack(found) for found in along(0, columns, sorted(window.offsets))], 1).T


def _moved(column: torch.Tensor, offset: int, stride: int, to_fine: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where a tap takes a column of coords, and which of them it takes anywhere; None for all."""
    if to_fine:
        return column * stride + offset, None
    moved = column - offset
    if stride == 1:
        return moved, None
    places = torch.div(moved, stride, rounding_mode="floor")
    return places, places * stride == moved


def checked_factors(factor: int | Sequence[int], rank: int) -> Ints:
    """By how much voxels are coarser or finer, an axis."""
    factors = per_axis(factor, rank, "factor", 1)
    if max(factors) > INT32.max:
        raise ValueError(f"factor must fit in 32 bits on every axis; got {factor!r}")
    return factors


def coarser(coords: torch.Tensor, factors: Ints) -> torch.Tensor:
    """The voxels floor(c / factor) of coords (N, 1+D), (M, 1+D) int32 in lexicographic order."""
    return unique_coords(torch.div(coords.long(), row((1, *factors), coords), rounding_mode="floor"))


def finer(coords: torch.Tensor, extent: IndexRange, factors: Ints) -> torch.Tensor:
    """The factor^D parts of each voxel of coords (N, 1+D), side by side, (M, 1+D) int64."""
    start, end = (tuple(v * f for v, f in zip(side, factors)) for side in (extent.start, extent.end))
    check_box(IndexRange(start, end), "the finer voxels")
    check_rows(max(1, len(coords)) * math.prod(factors), "the finer grid")
    parts = _points(IndexRange.of_shape((1, *factors)), coords)
    return ((coords.long() * row((1, *factors), coords))[:, None] + parts).reshape(-1, coords.shape[1])


def near(coords: torch.Tensor, extent: IndexRange, reach: Ints) -> torch.Tensor:
    """The voxels within ``reach`` cells of coords (N, 1+D) along each axis, (M, 1+D) int32 in lexicographic order."""
    start, end = (v - r for v, r in zip(extent.start, reach)), (v + r for v, r in zip(extent.end, reach))
    check_box(IndexRange(start, end), "the dilated voxels")
    check_rows(
        max(1, len(coords)) * math.prod(2 * r + 1 for r in reach), "the dilated grid, with each voxel's own box,"
    )
    moves = _points(IndexRange((0, *(-r for r in reach)), (1, *(r + 1 for r in reach))), coords)
    return unique_coords((coords.long()[:, None] + moves).reshape(-1, coords.shape[1]))


def _points(box: IndexRange, like: torch.Tensor) -> torch.Tensor:
    """The points of a box (M, 1+D) int64, last axis fastest."""
    return torch.cartesian_prod(*(torch.arange(a, b, device=like.device) for a, b in zip(box.start, box.end)))


def morton_rows(coords: torch.Tensor, extent: IndexRange) -> torch.Tensor:
    """Rows (N,) of coords along a Z curve in each batch item: sorted by the interleaved bits of the voxels."""
    rank = coords.shape[1] - 1
    bits = max((n - 1).bit_length() for n in extent.shape)
    rows = torch.arange(len(coords), device=coords.device)
    local = coords[:, 1:].long() - torch.tensor(extent.start, device=coords.device)
    for first in range(0, bits, 62 // rank):  # as many levels a pass as a key holds, least significant first
        key = torch.zeros_like(rows)
        for bit in range(first, min(bits, first + 62 // rank)):
            for axis in range(rank):
                key |= ((local[rows, axis] >> bit) & 1) << ((bit - first) * rank + rank - 1 - axis)
        rows = rows[torch.argsort(key, stable=True)]
    return rows[torch.argsort(coords[rows, 0], stable=True)]


def places_of(mask: torch.Tensor, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where mask (N,) bool is true, (places,) int64 with places >= N, and which of these count, (places,) bool.

    Nothing is read by the CPU. What does not count is some row.

    >>> [found.tolist() for found in places_of(torch.tensor([True, False, True]), 4)]
    [[0, 2, 2, 0], [True, True, False, False]]
    """
    rows = torch.arange(places + 1, device=mask.device)
    found = rows % max(1, len(mask))
    found.scatter_(0, torch.where(mask, mask.cumsum(0) - 1, places), rows[: len(mask)])
    return found[:-1], rows[:-1] < mask.sum()
