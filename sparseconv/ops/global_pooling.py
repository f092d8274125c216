"""Pooling over the whole of each scene: the voxels of a batch item become one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.ops.items import item_masks, split_items
from sparseconv.ops.rows import check_grid, check_rows, recorder, wide

if TYPE_CHECKING:
    from jaxtyping import Float


def global_sum_pool(x: Float[torch.Tensor, "N C"], grid: VoxelGrid) -> Float[torch.Tensor, "B C"]:
    """The sum over all voxels of each batch item: (N, C) -> (B, C); 0 for an empty item.

    >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 1], [1, 0]]))
    >>> global_sum_pool(torch.tensor([[1.0], [3.0], [5.0]]), grid).tolist()
    [[4.0], [5.0]]
    """
    check_grid(grid)
    if (traced := recorder(grid)) is not None:
        return traced.pooled(x, "sum")
    if grid.count is not None:
        return grid.all_sum(_by_mask(x, grid, 0, lambda rows, _: rows.sum(0)))
    return grid.all_sum(_by_item(x, grid, lambda item: item.sum(0)))


def global_avg_pool(x: Float[torch.Tensor, "N C"], grid: VoxelGrid) -> Float[torch.Tensor, "B C"]:
    """The mean over all voxels of each batch item: (N, C) -> (B, C); 0 for an empty item.

    >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 1], [1, 0]]))
    >>> global_avg_pool(torch.tensor([[1.0], [3.0], [5.0]]), grid).tolist()
    [[2.0], [5.0]]
    """
    check_grid(grid)
    if (traced := recorder(grid)) is not None:
        return traced.pooled(x, "average")
    if grid.count is not None and not grid.is_shared:
        kind = wide(x)
        return _by_mask(x, grid, 0, lambda rows, count: (rows.sum(0, dtype=kind) / count.clamp_min(1)).to(x.dtype))
    if not grid.is_shared:
        return _by_item(x, grid, lambda item: item.mean(0))
    counts = grid.all_sum(grid.batch_counts).clamp_min(1)
    return (global_sum_pool(x.to(wide(x)), grid) / counts[:, None]).to(x.dtype)


def global_max_pool(x: Float[torch.Tensor, "N C"], grid: VoxelGrid) -> Float[torch.Tensor, "B C"]:
    """The maximum over all voxels of each batch item: (N, C) -> (B, C); 0 for an empty item.

    >>> grid = VoxelGrid(torch.tensor([[0, 0], [2, 1], [2, 5]]))
    >>> global_max_pool(torch.tensor([[-1.0], [2.0], [4.0]]), grid).tolist()
    [[-1.0], [0.0], [4.0]]
    """
    check_grid(grid)
    if (traced := recorder(grid)) is not None:
        return traced.pooled(x, "max")
    if grid.is_shared:
        raise ValueError("a maximum over shards is not supported: pool to one grid first, or gather the scene")
    if grid.count is not None:
        return _by_mask(x, grid, -torch.inf, lambda rows, _: rows.max(0).values)
    return _by_item(x, grid, lambda item: item.max(0).values)


def _by_item(x: torch.Tensor, grid: VoxelGrid, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """(B, C): each item's rows reduced, 0 for an empty item."""
    _check(x, grid)
    if grid.batch_size == 0:
        return x
    found = [reduce(item) if item.shape[0] else item.sum(0) for item in split_items(x, grid)]
    with torch.autocast(x.device.type, enabled=False):  # whose stack takes no halves but its own
        return torch.stack(found)


def _by_mask(
    x: torch.Tensor, grid: VoxelGrid, fill: float, reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`_by_item` without the CPU, which may not know whose a row is: ``reduce`` takes all rows, those of others
    filled, and the number of the item's own, ()."""
    _check(x, grid)
    masks = item_masks(grid)
    counts = [mask.sum() for mask in masks]
    found = [reduce(torch.where(mask, x, fill), count) for mask, count in zip(masks, counts)]
    return torch.stack([torch.where(count > 0, item, 0) for item, count in zip(found, counts)])


def _check(x: torch.Tensor, grid: VoxelGrid) -> None:
    check_rows("x", x, len(grid), "voxel of the grid", grid.device, "the grid")
