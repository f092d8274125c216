"""The enumerations of MinkowskiEngine, and integers given for every axis."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

import numpy as np
import torch

from sparseconv.interop.arguments import axes
from sparseconv.kinds import check_kind

#: one integer, or one an axis
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


class PoolingMode(Enum):
    """What a pooling layer computes. The three spellings of a global mode give the same numbers here."""

    LOCAL_SUM_POOLING = 0
    LOCAL_AVG_POOLING = 1
    LOCAL_MAX_POOLING = 2
    GLOBAL_SUM_POOLING_DEFAULT = 3
    GLOBAL_AVG_POOLING_DEFAULT = 4
    GLOBAL_MAX_POOLING_DEFAULT = 5
    GLOBAL_SUM_POOLING_KERNEL = 6
    GLOBAL_AVG_POOLING_KERNEL = 7
    GLOBAL_MAX_POOLING_KERNEL = 8
    GLOBAL_SUM_POOLING_PYTORCH_INDEX = 9
    GLOBAL_AVG_POOLING_PYTORCH_INDEX = 10
    GLOBAL_MAX_POOLING_PYTORCH_INDEX = 11


class BroadcastMode(Enum):
    """What a broadcast does with the features of a batch item."""

    ELEMENTWISE_ADDITON = 0  # spelled as in MinkowskiEngine
    ELEMENTWISE_MULTIPLICATION = 1


class ConvolutionMode(Enum):
    """Accepted, without effect: the backend is chosen by sparseconv."""

    DEFAULT = 0
    DIRECT_GEMM = 1
    COPY_GEMM = 2


class CoordinateMapType(Enum):
    """Accepted, without effect: coordinates stay on the device where they are."""

    CPU = 0
    CUDA = 1


class GPUMemoryAllocatorType(Enum):
    """Accepted, without effect: torch allocates."""

    PYTORCH = 0
    CUDA = 1


class MinkowskiAlgorithm(Enum):
    """Accepted, without effect: one algorithm serves all."""

    DEFAULT = 0
    MEMORY_EFFICIENT = 1
    SPEED_OPTIMIZED = 2


class SparseTensorOperationMode(Enum):
    """Whether a new tensor gets a coordinate manager of its own, or the global one."""

    SEPARATE_COORDINATE_MANAGER = 0
    SHARE_COORDINATE_MANAGER = 1


class SparseTensorQuantizationMode(Enum):
    """What becomes of the features of points that share a voxel."""

    RANDOM_SUBSAMPLE = 0
    UNWEIGHTED_AVERAGE = 1
    UNWEIGHTED_SUM = 2
    NO_QUANTIZATION = 3
    MAX_POOL = 4
    SPLAT_LINEAR_INTERPOLATION = 5


def convert_to_int_list(arg: Axes, dimension: int) -> list[int]:
    """One integer an axis.

    Raises:
        ValueError: a sequence of another length. TypeError: no integers.

    >>> convert_to_int_list(2, 3)
    [2, 2, 2]
    """
    return axes(arg, dimension, "sizes")


def convert_to_int_tensor(arg: Axes, dimension: int) -> torch.Tensor:
    """One integer an axis, (D,) int32."""
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
