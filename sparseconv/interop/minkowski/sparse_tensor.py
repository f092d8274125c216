"""`SparseTensor` and `TensorField`: features of voxels, and of points anywhere, under a key of a coordinate manager."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch

from sparseconv import transforms
from sparseconv.checks import as_device, check_kind, check_tensor, check_values, described
from sparseconv.geometry.ranges import IndexRange
from sparseconv.geometry.views.dense import filled
from sparseconv.interop.arguments import axes, check_features, check_order, floor_to_int32, integers, maps_for_trace
from sparseconv.interop.minkowski.common import (
    Axes,
    CoordinateMapKey,
    SparseTensorOperationMode,
    check_mode,
    convert_to_int_list,
)
from sparseconv.interop.minkowski.common import SparseTensorQuantizationMode as Mode
from sparseconv.interop.minkowski.coordinate_manager import CoordinateManager, TracedManager, same
from sparseconv.ops.points import PointGroups, Reduce
from sparseconv.torch_private import settable, surely
from sparseconv.transforms import check_not_recorded

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


def _operator(method: str, function: Callable[..., torch.Tensor]) -> Callable[[Any, Any], Any]:
    def applied(self: Any, other: Any) -> Any:
        return getattr(self, method)(other, function)

    return applied


class Tensor:
    """Features (N, C) and the key of their N coordinates; see `SparseTensor` and `TensorField`."""

    _F: torch.Tensor
    _C: torch.Tensor | None
    _D: int
    _held: CoordinateManager

    @settable
    def _manager(self) -> CoordinateManager:
        return maps_for_trace(self._held, TracedManager)

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

    def placed(
        self, features: torch.Tensor, key: CoordinateMapKey, manager: CoordinateManager | None = None
    ) -> SparseTensor:
        """Features of the voxels of another key of this manager; while torch traces, of the one that the key is in."""
        there = self._manager if manager is None else manager
        return SparseTensor(features, coordinate_map_key=key, coordinate_manager=there)

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

    __iadd__ = _operator("_in_place", torch.Tensor.__iadd__)
    __isub__ = _operator("_in_place", torch.Tensor.__isub__)
    __imul__ = _operator("_in_place", torch.Tensor.__imul__)
    __itruediv__ = _operator("_in_place", torch.Tensor.__itruediv__)
    __add__ = _operator("_combined", torch.add)
    __sub__ = _operator("_combined", torch.sub)
    __mul__ = _operator("_combined", torch.mul)
    __truediv__ = _operator("_combined", torch.true_divide)

    def __pow__(self, power: Any) -> Self:
        return self.like(self._F**power)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(\n  coordinates={self.coordinates}\n  features={self._F}\n  "
            f"coordinate_map_key={self.key}\n  coordinate_manager={self._manager}\n  spatial dimension={self._D})"
        )


def features_of(input: Any) -> torch.Tensor:
    """The features of a sparse tensor or a field; TypeError for anything else."""
    if not isinstance(input, Tensor):
        raise TypeError(f"this takes a SparseTensor or a TensorField of MinkowskiEngine's, not {described(input)}")
    return input.F


def with_features(input: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A sparse tensor or a field with a function of its features."""
    made = function(features_of(input))
    return input.like(made)


def check_same_rows(features: torch.Tensor, coordinates: torch.Tensor) -> None:
    """Raise ValueError where features and coordinates do not go together."""
    if len(features) != len(coordinates):
        raise ValueError(
            f"features have {len(features)} rows, coordinates {len(coordinates)}: both need one row per point"
        )
    if features.device != coordinates.device:
        raise ValueError(
            f"features are on {features.device}, coordinates on {coordinates.device}: move one, or pass device="
        )


# ---- the two tensors


_REDUCTIONS: dict[Mode, Reduce] = {Mode.UNWEIGHTED_AVERAGE: "mean", Mode.UNWEIGHTED_SUM: "sum", Mode.MAX_POOL: "max"}


