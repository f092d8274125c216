"""Batch norm over the voxels of all processes, on any device and however the voxels are spread."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sparseconv.nn.module import Features, features_of, with_features
from sparseconv.nn.normalization import BatchNorm
from sparseconv.tensor import SparseTensor


class SyncBatchNorm(BatchNorm):
    """`BatchNorm` whose mean and variance are those of the voxels of all processes.

        mean = sum over processes and rows of x / N,    var = sum of (x - mean)^2 / N,    N = rows of all processes

    Processes may hold different numbers of voxels, none at all included. Statistics in fp32 for halves. Outside of
    training, or without processes, it is `BatchNorm`. State and arguments are torch's; ``process_group`` is the group.

    >>> net = torch.nn.Sequential(BatchNorm(8))
    >>> type(SyncBatchNorm.convert(net)[0]).__name__
    'SyncBatchNorm'
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)
        self.process_group = process_group

    def forward(self, x: Features) -> Features:
        """Features (N, C), alone or in a `SparseTensor` -> the same kind."""
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1
        if not together or not (self.training or self.running_mean is None):
            return super().forward(x)
        features = features_of(x, self, self.num_features)
        count = x.grid.count if isinstance(x, SparseTensor) else None
        return with_features(x, self._by_sums(features, count, self._sum))

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        from sparseconv.distributed.exchange import summed  # takes torch.distributed.checkpoint along

        return summed(values, self.process_group)

    @classmethod
    def convert(cls, module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """Replace every `BatchNorm` of a network by this one, with the same parameters and statistics; returns it."""
        if type(module) is BatchNorm:
            made = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group=process_group,
            )
            made.__dict__.update({**module.__dict__, "process_group": process_group})
            return made
        for name, child in module.named_children():
            setattr(module, name, cls.convert(child, process_group))
        return module
