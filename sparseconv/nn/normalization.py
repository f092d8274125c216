"""Norms of features: over all voxels, over the channels of a voxel, over the voxels of each batch item."""

from __future__ import annotations

from typing import Any

import torch

from sparseconv.checks import check_count
from sparseconv.compiler import operators
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.nn.fused.live_rows import over_live_rows
from sparseconv.nn.fused.training import Layer, serves, trained
from sparseconv.nn.geometry import grid_in
from sparseconv.nn.module import FeatureModule, Features, SparseModule, features_of, with_features
from sparseconv.ops.items import standardised
from sparseconv.tensor import SparseTensor
from sparseconv.torch_private import exporting
from sparseconv.transforms import tracing


def _kernels() -> Any:
    """The kernels of norms, for programs of torch.compile; loaded where they are used."""
    from sparseconv.nn.fused import normalize

    return normalize


operators.norm_kernels_of[:] = [_kernels]


class BatchNorm(SparseModule, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` over all voxels of all batch items; arguments and state are torch's.

        y = (x - mean) / sqrt(var + eps) * weight + bias        (mean and var of each channel, over the N rows)

    In training a batch of one voxel is its own mean, so y is the bias; like an empty batch it has no variance and
    leaves the running statistics as they are.

    >>> BatchNorm(1)(torch.tensor([[1.0], [3.0]])).tolist()[0][0] < 0
    True
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
    ) -> None:
        check_count("num_features", num_features, 1)
        more: dict[str, Any] = {} if bias else {"bias": False}  # torch 2.11 has no such argument, and says so
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype, **more)

    def forward(self, x: Features) -> Features:
        """Features (N, C), alone or in a `SparseTensor` -> the same kind."""
        features = features_of(x, self, self.num_features)
        grid = x.grid if isinstance(x, SparseTensor) else None
        count = None if grid is None else grid.count
        of_batch = self.training or self.running_mean is None
        if tracing() and not exporting() and not (grid is not None and grid.is_shared):
            return with_features(x, self._traced(features) if of_batch else super().forward(features))
        if grid is not None and grid.is_shared and of_batch:
            y = self._by_sums(features, count, grid.all_sum)
        elif serves(features, self, features.shape[0]):
            y = trained(features, [Layer(self, alive=count)])
        elif count is not None and of_batch:
            y = self._by_sums(features, count)
        elif of_batch and features.shape[0] < 2 and not getattr(features, "is_watched", False):
            y = features - features
            y = y if self.weight is None else y * self.weight
            y = (y if self.bias is None else y + self.bias).to(features.dtype)
        else:
            y = super().forward(features)
        return with_features(x, y)

    def _traced(self, features: torch.Tensor) -> torch.Tensor:
        """While torch.compile traces, which knows no number of rows."""
        count = torch.ops.sparseconv.rows(features)
        if self.momentum is None:  # statistics that are means over all batches
            return self._by_sums(features, count)
        kept = (self.running_mean, self.running_var) if self.training else (None, None)
        given = features, self.weight, self.bias, *kept, count, self.momentum, self.eps, True
        y, _, _, mean, var = torch.ops.sparseconv.batch_norm(*given)
        if self.training and self.running_mean is not None and self.running_var is not None:
            self.running_mean.copy_(mean)
            self.running_var.copy_(var)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_((count > 1)[0].to(torch.int64))
        return y

    def _by_sums(self, features: torch.Tensor, count: torch.Tensor | None, *total: Any) -> torch.Tensor:
        """Over the live rows, of all processes where ``total`` adds up over them; nothing is read by the CPU."""
        y, mean, var, rows = over_live_rows(features, count, self.weight, self.bias, self.eps, *total)
        if self.training and self.running_mean is not None and self.running_var is not None:
            self._follow(mean, var * rows / (rows - 1).clamp_min(1), (rows > 1).to(rows.dtype))
        return y

    def _follow(self, mean: torch.Tensor, var: torch.Tensor, share: torch.Tensor) -> None:
        """Move the running statistics as torch does, where ``share`` (1,) is 1; it is 0 where there is no variance."""
        tracked, momentum = self.num_batches_tracked, self.momentum
        if tracked is not None:
            tracked.add_(share[0].to(tracked.dtype))
        step = share
        if momentum is not None:
            step = share * momentum
        elif tracked is not None:
            step = share / tracked.clamp_min(1)
        for kept, seen in ((self.running_mean, mean), (self.running_var, var)):
            if kept is not None:
                kept.copy_(torch.lerp(kept.to(seen.dtype), seen, step))


class LayerNorm(FeatureModule, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` over the channels of each voxel.

    >>> LayerNorm(4)(torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """


class GroupNorm(SparseModule, torch.nn.GroupNorm):
    """`torch.nn.GroupNorm` per batch item: each group of channels over all voxels of an item; torch's arguments.

        y = (x - mean[b, g]) / sqrt(var[b, g] + eps) * weight + bias

    Differentiable to any order; statistics in fp32 for halves; an empty item has nothing to normalize.

    >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 1]]))
    >>> GroupNorm(1, 1)(torch.tensor([[1.0], [3.0]]), grid=grid).tolist()
    [[-0.9999949932098389], [0.9999949932098389]]
    """

    def forward(self, x: Features, *, grid: VoxelGrid | None = None) -> Features:
        """A `SparseTensor`, or features (N, C) with their ``grid`` -> the same kind."""
        return _per_item(x, grid, self, self.num_channels, self.num_groups)


class InstanceNorm(SparseModule):
    """Each channel over all voxels of a batch item, as `torch.nn.InstanceNorm1d` without running statistics.

    Args:
        num_features: C.
        eps: added to the variance.
        affine: learn a weight and a bias (C,).

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0], [0, 1], [1, 0]])), torch.rand(3, 4))
    >>> InstanceNorm(4)(x).shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.affine = num_features, eps, affine
        self.weight: torch.nn.Parameter | None
        self.bias: torch.nn.Parameter | None
        if affine:
            self.weight = torch.nn.Parameter(torch.ones(num_features, device=device, dtype=dtype))
            self.bias = torch.nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Weight 1 and bias 0."""
        if self.weight is not None and self.bias is not None:
            torch.nn.init.ones_(self.weight)
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Features, *, grid: VoxelGrid | None = None) -> Features:
        """A `SparseTensor`, or features (N, C) with their ``grid`` -> the same kind."""
        return _per_item(x, grid, self, self.num_features, self.num_features)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}"


def _per_item(x: Any, grid: VoxelGrid | None, norm: Any, channels: int, groups: int) -> Any:
    """Normalize groups of channels over the voxels of each item, then scale and shift."""
    features = features_of(x, norm, channels)
    grid = grid_in(x, norm, "grid=") if grid is None else grid
    if grid.is_shared:
        raise ValueError(f"{type(norm).__name__} over shards is not supported: use BatchNorm or LayerNorm")
    y = features.to(torch.promote_types(features.dtype, torch.float32))
    y = standardised(y, grid, groups, norm.eps)
    if norm.weight is not None:
        weight = norm.weight.to(y.dtype)
        y = y * weight if norm.bias is None else torch.addcmul(norm.bias.to(y.dtype), y, weight)
    return with_features(x, y.to(features.dtype))