def _reduced(features: torch.Tensor, mode: Mode, groups: PointGroups, unique: torch.Tensor) -> torch.Tensor:
    """One row per voxel of features that several points have."""
    if mode is Mode.RANDOM_SUBSAMPLE:
        return features[unique]
    if mode not in _REDUCTIONS:
        raise ValueError(
            f"{mode} merges no points, and some share a voxel: quantize them first, or choose another mode that makes "
            "one row per voxel"
        )
    return groups.reduce(features, _REDUCTIONS[mode])


@transforms.untraced
def _quantized(
    features: torch.Tensor, coordinates: torch.Tensor, manager: CoordinateManager | None, stride: Axes, mode: Mode
) -> tuple[torch.Tensor, CoordinateManager, CoordinateMapKey, tuple[torch.Tensor, torch.Tensor]]:
    """Features of voxels, their manager and key, and the results of `CoordinateManager.insert_and_map`."""
    check_same_rows(features, coordinates)
    manager = manager_for(coordinates.shape[1] - 1) if manager is None else maps_for_trace(manager, TracedManager)
    whole = floor_to_int32("coordinates", coordinates) if coordinates.is_floating_point() else coordinates
    key, (unique, inverse) = manager.insert_and_map(whole, stride)
    if len(unique) < len(features):
        features = _reduced(features, mode, PointGroups(inverse, len(unique)), unique)
    return features, manager, key, (unique, inverse)


