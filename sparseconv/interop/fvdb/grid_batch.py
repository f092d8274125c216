"""Voxels of a batch, with a voxel size and an origin for each item."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.checks import INTEGERS, as_tensor, check_kind, check_tensor, check_values
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Ints
from sparseconv.interop.arguments import axes
from sparseconv.interop.fvdb.jagged_tensor import JaggedTensor
from sparseconv.plan.convolution import ConvolutionPlan as Plan


def steps(value: Any, name: str) -> Ints:
    """Three positive whole numbers."""
    return tuple(axes(value, 3, name, 1))


class GridBatch:
    """Voxels in the order they were given; make it by `from_ijk`, or of a `VoxelGrid` by `from_voxel_grid`.

    ``voxel_grid`` is the `VoxelGrid` of their indices.

    >>> grid = GridBatch.from_ijk(JaggedTensor([torch.tensor([[0, 0, 0]]), torch.tensor([[0, 0, 1], [2, 0, 0]])]))
    >>> grid.grid_count, grid.total_voxels, grid.conv_grid(2, 2).ijk.unbind()[1].tolist()
    (2, 3, [[0, 0, 0], [1, 0, 0]])
    """

    def __init__(self, voxel_grid: VoxelGrid, voxel_sizes: torch.Tensor, origins: torch.Tensor) -> None:
        self.voxel_grid = voxel_grid
        #: (B, 3) float64, on the CPU
        self._sizes, self._origins = voxel_sizes, origins

    @classmethod
    def from_ijk(cls, ijk: JaggedTensor, voxel_sizes: Any = 1, origins: Any = 0) -> GridBatch:
        """Voxels (N, 3) of each item, each once; sizes and origins are one number, three, or three for each item."""
        check_kind("ijk", ijk, JaggedTensor, "JaggedTensor([ijk, ...]) makes one of tensors (N, 3)")
        if ijk.jdata.ndim != 2 or ijk.jdata.shape[1] != 3 or ijk.dtype not in INTEGERS:
            raise ValueError(f"ijk must be integers (N, 3) for each item; got {tuple(ijk.jdata.shape)} {ijk.dtype}")
        coords = torch.cat([ijk.jidx[:, None].long(), ijk.jdata.long()], 1)
        grid = VoxelGrid(coords, len(ijk), duplicates="first")
        sizes = _broadcast("voxel_sizes", voxel_sizes, len(ijk))
        if not bool((sizes > 0).all()):
            raise ValueError(f"voxel_sizes must be positive; got {voxel_sizes}")
        return cls(grid, sizes, _broadcast("origins", origins, len(ijk)))

    @classmethod
    def from_voxel_grid(cls, grid: VoxelGrid) -> GridBatch:
        """The voxels of a grid in three axes, rows item by item, with its size and origin."""
        check_kind("grid", grid, VoxelGrid, "GridBatch.from_ijk makes a GridBatch of indices")
        if grid.rank != 3:
            raise ValueError(f"a GridBatch has three axes; the grid has {grid.rank}")
        if grid.batch_rows is not None:
            raise ValueError("rows of a GridBatch go item by item: sort the grid's, grid.sorted() gives their order")
        return cls(grid, *(_broadcast("grid", value, grid.batch_size) for value in (grid.voxel_size, grid.origin)))

    # ---- reading

    @property
    def grid_count(self) -> int:
        """The number of items."""
        return self.voxel_grid.batch_size

    def __len__(self) -> int:
        return self.grid_count

    @property
    def total_voxels(self) -> int:
        return len(self.voxel_grid)

    @property
    def num_voxels(self) -> torch.Tensor:
        """(B,): voxels of each item."""
        return self.voxel_grid.batch_counts

    @property
    def device(self) -> torch.device:
        return self.voxel_grid.device

    @property
    def voxel_sizes(self) -> torch.Tensor:
        """(B, 3) float32."""
        return self._sizes.float().to(self.device)

    @property
    def origins(self) -> torch.Tensor:
        """(B, 3) float32."""
        return self._origins.float().to(self.device)

    @property
    def joffsets(self) -> torch.Tensor:
        """(B + 1,): item b owns rows joffsets[b] .. joffsets[b + 1]."""
        return self.voxel_grid.batch_offsets

    @property
    def ijk(self) -> JaggedTensor:
        """The voxels (N, 3) int32 of each item."""
        return self.jagged_like(self.voxel_grid.coords[:, 1:].clone())

    def jagged_like(self, data: torch.Tensor) -> JaggedTensor:
        """Rows (N, ...), one for each voxel, as a JaggedTensor."""
        check_tensor("data", data)
        if data.ndim < 1 or len(data) != self.total_voxels:
            raise ValueError(f"there are {self.total_voxels} voxels; got {tuple(data.shape)}")
        return JaggedTensor._of(data, self.joffsets)

    def voxel_to_world(self, ijk: JaggedTensor) -> JaggedTensor:
        """Places (M, 3) of each item in voxels, as lengths: ``ijk * voxel_size + origin``, differentiable."""
        sizes, origins = self._placed("ijk", ijk)
        return ijk.jagged_like(ijk.jdata * sizes + origins)

    def world_to_voxel(self, points: JaggedTensor) -> JaggedTensor:
        """Places (M, 3) of each item as lengths, in voxels: ``(points - origin) / voxel_size``, differentiable."""
        sizes, origins = self._placed("points", points)
        return points.jagged_like((points.jdata - origins) / sizes)

    def _placed(self, name: str, places: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The size and the origin of each row's item, in the dtype of its places."""
        check_kind(name, places, JaggedTensor, "JaggedTensor([places, ...]) makes one of tensors (M, 3)")
        data, dtype = places.jdata, torch.promote_types(places.dtype, torch.get_default_dtype())
        if len(places) != self.grid_count or data.ndim != 2 or data.shape[1] != 3:
            raise ValueError(f"{name} must be (M, 3) for {self.grid_count} items; got {tuple(data.shape)}")
        sizes, origins = (values.to(data.device, dtype)[places.jidx.long()] for values in (self._sizes, self._origins))
        return sizes, origins

    def is_same(self, other: GridBatch) -> bool:
        """Whether both are the same grid, and not only equal ones."""
        return isinstance(other, GridBatch) and self.voxel_grid is other.voxel_grid

    def to(self, device: torch.device | str) -> GridBatch:
        """On another device; itself if it is there."""
        moved = self.voxel_grid.to(device)
        return self if moved is self.voxel_grid else GridBatch(moved, self._sizes, self._origins)

    # ---- other grids

    def conv_grid(self, kernel_size: Any, stride: Any = 1) -> GridBatch:
        """Every voxel that sees one of these through a kernel."""
        kernel, step = steps(kernel_size, "kernel_size"), steps(stride, "stride")
        if kernel == step == (1, 1, 1):
            return self
        return self.scaled(Plan(self.voxel_grid, kernel, stride=step, target="full").target, step)

    def conv_transpose_grid(self, kernel_size: Any, stride: Any = 1) -> GridBatch:
        """Every voxel that one of these sees through a kernel."""
        kernel, step = steps(kernel_size, "kernel_size"), steps(stride, "stride")
        if kernel == step == (1, 1, 1):
            return self
        return self.scaled(Plan.transposed(self.voxel_grid, kernel, stride=step).target, step, finer=True)

    def coarsened_grid(self, coarsening_factor: Any) -> GridBatch:
        """The voxels floor(ijk / factor), each centered on the ones it holds."""
        step = steps(coarsening_factor, "coarsening_factor")
        coarse = self.scaled(self.voxel_grid.coarsen(step), step)
        shift = (torch.tensor(step, dtype=torch.float64) - 1) / 2
        return GridBatch(coarse.voxel_grid, coarse._sizes, self._origins + shift * self._sizes)

    def scaled(self, voxel_grid: VoxelGrid, step: Ints, finer: bool = False) -> GridBatch:
        """Other voxels of the same scene, ``step`` times as large, or as small."""
        factor = torch.tensor(step, dtype=torch.float64)
        return GridBatch(voxel_grid, self._sizes / factor if finer else self._sizes * factor, self._origins)


def _broadcast(name: str, value: Any, items: int) -> torch.Tensor:
    given = as_tensor(name, value)
    check_values(name, given)
    if given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"{name} must be real numbers; got {given.dtype}")
    given = given.detach().to("cpu", torch.float64)
    try:
        found = given.broadcast_to(items, 3)
    except RuntimeError:
        raise ValueError(f"{name} must be one number, three, or ({items}, 3); got {tuple(given.shape)}") from None
    if not bool(found.isfinite().all()):
        raise ValueError(f"{name} must be finite; got {value}")
    return found
