"""Features by batch item, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparseconv import transforms
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.ops.rows import recorder


def split_items(features: torch.Tensor, grid: VoxelGrid) -> tuple[torch.Tensor, ...]:
    """Features (N, C) in the grid's order -> one (N_b, C) for each batch item, empty ones included; differentiable.

    The first call on a grid reads the items' sizes from the device; they are kept with the grid.

    >>> grid = VoxelGrid(torch.tensor([[2, 0], [0, 0], [2, 1]]))
    >>> [item.flatten().tolist() for item in split_items(torch.tensor([[1.0], [2.0], [3.0]]), grid)]
    [[2.0], [], [1.0, 3.0]]
    """
    counts, rows, _ = _layout(grid)
    return (features if rows is None else features.index_select(0, rows)).split(counts)


def split_sizes(grid: VoxelGrid) -> list[int]:
    """Voxels of each batch item, on the CPU; kept with the grid.

    >>> split_sizes(VoxelGrid(torch.tensor([[2, 0], [0, 0], [2, 1]])))
    [1, 0, 2]
    """
    return _layout(grid)[0]


def join_items(items: Sequence[torch.Tensor], grid: VoxelGrid) -> torch.Tensor:
    """The inverse of `split_items`: one (N_b, C) for each batch item -> (N, C) in the grid's order."""
    with torch.autocast(items[0].device.type, enabled=False):  # whose cat takes no halves but its own
        joined = torch.cat(list(items)) if len(items) > 1 else items[0]
    inverse = _layout(grid)[2]
    return joined if inverse is None else joined.index_select(0, inverse)


def standardised(x: torch.Tensor, grid: VoxelGrid, groups: int, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) of each group of channels over all voxels of a batch item: (N, C) -> (N, C).

    An item of one number is its own mean; an empty one has nothing to normalize.
    """
    if (traced := recorder(grid)) is not None:
        return traced.standardised(x, groups, eps)
    if not x.shape[0]:
        return x
    if grid.count is not None:
        return _standardised_by_masks(x, grid, groups, eps)
    return join_items([_standardised_item(item, groups, eps) for item in split_items(x, grid)], grid)


def _standardised_item(item: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """By torch's batch norm of (N_b, G, C/G)."""
    grouped = item.reshape(item.shape[0], groups, item.shape[1] // groups)
    if grouped.shape[0] * grouped.shape[2] < 2:
        return item - item
    return torch.nn.functional.batch_norm(grouped, None, None, training=True, eps=eps).reshape(item.shape)


def item_masks(grid: VoxelGrid) -> list[torch.Tensor]:
    """(N, 1) bool for each batch item: the rows that are its voxels, of a grid whose numbers of rows the CPU may not
    know."""
    items = grid.coords[:, :1]
    return [items == item for item in range(grid.batch_size)]


def _standardised_by_masks(x: torch.Tensor, grid: VoxelGrid, groups: int, eps: float) -> torch.Tensor:
    """A pass over all rows for each item; rows that are no voxels are 0."""
    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups)
    found = torch.zeros_like(grouped)
    for mask in item_masks(grid):
        own = mask[:, :, None]
        terms = (mask.sum() * grouped.shape[2]).clamp_min(1)
        mean = torch.where(own, grouped, 0).sum((0, 2), keepdim=True) / terms
        off = torch.where(own, grouped - mean, 0)
        var = off.square().sum((0, 2), keepdim=True) / terms
        found = torch.where(own, off * torch.rsqrt(var + eps), found)
    return found.reshape(x.shape)


@transforms.constant
def _layout(grid: VoxelGrid) -> tuple[list[int], torch.Tensor | None, torch.Tensor | None]:
    """Voxels of each item on the CPU, the rows that group them, and where each row went; None for no change."""
    kept = grid.derived.get("items")
    if kept is None:
        rows = grid.batch_rows
        kept = (grid.batch_counts.tolist(), rows, None if rows is None else torch.argsort(rows))
        grid.derived["items"] = kept
    return kept