class SparseTensor(Tensor):
    """Features (N, C) of voxels.

    Args:
        features: (M, C) floating point.
        coordinates: (M, 1+D) integers, the batch first, multiples of the tensor stride; other numbers are floored.
        tensor_stride: distance of neighboring voxels, one integer or one per axis.
        coordinate_map_key: in place of coordinates, the key of voxels that the manager has.
        coordinate_manager: shares voxels and plans with other tensors.
        quantization_mode: what becomes of rows that share a voxel; the first one stands for ``RANDOM_SUBSAMPLE``.
        allocator_type, minkowski_algorithm: accepted, without effect.
        requires_grad: set on the features.
        device: where features and coordinates are moved to.
        feats, coords, coords_key, coords_manager: the names of version 0.4.

    ``unique_index`` are the rows that are first of their voxel, ``inverse_mapping`` (M,) the voxel of each row given.

    >>> x = SparseTensor(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([[0, 1], [0, 1], [0, 2]]),
    ...                  quantization_mode=Mode.UNWEIGHTED_AVERAGE)
    >>> x.F.tolist(), x.C.tolist(), x.inverse_mapping.tolist()
    ([[2.0], [5.0]], [[0, 1], [0, 2]], [0, 0, 1])
    """

    def __init__(
        self,
        features: torch.Tensor | None = None,
        coordinates: torch.Tensor | None = None,
        tensor_stride: Axes = 1,
        coordinate_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
        quantization_mode: Mode = Mode.RANDOM_SUBSAMPLE,
        allocator_type: Any = None,
        minkowski_algorithm: Any = None,
        requires_grad: bool | None = None,
        device: torch.device | str | int | None = None,
        *,
        feats: torch.Tensor | None = None,
        coords: torch.Tensor | None = None,
        coords_key: CoordinateMapKey | None = None,
        coords_manager: CoordinateManager | None = None,
    ) -> None:
        rows: Any = feats if features is None else features
        check_features("features", rows)
        coordinates = coords if coordinates is None else coordinates
        check_order("SparseTensor(features, coordinates, ...)", rows, coordinates)
        key: Any = coords_key if coordinate_map_key is None else coordinate_map_key
        manager: Any = coords_manager if coordinate_manager is None else coordinate_manager
        _check_source(coordinates, key, manager)
        rows, coordinates = _placed(rows, coordinates, device)
        check_mode("quantization_mode", quantization_mode, Mode)
        self.quantization_mode = quantization_mode
        self._C = None
        if coordinates is not None:
            rows, manager, key, (self.unique_index, self.inverse_mapping) = _quantized(
                rows, coordinates, manager, tensor_stride, quantization_mode
            )
        elif surely(rows.shape[0] != manager.size(key)):
            raise ValueError(f"{key} names {manager.size(key)} voxels; got features {tuple(rows.shape)}")
        if requires_grad is not None:
            rows.requires_grad_(requires_grad)
        self._F, self._manager, self._D = rows, manager, manager.D
        self.coordinate_map_key: CoordinateMapKey = key

    @property
    def key(self) -> CoordinateMapKey:
        return self.coordinate_map_key

    def like(self, features: torch.Tensor) -> SparseTensor:
        return self.placed(features, self.coordinate_map_key)

    def _read_coordinates(self) -> torch.Tensor:
        return self._manager.get_coordinates(self.coordinate_map_key)

    def _united(self, other: Any, combine: Callable[[torch.Tensor, Any], torch.Tensor]) -> SparseTensor:
        key = CoordinateMapKey(self._D + 1)
        mine, theirs = self._manager.union_map([self.key, other.key], key)
        zeros = self._F.new_zeros(self._manager.size(key), self._F.shape[1])
        out = zeros.index_copy(0, mine[1], self._F)
        both = combine(out[theirs[1]], other.F)
        return self.placed(out.to(both.dtype).index_copy(0, theirs[1], both), key)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> SparseTensor:
        """The tensor on a device, with a manager of its own there, and its features in a dtype."""
        features = self._F.to(device=device, dtype=dtype)
        if features.device == self.device:
            return self.like(features)
        return SparseTensor(
            features,
            self.coordinates.to(features.device),
            self.tensor_stride,
            quantization_mode=self.quantization_mode,
        )

    def cpu(self) -> SparseTensor:
        return self.to("cpu")

    def cuda(self, device: torch.device | str | None = None) -> SparseTensor:
        return self.to("cuda" if device is None else device)

    # ---- dense arrays

    def dense(
        self,
        shape: torch.Size | tuple[int, ...] | None = None,
        min_coordinate: torch.Tensor | int | None = None,
        contract_stride: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dense (B, C, *spatial), the smallest coordinate, the tensor stride); 0 where there is no voxel.

        Args:
            shape: of the result; its channels are those of the features. Default: what holds every voxel.
            min_coordinate: (D,) integers, the coordinate of the first cell, a multiple of the tensor stride; default 0.
            contract_stride: a cell for every voxel, and none between them.

        Raises:
            ValueError: a voxel that lies outside, or below 0 without ``min_coordinate``.
        """
        coords, stride = self.coordinates, torch.IntTensor(self.tensor_stride)
        steps = stride.to(coords.device).clamp_min(1)
        low = coords[:, 1:].min(0, keepdim=True).values if len(coords) else coords.new_zeros(1, self._D)
        start = coords.new_zeros(1, self._D)
        if min_coordinate is not None:
            start = low = coords.new_tensor(axes(min_coordinate, self._D, "min_coordinate"))[None]
        if bool((start % steps).any()):
            raise ValueError(f"min_coordinate {start[0].tolist()} must be a multiple of {self.tensor_stride}")
        cells = coords[:, 1:] - start
        if contract_stride:
            cells = torch.div(cells, steps, rounding_mode="floor")
        if shape is None:
            if not len(coords):
                raise ValueError("shape is needed to make a dense array of no voxel")
            size = [int(coords[:, 0].max()) + 1, *(cells.max(0).values + 1).tolist()]
        elif len(shape := torch.Size(integers(shape, "shape", 0))) == self._D + 2:
            size = [shape[0], *shape[2:]]
        else:
            raise ValueError(f"shape must be (B, C, {', '.join('n' * self._D)}); got {tuple(shape)}")
        at = torch.cat([coords[:, :1], cells], 1)
        if bool(((at < 0) | (at >= at.new_tensor(size))).any()):
            raise ValueError(
                f"voxels from {at.min(0).values.tolist()} to {at.max(0).values.tolist()} (batch first) do not fit in "
                f"{size}: give min_coordinate for coordinates below 0, or a larger shape"
            )
        return filled(self._F, at, size[0], IndexRange.of_shape(size[1:])).contiguous(), low, stride

    def sparse(
        self,
        min_coords: torch.Tensor | None = None,
        max_coords: torch.Tensor | None = None,
        contract_coords: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(torch's sparse tensor (B, *spatial, C), the smallest coordinate, the tensor stride)."""
        coords, stride = self.coordinates, torch.IntTensor(self.tensor_stride)
        steps = stride.to(coords.device).clamp_min(1)
        low = coords[:, 1:].min(0).values
        if min_coords is not None:
            low = coords.new_tensor(axes(min_coords, self._D, "min_coords"))
        cells, unit = coords[:, 1:] - low, steps if contract_coords else torch.ones_like(steps)
        cells = torch.div(cells, unit, rounding_mode="floor")
        size = None
        if max_coords is not None:
            high = coords.new_tensor(axes(max_coords, self._D, "max_coords"))
            ends = torch.div(high - low, unit, rounding_mode="floor") + 1
            size = (self._manager.find(self.key).grid.batch_size, *ends.tolist(), self._F.shape[1])
        at = torch.cat([coords[:, :1], cells], 1).long().t()
        extent = (size,) if size else ()
        made = torch.sparse_coo_tensor(at, self._F, *extent, check_invariants=True)
        return made, torch.div(low, unit, rounding_mode="floor")[None], stride

    # ---- points

    def features_at_coordinates(self, query_coordinates: torch.Tensor) -> torch.Tensor:
        """Features (M, C) interpolated at points (M, 1+D), the batch first; absent voxels count as 0."""
        plan, points = self._manager.interpolation(self.key, query_coordinates)
        return plan.interpolate(self._F, points).to(self._F.dtype)

    def interpolate(self, X: TensorField) -> TensorField:
        """Features interpolated at the points of a field."""
        check_kind("X", X, TensorField, "interpolation takes the points of a field")
        return X.like(self.features_at_coordinates(X.C))

    def slice(self, X: TensorField | SparseTensor) -> TensorField:
        """The features of the voxel that holds each point of a field, or each row that a tensor was made of."""
        return self._sliced(X, False)

    def cat_slice(self, X: TensorField | SparseTensor) -> TensorField:
        """`slice`, and the features of X beside it."""
        return self._sliced(X, True)

    def _sliced(self, X: TensorField | SparseTensor, joined: bool) -> TensorField:
        if isinstance(X, TensorField):
            features = self._manager.groups(X.key, self.key).spread(self._F)
            return X.like(torch.cat([features, X.F], 1) if joined else features)
        if not isinstance(X, SparseTensor) or X.key != self.key or not hasattr(X, "inverse_mapping"):
            raise ValueError("slice takes a TensorField, or the SparseTensor with the coordinates that this one has")
        features = torch.cat([self._F, X.F], 1) if joined else self._F
        rows = PointGroups(X.inverse_mapping, len(self)).spread(features)
        return TensorField(
            rows,
            self.coordinates[X.inverse_mapping],
            coordinate_manager=self._manager,
            quantization_mode=self.quantization_mode,
        )


