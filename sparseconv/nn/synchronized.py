"""Batch norm over the voxels of all processes, on any device and however the voxels are spread."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sparseconv.nn.module import Features, features_of, with_features
from sparseconv.nn.normalization import BatchNorm


class SyncBatchNorm(BatchNorm):
    """`BatchNorm` whose mean and variance are those of the voxels of all processes.

        mean = sum over processes and rows of x / N,    var = sum of (x - mean)^2 / N,    N = rows of all processes

    Processes may hold different numbers of voxels, none at all included. Statistics in fp32 for halves. Outside of
    training, or without processes, it is `BatchNorm`. State and arguments are torch's; ``process_group`` is the group.
    """

    def __init__(self, num_features: int, *args: Any, process_group: Any = None, **options: Any) -> None:
        super().__init__(num_features, *args, **options)
        self.process_group = process_group

    def forward(self, x: Features) -> Features:
        """Features (N, C), alone or in a `SparseTensor` -> the same kind."""
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1
        if not together or not (self.training or self.running_mean is None):
            return super().forward(x)
        features = features_of(x, self, self.num_features)
        wide = features.to(torch.promote_types(features.dtype, torch.float32))
        rows = wide.new_full((1,), wide.shape[0])
        total = self._sum(torch.cat([wide.sum(0), rows]))
        count = total[-1].detach().clamp_min(1)
        mean = total[:-1] / count
        centred = wide - mean
        var = self._sum(centred.square().sum(0)) / count
        self._remember(mean.detach(), var.detach(), count)
        y = centred * torch.rsqrt(var + self.eps)
        if self.weight is not None:
            y = y * self.weight + self.bias
        return with_features(x, y.to(features.dtype))

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        return _AllSum.apply(values, self.process_group)

    def _remember(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
        """Update the running statistics as torch does; a single voxel has no variance and changes nothing."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        share = (count > 1).to(count.dtype)
        self.num_batches_tracked += share.to(self.num_batches_tracked.dtype)
        momentum = 1 / self.num_batches_tracked.clamp_min(1) if self.momentum is None else self.momentum
        unbiased = var * count / (count - 1).clamp_min(1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share * momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share * momentum)

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


class _AllSum(torch.autograd.Function):
    """The sum over processes; its derivative is the sum over processes of the gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        return _AllSum.apply(grad, ctx.group), None
