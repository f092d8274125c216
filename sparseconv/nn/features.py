"""Modules of features alone: linear layers, activations, dropout, and any torch module made to fit."""

from __future__ import annotations

import torch

from sparseconv.nn.module import FeatureModule, Features, SparseModule, features_of, with_features


class Pointwise(SparseModule):
    """Any torch module of features (N, C), as one that takes and returns a `SparseTensor`.

    >>> Pointwise(torch.nn.Softsign())
    Pointwise(
      (module): Softsign()
    )
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Features) -> Features:
        """Features (N, C), alone or in a `SparseTensor` -> the same kind, (N, C')."""
        return with_features(x, self.module(features_of(x, self, floating=False)))


class Linear(FeatureModule, torch.nn.Linear):
    """`torch.nn.Linear` on the features of each voxel: a convolution of one tap."""


class Dropout(FeatureModule, torch.nn.Dropout):
    """`torch.nn.Dropout` on single features."""


class ReLU(FeatureModule, torch.nn.ReLU):
    """`torch.nn.ReLU` on the features."""


class LeakyReLU(FeatureModule, torch.nn.LeakyReLU):
    """`torch.nn.LeakyReLU` on the features."""


class PReLU(FeatureModule, torch.nn.PReLU):
    """`torch.nn.PReLU` on the features."""


class ELU(FeatureModule, torch.nn.ELU):
    """`torch.nn.ELU` on the features."""


class GELU(FeatureModule, torch.nn.GELU):
    """`torch.nn.GELU` on the features."""


class SiLU(FeatureModule, torch.nn.SiLU):
    """`torch.nn.SiLU` on the features."""


class Sigmoid(FeatureModule, torch.nn.Sigmoid):
    """`torch.nn.Sigmoid` on the features; voxels that are absent stay absent."""


class Tanh(FeatureModule, torch.nn.Tanh):
    """`torch.nn.Tanh` on the features."""


class Softplus(FeatureModule, torch.nn.Softplus):
    """`torch.nn.Softplus` on the features; voxels that are absent stay absent."""