class TensorField(Tensor):
    """Features (N, C) of points anywhere, which may share voxels.

    Args: those of `SparseTensor`; coordinates may be of any number type, and ``coordinate_field_map_key`` stands in
    place of them.

    >>> field = TensorField(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 0.2], [0, 0.7]]))
    >>> x = field.sparse()
    >>> x.F.tolist(), x.slice(field).F.tolist()
    ([[2.0]], [[2.0], [2.0]])
    """

    def __init__(
        self,
        features: torch.Tensor,
        coordinates: torch.Tensor | None = None,
        tensor_stride: Axes = 1,
        coordinate_field_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
        quantization_mode: Mode = Mode.UNWEIGHTED_AVERAGE,
        allocator_type: Any = None,
        minkowski_algorithm: Any = None,
        requires_grad: bool | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        check_features("features", features)
        check_order("TensorField(features, coordinates, ...)", features, coordinates)
        key: Any = coordinate_field_map_key
        manager: Any = coordinate_manager
        check_mode("quantization_mode", quantization_mode, Mode)
        if quantization_mode is not Mode.RANDOM_SUBSAMPLE and quantization_mode not in _REDUCTIONS:
            raise ValueError(f"a field's quantization_mode must make one row per voxel; got {quantization_mode}")
        _check_source(coordinates, key, manager)
        features, coordinates = _placed(features, coordinates, device)
        if coordinates is not None:
            check_same_rows(features, coordinates)
            manager = manager_for(coordinates.shape[1] - 1) if manager is None else manager
            key = manager.insert_field(coordinates, tensor_stride)
        if requires_grad is not None:
            features.requires_grad_(requires_grad)
        self.quantization_mode = quantization_mode
        self._F, self._C, self._manager = features, coordinates, manager
        self._D = manager.D
        self.coordinate_field_map_key: CoordinateMapKey = key

    @property
    def key(self) -> CoordinateMapKey:
        return self.coordinate_field_map_key

    def like(self, features: torch.Tensor) -> TensorField:
        return TensorField(
            features,
            coordinate_field_map_key=self.coordinate_field_map_key,
            coordinate_manager=self._manager,
            quantization_mode=self.quantization_mode,
        )

    def _read_coordinates(self) -> torch.Tensor:
        return self._manager.get_coordinate_field(self.key)

    def sparse(
        self,
        tensor_stride: Axes = 1,
        coordinate_map_key: CoordinateMapKey | None = None,
        quantization_mode: Mode | None = None,
    ) -> SparseTensor:
        """The voxels of a stride that hold points, or those of a key, with the points' features reduced."""
        mode = self.quantization_mode if quantization_mode is None else quantization_mode
        key = coordinate_map_key
        if key is None:
            stride = convert_to_int_list(tensor_stride, self._D)
            key, (unique, _) = self._manager.field_to_sparse_insert_and_map(self.key, stride)
            groups = self._manager.groups(self.key, key)
            features = _reduced(self._F, mode, groups, unique)
        elif mode is Mode.RANDOM_SUBSAMPLE:
            padded = torch.cat([self._F, self._F.new_zeros(1, self._F.shape[1])])
            features = padded[self._manager.first_points(self.key, key)]
        else:
            features = _reduced(self._F, mode, self._manager.groups(self.key, key), self._F)
        return self.placed(features, key)

    def splat(self) -> SparseTensor:
        """The voxels around every point, each with its share of the points' features by linear interpolation."""
        points = self._manager.find_field(self.key)
        corners = torch.cartesian_prod(*[torch.arange(2, device=self.device)] * self._D).reshape(-1, self._D)
        around = torch.cat([torch.zeros_like(corners[:, :1]), corners], 1).int()
        at = (points.quantized([1] * self._D)[:, None] + around).flatten(0, 1)
        key, _ = self._manager.insert_and_map(at)
        plan, where = self._manager.interpolation(key, points.coords)
        return self.placed(plan.splat(self._F, where).to(self.dtype), key)

    def inverse_mapping(self, sparse_tensor_map_key: CoordinateMapKey) -> torch.Tensor:
        """(N,) int64: the row of the voxel that holds each point, -1 where there is none."""
        return self._manager.field_rows(self.key, sparse_tensor_map_key)


def _placed(
    features: torch.Tensor, coordinates: torch.Tensor | None, device: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both on a device, where one is named."""
    if device is None:
        return features, coordinates
    place = as_device(device)
    return features.to(place), None if coordinates is None else coordinates.to(place)


def _check_source(coordinates: Any, key: Any, manager: Any) -> None:
    """Raise where a tensor is given neither coordinates nor a key and its manager, or both."""
    check_not_recorded()
    if (coordinates is None) == (key is None):
        raise ValueError("give either coordinates, or a coordinate map key and its coordinate_manager")
    for name, value, kind in (
        ("coordinates", coordinates, torch.Tensor),
        ("coordinate_map_key", key, CoordinateMapKey),
        ("coordinate_manager", manager, CoordinateManager),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}; got {type(value).__name__}")
    if key is not None and manager is None:
        raise ValueError("a coordinate map key needs the coordinate_manager that it belongs to")
    if coordinates is not None:
        check_values("coordinates", coordinates, "(N, 1+D), the batch first")
    if coordinates is not None and coordinates.ndim != 2:
        raise ValueError(f"coordinates must be (N, 1+D), the batch first; got {tuple(coordinates.shape)}")


__all__ = [
    "SparseTensor",
    "TensorField",
    "clear_global_coordinate_manager",
    "global_coordinate_manager",
    "set_global_coordinate_manager",
    "set_sparse_tensor_operation_mode",
    "sparse_tensor_operation_mode",
]
