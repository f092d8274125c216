"""Points -> voxels with a fixed number of points each, as detectors of the VoxelNet family take them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from sparseconv.checks import INTEGERS, as_device, check_values, described, numbers, shortened
from sparseconv.geometry.keys import KEY_LIMIT
from sparseconv.interop.arguments import first_rows, integers
from sparseconv.interop.spconv import point_loop


class PointToVoxel:
    """Puts points into the voxels of a box.

    Args:
        vsize_xyz: edge of a voxel, one number per axis.
        coors_range_xyz: lower corner, then upper corner of the box.
        num_point_features: F, columns of the points; the first D are positions.
        max_num_voxels: voxels past that many are dropped, first come first kept.
        max_num_points_per_voxel: points past that many are dropped from a voxel.
        device: of the points.

    >>> make = PointToVoxel([1.0, 1.0], [0.0, 0.0, 4.0, 2.0], 2, 10, 3)
    >>> voxels, indices, counts = make(torch.tensor([[0.5, 0.5], [3.5, 1.5], [0.2, 0.1]]))
    >>> indices.tolist(), counts.tolist()
    ([[0, 0], [1, 3]], [2, 1])
    """

    def __init__(
        self,
        vsize_xyz: Sequence[float] | np.ndarray,
        coors_range_xyz: Sequence[float] | np.ndarray,
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, given in (("vsize_xyz", vsize_xyz), ("coors_range_xyz", coors_range_xyz)):
            if not isinstance(given, (Sequence, np.ndarray)) or isinstance(given, (str, bytes)):
                raise TypeError(f"{name} must be a sequence of numbers, but it is {described(given)}")
        self.ndim = len(vsize_xyz)
        if not 1 <= self.ndim <= 4:
            raise ValueError(f"vsize_xyz must have one number for each of 1 to 4 axes; got {shortened(vsize_xyz)}")
        sizes = numbers(vsize_xyz, self.ndim, "vsize_xyz", positive=True)
        ends = numbers(coors_range_xyz, 2 * self.ndim, "coors_range_xyz")
        self.device = as_device(device)
        (self.num_point_features,) = integers([num_point_features], "num_point_features", self.ndim)
        (self.max_num_voxels,) = integers([max_num_voxels], "max_num_voxels", 0)
        (self.max_num_points_per_voxel,) = integers([max_num_points_per_voxel], "max_num_points_per_voxel", 1)
        # slowest axis first (z, y, x), as the indices are
        self.vsize = list(reversed(sizes))
        self.coors_range = [*reversed(ends[: self.ndim]), *reversed(ends[self.ndim :])]
        self.grid_size = _cells(self.coors_range[: self.ndim], self.coors_range[self.ndim :], self.vsize)

    def __call__(
        self, pc: torch.Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Points (M, F) -> voxels (V, P, F), indices (V, D) int32 with z first, points per voxel (V,) int32."""
        return self.generate_voxel_with_id(pc, clear_voxels, empty_mean)[:3]

    def generate_voxel_with_id(
        self, pc: torch.Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As calling it, and the voxel of each point (M,) int64, -1 for a point in none.

        Voxels are numbered in the order of their first points. Places without a point hold 0, or the mean of the
        voxel's points where ``empty_mean``; ``clear_voxels`` changes nothing, since every call has its own memory.
        """
        check_values("points", pc, f"(M, {self.num_point_features}) floating point")
        if pc.ndim != 2 or pc.shape[1] != self.num_point_features:
            raise ValueError(f"points must be (M, {self.num_point_features}); got {tuple(pc.shape)}")
        if not pc.is_floating_point():
            raise TypeError(f"points must be floating point; got {pc.dtype}")
        if pc.device.type != self.device.type:
            raise ValueError(f"points are on {pc.device}, this was made for {self.device}")
        if math.prod(self.grid_size) >= KEY_LIMIT:
            raise ValueError(
                f"the box has {' x '.join(map(str, self.grid_size))} voxels (z first), and 64-bit keys number "
                "fewer than 2^63: use larger voxels or a smaller box"
            )
        if point_loop.serves(pc):
            low = self.coors_range[: self.ndim]
            most = self.max_num_voxels, self.max_num_points_per_voxel
            return point_loop.put(pc, self.vsize, low, self.grid_size, *most, empty_mean)
        with torch.no_grad():
            return self._generate(pc, empty_mean)

    def _generate(
        self, pc: torch.Tensor, empty_mean: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """By torch's operations, on every device."""
        size, low = pc.new_tensor(self.vsize), pc.new_tensor(self.coors_range[: self.ndim])
        cells = torch.floor((pc[:, : self.ndim].flip(1) - low) / size)
        inside = torch.ones(len(pc), dtype=torch.bool, device=pc.device)
        for n, column in zip(self.grid_size, cells.unbind(1)):
            inside &= (column >= 0) & (column < n)
        at = inside.nonzero()[:, 0]
        cells = cells.index_select(0, at).int()
        first, voxel = first_rows(cells)  # voxels are in the order of their first points
        count, most = min(len(first), self.max_num_voxels), self.max_num_points_per_voxel
        held = torch.bincount(voxel, minlength=len(first))
        order = torch.argsort(voxel, stable=True)
        begin = (held.cumsum(0) - held)[voxel[order]]
        place = torch.empty_like(voxel).index_copy_(0, order, torch.arange(len(at), device=pc.device) - begin)
        known = voxel < count
        ids = torch.full((len(pc),), -1, dtype=torch.int64, device=pc.device)
        ids = ids.index_copy_(0, at, torch.where(known, voxel, -1))
        indices, num = cells[first[:count]], held[:count].clamp(max=most)
        taken = ((place < most) & known).nonzero()[:, 0]
        voxels = torch.zeros(count, most, self.num_point_features, device=pc.device)
        voxels[voxel[taken], place[taken]] = pc[at[taken]].float()
        if empty_mean:
            mean = voxels.sum(1, keepdim=True) / num.clamp(min=1)[:, None, None]
            blank = torch.arange(most, device=pc.device)[None, :, None] >= num[:, None, None]
            voxels = torch.where(blank, mean, voxels)
        return voxels, indices, num.int(), ids


def _cells(low: list[float], high: list[float], size: list[float]) -> list[int]:
    """How many voxels there are along each axis: as spconv counts, in fp32 and halves away from 0."""
    a, b, v = torch.tensor([low, high, size], dtype=torch.float64).float()
    count = ((b - a) / v).double().nan_to_num(nan=KEY_LIMIT, posinf=KEY_LIMIT)  # which is an error later
    return [int(n) for n in (count + torch.copysign(torch.full_like(count, 0.5), count)).tolist()]


def gather_features_by_pc_voxel_id(
    seg_res_features: torch.Tensor, pc_voxel_id: torch.Tensor, invalid_value: float = 0
) -> torch.Tensor:
    """Features of voxels (V, ...) -> those of points (M, ...); ``invalid_value`` for points in no voxel."""
    check_values("seg_res_features", seg_res_features, "(V, ...)")
    check_values("pc_voxel_id", pc_voxel_id, "(M,) integers")
    if pc_voxel_id.dtype not in INTEGERS or pc_voxel_id.ndim != 1 or seg_res_features.ndim < 1:
        raise TypeError(
            f"pc_voxel_id must be (M,) integers, features (V, ...); got {tuple(pc_voxel_id.shape)} {pc_voxel_id.dtype} "
            f"and {tuple(seg_res_features.shape)}"
        )
    ids = pc_voxel_id.to(seg_res_features.device)
    shape = (ids.shape[0], *seg_res_features.shape[1:])
    result = seg_res_features.new_full(shape, invalid_value)
    inside = ids >= 0
    if ids.device.type == "cpu" and len(ids) and int(ids.max()) >= len(seg_res_features):  # a GPU checks by itself
        raise ValueError(f"there are features of {len(seg_res_features)} voxels; a point is in voxel {int(ids.max())}")
    result[inside] = seg_res_features[ids[inside]]
    return result
