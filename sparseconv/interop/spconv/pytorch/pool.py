"""Pooling with spconv's names and arguments."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.interop.arguments import REQUIRED, check_algorithm
from sparseconv.interop.spconv import constants
from sparseconv.interop.spconv.core import ConvAlgo, default_algo
from sparseconv.interop.spconv.pytorch.conv import RECORD, Size, WindowModule
from sparseconv.interop.spconv.pytorch.core import SparseConvTensor
from sparseconv.interop.spconv.pytorch.functional import SpconvMean
from sparseconv.interop.spconv.pytorch.geometry import conv_size, find_plan
from sparseconv.interop.spconv.pytorch.modules import SparseModule, of_ranks
from sparseconv.interop.spconv.pytorch.tracing import leaf
from sparseconv.ops import global_pooling, pooling
from sparseconv.plan.convolution import ConvolutionPlan


class _Pool(WindowModule):
    """A window over the voxels there are.

    Args:
        stride: default 1 here and ``kernel_size`` in the classes with a number of axes in their names, or where None.
        subm: outputs are the voxels of the input.
        indice_key: keep the map, for an inverse convolution.
    """

    #: of a window that spconv pools by implicit GEMM
    most_taps = 128

    def __init__(
        self,
        ndim: int,
        kernel_size: Size = 3,
        stride: Size | None = 1,
        padding: Size = 0,
        dilation: Size = 1,
        indice_key: str | None = None,
        subm: bool = False,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.subm, self.indice_key = subm, indice_key
        check_algorithm(algo)
        self._set_window(ndim, kernel_size, kernel_size if stride is None else stride, padding, dilation)
        self.algo = default_algo(self.kernel_size, self.most_taps) if algo is None else algo
        self.record_voxel_count = record_voxel_count
        if record_voxel_count and not subm:
            self.register_buffer(RECORD, torch.zeros(1, dtype=torch.int32))

    def _reduce(self, features: torch.Tensor, plan: ConvolutionPlan) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input: SparseConvTensor) -> SparseConvTensor:
        """A `SparseConvTensor` -> one on the output's voxels."""
        if not isinstance(input, SparseConvTensor):
            return leaf(self, input)
        if self.indice_key is not None and self.indice_key in input.indice_dict:
            raise ValueError(f"indice_key {self.indice_key!r} is taken: give this pool a key of its own, or none")
        voxels, shape = input.inside, input.spatial_shape
        window = self._window()
        out_shape = shape if self.subm else conv_size(shape, *window)
        plan = find_plan(voxels, window, out_shape, subm=self.subm)
        out = input.replace_feature(self._reduce(input.features, plan))
        return self._place_output(input, out, plan, out_shape, is_new=True)

    def extra_repr(self) -> str:
        words = [f"{n}={getattr(self, n)}" for n in ("kernel_size", "stride", "padding", "dilation")]
        return ", ".join([*words, f"algo={self.algo}"])


class SparseMaxPool(_Pool):
    """The largest voxel of each window, channel by channel; absent voxels do not count.

    Under ``constants.POOL_AS_SPCONV`` a maximum is 0 at least.
    """

    def _reduce(self, features: torch.Tensor, plan: ConvolutionPlan) -> torch.Tensor:
        largest = pooling.max_pool(features, plan)[0]
        return largest.clamp(min=0) if constants.POOL_AS_SPCONV else largest


class SparseAvgPool(_Pool):
    """The mean over the voxels of each window that are there.

    Under ``constants.POOL_AS_SPCONV`` its gradient is spconv's.
    """

    def _reduce(self, features: torch.Tensor, plan: ConvolutionPlan) -> torch.Tensor:
        if not constants.POOL_AS_SPCONV:
            return pooling.avg_pool(features, plan)
        wide = features.to(torch.promote_types(features.dtype, torch.float32))
        counts = pooling.sum_pool(torch.ones_like(wide[:, :1], requires_grad=False), plan)
        return SpconvMean.apply(pooling.sum_pool(wide, plan), counts).to(features.dtype)


class _GlobalPool(SparseModule):
    pool: Any

    def forward(self, input: SparseConvTensor) -> torch.Tensor:
        return self.pool(input.features, input.voxels) if isinstance(input, SparseConvTensor) else leaf(self, input)


class SparseGlobalMaxPool(_GlobalPool):
    """The maximum over the voxels of each batch item, (B, C); 0 for an empty item."""

    pool = staticmethod(global_pooling.global_max_pool)


class SparseGlobalAvgPool(_GlobalPool):
    """The mean over the voxels of each batch item, (B, C); 0 for an empty item."""

    pool = staticmethod(global_pooling.global_avg_pool)


_ARGUMENTS = "kernel_size stride padding dilation indice_key algo record_voxel_count name"
_DEFAULTS = {"kernel_size": REQUIRED, "stride": None}

SparseMaxPool1d, SparseMaxPool2d, SparseMaxPool3d, SparseMaxPool4d = of_ranks(
    SparseMaxPool,
    "SparseMaxPool",
    "Max pooling on {}; the stride defaults to the kernel size.",
    _ARGUMENTS,
    _DEFAULTS,
)
SparseAvgPool1d, SparseAvgPool2d, SparseAvgPool3d, SparseAvgPool4d = of_ranks(
    SparseAvgPool,
    "SparseAvgPool",
    "Average pooling on {}; the stride defaults to the kernel size.",
    _ARGUMENTS,
    _DEFAULTS,
)

ALL_POOL_LAYERS = {SparseMaxPool, SparseAvgPool, *SparseMaxPool.__subclasses__(), *SparseAvgPool.__subclasses__()}
