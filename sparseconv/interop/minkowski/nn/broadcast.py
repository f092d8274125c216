"""Features of whole batch items, given to each of their voxels."""

from __future__ import annotations

import torch

from sparseconv.interop.minkowski.coordinate_manager import CoordinateManager
from sparseconv.interop.minkowski.keys import CoordinateMapKey
from sparseconv.interop.minkowski.kinds import BroadcastMode
from sparseconv.interop.minkowski.nn.convolution import MinkowskiModuleBase
from sparseconv.interop.minkowski.nn.placement import check_input
from sparseconv.interop.minkowski.sparse_tensor import SparseTensor
from sparseconv.interop.minkowski.tensor import checked_at, checked_features


def spread(features_global: torch.Tensor, key: CoordinateMapKey, manager: CoordinateManager) -> torch.Tensor:
    """(B, C) of the batch items -> (N, C) of the voxels of a key."""
    items = manager.find(key).items
    checked_features(features_global)
    if len(features_global) < items.num_voxels:
        raise ValueError(f"a broadcast takes a row for each of {items.num_voxels} batch items; got "
                         f"{tuple(features_global.shape)}: pool globally first")  # fmt: skip
    return items.spread(features_global[: items.num_voxels])


def _check_channels(features: torch.Tensor, each: torch.Tensor) -> None:
    """Raise ValueError where features of voxels and of their items cannot be combined."""
    if each.shape[1] not in (1, features.shape[1]) and features.shape[1] != 1:
        raise ValueError(
            f"voxels have {features.shape[1]} channels and batch items {each.shape[1]}: a broadcast takes as many"
        )


class MinkowskiBroadcastFunction:
    """A broadcast as a function of features; differentiable to any order."""

    @staticmethod
    def apply(
        input_features: torch.Tensor,
        input_features_global: torch.Tensor,
        operation_type: BroadcastMode,
        in_coords_key: CoordinateMapKey,
        glob_coords_key: CoordinateMapKey,
        coords_manager: CoordinateManager,
    ) -> torch.Tensor:
        """Features (N, C) and (B, C) -> (N, C): their sum or product."""
        checked_at("input_features", input_features, coords_manager.size(in_coords_key), "a voxel")
        each = spread(input_features_global, in_coords_key, coords_manager)
        _check_channels(input_features, each)
        added = operation_type is BroadcastMode.ELEMENTWISE_ADDITON
        return input_features + each if added else input_features * each


class MinkowskiBroadcast(MinkowskiModuleBase):
    """Each voxel takes the features of its batch item. ``dimension`` is accepted, without effect."""

    def __init__(self, dimension: int | None = None) -> None:
        super().__init__()

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        check_input(input, None)
        check_input(input_glob, None)
        each = spread(input_glob.F, input.key, input.coordinate_manager)
        return input.like(self.combine(input.F, each))

    def combine(self, features: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
        """What becomes of a voxel's features and its item's."""
        return each

    def __repr__(self) -> str:
        return type(self).__name__


class MinkowskiBroadcastAddition(MinkowskiBroadcast):
    """Each voxel's features and those of its batch item, added."""

    operation_type = BroadcastMode.ELEMENTWISE_ADDITON

    def combine(self, features: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
        _check_channels(features, each)
        return features + each


class MinkowskiBroadcastMultiplication(MinkowskiBroadcast):
    """Each voxel's features and those of its batch item, multiplied."""

    operation_type = BroadcastMode.ELEMENTWISE_MULTIPLICATION

    def combine(self, features: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
        _check_channels(features, each)
        return features * each


class MinkowskiBroadcastConcatenation(MinkowskiBroadcast):
    """Each voxel's features and those of its batch item, side by side."""

    def combine(self, features: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
        return torch.cat([features, each], 1)
