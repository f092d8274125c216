"""From FlexGEMM's coords and shape to a grid."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange
from sparseconv.interop.arguments import whole
from sparseconv.kinds import check_values
from sparseconv.torch_private import surely, tracing


def sizes(shape: Any) -> list[int]:
    """Batch items, channels, W, H, D."""
    found = whole(shape, "shape", 0)
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
    check_values(name, coords, "(N, 4) integers")
    if coords.ndim != 2 or coords.shape[1] != 4:
        raise ValueError(f"{name} must be (N, 4), the batch item and three axes; got {tuple(coords.shape)}")
    grid = VoxelGrid(coords, items)
    if tracing():
        grid.lie_within(shape)  # type: ignore[attr-defined]
        return grid
    if len(grid) and not IndexRange.of_shape(shape).encloses(grid.extent):
        places = grid.coords[:, 1:]
        row = int(((places < 0) | (places >= places.new_tensor(shape))).any(1).nonzero()[0])
        raise ValueError(
            f"{name} must lie within the shape {tuple(shape)}, but they reach over {grid.extent}, first in row {row}, "
            f"{grid.coords[row].tolist()}: pass a larger shape, or leave such rows out"
        )
    return grid


def check_features(feats: torch.Tensor, rows: int) -> None:
    """Raise unless features are (N, C), a row for each voxel."""
    check_values("feats", feats, "(N, C)")
    if feats.ndim != 2 or surely(feats.shape[0] != rows):
        raise ValueError(f"feats must be ({rows}, C), a row for each voxel; got {tuple(feats.shape)}")
