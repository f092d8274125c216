"""Norms of features: over all voxels, over the channels of a voxel, over the voxels of each batch item."""

from __future__ import annotations

import torch

from sparseconv.nn.module import FeatureModule, Features, SparseModule, features_of, with_features


class BatchNorm(SparseModule, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` over all voxels of all batch items; arguments and state are torch's.

        y = (x - mean) / sqrt(var + eps) * weight + bias        (mean and var of each channel, over the N rows)

    In training a batch of one voxel is its own mean, so y is the bias; like an empty batch it has no variance and
    leaves the running statistics as they are.
    """

    def forward(self, x: Features) -> Features:
        """Features (N, C), alone or in a `SparseTensor` -> the same kind."""
        features = features_of(x, self, self.num_features)
        if features.shape[0] < 2 and (self.training or self.running_mean is None):
            y = features - features
            if self.weight is not None:
                y = (y * self.weight + self.bias).to(features.dtype)
        else:
            y = super().forward(features)
        return with_features(x, y)


class LayerNorm(FeatureModule, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` over the channels of each voxel."""
