"""Arguments of MinkowskiEngine's layers: enumerations, keys of coordinates and kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch

from sparseconv.checks import as_tensor, check_kind
from sparseconv.geometry.ranges import Ints
from sparseconv.geometry.window import check_taps
from sparseconv.interop.arguments import axes, floor_to_int32, integers, trace_constants
from sparseconv.interop.layouts import hyper_cross_taps

#: one integer, or one per axis
Axes: TypeAlias = int | Sequence[int] | np.ndarray | torch.Tensor


class RegionType(Enum):
    """The shape of a kernel. The spellings without an underscore, and ``HYBRID``, are those of version 0.4."""

    HYPER_CUBE = 0
    HYPER_CROSS = 1
    CUSTOM = 2
    HYBRID = 3
    HYPERCUBE = 0  # noqa: PIE796
    HYPERCROSS = 1  # noqa: PIE796


def region_of(value: RegionType | int) -> RegionType:
    """A shape, or the one of this number: TypeError or ValueError for anything else."""
    if isinstance(value, RegionType):
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"region_type must be a RegionType; got {value!r}")
    if value not in [kind.value for kind in RegionType]:
        raise ValueError(f"region_type must be a RegionType, or its number of {list(RegionType)}; got {value!r}")
    return RegionType(value)


#: what a pooling layer computes; the three spellings of a global mode give the same numbers here
PoolingMode = Enum(
    "PoolingMode",
    "LOCAL_SUM_POOLING LOCAL_AVG_POOLING LOCAL_MAX_POOLING "
    "GLOBAL_SUM_POOLING_DEFAULT GLOBAL_AVG_POOLING_DEFAULT GLOBAL_MAX_POOLING_DEFAULT "
    "GLOBAL_SUM_POOLING_KERNEL GLOBAL_AVG_POOLING_KERNEL GLOBAL_MAX_POOLING_KERNEL "
    "GLOBAL_SUM_POOLING_PYTORCH_INDEX GLOBAL_AVG_POOLING_PYTORCH_INDEX GLOBAL_MAX_POOLING_PYTORCH_INDEX",
    start=0,
)
#: what a broadcast does with the features of a batch item, spelled as in MinkowskiEngine
BroadcastMode = Enum("BroadcastMode", "ELEMENTWISE_ADDITON ELEMENTWISE_MULTIPLICATION", start=0)
#: whether a new tensor gets a coordinate manager of its own, or the global one
SparseTensorOperationMode = Enum(
    "SparseTensorOperationMode", "SEPARATE_COORDINATE_MANAGER SHARE_COORDINATE_MANAGER", start=0
)
#: what becomes of the features of points that share a voxel
SparseTensorQuantizationMode = Enum(
    "SparseTensorQuantizationMode",
    "RANDOM_SUBSAMPLE UNWEIGHTED_AVERAGE UNWEIGHTED_SUM NO_QUANTIZATION MAX_POOL SPLAT_LINEAR_INTERPOLATION",
    start=0,
)
# accepted, without effect
ConvolutionMode = Enum("ConvolutionMode", "DEFAULT DIRECT_GEMM COPY_GEMM", start=0)
CoordinateMapType = Enum("CoordinateMapType", "CPU CUDA", start=0)
GPUMemoryAllocatorType = Enum("GPUMemoryAllocatorType", "PYTORCH CUDA", start=0)
MinkowskiAlgorithm = Enum("MinkowskiAlgorithm", "DEFAULT MEMORY_EFFICIENT SPEED_OPTIMIZED", start=0)


def convert_to_int_list(arg: Axes, dimension: int) -> list[int]:
    """One integer per axis.

    Raises:
        ValueError: a sequence of another length. TypeError: no integers.

    >>> convert_to_int_list(2, 3)
    [2, 2, 2]
    """
    return axes(arg, dimension, "sizes")


def convert_to_int_tensor(arg: Axes, dimension: int) -> torch.Tensor:
    """One integer per axis, (D,) int32."""
    return torch.tensor(convert_to_int_list(arg, dimension), dtype=torch.int32)


def positive(name: str, arg: Axes, dimension: int) -> list[int]:
    """One integer of at least 1 an axis; raises ValueError for others, naming them."""
    return axes(arg, dimension, name, 1)


def rank_of(dimension: int | None) -> int:
    """A number of axes."""
    if not isinstance(dimension, int) or not 1 <= dimension <= 4:
        raise ValueError(f"dimension must be the number of axes, 1 to 4; got {dimension!r}")
    return dimension


def check_mode(name: str, value: object, kind: type[Enum]) -> None:
    """Raise TypeError unless ``value`` is of this enumeration."""
    if not isinstance(value, kind):
        check_kind(name, value, kind, f"pass one of {', '.join(kind.__members__)}")


# ---- keys: the names of sets of voxels


#: tensor stride and a string that tells apart sets of one stride
Key = tuple[tuple[int, ...], str]


class CoordinateMapKey:
    """The name of a set of voxels in a coordinate manager: its tensor stride, and a string.

    Args:
        size_or_stride: the number of columns of the coordinates, for a key that a layer sets later; or the tensor
            stride, one integer per axis.
        string_id: tells apart sets of one tensor stride; given, it makes a key that is set.

    >>> key = CoordinateMapKey([2, 2], "")
    >>> key, key.get_tensor_stride(), CoordinateMapKey(3).is_key_set()
    (coordinate map key:[2, 2], [2, 2], False)
    """

    def __init__(self, size_or_stride: int | Sequence[int], string_id: str | None = None) -> None:
        self._key: Key | None = None
        if isinstance(size_or_stride, int):
            (self._size,) = integers([size_or_stride], "size_or_stride", 2)
        else:
            stride = integers(size_or_stride, "size_or_stride", 0)
            self._size = len(stride) + 1
            self.set_key(stride, "" if string_id is None else string_id)

    @classmethod
    def of(cls, key: Key) -> CoordinateMapKey:
        """The key object of a stride and a string."""
        return cls(list(key[0]), key[1])

    @property
    def key(self) -> Key:
        """The stride and the string; raises ValueError where no layer has set them yet."""
        if self._key is None:
            raise ValueError("this coordinate map key is not set: a layer sets it when it makes its output's voxels")
        return trace_constants(self._key[0]), self._key[1]

    def is_key_set(self) -> bool:
        return self._key is not None

    def get_coordinate_size(self) -> int:
        """Columns of the coordinates, the batch included."""
        return self._size

    def get_key(self) -> tuple[list[int], str]:
        return list(self.key[0]), self.key[1]

    def set_key(self, stride: Any, string_id: str | None = None) -> None:
        """Set the stride and the string, given apart or as one pair."""
        if string_id is None:
            stride, string_id = stride
        stride = integers(stride, "stride", 0)
        check_kind("string_id", string_id, str, "pass the string that tells apart sets of one stride")
        if len(stride) + 1 != self._size:
            raise ValueError(f"a key of {self._size} columns takes a stride of {self._size - 1} axes; got {stride}")
        self._key = tuple(stride), string_id

    def get_tensor_stride(self) -> list[int]:
        return list(self.key[0])

    def __eq__(self, other: object) -> bool:
        both = self._key is not None and isinstance(other, CoordinateMapKey) and other._key is not None
        return both and self.key == other.key  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        if self._key is None:
            return "coordinate map key:not set"
        return f"coordinate map key:{list(self._key[0])}" + (f":{self._key[1]}" if self._key[1] else "")


# ---- kernels: which neighbors a voxel sees, and in what order


class KernelGenerator:
    """A kernel: its size, stride, dilation and shape.

        in = out + tap * dilation * tensor stride of the finer side

    Taps of a cube are numbered with the first axis fastest. An odd axis is centered; an even one covers 0 .. k-1. A
    cross has its center first, then each axis in turn: +1 .. +r, -r .. -1.

    Args:
        kernel_size, stride, dilation: one integer, or one per axis.
        region_type: the shape, or its number; a kernel of one tap is a cube whatever is asked.
        region_offsets: (V, D) integers, the taps of ``RegionType.CUSTOM``.
        axis_types: for ``RegionType.HYBRID``, a cube or a cross for each axis.
        expand_coordinates: outputs are all voxels that the kernel reaches.
        dimension: number of axes.

    Raises:
        ValueError, TypeError: sizes below 1, a cross of even size, or offsets that do not fit the shape.

    >>> KernelGenerator(3, region_type=RegionType.HYPER_CROSS, dimension=3).kernel_volume
    7
    """

    def __init__(
        self,
        kernel_size: Axes = -1,
        stride: Axes = 1,
        dilation: Axes = 1,
        is_transpose: bool = False,
        region_type: RegionType | int = RegionType.HYPER_CUBE,
        region_offsets: torch.Tensor | Sequence[Sequence[int]] | None = None,
        expand_coordinates: bool = False,
        axis_types: Sequence[RegionType] | None = None,
        dimension: int = -1,
    ) -> None:
        dimension = rank_of(dimension)
        self.dimension = dimension
        self.kernel_size = positive("kernel_size", kernel_size, dimension)
        self.kernel_stride = positive("stride", stride, dimension)
        self.kernel_dilation = positive("dilation", dilation, dimension)
        self.region_type, self.axis_types = region_of(region_type), axis_types
        offsets = as_tensor("region_offsets", [] if region_offsets is None else region_offsets)
        self.region_offsets = floor_to_int32("region_offsets", offsets) if offsets.numel() else offsets.int()
        self.expand_coordinates = expand_coordinates
        self.requires_strided_coordinates = max(self.kernel_stride) == 1  # as in MinkowskiEngine
        self.cache: dict[Any, Any] = {}
        self._taps = self._listed()
        self.kernel_volume = math.prod(self.kernel_size) if self._taps is None else len(self._taps)

    def _listed(self) -> tuple[Ints, ...] | None:
        """The taps of a kernel that is no cube, before dilation."""
        offsets, kind = self.region_offsets, self.region_type
        if (offsets.numel() > 0) != (kind is RegionType.CUSTOM):
            raise ValueError(f"region_offsets are the taps of RegionType.CUSTOM, and of that alone; got {kind} with "
                             f"{offsets.shape} of them")  # fmt: skip
        if kind is RegionType.CUSTOM:
            if offsets.ndim != 2 or offsets.shape[1] != self.dimension:
                raise ValueError(f"region_offsets must be (V, {self.dimension}); got {tuple(offsets.shape)}")
            return tuple(map(tuple, offsets.tolist()))
        check_taps(self.kernel_size)
        if kind is RegionType.HYPER_CUBE or max(self.kernel_size) == 1:
            return None
        if kind is RegionType.HYPER_CROSS:
            even = [k for k in self.kernel_size if k % 2 == 0]
            if even:
                raise ValueError(f"a hyper-cross takes an odd kernel_size on every axis; got {self.kernel_size}")
            return tuple(hyper_cross_taps(self.dimension, [k // 2 for k in self.kernel_size]))
        types = self.axis_types
        if types is None or len(types) != self.dimension:
            raise ValueError(f"RegionType.HYBRID takes axis_types, one for each of {self.dimension} axes; got {types}")
        return _hybrid(self.kernel_size, types)

    def window(self, reach: Ints) -> dict[str, Any]:
        """What a plan is given for this kernel, its axes backwards; ``reach`` is a tap of 1 in the grid's own cells."""
        steps = tuple([d * r for d, r in zip(trace_constants(self.kernel_dilation)[::-1], reach)])
        if self._taps is None:
            size = trace_constants(self.kernel_size)[::-1]
            padding = tuple([d * (k // 2) if k % 2 else 0 for d, k in zip(steps, size)])
            return {"kernel_size": size, "dilation": steps, "padding": padding}
        return {"taps": tuple([trace_constants(tap)[::-1] for tap in self._taps]), "dilation": steps}

    def taps(self) -> torch.Tensor:
        """(V, D) int32: the taps in their order, before dilation."""
        if self._taps is not None:
            return torch.tensor(self._taps, dtype=torch.int32)
        ranges = [torch.arange(k) - (k // 2 if k % 2 else 0) for k in reversed(self.kernel_size)]
        return torch.cartesian_prod(*ranges).reshape(-1, self.dimension).flip(1).int()

    def get_kernel(self, tensor_stride: Sequence[int], is_transpose: bool = False) -> tuple:
        """(region type, offsets in coordinates or an empty tensor for cubes and crosses, kernel volume)."""
        offsets = torch.zeros(0, dtype=torch.int32)
        kind = self.region_type
        if kind in (RegionType.HYBRID, RegionType.CUSTOM) and self._taps is not None:
            up = self.kernel_stride if is_transpose else [1] * self.dimension
            steps = [d * t // u for d, t, u in zip(self.kernel_dilation, tensor_stride, up)]
            offsets, kind = self.taps() * torch.tensor(steps, dtype=torch.int32), RegionType.CUSTOM
        return kind, offsets, self.kernel_volume

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(kernel_size={self.kernel_size}, kernel_stride={self.kernel_stride}, "
            f"kernel_dilation={self.kernel_dilation}, region_type={self.region_type}, "
            f"expand_coordinates={self.expand_coordinates}, dimension={self.dimension})"
        )


def get_kernel_volume(
    region_type: RegionType,
    kernel_size: Axes,
    region_offset: torch.Tensor | None,
    axis_types: Sequence[RegionType] | None,
    dimension: int,
) -> int:
    """Number of taps."""
    return kernel_of(kernel_size, 1, 1, region_type, region_offset, axis_types, dimension).kernel_volume


def convert_region_type(
    region_type: RegionType,
    tensor_stride: Sequence[int],
    kernel_size: Axes,
    up_stride: Sequence[int],
    dilation: Axes,
    region_offset: torch.Tensor | None,
    axis_types: Sequence[RegionType] | None,
    dimension: int,
    center: bool = True,
) -> tuple:
    """`KernelGenerator.get_kernel` of these arguments; ``center`` has no effect."""
    kernel = kernel_of(kernel_size, up_stride, dilation, region_type, region_offset, axis_types, dimension)
    return kernel.get_kernel(tensor_stride, True)


def kernel_of(
    size: Axes, stride: Axes, dilation: Axes, kind: Any, offsets: Any, types: Any, dimension: int
) -> KernelGenerator:
    offsets = None if offsets is None or len(offsets) == 0 else offsets
    return KernelGenerator(size, stride, dilation, False, kind, offsets, False, types, dimension)


def _hybrid(size: Sequence[int], types: Sequence[RegionType]) -> tuple[Ints, ...]:
    """The center; its copies along each axis of the cube, axis by axis; then the arms of the cross."""
    moves = [[t - (k - 1) // 2 for t in range(k) if t != (k - 1) // 2] for k in size]
    taps: list[Ints] = [(0,) * len(size)]
    for axis, kind in enumerate(types):
        if kind is RegionType.HYPER_CUBE:
            taps += [(*tap[:axis], move, *tap[axis + 1 :]) for tap in taps for move in moves[axis]]
    for axis, kind in enumerate(types):
        if kind is RegionType.HYPER_CROSS:
            taps += [tuple(move if i == axis else 0 for i in range(len(size))) for move in moves[axis]]
    return tuple(taps)


__all__ = [
    *("BroadcastMode", "ConvolutionMode", "CoordinateMapKey", "CoordinateMapType", "GPUMemoryAllocatorType"),
    *("KernelGenerator", "MinkowskiAlgorithm", "PoolingMode", "RegionType", "SparseTensorOperationMode"),
    *("SparseTensorQuantizationMode", "convert_region_type", "convert_to_int_list", "convert_to_int_tensor"),
    "get_kernel_volume",
]
