"""A grid and its features, as networks pass them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange
from sparseconv.kinds import as_device, check_kind, check_tensor


@dataclass(frozen=True)
class SparseTensor:
    """Features (N, C), one row a voxel of ``grid``, on its device.

    >>> grid = VoxelGrid(torch.tensor([[0, 1, 2], [1, 0, 0], [1, 0, 1]]))
    >>> x = SparseTensor(grid, torch.arange(6.0).view(3, 2))
    >>> [item.tolist() for item in x.to_list()]
    [[[0.0, 1.0]], [[2.0, 3.0], [4.0, 5.0]]]
    """

    grid: VoxelGrid
    features: torch.Tensor

    def __post_init__(self) -> None:
        check_kind("grid", self.grid, VoxelGrid, "pass VoxelGrid(coords)")
        check_tensor("features", self.features)
        shape = tuple(self.features.shape)
        if len(shape) != 2 or shape[0] != self.grid.num_voxels:
            raise ValueError(f"features must be ({self.grid.num_voxels}, C), one row a voxel; got {shape}")
        if self.features.device != self.grid.device:
            raise ValueError(f"features are on {self.features.device}, the grid is on {self.grid.device}: move one")

    # ---- between layouts

    @classmethod
    def from_list(cls, coords: Sequence[torch.Tensor], features: Sequence[torch.Tensor]) -> SparseTensor:
        """One item a scene: coords (N_b, D) integers and features (N_b, C); either may have no row."""
        for name, items in (("coords", coords), ("features", features)):
            check_kind(name, items, (list, tuple), "pass a list of tensors, one a scene")
            for number, item in enumerate(items):
                check_tensor(f"{name}[{number}]", item)
        if len(coords) != len(features) or not coords:
            raise ValueError(f"need as many coords as features, at least one; got {len(coords)} and {len(features)}")
        items = [torch.cat([torch.full_like(c[:, :1], b), c], 1) for b, c in enumerate(coords)]
        return cls(VoxelGrid(torch.cat(items), len(items)), torch.cat(list(features)))

    def to_list(self) -> list[torch.Tensor]:
        """The features of each batch item (N_b, C), rows in the grid's order."""
        return list(self._grouped().split(self.grid.batch_counts.tolist()))

    @classmethod
    def from_nested(cls, grid: VoxelGrid, nested: torch.Tensor) -> SparseTensor:
        """A jagged `torch.nested` tensor (B, N_b, C) whose items follow the grid's rows of each batch item."""
        check_kind("grid", grid, VoxelGrid, "pass the grid of the voxels")
        if not isinstance(nested, torch.Tensor):
            check_tensor("nested", nested)
        if not nested.is_nested or nested.layout != torch.jagged:
            raise TypeError(f"expected a torch.nested tensor of layout torch.jagged; got layout {nested.layout}")
        values, offsets = nested.values(), nested.offsets()  # type: ignore[attr-defined]
        if not torch.equal(offsets.to(grid.device), grid.batch_offsets):
            raise ValueError(
                f"the items' lengths {offsets.diff().tolist()} are not the grid's {grid.batch_counts.tolist()}"
            )
        if grid.batch_rows is not None:
            values = torch.empty_like(values).index_copy(0, grid.batch_rows, values)
        return cls(grid, values)

    def to_nested(self) -> torch.Tensor:
        """The features as a jagged `torch.nested` tensor (B, N_b, C); differentiable."""
        return torch.nested.nested_tensor_from_jagged(self._grouped(), self.grid.batch_offsets)

    def _grouped(self) -> torch.Tensor:
        rows = self.grid.batch_rows
        return self.features if rows is None else self.features[rows]

    @classmethod
    def from_dense(cls, dense: torch.Tensor) -> SparseTensor:
        """The sites of dense (B, C, *spatial) where any channel is not zero."""
        check_tensor("dense", dense)
        return cls(*VoxelGrid.from_dense(dense))

    def to_dense(self, extent: IndexRange | Sequence[int] | None = None) -> torch.Tensor:
        """(B, C, *shape) over the extent (default: the grid's own), zero where there is no voxel."""
        if extent is not None:
            check_kind("extent", extent, (IndexRange, list, tuple), "pass IndexRange.of_shape(shape), or a shape")
        return self.grid.to_dense(self.features, extent)

    # ---- the same voxels, other features

    def with_features(self, features: torch.Tensor) -> SparseTensor:
        """Other features (N, C') on the same grid."""
        return SparseTensor(self.grid, features)

    def cat(self, *others: SparseTensor) -> SparseTensor:
        """Channels side by side; all on one grid."""
        for other in others:
            check_kind("other", other, SparseTensor, "SparseTensor(grid, features) makes one")
            self._check_same_grid(other)
        return self.with_features(torch.cat([self.features, *(other.features for other in others)], 1))

    def __add__(self, other: SparseTensor) -> SparseTensor:
        check_kind("other", other, SparseTensor, "use with_features(x.features + other) for a number or a tensor")
        self._check_same_grid(other)
        return self.with_features(self.features + other.features)

    def _check_same_grid(self, other: SparseTensor) -> None:
        if other.grid is not self.grid and not torch.equal(other.grid.coords, self.grid.coords):
            raise ValueError(f"the two tensors live on different voxels: {self.grid} and {other.grid}")

    # ---- reading

    @property
    def channels(self) -> int:
        return self.features.shape[1]

    @property
    def device(self) -> torch.device:
        return self.features.device

    @property
    def dtype(self) -> torch.dtype:
        return self.features.dtype

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> SparseTensor:
        """The grid and the features on a device, the features in a dtype."""
        if dtype is not None:
            check_kind("dtype", dtype, torch.dtype, "pass torch.float32 or another dtype of torch")
        grid = self.grid if device is None else self.grid.to(as_device(device))
        return SparseTensor(grid, self.features.to(device=grid.device, dtype=dtype or self.dtype))

    def __repr__(self) -> str:
        return f"SparseTensor({self.channels} channels, {self.dtype}, on {self.grid})"
