"""Modules of features alone: linear layers, activations, dropout, and any torch module made to fit."""

from __future__ import annotations

import torch

from sparseconv.nn.module import FeatureModule, Features, SparseModule, features_of, with_features


class Pointwise(SparseModule):
    """Wraps a PyTorch module on features (N, C), so that it takes and returns a `SparseTensor`.

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
    """`torch.nn.Linear` on the features of each voxel: a convolution of one tap.

    >>> Linear(4, 8)(torch.ones(3, 4)).shape
    torch.Size([3, 8])
    """


class Dropout(FeatureModule, torch.nn.Dropout):
    """`torch.nn.Dropout` on single features.

    >>> Dropout(0.5).eval()(torch.ones(1, 2))
    tensor([[1., 1.]])
    """


class ReLU(FeatureModule, torch.nn.ReLU):
    """`torch.nn.ReLU` on the features.

    >>> ReLU()(torch.tensor([[-1.0, 2.0]]))
    tensor([[0., 2.]])
    """


class LeakyReLU(FeatureModule, torch.nn.LeakyReLU):
    """`torch.nn.LeakyReLU` on the features.

    >>> LeakyReLU(0.1)(torch.tensor([[-1.0, 2.0]]))
    tensor([[-0.1000,  2.0000]])
    """


class PReLU(FeatureModule, torch.nn.PReLU):
    """`torch.nn.PReLU` on the features.

    >>> PReLU()(torch.tensor([[-1.0, 2.0]])).tolist()
    [[-0.25, 2.0]]
    """


class ELU(FeatureModule, torch.nn.ELU):
    """`torch.nn.ELU` on the features.

    >>> ELU()(torch.tensor([[-1.0, 2.0]]))
    tensor([[-0.6321,  2.0000]])
    """


class GELU(FeatureModule, torch.nn.GELU):
    """`torch.nn.GELU` on the features.

    >>> GELU()(torch.tensor([[-1.0, 2.0]]))
    tensor([[-0.1587,  1.9545]])
    """


class SiLU(FeatureModule, torch.nn.SiLU):
    """`torch.nn.SiLU` on the features.

    >>> SiLU()(torch.tensor([[-1.0, 2.0]]))
    tensor([[-0.2689,  1.7616]])
    """


class Sigmoid(FeatureModule, torch.nn.Sigmoid):
    """`torch.nn.Sigmoid` on the features; voxels that are absent stay absent.

    >>> Sigmoid()(torch.tensor([[-1.0, 2.0]]))
    tensor([[0.2689, 0.8808]])
    """


class Tanh(FeatureModule, torch.nn.Tanh):
    """`torch.nn.Tanh` on the features.

    >>> Tanh()(torch.tensor([[-1.0, 2.0]]))
    tensor([[-0.7616,  0.9640]])
    """


class Softplus(FeatureModule, torch.nn.Softplus):
    """`torch.nn.Softplus` on the features; voxels that are absent stay absent.

    >>> Softplus()(torch.tensor([[-1.0, 2.0]]))
    tensor([[0.3133, 2.1269]])
    """
