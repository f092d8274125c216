"""Features by batch item, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseconv import transforms
from sparseconv.geometry.grid import VoxelGrid


def split_items(features: torch.Tensor, grid: VoxelGrid) -> tuple[torch.Tensor, ...]:
    """Features (N, C) in the grid's order -> one (N_b, C) for each batch item, empty ones included; differentiable.

    The first call on a grid reads the items' sizes from the device; they are kept with the grid.

    >>> grid = VoxelGrid(torch.tensor([[2, 0], [0, 0], [2, 1]]))
    >>> [item.flatten().tolist() for item in split_items(torch.tensor([[1.0], [2.0], [3.0]]), grid)]
    [[2.0], [], [1.0, 3.0]]
    """
    counts, rows, _ = _layout(grid)
    return (features if rows is None else features.index_select(0, rows)).split(counts)


def join_items(items: Sequence[torch.Tensor], grid: VoxelGrid) -> torch.Tensor:
    """The inverse of `split_items`: one (N_b, C) for each batch item -> (N, C) in the grid's order."""
    joined = torch.cat(list(items)) if len(items) > 1 else items[0]
    inverse = _layout(grid)[2]
    return joined if inverse is None else joined.index_select(0, inverse)


@transforms.constant
def _layout(grid: VoxelGrid) -> tuple[list[int], torch.Tensor | None, torch.Tensor | None]:
    """Voxels of each item on the host, the rows that group them, and where each row went; None for no change."""
    kept = grid.derived.get("items")
    if kept is None:
        rows = grid.batch_rows
        kept = (grid.batch_counts.tolist(), rows, None if rows is None else torch.argsort(rows))
        grid.derived["items"] = kept
    return kept
