"""Layers of torch that work on features, with the layer of torch under ``module``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sparseconv.interop.minkowski.nn.convolution import MinkowskiModuleBase
from sparseconv.interop.minkowski.sparse_tensor import SparseTensor, TensorField
from sparseconv.interop.minkowski.tensor import with_features


class MinkowskiNonlinearityBase(MinkowskiModuleBase):
    """A layer of torch, ``MODULE``, on the features of a sparse tensor or a field; its arguments are that layer's."""

    MODULE: type[nn.Module] = nn.Identity

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.MODULE(*args, **kwargs)

    def forward(self, input: SparseTensor | TensorField) -> SparseTensor | TensorField:
        return with_features(input, self.module)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MinkowskiELU(MinkowskiNonlinearityBase):
    """``torch.nn.ELU`` on features."""

    MODULE = nn.ELU


class MinkowskiHardshrink(MinkowskiNonlinearityBase):
    """``torch.nn.Hardshrink`` on features."""

    MODULE = nn.Hardshrink


class MinkowskiHardsigmoid(MinkowskiNonlinearityBase):
    """``torch.nn.Hardsigmoid`` on features."""

    MODULE = nn.Hardsigmoid


class MinkowskiHardtanh(MinkowskiNonlinearityBase):
    """``torch.nn.Hardtanh`` on features."""

    MODULE = nn.Hardtanh


class MinkowskiHardswish(MinkowskiNonlinearityBase):
    """``torch.nn.Hardswish`` on features."""

    MODULE = nn.Hardswish


class MinkowskiLeakyReLU(MinkowskiNonlinearityBase):
    """``torch.nn.LeakyReLU`` on features."""

    MODULE = nn.LeakyReLU


class MinkowskiLogSigmoid(MinkowskiNonlinearityBase):
    """``torch.nn.LogSigmoid`` on features."""

    MODULE = nn.LogSigmoid


class MinkowskiPReLU(MinkowskiNonlinearityBase):
    """``torch.nn.PReLU`` on features."""

    MODULE = nn.PReLU


class MinkowskiReLU(MinkowskiNonlinearityBase):
    """``torch.nn.ReLU`` on features."""

    MODULE = nn.ReLU


class MinkowskiReLU6(MinkowskiNonlinearityBase):
    """``torch.nn.ReLU6`` on features."""

    MODULE = nn.ReLU6


class MinkowskiRReLU(MinkowskiNonlinearityBase):
    """``torch.nn.RReLU`` on features."""

    MODULE = nn.RReLU


class MinkowskiSELU(MinkowskiNonlinearityBase):
    """``torch.nn.SELU`` on features."""

    MODULE = nn.SELU


class MinkowskiCELU(MinkowskiNonlinearityBase):
    """``torch.nn.CELU`` on features."""

    MODULE = nn.CELU


class MinkowskiGELU(MinkowskiNonlinearityBase):
    """``torch.nn.GELU`` on features."""

    MODULE = nn.GELU


class MinkowskiSigmoid(MinkowskiNonlinearityBase):
    """``torch.nn.Sigmoid`` on features."""

    MODULE = nn.Sigmoid


class MinkowskiSiLU(MinkowskiNonlinearityBase):
    """``torch.nn.SiLU`` on features."""

    MODULE = nn.SiLU


class MinkowskiSoftplus(MinkowskiNonlinearityBase):
    """``torch.nn.Softplus`` on features."""

    MODULE = nn.Softplus


class MinkowskiSoftshrink(MinkowskiNonlinearityBase):
    """``torch.nn.Softshrink`` on features."""

    MODULE = nn.Softshrink


class MinkowskiSoftsign(MinkowskiNonlinearityBase):
    """``torch.nn.Softsign`` on features."""

    MODULE = nn.Softsign


class MinkowskiTanh(MinkowskiNonlinearityBase):
    """``torch.nn.Tanh`` on features."""

    MODULE = nn.Tanh


class MinkowskiTanhshrink(MinkowskiNonlinearityBase):
    """``torch.nn.Tanhshrink`` on features."""

    MODULE = nn.Tanhshrink


class MinkowskiThreshold(MinkowskiNonlinearityBase):
    """``torch.nn.Threshold`` on features."""

    MODULE = nn.Threshold


class MinkowskiSoftmin(MinkowskiNonlinearityBase):
    """``torch.nn.Softmin`` on features."""

    MODULE = nn.Softmin


class MinkowskiSoftmax(MinkowskiNonlinearityBase):
    """``torch.nn.Softmax`` on features."""

    MODULE = nn.Softmax


class MinkowskiLogSoftmax(MinkowskiNonlinearityBase):
    """``torch.nn.LogSoftmax`` on features."""

    MODULE = nn.LogSoftmax


class MinkowskiAdaptiveLogSoftmaxWithLoss(MinkowskiNonlinearityBase):
    """``torch.nn.AdaptiveLogSoftmaxWithLoss`` on features."""

    MODULE = nn.AdaptiveLogSoftmaxWithLoss


class MinkowskiDropout(MinkowskiNonlinearityBase):
    """``torch.nn.Dropout`` on features."""

    MODULE = nn.Dropout


class MinkowskiAlphaDropout(MinkowskiNonlinearityBase):
    """``torch.nn.AlphaDropout`` on features."""

    MODULE = nn.AlphaDropout


class MinkowskiSinusoidal(MinkowskiModuleBase):
    """``sin(x @ kernel + bias) * coef``, features (N, C_in) -> (N, C_out)."""

    def __init__(self, in_channel: int, out_channel: int) -> None:
        super().__init__()
        self.in_channel, self.out_channel = in_channel, out_channel
        self.kernel = nn.Parameter(torch.rand(in_channel, out_channel))
        self.bias = nn.Parameter(torch.rand(1, out_channel))
        self.coef = nn.Parameter(torch.rand(1, out_channel))

    def forward(self, input: SparseTensor | TensorField) -> SparseTensor | TensorField:
        return with_features(input, lambda x: torch.sin(x @ self.kernel + self.bias) * self.coef)
