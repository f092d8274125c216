"""Points -> voxels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sparseconv import transforms
from sparseconv.checks import INT32, INTEGERS, Floats, check_values, checked_batch_size, numbers
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.keys import KeySpace
from sparseconv.geometry.ranges import IndexRange
from sparseconv.gpu.cuda_capability import SORTING, has_kernels

if TYPE_CHECKING:
    from jaxtyping import Float, Int64, Integer

#: what to do with a list of clouds
SEVERAL = "a batch is {joined} with batch=torch.repeat_interleave(torch.tensor([len(p) for p in points]))"


@transforms.constant
def voxelize(
    points: Float[torch.Tensor, "M D"],
    voxel_size: float | Sequence[float],
    batch: Integer[torch.Tensor, " M"] | None = None,
    *,
    batch_size: int | None = None,
    origin: float | Sequence[float] = 0.0,
) -> tuple[VoxelGrid, Int64[torch.Tensor, " M"]]:
    """Put points into voxels: the grid of the occupied ones, in lexicographic order, and the voxel row of each point.

        voxel(p) = floor((p - origin) / voxel_size)

    Args:
        points: (M, D) floating point, D from 1 to 4, in the unit of ``voxel_size``; float32 or wider, since float16
            numbers near 100 are 0.06 apart.
        voxel_size: edge of a voxel, one number or one per axis.
        batch: (M,) integers, the batch item of each point; default: one scene.
        batch_size: number of batch items; default: the largest one present + 1.
        origin: position of the lower corner of voxel 0.

    Returns:
        (`VoxelGrid`, point_rows (M,) int64).

    Raises:
        TypeError: points are not floating point, or batch is not integer.
        ValueError: wrong shapes, NaN or infinite points, voxel indices past 32 bits, or points in float16 or bfloat16
            whose numbers are further apart than voxels (of wider types, that is a warning).

    >>> grid, rows = voxelize(torch.tensor([[0.02, 0.31], [0.07, 0.30], [-0.01, 0.0]]), voxel_size=0.1)
    >>> grid.coords.tolist(), rows.tolist()
    ([[0, -1, 0], [0, 0, 3]], [1, 1, 0])
    """
    check_values("points", points, "(M, D) floating point", SEVERAL)
    if not points.is_floating_point():
        raise TypeError(f"points must be floating point; got {points.dtype}. Integer voxels go to VoxelGrid(coords)")
    if points.ndim != 2 or not 1 <= points.shape[1] <= 4:
        turned = points.ndim == 2 and 1 <= points.shape[0] <= 4
        advice = "transpose them, points.T" if turned else "positions alone, other columns are features"
        if points.ndim == 3:
            advice = (
                "a batch is points.flatten(0, 1) with "
                "batch=torch.arange(len(points)).repeat_interleave(points.shape[1])"
            )
        raise ValueError(f"points must be (M, D) with 1 to 4 axes; got shape {tuple(points.shape)}: {advice}")
    count, rank = points.shape
    size = numbers(voxel_size, rank, "voxel_size", positive=True)
    corner = numbers(origin, rank, "origin")
    if batch_size is not None:
        batch_size = checked_batch_size(batch_size)
    if rank == 4 and isinstance(voxel_size, (int, float)):
        warnings.warn(
            "points with 4 columns become voxels with 4 axes. If the fourth column is an intensity or a time, pass "
            "points[:, :3]; if it is an axis, give voxel_size as 4 numbers",
            stacklevel=3,
        )
    if batch is not None:
        check_values("batch", batch, f"({count},) integers")
        if batch.dtype not in INTEGERS:
            raise TypeError(f"batch must be integers; got {batch.dtype}")
        if batch.shape != (count,) or batch.device != points.device:
            raise ValueError(f"batch must be ({count},) on {points.device}; got {tuple(batch.shape)} on {batch.device}")
    if count == 0:
        nothing = torch.zeros(0, rank + 1, dtype=torch.int32, device=points.device)
        return VoxelGrid(nothing, batch_size, size, corner), torch.zeros(0, dtype=torch.int64, device=points.device)
    if points.device.type not in SORTING:
        of_points = None if batch is None else batch.cpu()
        grid, rows = voxelize(points.cpu(), voxel_size, of_points, batch_size=batch_size, origin=origin)
        return grid.to(points.device), rows.to(points.device)
    cells = _cells(points.detach(), size, corner)
    low, high = _bounds(cells, batch)
    if not all(map(math.isfinite, low + high)):
        finite = torch.isfinite(points).all(1)
        if not bool(finite.all()):
            bad = (~finite).nonzero()
            raise ValueError(
                f"point {int(bad[0])} is {points[bad[0, 0]].tolist()}, and {len(bad)} points in all are not finite: "
                "drop them"
            )
    furthest = max(map(abs, low[1:] + high[1:]))
    if not furthest < INT32.max:
        raise ValueError(
            f"a voxel size of {voxel_size} puts points at voxel {furthest:.3g}, past 32 bits: use larger voxels or "
            "move the origin"
        )
    if coarse := _coarse(points.dtype, size, corner, low[1:], high[1:]):
        if points.dtype.itemsize < 4:
            raise ValueError(coarse)
        warnings.warn(coarse, stacklevel=3)
    if low[0] < 0:
        raise ValueError(f"batch items start at 0; got {low[0]:.0f}")
    if batch_size is not None and high[0] >= batch_size:
        raise ValueError(f"batch names item {high[0]:.0f}, but batch_size is {batch_size}")
    items = checked_batch_size(int(high[0]) + 1) if batch_size is None else batch_size
    box = IndexRange([int(v) for v in low[1:]], [int(v) + 1 for v in high[1:]])
    coords, rows = _merged(cells, batch, KeySpace(IndexRange((0, *box.start), (items, *box.end))))
    like = object.__new__(VoxelGrid)
    like.batch_size, like.voxel_size, like.origin, like.is_placed = items, size, corner, True
    return like._known(coords, box, fills=True), rows


def _merged(cells: torch.Tensor, batch: torch.Tensor | None, space: KeySpace) -> tuple[torch.Tensor, torch.Tensor]:
    """Voxels (N, 1+D) int32 in lexicographic order, and the row of each point (M,) int64, of cells within a space."""
    columns = cells.int()
    if batch is not None:
        columns = torch.cat([batch[:, None].int(), columns], 1)
    keys = space.keys(columns, narrow=True)
    if keys.dtype == torch.int32 and has_kernels(keys.device):  # a radix sort of as many bits as there are keys
        from sparseconv.gpu.radix_sort import unique_keys  # Triton is loaded where it is used

        first, rows = unique_keys(keys, max(1, (math.prod(space.size) - 1).bit_length()))
        coords = columns.index_select(0, first)
    else:
        keys, rows = torch.unique(keys, return_inverse=True)
        # all points of a voxel write the same numbers
        coords = columns.new_empty(len(keys), columns.shape[1]).index_copy_(0, rows, columns)
    return coords if batch is not None else torch.nn.functional.pad(coords, (1, 0)), rows


def _cells(points: torch.Tensor, size: Floats, corner: Floats) -> torch.Tensor:
    """floor((p - corner) / size), (M, D) float64. Reads nothing back, where all axes have one size and one corner."""

    def spread(values: Floats) -> torch.Tensor:  # a GPU multiplies by the inverse of a number that the CPU has
        return wide.new_full((), values[0]) if len({*values}) == 1 else wide.new_tensor(values)

    wide = points.double()
    if any(corner):
        wide = wide - spread(corner)
    return torch.div(wide, spread(size)).floor_()


def _bounds(cells: torch.Tensor, batch: torch.Tensor | None) -> tuple[Floats, Floats]:
    """Smallest and largest batch item and cell along each axis, read at once; nan or infinite where a cell is."""
    ends = torch.stack(torch.aminmax(cells, dim=0))
    if batch is None:
        low, high = ends.tolist()
        return (0.0, *low), (0.0, *high)
    items = torch.stack(torch.aminmax(batch)).double()[:, None]
    low, high = torch.cat([items, ends], 1).tolist()
    return tuple(low), tuple(high)


def _coarse(dtype: torch.dtype, size: Floats, corner: Floats, low: Sequence[float], high: Sequence[float]) -> str:
    """What to say where numbers of a dtype, as large as those of points in these cells, are further apart than voxels:
    of neighboring voxels some can hold no point. Empty where they are not."""
    eps = torch.finfo(dtype).eps
    for s, c, first, last in zip(size, corner, low, high):
        furthest = max(abs(first * s + c), abs(last * s + c))
        apart = eps * 2.0 ** (math.frexp(furthest)[1] - 1)
        if apart > s:
            return (
                f"points are {dtype}, whose numbers near {furthest:.6g} are {apart:.3g} apart, but voxels are {s:.3g} "
                "wide: keep positions in float64, or move the origin before they become narrower"
            )
    return ""
