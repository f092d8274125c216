"""Points -> voxels."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from sparseconv import transforms
from sparseconv.geometry.arguments import INT32, INTEGERS, checked_batch_size, numbers
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.kinds import check_values


@transforms.constant
def voxelize(
    points: torch.Tensor,
    voxel_size: float | Sequence[float],
    batch: torch.Tensor | None = None,
    *,
    batch_size: int | None = None,
    origin: float | Sequence[float] = 0.0,
) -> tuple[VoxelGrid, torch.Tensor]:
    """Put points into voxels: the grid of the occupied ones, in lexicographic order, and the voxel row of each point.

        voxel(p) = floor((p - origin) / voxel_size)

    Args:
        points: (M, D) floating point, D from 1 to 4, in the unit of ``voxel_size``.
        voxel_size: edge of a voxel, one number or one an axis.
        batch: (M,) integers, the batch item of each point; default: one scene.
        batch_size: number of batch items; default: the largest one present + 1.
        origin: position of the lower corner of voxel 0.

    Returns:
        (`VoxelGrid`, point_rows (M,) int64).

    Raises:
        TypeError: points are not floating point, or batch is not integer.
        ValueError: wrong shapes, NaN or infinite points, or voxel indices past 32 bits.

    >>> grid, rows = voxelize(torch.tensor([[0.02, 0.31], [0.07, 0.30], [-0.01, 0.0]]), voxel_size=0.1)
    >>> grid.coords.tolist(), rows.tolist()
    ([[0, -1, 0], [0, 0, 3]], [1, 1, 0])
    """
    check_values("points", points, "(M, D) floating point")
    if not points.is_floating_point():
        raise TypeError(f"points must be floating point; got {points.dtype}. Integer voxels go to VoxelGrid(coords)")
    if points.ndim != 2 or not 1 <= points.shape[1] <= 4:
        turned = points.ndim == 2 and 1 <= points.shape[0] <= 4
        raise ValueError(
            f"points must be (M, D) with 1 to 4 axes; got shape {tuple(points.shape)}"
            + (": transpose them, points.T" if turned else ": positions alone, other columns are features")
        )
    rank = points.shape[1]
    size = numbers(voxel_size, rank, "voxel_size", positive=True)
    corner = numbers(origin, rank, "origin")
    if batch_size is not None:
        batch_size = checked_batch_size(batch_size)
    if rank == 4 and isinstance(voxel_size, (int, float)):
        warnings.warn(
            "points of 4 columns become voxels in 4 axes. Where the fourth is intensity or time of no axis, pass "
            "points[:, :3]; where it is an axis, give voxel_size as 4 numbers",
            stacklevel=3,
        )
    if batch is None:
        batch = torch.zeros(len(points), dtype=torch.int32, device=points.device)
    check_values("batch", batch, f"({len(points)},) integers")
    if batch.dtype not in INTEGERS:
        raise TypeError(f"batch must be integers; got {batch.dtype}")
    if batch.shape != (len(points),) or batch.device != points.device:
        raise ValueError(
            f"batch must be ({len(points)},) on {points.device}; got {tuple(batch.shape)} on {batch.device}"
        )
    wide = points.detach().double()
    finite = torch.isfinite(wide).all(1)
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise ValueError(
            f"point {bad} is {points[bad].tolist()}, and {int((~finite).sum())} points in all are not finite: drop them"
        )
    if len(points) == 0:
        nothing = torch.zeros(0, rank + 1, dtype=torch.int32, device=points.device)
        return VoxelGrid(nothing, batch_size, size, corner), torch.zeros(0, dtype=torch.int64, device=points.device)
    cells = torch.floor((wide - wide.new_tensor(corner)) / wide.new_tensor(size))
    if bool((cells.abs() >= INT32.max).any()):
        raise ValueError(
            f"a voxel size of {voxel_size} puts points at voxel {cells.abs().max().item():.3g}, past 32 bits: use "
            "larger voxels or move the origin"
        )
    coords = torch.cat([batch[:, None].long(), cells.long()], 1)
    everything = VoxelGrid(coords, batch_size, size, corner, duplicates="first")
    grid, _ = everything.sorted("lexicographic")
    return grid, grid.lookup(coords)
