"""Kernels: which neighbours a voxel sees, and in what order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sparseconv.geometry.ranges import Ints
from sparseconv.geometry.window import check_taps
from sparseconv.interop.arguments import lower_corners, settled
from sparseconv.interop.minkowski.kinds import Axes, RegionType, positive, rank_of, region_of
from sparseconv.kinds import as_tensor


class KernelGenerator:
    """A kernel: its size, stride, dilation and shape.

        in = out + tap * dilation * tensor stride of the finer side

    Taps of a cube are numbered with the first axis fastest. An odd axis is centred; an even one covers 0 .. k-1. A
    cross has its centre first, then each axis in turn: +1 .. +r, -r .. -1.

    Args:
        kernel_size, stride, dilation: one integer, or one an axis.
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
        self.region_offsets = lower_corners("region_offsets", offsets) if offsets.numel() else offsets.int()
        self.expand_coordinates = expand_coordinates
        self.requires_strided_coordinates = all(
            s == 1 for s in self.kernel_stride
        )  # as in MinkowskiEngine: at stride 1
        self.cache: dict[Any, Any] = {}
        self._taps = self._listed()
        self.kernel_volume = math.prod(self.kernel_size) if self._taps is None else len(self._taps)

    def _listed(self) -> tuple[Ints, ...] | None:
        """The taps of a kernel that is no cube, before dilation."""
        given, kind = self.region_offsets.numel() > 0, self.region_type
        if given != (kind is RegionType.CUSTOM):
            raise ValueError(f"region_offsets are the taps of RegionType.CUSTOM, and of that alone; got {kind} with "
                             f"{self.region_offsets.shape} of them")  # fmt: skip
        if not given:
            check_taps(self.kernel_size)
        if given:
            if self.region_offsets.ndim != 2 or self.region_offsets.shape[1] != self.dimension:
                raise ValueError(
                    f"region_offsets must be (V, {self.dimension}); got {tuple(self.region_offsets.shape)}"
                )
            return tuple(map(tuple, self.region_offsets.tolist()))
        if kind is RegionType.HYPER_CUBE or max(self.kernel_size) == 1:
            return None
        if kind is RegionType.HYPER_CROSS:
            even = [k for k in self.kernel_size if k % 2 == 0]
            if even:
                raise ValueError(f"a hyper-cross takes an odd kernel_size on every axis; got {self.kernel_size}")
            return _cross(self.kernel_size)
        types = self.axis_types
        if types is None or len(types) != self.dimension:
            raise ValueError(f"RegionType.HYBRID takes axis_types, one for each of {self.dimension} axes; got {types}")
        return _hybrid(self.kernel_size, types)

    def window(self, reach: Ints) -> dict[str, Any]:
        """What a plan is given for this kernel, its axes backwards; ``reach`` is a tap of 1 in the grid's own cells."""
        steps = tuple([d * r for d, r in zip(settled(self.kernel_dilation)[::-1], reach)])
        if self._taps is None:
            size = settled(self.kernel_size)[::-1]
            padding = tuple([d * (k // 2) if k % 2 else 0 for d, k in zip(steps, size)])
            return {"kernel_size": size, "dilation": steps, "padding": padding}
        return {"taps": tuple([settled(tap)[::-1] for tap in self._taps]), "dilation": steps}

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
    return KernelGenerator(
        kernel_size,
        region_type=region_type,
        region_offsets=region_offset,
        axis_types=axis_types,
        dimension=dimension,
    ).kernel_volume


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
    kernel = KernelGenerator(
        kernel_size,
        up_stride,
        dilation,
        region_type=region_type,
        region_offsets=None if region_offset is None or len(region_offset) == 0 else region_offset,
        axis_types=axis_types,
        dimension=dimension,
    )
    return kernel.get_kernel(tensor_stride, True)


def _cross(size: Sequence[int]) -> tuple[Ints, ...]:
    """The centre, then for each axis +1 .. +r, -r .. -1."""
    taps = [(0,) * len(size)]
    for axis, k in enumerate(size):
        r = k // 2
        for move in (*range(1, r + 1), *range(-r, 0)):
            taps.append(tuple(move if i == axis else 0 for i in range(len(size))))
    return tuple(taps)


def _hybrid(size: Sequence[int], types: Sequence[RegionType]) -> tuple[Ints, ...]:
    """The centre; its copies along each axis of the cube, axis by axis; then the arms of the cross."""
    moves = [[t - (k - 1) // 2 for t in range(k) if t != (k - 1) // 2] for k in size]
    taps: list[Ints] = [(0,) * len(size)]
    for axis, kind in enumerate(types):
        if kind is RegionType.HYPER_CUBE:
            taps += [(*tap[:axis], move, *tap[axis + 1 :]) for tap in taps for move in moves[axis]]
    for axis, kind in enumerate(types):
        if kind is RegionType.HYPER_CROSS:
            taps += [tuple(move if i == axis else 0 for i in range(len(size))) for move in moves[axis]]
    return tuple(taps)
