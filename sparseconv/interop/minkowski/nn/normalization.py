"""Norms, with the norm of torch under ``bn``."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.interop.arguments import whole
from sparseconv.interop.minkowski.coordinate_manager import CoordinateManager
from sparseconv.interop.minkowski.keys import CoordinateMapKey
from sparseconv.interop.minkowski.nn.convolution import MinkowskiModuleBase
from sparseconv.interop.minkowski.nn.placement import check_input
from sparseconv.interop.minkowski.sparse_tensor import SparseTensor, TensorField
from sparseconv.interop.minkowski.tensor import with_features


class MinkowskiBatchNorm(torch.nn.Module):
    """``torch.nn.BatchNorm1d`` over all voxels or points."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__()
        (num_features,) = whole([num_features], "num_features", 1)
        self.bn: Any = torch.nn.BatchNorm1d(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: SparseTensor | TensorField) -> SparseTensor | TensorField:
        return with_features(input, self.bn)

    def __repr__(self) -> str:
        bn = self.bn
        return (
            f"{type(self).__name__}({bn.num_features}, eps={bn.eps}, momentum={bn.momentum}, affine={bn.affine}, "
            f"track_running_stats={bn.track_running_stats})"
        )


class MinkowskiSyncBatchNorm(MinkowskiBatchNorm):
    """``torch.nn.SyncBatchNorm`` over all voxels of all processes."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        (num_features,) = whole([num_features], "num_features", 1)
        rest: Any = (momentum, affine, track_running_stats, process_group)
        self.bn = torch.nn.SyncBatchNorm(num_features, eps, *rest)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """The module with every `MinkowskiBatchNorm` in it replaced; parameters and statistics are kept."""
        made = module
        if isinstance(module, MinkowskiBatchNorm) and not isinstance(module, MinkowskiSyncBatchNorm):
            made = MinkowskiSyncBatchNorm(1)
            made.bn = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module.bn, process_group)
            made.training = module.training
        for name, child in module.named_children():
            if made is module:
                made.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return made


def _normalized(features: torch.Tensor, key: CoordinateMapKey, manager: CoordinateManager, eps: float) -> torch.Tensor:
    """Features of each batch item and channel with mean 0 and variance 1, the biased one; in fp32 for halves."""
    items = manager.find(key).items
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    centred = features - items.spread(items.reduce(features, "mean"))
    variance = items.reduce(centred**2, "mean")
    return centred * items.spread((variance + eps).rsqrt())


class MinkowskiInstanceNormFunction:
    """The instance norm without weights, as a function; differentiable to any order."""

    @staticmethod
    def apply(
        in_feat: torch.Tensor,
        in_coords_key: CoordinateMapKey,
        glob_coords_key: CoordinateMapKey | None = None,
        coords_manager: CoordinateManager | None = None,
        gpooling_mode: Any = None,
    ) -> torch.Tensor:
        """Features (N, C) -> (N, C)."""
        if coords_manager is None:
            raise TypeError("coords_manager must be the manager of the key; got None")
        return _normalized(in_feat, in_coords_key, coords_manager, 1e-8).to(in_feat.dtype)


class MinkowskiInstanceNorm(MinkowskiModuleBase):
    """Each channel of each batch item with mean 0 and variance 1, then ``weight`` and ``bias`` (1, C)."""

    eps = 1e-8

    def __init__(self, num_features: int, dimension: int | None = None) -> None:
        super().__init__()
        (self.num_features,) = whole([num_features], "num_features", 1)
        self.weight = torch.nn.Parameter(torch.ones(1, self.num_features))
        self.bias = torch.nn.Parameter(torch.zeros(1, self.num_features))

    def reset_parameters(self) -> None:
        """Weight 1, bias 0."""
        torch.nn.init.ones_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: SparseTensor) -> SparseTensor:
        check_input(input, None)
        normalized = _normalized(input.F, input.key, input.coordinate_manager, self.eps)
        dtype = torch.promote_types(input.dtype, self.weight.dtype)
        return input.like((normalized * self.weight + self.bias).to(dtype))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nchannels={self.num_features})"


class MinkowskiStableInstanceNorm(MinkowskiInstanceNorm):
    """`MinkowskiInstanceNorm` with a larger number under the root."""

    eps = 1e-6
