"""Voxel generators with the names of spconv 1.x and 2.x, and its operations on boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sparseconv.checks import described
from sparseconv.interop.spconv.boxes import (  # noqa: F401
    non_max_suppression_cpu,
    rbbox_intersection,
    rbbox_iou,
    rotate_non_max_suppression_cpu,
)
from sparseconv.interop.spconv.pytorch.utils import PointToVoxel


class VoxelGeneratorV2:
    """Points (numpy) -> voxels, as a dictionary.

    Args:
        voxel_size: edge of a voxel, x first.
        point_cloud_range: lower corner, then upper corner.
        max_num_points, max_voxels: what is kept, first come first kept.
        full_mean: fill places without a point with the mean of the voxel's points.
    """

    def __init__(
        self,
        voxel_size: Sequence[float],
        point_cloud_range: Sequence[float],
        max_num_points: int,
        max_voxels: int = 20000,
        full_mean: bool = False,
    ) -> None:
        columns = 4  # as many as there can be axes: the points say how many they have
        made = PointToVoxel(voxel_size, point_cloud_range, columns, max_voxels, max_num_points)
        self.voxel_size = np.asarray(voxel_size, np.float32)
        self.point_cloud_range = np.asarray(point_cloud_range, np.float32)
        self.grid_size = np.asarray(made.grid_size[::-1], np.int64)
        self.max_num_points_per_voxel, self.max_voxels = made.max_num_points_per_voxel, made.max_num_voxels
        self.full_mean = full_mean

    def generate(self, points: np.ndarray, max_voxels: int | None = None) -> dict[str, Any]:
        """Points (M, F) -> ``voxels`` (V, P, F), ``coordinates`` (V, D) z first, ``num_points_per_voxel`` (V,),
        ``voxel_point_mask`` (V, P, 1) and ``voxel_num``."""
        if not isinstance(points, np.ndarray) or points.ndim != 2:
            raise TypeError(f"points must be a numpy array (M, F), but it is {described(points)}")
        make = PointToVoxel(
            self.voxel_size.tolist(),
            self.point_cloud_range.tolist(),
            points.shape[1],
            self.max_voxels if max_voxels is None else max_voxels,
            self.max_num_points_per_voxel,
        )
        voxels, indices, count = (t.numpy() for t in make(_as_tensor(points), empty_mean=self.full_mean))
        mask = np.arange(self.max_num_points_per_voxel)[None] < count[:, None]
        return {
            "voxels": voxels,
            "coordinates": indices,
            "num_points_per_voxel": count,
            "voxel_point_mask": mask[..., None].astype(voxels.dtype),
            "voxel_num": len(voxels),
        }


class VoxelGenerator(VoxelGeneratorV2):
    """`VoxelGeneratorV2` whose ``generate`` returns (voxels, coordinates, num_points_per_voxel)."""

    def generate(self, points: np.ndarray, max_voxels: int | None = None) -> Any:
        made = super().generate(points, max_voxels)
        return made["voxels"], made["coordinates"], made["num_points_per_voxel"]


class _Point2VoxelCPU(PointToVoxel):
    """The generator of spconv 2.x for arrays that have ``.numpy()`` (torch, cumm) or are numpy arrays."""

    def point_to_voxel(self, pc: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Points (M, F) -> (voxels, indices z first, points per voxel), torch tensors; ``.numpy()`` reads them."""
        return self(_as_tensor(pc))

    def point_to_voxel_empty_mean(self, pc: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As ``point_to_voxel``, with places without a point filled by the mean."""
        return self(_as_tensor(pc), empty_mean=True)


def _on_axes(rank: int) -> Any:
    return type(f"Point2VoxelCPU{rank}d", (_Point2VoxelCPU,), {"__doc__": f"{rank} axes.", "__module__": __name__})


Point2VoxelCPU1d, Point2VoxelCPU2d, Point2VoxelCPU3d, Point2VoxelCPU4d = map(_on_axes, (1, 2, 3, 4))


def _as_tensor(pc: Any) -> torch.Tensor:
    if isinstance(pc, torch.Tensor):
        return pc
    return torch.from_numpy(np.ascontiguousarray(pc if isinstance(pc, np.ndarray) else pc.numpy()))
