"""From FlexGEMM's coords and shape to a grid."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.interop.arguments import check_inside, check_rows, integers
from sparseconv.transforms import tracing


def sizes(shape: Any) -> list[int]:
    """Batch items, channels, W, H, D."""
    found = integers(shape, "shape", 0)
    if len(found) != 5:
        raise ValueError(f"shape must be (batch size, channels, W, H, D); got {tuple(found)}")
    return found


def bits(*edges: int) -> int:
    """Bits of the largest index on an axis of the longest of these edges."""
    return max(max(edges) - 1, 0).bit_length()


def voxels(name: str, coords: torch.Tensor, items: int, shape: list[int]) -> VoxelGrid:
    """The grid of coords (N, 4) with the batch item first, all of them within [0, shape).

    Raises:
        TypeError: coords are not integers.
        ValueError: a voxel outside, or twice.
    """
    check_rows(name, coords, 4, "the batch item and three axes")
    grid = VoxelGrid(coords, items)
    if tracing():
        grid.lie_within(shape)  # type: ignore[attr-defined]
    else:
        check_inside(name, grid, shape, "the shape")
    return grid
