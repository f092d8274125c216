"""Which cells a convolution computes: every one of the box, or the occupied ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from sparseconv.geometry import VoxelGrid
from sparseconv.viz.palette import EMPTY, INK, ROW, WINDOW

if TYPE_CHECKING:
    from jaxtyping import Bool
    from matplotlib.axes import Axes


def unit_of(grid: VoxelGrid, unit: str | None) -> str:
    """The unit of labels: the one given, else voxels where the grid has no voxel size, else none."""
    return ("" if grid.is_placed else "voxels") if unit is None else unit


def axis_label(name: str, unit: str) -> str:
    """The name of an axis with its unit, where there is one."""
    return f"{name} [{unit}]" if unit else name


def dense_against_sparse(
    left: Axes,
    right: Axes,
    occupied: Bool[np.ndarray, "rows columns"] | Bool[torch.Tensor, "rows columns"],
    center: tuple[int, int],
    kernel_size: int = 3,
) -> tuple[int, int]:
    """Draw one layer of voxels twice: with the cells that a dense, and those that a submanifold convolution computes.

    Args:
        left: the axes for the dense convolution.
        right: the axes for the sparse one.
        occupied: (rows, columns) bool, the layer.
        center: (row, column) of an occupied cell whose window is shown.
        kernel_size: the width of the window.

    Returns:
        Multiplications by a weight in the layer, (dense, sparse): cells times taps, and pairs of neighbors.

    >>> from sparseconv.viz import new_figure
    >>> with new_figure(4, 2) as figure:
    ...     dense_against_sparse(*figure.subplots(1, 2), np.eye(4, dtype=bool), center=(1, 1))
    (144, 10)
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    cells = np.asarray(occupied, bool)
    rows, columns = cells.shape
    half = kernel_size // 2
    padded = np.pad(cells, half)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel_size, kernel_size))
    pairs = int(windows[cells].sum())
    for axes, computed, title in (
        (left, np.ones_like(cells), "dense: every cell of the box"),
        (right, cells, "sparse: the occupied cells"),
    ):
        picture = np.where(cells, 2, computed.astype(int))
        axes.imshow(picture, cmap=ListedColormap([EMPTY, ROW, INK]), vmin=0, vmax=2, origin="lower")
        axes.set_xticks(np.arange(columns + 1) - 0.5, labels=[])
        axes.set_yticks(np.arange(rows + 1) - 0.5, labels=[])
        axes.grid(color="#e6e9ee", linewidth=0.25)
        axes.tick_params(length=0)
        axes.set_title(title)
        row, column = center
        axes.add_patch(
            Rectangle((column - half - 0.5, row - half - 0.5), kernel_size, kernel_size, fill=False, color=WINDOW, lw=2)
        )
        for r in range(row - half, row + half + 1):
            for c in range(column - half, column + half + 1):
                inside = 0 <= r < rows and 0 <= c < columns
                if (axes is left and inside) or (inside and cells[r, c]):
                    axes.plot(c, r, ".", color=WINDOW, markersize=4.5)
    return cells.size * kernel_size**2, pairs
