"""The sparse tensor with spconv's name, arguments and attributes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sparseconv.checks import INTEGERS, check_kind, check_tensor, check_values, checked_coords, no_batch, own
from sparseconv.compiler.traced import begin_program
from sparseconv.geometry.grid import VoxelGrid, left_trace
from sparseconv.interop.arguments import axes, check_order, integers
from sparseconv.interop.spconv.core import ConvAlgo
from sparseconv.interop.spconv.pytorch.geometry import IndiceData, Place, check_inside, place_in_trace
from sparseconv.interop.spconv.pytorch.tracing import Traced
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import check_in_trace, exporting, settable
from sparseconv.transforms import tracing

#: one class here stands for both of spconv's
ImplicitGemmIndiceData = IndiceData
#: what a tensor holds
FIELDS = (
    *("_features", "_indices", "_voxels", "spatial_shape", "batch_size", "grid", "voxel_num", "indice_dict"),
    *("benchmark", "benchmark_record", "thrust_allocator", "force_algo", "int8_scale", "_timer"),
)


class SparseConvTensor(metaclass=Traced):
    """Features (N, C) at indices (N, 1+D), within a spatial shape.

    Args:
        features: (N, C), any floating dtype, on the device of the indices.
        indices: (N, 1+D) integers, the batch item first; rows must differ. Kept as int32.
        spatial_shape: cells along each axis.
        batch_size: number of batch items.
        grid, voxel_num, benchmark, permanent_thrust_allocator, enable_timer, force_algo: kept, without effect.
        indice_dict: what layers with an ``indice_key`` have stored so far.

    Where `torch.fx` traces, one that is made of proxies is a proxy.

    >>> indices = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)
    >>> SparseConvTensor(torch.ones(2, 4), indices, [8, 8], 1).dense().shape
    torch.Size([1, 4, 8, 8])
    """

    def __init__(
        self,
        features: torch.Tensor,
        indices: torch.Tensor,
        spatial_shape: Sequence[int] | np.ndarray,
        batch_size: int,
        grid: torch.Tensor | None = None,
        voxel_num: torch.Tensor | None = None,
        indice_dict: dict[str, Any] | None = None,
        benchmark: bool = False,
        permanent_thrust_allocator: bool = False,
        enable_timer: bool = False,
        force_algo: ConvAlgo | None = None,
    ) -> None:
        _check_features("features", features)
        check_tensor("indices", indices, "(N, 1+D) integers")
        check_order("SparseConvTensor(features, indices, ...)", features, indices)
        if features.ndim != 2 or indices.ndim != 2:
            raise ValueError(
                f"features must be (N, C) and indices (N, 1+D); got {tuple(features.shape)} and {tuple(indices.shape)}"
            )
        if tracing():
            begin_program()
            check_in_trace(features.shape[0] == indices.shape[0])
        self._features = features
        self._indices: torch.Tensor | None = None
        self._voxels: Place | None = None
        self.indices = indices
        self.spatial_shape = integers(spatial_shape, "spatial_shape", 1)
        if len(self.spatial_shape) != indices.shape[1] - 1:
            advice = f". {no_batch(indices.shape[1] - 1)}" if len(self.spatial_shape) == indices.shape[1] else ""
            raise ValueError(
                f"spatial_shape {self.spatial_shape} must have one entry for each of the {indices.shape[1] - 1} axes "
                f"of indices {tuple(indices.shape)}{advice}"
            )
        (self.batch_size,) = integers([batch_size], "batch_size", 1)
        if tracing():
            self._voxels = self._place()
        self.grid: torch.Tensor | None = torch.Tensor() if grid is None else grid
        self.voxel_num = voxel_num
        self.indice_dict: dict[str, Any] = {} if indice_dict is None else indice_dict
        self.benchmark = benchmark
        self.benchmark_record: dict[str, Any] = {}
        self.thrust_allocator = None
        self.force_algo = force_algo
        self.int8_scale = None
        self._timer = None

    # ---- to and from sparseconv's own tensors

    @property
    def voxels(self) -> VoxelGrid:
        """The indices as a `VoxelGrid`, made at the first reading and passed on to tensors at the same indices."""
        return self._place().voxels

    def _place(self) -> Place:
        """The grid, and the tensor of indices that it goes with; made anew where the client wrote to that tensor, or
        gave this one another batch size."""
        kept = self._voxels
        if tracing():
            return place_in_trace(self._indices, kept, self.batch_size)
        if kept is not None and left_trace(kept.voxels):
            kept = self._voxels = None if self._indices is not None else kept.after_trace()
        if kept is None or kept.voxels.batch_size != self.batch_size or not kept.is_fresh():
            if kept is not None and self._indices is None:
                self._indices = own(kept.voxels.coords)
            indices = self.indices
            kept = Place.known(indices, self.batch_size)
            self._voxels = kept = kept or Place.of(indices, VoxelGrid(indices, self.batch_size))
        return kept

    @property
    def inside(self) -> VoxelGrid:
        """The voxels, for what ends at the spatial shape; ValueError where the client's indices leave it."""
        place = self._place()
        if place.indices is not None:
            check_inside(place.voxels, self.spatial_shape)
        return place.voxels

    def _is_at(self, other: SparseConvTensor) -> bool:
        """Whether the indices of another tensor with as many rows are these, where that is known without waiting for a
        GPU; True elsewhere."""
        if self._indices is not None and self._indices is other._indices:
            return True
        places = self._voxels, other._voxels
        if None not in places and places[0].voxels is places[1].voxels:  # type: ignore[union-attr]
            return True
        if torch.compiler.is_compiling() or exporting() or self.features.is_cuda:
            return True
        mine, theirs = self._place().voxels, other._place().voxels
        return mine.count is not None or theirs.count is not None or torch.equal(mine.coords, theirs.coords)

    def _rows(self) -> torch.Tensor:
        """The indices (N, 1+D) int32, not to be written to."""
        return self._place().voxels.coords if self._indices is None else self._indices

    @settable
    def indices(self) -> torch.Tensor:
        """(N, 1+D) int32, which the client may write to: where a plan's own are behind it, a copy of them, made at the
        first reading."""
        handed = self._indices
        if handed is None and tracing():
            return self._place().voxels.coords
        if handed is None:
            voxels = self._place().voxels
            handed = self._indices = own(voxels.coords)
            self._voxels = Place.of(handed, voxels)
        return handed

    @indices.setter
    def indices(self, value: torch.Tensor) -> None:
        check_tensor("indices", value, "(N, 1+D) integers")
        if value.dtype != torch.int32:
            value = checked_coords(value)
        elif not tracing() and value.is_inference():  # which tells nobody that it was written to
            value = own(value)
        self._indices = value
        self._voxels = None

    def to_sparse_tensor(self) -> SparseTensor:
        """The same features on the same voxels, for modules of `sparseconv.nn`."""
        return SparseTensor(self.voxels, self.features)

    @classmethod
    def from_sparse_tensor(cls, x: SparseTensor, spatial_shape: Sequence[int]) -> SparseConvTensor:
        """A `SparseTensor` with the spatial shape that it lacks; its grid and the plans kept there are shared."""
        check_kind("x", x, SparseTensor, "pass a sparseconv.SparseTensor")
        made = cls(x.features, x.grid.coords, spatial_shape, x.grid.batch_size)
        check_inside(x.grid, made.spatial_shape)
        return made._at(Place(None, 0, x.grid))

    def _leave_keys(self) -> SparseConvTensor:
        """Forget (on this fresh tensor) what keys remember."""
        self.indice_dict = {}
        return self

    def _at(self, place: Place) -> SparseConvTensor:
        """Move this (fresh) tensor to other voxels."""
        self._indices, self._voxels = place.indices, place
        return self

    # ---- features

    @settable
    def features(self) -> torch.Tensor:
        return self._features

    @features.setter
    def features(self, value: torch.Tensor) -> None:
        raise ValueError("features are not set in place: write x = x.replace_feature(features)")

    def replace_feature(self, feature: torch.Tensor) -> SparseConvTensor:
        """Other features (N, C') at the same indices."""
        _check_features("feature", feature)
        other = self.shadow_copy()
        other._features = feature
        return other

    def shadow_copy(self) -> SparseConvTensor:
        """A new tensor that shares everything with this one."""
        other = object.__new__(type(self))
        if torch.compiler.is_compiling():  # Dynamo of torch 2.11 follows names alone
            for name in FIELDS:
                setattr(other, name, getattr(self, name))
        else:
            other.__dict__ = self.__dict__.copy()
        return other

    def select_by_index(self, valid_indices: torch.Tensor | slice) -> SparseConvTensor:
        """The rows at ``valid_indices`` (integers, a mask or a slice); what keys remember is left behind."""
        if not isinstance(valid_indices, slice):
            check_values("valid_indices", valid_indices, "(M,) integers, or (N,) bool")
            if valid_indices.dtype not in (*INTEGERS, torch.bool) or valid_indices.ndim != 1:
                raise TypeError(
                    f"valid_indices must be (M,) integers, or a mask (N,) bool; got {tuple(valid_indices.shape)} "
                    f"{valid_indices.dtype}"
                )
        other = self.replace_feature(self.features[valid_indices])
        coords = self.voxels.coords if self._indices is None else self._indices
        other.indices, other.indice_dict = coords[valid_indices], {}
        if tracing():
            other._voxels = other._place()
        return other

    def minus(self) -> SparseConvTensor:
        return self.replace_feature(-self.features)

    def __add__(self, other: SparseConvTensor | torch.Tensor) -> SparseConvTensor:
        """Features added row by row; a tensor's indices must be this one's."""
        if isinstance(other, SparseConvTensor):
            if other.features.shape != self.features.shape or not self._is_at(other):
                raise ValueError(
                    f"cannot add features {tuple(self.features.shape)} and {tuple(other.features.shape)}: tensors with "
                    "different indices are added by functional.sparse_add"
                )
            other = other.features
        elif isinstance(other, torch.Tensor):
            _check_features("other", other)
            fits = (n in (1, rows) for n, rows in zip(other.shape[::-1], self.features.shape[::-1]))
            if other.ndim > self.features.ndim or not all(fits):
                raise ValueError(f"cannot add {tuple(other.shape)} to features {tuple(self.features.shape)}")
        return self.replace_feature(self.features + other)

    __radd__ = __add__
    __iadd__ = __add__

    @property
    def is_quantized(self) -> bool:
        return self.features.is_quantized

    def dequantize(self) -> SparseConvTensor:
        return self.replace_feature(self.features.dequantize())

    # ---- reading

    @property
    def spatial_size(self) -> int:
        return int(np.prod(self.spatial_shape))

    def find_indice_pair(self, key: str | None) -> IndiceData | None:
        """What the layer with this ``indice_key`` stored, or None."""
        return None if key is None else self.indice_dict.get(key)

    @classmethod
    def from_dense(cls, x: torch.Tensor) -> SparseConvTensor:
        """The cells of x (B, *spatial, C), channels last, where any channel is not zero."""
        check_values("x", x, "(B, *spatial, C)")
        if x.ndim < 3:
            raise ValueError(f"x must be (B, *spatial, C); got {tuple(x.shape)}")
        sites = (x != 0).any(-1).nonzero()
        return cls(x[tuple(sites.unbind(1))], sites.int(), x.shape[1:-1], x.shape[0])

    def dense(self, channels_first: bool = True) -> torch.Tensor:
        """(B, C, *spatial), or (B, *spatial, C); zero where there is no voxel. Differentiable."""
        if tracing():
            voxels: Any = self.voxels
            dense = voxels.dense(self.features, [0] * len(self.spatial_shape), self.spatial_shape)
            return dense if channels_first else dense.movedim(1, -1).contiguous()
        dense = self.voxels.to_dense(self.features, self.spatial_shape)
        return (dense if channels_first else dense.movedim(1, -1)).contiguous()

    def __getattr__(self, name: str) -> Any:
        advice = ""
        if not name.startswith("_") and hasattr(torch.Tensor, name):
            advice = (
                ": modules and functions of torch take x.features, and x.replace_feature(...) puts the result in "
                "place; SparseSequential does so by itself"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{advice}")

    def __dir__(self) -> list[str]:
        """The names of the class and of its fields: clients ask for ``replace_feature``, also where torch traces."""
        return NAMES

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_indices": self.indices, "_voxels": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.indices = state["_indices"]  # which in inference mode counts no writes

    def __repr__(self) -> str:
        return f"SparseConvTensor[shape={self._features.shape}]"


def _check_features(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a dense tensor; quantized ones are kept until a layer is asked."""
    if not isinstance(value, torch.Tensor) or not value.is_quantized:
        check_tensor(name, value, "(N, C)")
    if value.ndim < 1:
        raise ValueError(f"{name} must be (N, C), but it is a single number")


NAMES = sorted({*FIELDS, *(name for kind in SparseConvTensor.__mro__ for name in vars(kind))})
# what `help` shows of a class whose metaclass has a call of its own
_OF_SELF, *_GIVEN = inspect.signature(SparseConvTensor.__init__).parameters.values()
SparseConvTensor.__signature__ = inspect.Signature(_GIVEN)  # type: ignore[attr-defined]


def expand_nd(ndim: int, val: int | Sequence[int] | np.ndarray) -> list[int]:
    """One integer per axis."""
    return axes(val, ndim, "sizes")


def scatter_nd(indices: torch.Tensor, updates: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of ``shape`` with ``updates`` written at indices (..., R) of the first R axes."""
    check_values("indices", indices, "(..., R) integers")
    check_values("updates", updates, "(..., *shape[R:])")
    if indices.ndim < 1 or updates.shape != (*indices.shape[:-1], *shape[indices.shape[-1] :]):
        raise ValueError(
            f"indices must be (..., R) and updates (..., *shape[R:]) of the shape {tuple(shape)}; got "
            f"{tuple(indices.shape)} and {tuple(updates.shape)}"
        )
    result = torch.zeros(*shape, dtype=updates.dtype, device=updates.device)
    flat = indices.reshape(-1, indices.shape[-1])
    result[tuple(flat.unbind(1))] = updates.reshape(flat.shape[0], *shape[indices.shape[-1] :])
    return result
