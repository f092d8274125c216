"""Features of voxels at points."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.checks import check_choice, check_values
from sparseconv.interop.arguments import check_features, floor_to_int32
from sparseconv.interop.flex_gemm.geometry import sizes, voxels
from sparseconv.ops.interpolation import Interpolation

#: points that are looked up at once: about 0.8 KB each meanwhile
MOST_POINTS = 1 << 20
#: set by clients, without effect
HASHMAP_RATIO = 2.0


def set_hashmap_ratio(ratio: float) -> None:
    """Kept in ``HASHMAP_RATIO``, without effect."""
    global HASHMAP_RATIO
    HASHMAP_RATIO = ratio


def grid_sample_3d(
    feats: torch.Tensor, coords: torch.Tensor, shape: Any, grid: torch.Tensor, mode: str = "trilinear"
) -> torch.Tensor:
    """The features at points, which are in voxels: the voxel c is [c, c + 1), its center c + 0.5.

    Args:
        feats: (N, C) floating point.
        coords: (N, 4) whole numbers, the batch item first.
        shape: batch size, C, W, H, D.
        grid: (B, L, 3) points, floating point, for each of the first B batch items.
        mode: ``"trilinear"``, whose weights are divided by the sum over the voxels that are there; ``"nearest"``, the
            voxel of the whole part of a point. Both are 0 where there is no voxel.

    Returns:
        (B, L, C), dtype of feats, differentiable in feats to any order, and in the points of ``"trilinear"``.

    >>> coords = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]])
    >>> points = torch.tensor([[[0.75, 0.5, 0.5], [1.5, 0.5, 0.9]]])
    >>> grid_sample_3d(torch.tensor([[4.0], [8.0]]), coords, (1, 1, 2, 1, 1), points).flatten().tolist()
    [5.0, 8.0]
    """
    check_choice("mode", mode, ("nearest", "trilinear"))
    items, channels, *edges = sizes(shape)
    place = voxels("coords", floor_to_int32("coords", coords), items, edges)
    check_features("feats", feats, len(place))
    check_values("grid", grid, "(B, L, 3)")
    if grid.ndim != 3 or grid.shape[2] != 3 or len(grid) > items or not grid.is_floating_point():
        raise ValueError(
            f"grid must be (B, L, 3) floating point, B at most {items}; got {tuple(grid.shape)} {grid.dtype}"
        )
    if feats.shape[1] != channels:
        raise ValueError(f"feats must have the {channels} channels of the shape; got {tuple(feats.shape)}")
    batch = torch.arange(len(grid), device=grid.device).repeat_interleave(grid.shape[1])
    near = mode == "nearest"
    points = (grid.detach().double().trunc() + 0.5 if near else grid).flatten(0, 1)
    parts = []
    for rows, owner in zip(points.split(MOST_POINTS), batch.split(MOST_POINTS)):
        plan = Interpolation(place, rows, owner, mode="nearest" if near else "linear", renormalize=not near)
        parts.append(plan.interpolate(feats, None if near else rows))
    return torch.cat(parts).view(*grid.shape[:2], channels)


#: the same function; FlexGEMM has a second one to compare with
grid_sample_3d_torch = grid_sample_3d


class GridSample3dFunction:
    """`grid_sample_3d` as code that calls FlexGEMM's autograd function asks for it."""

    apply = staticmethod(grid_sample_3d)
