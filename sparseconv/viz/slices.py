"""Plane cuts through a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sparseconv.geometry import VoxelGrid

if TYPE_CHECKING:
    from jaxtyping import Float32, Shaped
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage


def slice_image(
    grid: VoxelGrid, values: Shaped[torch.Tensor, " N *C"], axis: int, at: float, *, batch: int = 0
) -> tuple[Float32[np.ndarray, "rows columns *C"], tuple[float, float, float, float]]:
    """The layer of voxels that a plane passes through, as an image.

    Args:
        grid: rank 3.
        values: (N,) numbers or (N, C) colors, one row per voxel.
        axis: 0, 1 or 2, the normal of the plane; the other two axes become columns and rows, in this order.
        at: where the plane is along its normal, in the length unit of the grid's voxel size.
        batch: the item to show.

    Returns:
        (image (rows, columns) or (rows, columns, C) float32, NaN where there is no voxel; the box (left, right, bottom,
        top) that it covers, in the length unit).

    >>> grid = VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 5]]), voxel_size=0.5)
    >>> image, box = slice_image(grid, torch.tensor([1.0, 2.0, 3.0]), axis=2, at=0.2)
    >>> image.tolist(), box
    ([[1.0, nan], [nan, 2.0]], (0.0, 1.0, 0.0, 1.0))
    """
    if grid.rank != 3 or axis not in (0, 1, 2):
        raise ValueError(f"slices are of rank 3 along axis 0, 1 or 2; got rank {grid.rank}, axis {axis}")
    if len(values) != len(grid):
        raise ValueError(f"values must have {len(grid)} rows, one per voxel; got {tuple(values.shape)}")
    size, origin, extent = grid.voxel_size, grid.origin, grid.extent
    layer = int(np.floor((at - origin[axis]) / size[axis]))
    coords = grid.coords.cpu()
    here = (coords[:, 0] == batch) & (coords[:, 1 + axis] == layer)
    across, up = (a for a in range(3) if a != axis)
    column = (coords[here, 1 + across] - extent.start[across]).long().numpy()
    row = (coords[here, 1 + up] - extent.start[up]).long().numpy()
    image = np.full((extent.shape[up], extent.shape[across], *values.shape[1:]), np.nan, np.float32)
    image[row, column] = values.detach().cpu()[here].float().numpy()
    box = []
    for a in (across, up):
        box += [origin[a] + size[a] * extent.start[a], origin[a] + size[a] * extent.end[a]]
    return image, (box[0], box[1], box[2], box[3])


def show_slice(
    axes: Axes,
    grid: VoxelGrid,
    values: Shaped[torch.Tensor, " N *C"],
    axis: int,
    at: float,
    *,
    unit: str = "",
    names: tuple[str, str, str] = ("x", "y", "z"),
    **options: Any,
) -> AxesImage:
    """Draw `slice_image` with its axes in the length unit; ``options`` go to matplotlib's ``imshow``.

    >>> from sparseconv.viz import new_figure
    >>> grid = VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0]]), voxel_size=0.5)
    >>> with new_figure(3, 3) as figure:
    ...     shown = show_slice(figure.subplots(), grid, torch.tensor([1.0, 2.0]), axis=2, at=0.2, unit="m")
    >>> shown.axes.get_xlabel(), [float(end) for end in shown.get_extent()]
    ('x [m]', [0.0, 1.0, 0.0, 1.0])
    """
    image, box = slice_image(grid, values, axis, at)
    across, up = (a for a in range(3) if a != axis)
    shown = axes.imshow(image, origin="lower", extent=box, interpolation="nearest", **options)
    axes.set_xlabel(f"{names[across]} [{unit}]" if unit else names[across])
    axes.set_ylabel(f"{names[up]} [{unit}]" if unit else names[up])
    return shown
