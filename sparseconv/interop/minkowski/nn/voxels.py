"""Layers that change voxels: pruning, union, and interpolation between them."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.geometry.arguments import check_mask
from sparseconv.interop.minkowski.coordinate_manager import CoordinateManager
from sparseconv.interop.minkowski.keys import CoordinateMapKey
from sparseconv.interop.minkowski.nn.convolution import MinkowskiModuleBase
from sparseconv.interop.minkowski.nn.placement import check_input
from sparseconv.interop.minkowski.sparse_tensor import SparseTensor
from sparseconv.interop.minkowski.tensor import checked_at


class MinkowskiPruningFunction:
    """Pruning as a function of features; differentiable to any order."""

    @staticmethod
    def apply(
        in_feat: torch.Tensor,
        mask: torch.Tensor,
        in_coords_key: CoordinateMapKey,
        out_coords_key: CoordinateMapKey | None = None,
        coords_manager: CoordinateManager | None = None,
    ) -> torch.Tensor:
        """Features (N, C) -> those where mask (N,) bool is true; sets an output key that is not set."""
        if coords_manager is None:
            raise TypeError("coords_manager must be the manager of the key; got None")
        features = checked_at("in_feat", in_feat, coords_manager.size(in_coords_key), "a voxel")
        check_mask(mask, len(features))
        if out_coords_key is not None and not out_coords_key.is_key_set():
            out_coords_key.set_key(*coords_manager.prune(in_coords_key, mask).get_key())
        return features[mask]


class MinkowskiPruning(MinkowskiModuleBase):
    """The voxels where a mask is true, in their order."""

    def forward(self, input: SparseTensor, mask: torch.Tensor) -> SparseTensor:
        """A `SparseTensor` and mask (N,) bool on its device -> the voxels that stay."""
        check_input(input, None)
        manager = input.coordinate_manager
        key = manager.prune(input.key, mask)
        return SparseTensor(input.F[mask], coordinate_map_key=key, coordinate_manager=manager)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MinkowskiUnionFunction:
    """The union as a function of features; differentiable to any order."""

    @staticmethod
    def apply(
        in_coords_keys: list[CoordinateMapKey],
        out_coords_key: CoordinateMapKey,
        coordinate_manager: CoordinateManager,
        *in_feats: torch.Tensor,
    ) -> torch.Tensor:
        """Features (N_i, C) of each key -> their sum over all voxels; sets the output key."""
        if len(in_feats) != len(in_coords_keys) or len(in_feats) < 2:
            raise ValueError(f"a union takes two tensors or more; got {len(in_feats)}, {len(in_coords_keys)} keys")
        for key, features in zip(in_coords_keys, in_feats):
            checked_at("in_feats", features, coordinate_manager.size(key), "a voxel of its key")
        if len({features.shape[1] for features in in_feats}) > 1:
            raise ValueError(f"in_feats must have as many channels each; got {[tuple(x.shape) for x in in_feats]}")
        maps = coordinate_manager.union_map(in_coords_keys, out_coords_key)
        zeros = in_feats[0].new_zeros(coordinate_manager.size(out_coords_key), in_feats[0].shape[1])
        parts = [zeros.to(x.dtype).index_copy(0, rows[1], x) for rows, x in zip(maps, in_feats)]
        out = parts[0]
        for part in parts[1:]:
            out = out + part
        return out


class MinkowskiUnion(MinkowskiModuleBase):
    """The sum of sparse tensors over all their voxels, absent ones counting as 0."""

    def forward(self, *inputs: SparseTensor) -> SparseTensor:
        """Two sparse tensors or more, of one coordinate manager."""
        if len(inputs) < 2 or not all(isinstance(x, SparseTensor) for x in inputs):
            raise ValueError(f"a union takes two SparseTensors or more; got {[type(x).__name__ for x in inputs]}")
        manager = inputs[0].coordinate_manager
        if any(x.coordinate_manager is not manager for x in inputs):
            raise ValueError("the tensors of a union must share one coordinate manager")
        key = CoordinateMapKey(manager.D + 1)
        out = MinkowskiUnionFunction.apply([x.key for x in inputs], key, manager, *(x.F for x in inputs))
        return SparseTensor(out, coordinate_map_key=key, coordinate_manager=manager)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MinkowskiInterpolationFunction:
    """Interpolation as a function of features and points; differentiable in both."""

    @staticmethod
    def apply(
        input_features: torch.Tensor,
        tfield: torch.Tensor,
        in_coordinate_map_key: CoordinateMapKey,
        coordinate_manager: CoordinateManager | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features (N, C), points (M, 1+D) -> (features (M, C), voxel rows, point rows, weights)."""
        if coordinate_manager is None:
            raise TypeError("coordinate_manager must be the manager of the key; got None")
        plan, points = coordinate_manager.interpolation(in_coordinate_map_key, tfield)
        out = plan.interpolate(input_features, points).to(input_features.dtype)
        found = coordinate_manager.interpolation_map_weight(in_coordinate_map_key, tfield.detach())
        return out, found[0], found[1], found[2]


class MinkowskiInterpolation(MinkowskiModuleBase):
    """Features at points between the voxels, linearly; absent voxels count as 0."""

    def __init__(self, return_kernel_map: bool = False, return_weights: bool = False) -> None:
        super().__init__()
        self.return_kernel_map, self.return_weights = return_kernel_map, return_weights

    def forward(self, input: SparseTensor, tfield: torch.Tensor) -> Any:
        """Points (M, 1+D), the batch first -> features (M, C), and what was asked for beside them."""
        check_input(input, None)
        if not self.return_kernel_map and not self.return_weights:
            return input.features_at_coordinates(tfield)
        apply = MinkowskiInterpolationFunction.apply
        out, in_map, out_map, weights = apply(input.F, tfield, input.key, input.coordinate_manager)
        asked = [(in_map, out_map)] * self.return_kernel_map + [weights] * self.return_weights
        return (out, *asked)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
