"""Boxes of voxels with the batch as their first axis, and how they follow windows and scales."""

from __future__ import annotations

from fractions import Fraction

import torch

from sparseconv.geometry.ranges import IndexRange
from sparseconv.geometry.window import Window

#: beyond every voxel: what a box without an end has there
FAR = 2**40

#: cells of the input's grid for one of this grid, an axis
Scale = tuple[Fraction, ...]


def union(a: IndexRange | None, b: IndexRange | None) -> IndexRange | None:
    """The box around two boxes; None is an empty one.

    >>> str(union(IndexRange((0, 0), (1, 2)), IndexRange((0, 5), (1, 6))))
    '[0, 1) x [0, 6)'
    """
    if a is None or b is None:
        return b if a is None else a
    start, end = map(min, zip(a.start, b.start)), map(max, zip(a.end, b.end))
    return IndexRange(tuple(start), tuple(end))


def seen(box: IndexRange | None, window: Window, is_transposed: bool) -> IndexRange | None:
    """The inputs that outputs within a box look at, by the window's index projection."""
    if box is None:
        return None
    space = IndexRange(box.start[1:], box.end[1:])
    inputs = window.projection.preimage(space) if is_transposed else window.projection.region(space)
    if inputs.size == 0:
        return None
    return IndexRange((box.start[0], *inputs.start), (box.end[0], *inputs.end))


def scaled(box: IndexRange, scale: Scale) -> IndexRange | None:
    """The voxels c of a coarser or finer grid for which c * scale lies in a box of the input's grid.

    Boxes that lie side by side give boxes that lie side by side: each voxel has one of them.

    >>> str(scaled(IndexRange((0, 3), (1, 8)), (Fraction(2),)))
    '[0, 1) x [2, 4)'
    """
    start = [-(-s * f.denominator // f.numerator) for s, f in zip(box.start[1:], scale)]
    end = [-(-e * f.denominator // f.numerator) for e, f in zip(box.end[1:], scale)]
    if any(a >= b for a, b in zip(start, end)):
        return None
    return IndexRange((box.start[0], *start), (box.end[0], *end))


def meets(a: IndexRange, b: IndexRange) -> bool:
    """Whether two boxes share a voxel."""
    return all(s < f and t < e for s, e, t, f in zip(a.start, a.end, b.start, b.end))


def within(coords: torch.Tensor, box: IndexRange) -> torch.Tensor:
    """(M,) bool: which coords (M, 1+D) lie in a box."""
    limits = torch.iinfo(coords.dtype)  # torch would wrap a number beyond them round to this dtype
    low = [max(start, limits.min) for start in box.start]
    high = [min(end - 1, limits.max) for end in box.end]
    if any(a > b for a, b in zip(low, high)):
        return torch.zeros(len(coords), dtype=torch.bool, device=coords.device)
    if coords.is_cuda:  # few launches: they wait for the thread that computes
        low_, high_ = coords.new_tensor([low, high])
        return ((coords >= low_) & (coords <= high_)).all(1)
    inside = torch.ones(len(coords), dtype=torch.bool)
    for axis, (a, b) in enumerate(zip(low, high)):
        inside &= (coords[:, axis] >= a) & (coords[:, axis] <= b)
    return inside
