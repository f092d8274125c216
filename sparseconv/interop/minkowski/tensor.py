"""What sparse tensors and tensor fields share: features under a key of a coordinate manager."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.interop.minkowski.coordinate_manager import CoordinateManager
from sparseconv.interop.minkowski.keys import CoordinateMapKey
from sparseconv.interop.minkowski.kinds import SparseTensorOperationMode
from sparseconv.interop.minkowski.traced import met, same
from sparseconv.kinds import check_tensor, described
from sparseconv.torch_private import settable

if TYPE_CHECKING:
    from typing_extensions import Self


class _Shared:
    """The operation mode, and the manager that tensors share under it."""

    mode = SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER
    manager: CoordinateManager | None = None


def set_sparse_tensor_operation_mode(operation_mode: SparseTensorOperationMode) -> None:
    """Choose whether new tensors share the global coordinate manager."""
    if not isinstance(operation_mode, SparseTensorOperationMode):
        raise TypeError(f"operation_mode must be a SparseTensorOperationMode; got {operation_mode!r}")
    _Shared.mode = operation_mode


def sparse_tensor_operation_mode() -> SparseTensorOperationMode:
    """Whether new tensors share the global coordinate manager."""
    return _Shared.mode


def global_coordinate_manager() -> CoordinateManager | None:
    """The manager that tensors share, if one was made or set."""
    return _Shared.manager


def set_global_coordinate_manager(coordinate_manager: CoordinateManager | None) -> None:
    """Set the manager that tensors share."""
    _Shared.manager = coordinate_manager


def clear_global_coordinate_manager() -> None:
    """Forget the manager that tensors share, with all its voxels and plans."""
    _Shared.manager = None


def manager_for(rank: int) -> CoordinateManager:
    """A coordinate manager for a new tensor: its own, or the global one under `SHARE_COORDINATE_MANAGER`."""
    if _Shared.mode is not SparseTensorOperationMode.SHARE_COORDINATE_MANAGER:
        return CoordinateManager(D=rank)
    if _Shared.manager is None:
        _Shared.manager = CoordinateManager(D=rank)
    return _Shared.manager


class Tensor:
    """Features (N, C) and the key of their N coordinates; see `SparseTensor` and `TensorField`."""

    _F: torch.Tensor
    _C: torch.Tensor | None
    _D: int
    _held: CoordinateManager

    @settable
    def _manager(self) -> CoordinateManager:
        return met(self._held)

    @_manager.setter
    def _manager(self, manager: CoordinateManager) -> None:
        self._held = manager

    @property
    def key(self) -> CoordinateMapKey:
        """The key of the coordinates."""
        raise NotImplementedError

    def like(self, features: torch.Tensor) -> Self:
        """Other features at the same coordinates."""
        raise NotImplementedError

    def _read_coordinates(self) -> torch.Tensor:
        raise NotImplementedError

    # ---- reading

    @property
    def coordinate_manager(self) -> CoordinateManager:
        return self._manager

    coords_man = coordinate_manager

    @property
    def coordinate_key(self) -> CoordinateMapKey:
        return self.key

    coords_key = coordinate_key

    @property
    def tensor_stride(self) -> list[int]:
        return self.key.get_tensor_stride()

    @property
    def coordinates(self) -> torch.Tensor:
        """(N, 1+D), the batch first."""
        if self._C is None:
            self._C = self._read_coordinates()
        return self._C

    C = coords = coordinates

    @property
    def features(self) -> torch.Tensor:
        """(N, C)."""
        return self._F

    F = feats = features

    @property
    def dimension(self) -> int:
        return self._D

    D = dimension

    @property
    def requires_grad(self) -> bool:
        return self._F.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> None:
        self._F.requires_grad_(requires_grad)

    @property
    def shape(self) -> torch.Size:
        return self._F.shape

    @property
    def device(self) -> torch.device:
        return self._F.device

    @property
    def dtype(self) -> torch.dtype:
        return self._F.dtype

    def size(self, *dim: int) -> Any:
        return self._F.size(*dim)

    def get_device(self) -> int:
        return self._F.get_device()

    def __len__(self) -> int:
        return len(self._F)

    # ---- batch items

    @property
    def decomposition_permutations(self) -> list[torch.Tensor]:
        """The rows (N_b,) of each batch item."""
        return self._manager.origin_map(self.key)[1]

    _batchwise_row_indices = decomposition_permutations

    @property
    def decomposed_coordinates(self) -> list[torch.Tensor]:
        """The coordinates (N_b, D) of each batch item, without the batch."""
        return [self.coordinates[rows, 1:] for rows in self.decomposition_permutations]

    @property
    def decomposed_features(self) -> list[torch.Tensor]:
        """The features (N_b, C) of each batch item."""
        return [self._F[rows] for rows in self.decomposition_permutations]

    @property
    def decomposed_coordinates_and_features(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self.decomposed_coordinates, self.decomposed_features

    def coordinates_at(self, batch_index: int) -> torch.Tensor:
        return self.coordinates[self.decomposition_permutations[batch_index], 1:]

    def features_at(self, batch_index: int) -> torch.Tensor:
        return self._F[self.decomposition_permutations[batch_index]]

    def coordinates_and_features_at(self, batch_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.coordinates_at(batch_index), self.features_at(batch_index)

    # ---- changing, in place as in MinkowskiEngine

    def float(self) -> Self:
        self._F = self._F.float()
        return self

    def double(self) -> Self:
        self._F = self._F.double()
        return self

    def detach(self) -> Self:
        self._F = self._F.detach()
        return self

    # ---- arithmetic

    def _check_same(self, other: Tensor) -> None:
        if not same(self._manager, other._manager):
            raise ValueError(
                "the two tensors have two coordinate managers: give the second one coordinate_manager= of the first, "
                "or share one by set_sparse_tensor_operation_mode"
            )
        if not self.key == other.key:  # which torch traces
            raise ValueError(f"the two tensors live on different coordinates: {self.key} and {other.key}")

    def _operand(self, other: Any) -> Any:
        """What is no sparse tensor: numbers, and tensors whose shape is that of the features or broadcast to it."""
        if isinstance(other, torch.Tensor):
            check_tensor("other", other)
            if len(other.shape) > 2 or any(n not in (1, m) for n, m in zip(other.shape[::-1], self._F.shape[::-1])):
                raise ValueError(f"{tuple(other.shape)} does not broadcast to features {tuple(self._F.shape)}")
        elif not isinstance(other, Number):
            raise TypeError(f"features go together with numbers, tensors and their like, not with {described(other)}")
        return other

    def _in_place(self, other: Any, change: Callable[[torch.Tensor, Any], Any]) -> Self:
        if isinstance(other, Tensor):
            self._check_same(other)
            other = other.F
        change(self._F, self._operand(other))
        return self

    def _combined(self, other: Any, combine: Callable[[torch.Tensor, Any], torch.Tensor]) -> Self:
        if not isinstance(other, Tensor):
            return self.like(combine(self._F, self._operand(other)))
        if not same(self._manager, other._manager) or self.key == other.key:
            self._check_same(other)
            return self.like(combine(self._F, other.F))
        return self._united(other, combine)

    def _united(self, other: Any, combine: Callable[[torch.Tensor, Any], torch.Tensor]) -> Self:
        raise ValueError(f"the two fields live on different points: {self.key} and {other.key}")

    def __iadd__(self, other: Any) -> Self:
        return self._in_place(other, torch.Tensor.__iadd__)

    def __isub__(self, other: Any) -> Self:
        return self._in_place(other, torch.Tensor.__isub__)

    def __imul__(self, other: Any) -> Self:
        return self._in_place(other, torch.Tensor.__imul__)

    def __itruediv__(self, other: Any) -> Self:
        return self._in_place(other, torch.Tensor.__itruediv__)

    def __add__(self, other: Any) -> Self:
        return self._combined(other, torch.add)

    def __sub__(self, other: Any) -> Self:
        return self._combined(other, torch.sub)

    def __mul__(self, other: Any) -> Self:
        return self._combined(other, torch.mul)

    def __truediv__(self, other: Any) -> Self:
        return self._combined(other, torch.true_divide)

    def __pow__(self, power: Any) -> Self:
        return self.like(self._F**power)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(\n  coordinates={self.coordinates}\n  features={self._F}\n  "
            f"coordinate_map_key={self.key}\n  coordinate_manager={self._manager}\n  spatial dimension={self._D})"
        )


def checked_features(features: Any) -> torch.Tensor:
    """Features (N, C), or an error that says so."""
    check_tensor("features", features, "(N, C)")
    if features.ndim != 2:
        raise ValueError(f"features must be (N, C); got {tuple(features.shape)}")
    return features


def checked_at(name: str, features: Any, rows: int, each: str) -> torch.Tensor:
    """Features (N, C) with so many rows, or an error that says so."""
    check_tensor(name, features, f"({rows}, C)")
    if features.ndim != 2 or len(features) != rows:
        raise ValueError(f"{name} must be ({rows}, C), one row {each}; got {tuple(features.shape)}")
    return features


def features_of(input: Any) -> torch.Tensor:
    """The features of a sparse tensor or a field; TypeError for anything else."""
    if not isinstance(input, Tensor):
        raise TypeError(f"this takes a SparseTensor or a TensorField of MinkowskiEngine's, not {described(input)}")
    return input.F


def with_features(input: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A sparse tensor or a field with a function of its features."""
    made = function(features_of(input))
    return input.like(made)


def check_rows(features: torch.Tensor, coordinates: torch.Tensor) -> None:
    """Raise ValueError where features and coordinates do not go together."""
    if len(features) != len(coordinates):
        raise ValueError(f"features have {len(features)} rows, coordinates {len(coordinates)}: one row a point each")
    if features.device != coordinates.device:
        raise ValueError(
            f"features are on {features.device}, coordinates on {coordinates.device}: move one, or pass device="
        )
