"""Pooling over kernels and over whole batch items."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.geometry.arguments import INTEGERS
from sparseconv.interop.minkowski.coordinate_manager import CoordinateManager
from sparseconv.interop.minkowski.kernel_generator import KernelGenerator
from sparseconv.interop.minkowski.keys import CoordinateMapKey
from sparseconv.interop.minkowski.kinds import Axes, PoolingMode, rank_of
from sparseconv.interop.minkowski.nn.convolution import MinkowskiModuleBase
from sparseconv.interop.minkowski.nn.placement import Place, check_input, ends, place_key
from sparseconv.interop.minkowski.sparse_tensor import SparseTensor, TensorField
from sparseconv.interop.minkowski.tensor import checked_features, features_of
from sparseconv.kinds import check_kind, check_values
from sparseconv.ops.points import PointGroups, Reduce
from sparseconv.ops.pooling import avg_pool, max_pool, sum_pool

_HOW: dict[PoolingMode, Reduce] = {
    PoolingMode.LOCAL_SUM_POOLING: "sum",
    PoolingMode.LOCAL_AVG_POOLING: "mean",
    PoolingMode.LOCAL_MAX_POOLING: "max",
}


def _pool(
    features: torch.Tensor,
    mode: PoolingMode,
    kernel: KernelGenerator,
    in_key: CoordinateMapKey,
    out_key: CoordinateMapKey,
    manager: CoordinateManager,
    transposed: bool,
) -> torch.Tensor:
    """Pool over a kernel; over the cells of the coarser tensor stride, where kernel size and stride are equal."""
    if kernel.kernel_size == kernel.kernel_stride:
        if transposed:
            return manager.groups(out_key, in_key).spread(features)
        return manager.groups(in_key, out_key).reduce(features, _HOW[mode])
    plan = manager.plan(in_key, out_key, kernel, transposed)
    if transposed or mode is PoolingMode.LOCAL_SUM_POOLING:
        return sum_pool(features, plan)
    return avg_pool(features, plan) if mode is PoolingMode.LOCAL_AVG_POOLING else max_pool(features, plan)[0]


class MinkowskiLocalPoolingFunction:
    """Pooling over a kernel as a function of features; differentiable to any order."""

    transposed = False

    @classmethod
    def apply(
        cls,
        input_features: torch.Tensor,
        pooling_mode: PoolingMode,
        kernel_generator: KernelGenerator,
        in_coordinate_map_key: CoordinateMapKey,
        out_coordinate_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
    ) -> torch.Tensor:
        """Features (N, C) -> (N_out, C)."""
        if coordinate_manager is None:
            raise TypeError("coordinate_manager must be the manager of the keys; got None")
        expand = cls.transposed and kernel_generator.expand_coordinates
        given = in_coordinate_map_key, out_coordinate_map_key
        key = ends(*given, coordinate_manager, kernel_generator, cls.transposed, expand)
        return _pool(input_features, pooling_mode, kernel_generator, given[0], key, coordinate_manager, cls.transposed)


class MinkowskiLocalPoolingTransposeFunction(MinkowskiLocalPoolingFunction):
    """The transposed pooling as a function."""

    transposed = True


class MinkowskiPoolingBase(MinkowskiModuleBase):
    """Pooling over a kernel.

    Args:
        kernel_size, stride, dilation: one integer or one an axis; a ``kernel_generator`` stands in place of them.
        dimension: number of axes.

    Where kernel size and stride are equal, a cell of the coarser tensor stride is pooled: 0 .. k-1 in front of its
    corner, for odd kernels too. Absent voxels do not count; an output that sees none is 0.
    """

    def __init__(
        self,
        kernel_size: Axes,
        stride: Axes = 1,
        dilation: Axes = 1,
        kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False,
        pooling_mode: PoolingMode = PoolingMode.LOCAL_AVG_POOLING,
        dimension: int | None = -1,
    ) -> None:
        super().__init__()
        dimension = rank_of(dimension)
        if kernel_generator is None:
            kernel_generator = KernelGenerator(kernel_size, stride, dilation, dimension=dimension)
        check_kind("kernel_generator", kernel_generator, KernelGenerator, "leave it out, or make one")
        self.is_transpose, self.kernel_generator = is_transpose, kernel_generator
        self.pooling_mode, self.dimension = pooling_mode, dimension

    def forward(self, input: SparseTensor, coordinates: Place | None = None) -> SparseTensor:
        check_input(input, self.dimension)
        kernel, manager, transposed = self.kernel_generator, input.coordinate_manager, self.is_transpose
        given = place_key(input, manager, coordinates, kernel, transposed)
        key = ends(input.key, given, manager, kernel, transposed, transposed and kernel.expand_coordinates)
        out = _pool(input.F, self.pooling_mode, kernel, input.key, key, manager, transposed)
        return SparseTensor(out, coordinate_map_key=key, coordinate_manager=manager)

    def __repr__(self) -> str:
        kernel = self.kernel_generator
        return (
            f"{type(self).__name__}(kernel_size={kernel.kernel_size}, stride={kernel.kernel_stride}, "
            f"dilation={kernel.kernel_dilation})"
        )


class MinkowskiSumPooling(MinkowskiPoolingBase):
    """The sum of the voxels that each output sees."""

    MODE = PoolingMode.LOCAL_SUM_POOLING

    def __init__(
        self,
        kernel_size: Axes = -1,
        stride: Axes = 1,
        dilation: Axes = 1,
        kernel_generator: KernelGenerator | None = None,
        dimension: int | None = None,
    ) -> None:
        super().__init__(kernel_size, stride, dilation, kernel_generator, False, self.MODE, dimension)


class MinkowskiAvgPooling(MinkowskiSumPooling):
    """The mean of the voxels that each output sees."""

    MODE = PoolingMode.LOCAL_AVG_POOLING


class MinkowskiMaxPooling(MinkowskiSumPooling):
    """The maximum of the voxels that each output sees."""

    MODE = PoolingMode.LOCAL_MAX_POOLING


class MinkowskiPoolingTranspose(MinkowskiPoolingBase):
    """Each fine voxel takes the sum of the coarse voxels that see it: the transpose of the sum."""

    def __init__(
        self,
        kernel_size: Axes,
        stride: Axes,
        dilation: Axes = 1,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        dimension: int | None = None,
    ) -> None:
        super().__init__(kernel_size, stride, dilation, kernel_generator, True, dimension=dimension)
        if kernel_generator is None:
            self.kernel_generator.expand_coordinates = expand_coordinates


# ---- whole batch items


def _global(
    features: torch.Tensor, mode: PoolingMode, key: CoordinateMapKey, manager: CoordinateManager
) -> torch.Tensor:
    """(B, C): the rows of each batch item reduced; 0 for an item without any."""
    kinds: tuple[tuple[str, Reduce], ...] = (("_SUM_", "sum"), ("_AVG_", "mean"), ("_MAX_", "max"))
    how = next(how for word, how in kinds if word in mode.name)
    held = manager.find_field(key) if manager.is_field(key) else manager.find(key)
    out = held.items.reduce(features, how)
    missing = manager.batch_size - len(out)
    return torch.cat([out, out.new_zeros(missing, out.shape[1])]) if missing else out


class MinkowskiGlobalPoolingFunction:
    """Pooling over batch items as a function of features; differentiable to any order."""

    @staticmethod
    def apply(
        input_features: torch.Tensor,
        pooling_mode: PoolingMode,
        in_coordinate_map_key: CoordinateMapKey,
        out_coordinate_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
    ) -> torch.Tensor:
        """Features (N, C) -> (B, C)."""
        if coordinate_manager is None:
            raise TypeError("coordinate_manager must be the manager of the keys; got None")
        if out_coordinate_map_key is not None and not out_coordinate_map_key.is_key_set():
            out_coordinate_map_key.set_key(*coordinate_manager.origin().get_key())
        return _global(input_features, pooling_mode, in_coordinate_map_key, coordinate_manager)


class MinkowskiGlobalPooling(MinkowskiModuleBase):
    """The mean, sum or maximum of each batch item, at the origin: one row an item, 0 for an item without a voxel."""

    MODE = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX

    def __init__(self, mode: PoolingMode | None = None, dimension: int | None = None) -> None:
        super().__init__()
        if mode is not None and not (isinstance(mode, PoolingMode) and mode.name.startswith("GLOBAL")):
            raise TypeError(f"mode must be a global PoolingMode; got {mode!r}")
        self.pooling_mode = self.MODE if mode is None else mode

    def forward(self, input: SparseTensor | TensorField, coordinates: Any = None) -> SparseTensor:
        out = features_of(input)
        manager = input.coordinate_manager
        out = _global(out, self.pooling_mode, input.key, manager)
        return SparseTensor(out, coordinate_map_key=manager.origin(), coordinate_manager=manager)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mode={self.pooling_mode})"


class MinkowskiGlobalSumPooling(MinkowskiGlobalPooling):
    """The sum of each batch item."""

    MODE = PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX


class MinkowskiGlobalAvgPooling(MinkowskiGlobalPooling):
    """The mean of each batch item."""


class MinkowskiGlobalMaxPooling(MinkowskiGlobalPooling):
    """The maximum of each batch item."""

    MODE = PoolingMode.GLOBAL_MAX_POOLING_PYTORCH_INDEX


class MinkowskiDirectMaxPoolingFunction:
    """The maximum over given pairs of rows."""

    @staticmethod
    def apply(
        in_map: torch.Tensor, out_map: torch.Tensor, in_feat: torch.Tensor, out_nrows: int, is_sorted: bool = False
    ) -> torch.Tensor:
        """y[o] = the maximum of x[in_map[p]] over the pairs p with out_map[p] = o: (N, C) -> (out_nrows, C)."""
        check_values("in_map", in_map, "(P,) integers")
        check_values("out_map", out_map, "(P,) integers")
        features = checked_features(in_feat)
        if in_map.ndim != 1 or in_map.dtype not in INTEGERS or in_map.shape != out_map.shape:
            raise ValueError(
                f"in_map and out_map must be (P,) integers; got {tuple(in_map.shape)} {in_map.dtype} and "
                f"{tuple(out_map.shape)}"
            )
        low, high = (int(end) for end in in_map.aminmax()) if len(in_map) and not in_map.is_cuda else (0, -1)
        if low < 0 or high >= len(features):  # a GPU checks by itself
            raise ValueError(f"in_map must name rows from 0 to {len(features) - 1}; got {low} to {high}")
        return PointGroups(out_map, out_nrows).reduce(features[in_map.long()], "max")
