"""Residual blocks with squeeze and excitation."""

from __future__ import annotations

import torch

from sparseconv.interop.minkowski.modules.resnet_block import BasicBlock, Bottleneck
from sparseconv.interop.minkowski.nn.broadcast import MinkowskiBroadcastMultiplication
from sparseconv.interop.minkowski.nn.nonlinearity import MinkowskiReLU, MinkowskiSigmoid
from sparseconv.interop.minkowski.nn.operations import MinkowskiLinear
from sparseconv.interop.minkowski.nn.pooling import MinkowskiGlobalPooling
from sparseconv.interop.minkowski.sparse_tensor import SparseTensor


class SELayer(torch.nn.Module):
    """Each channel times a number in (0, 1) that two linear layers make of the item's means."""

    def __init__(self, channel: int, reduction: int = 16, D: int = -1) -> None:
        super().__init__()
        self.fc = torch.nn.Sequential(
            MinkowskiLinear(channel, channel // reduction),
            MinkowskiReLU(inplace=True),
            MinkowskiLinear(channel // reduction, channel),
            MinkowskiSigmoid(),
        )
        self.pooling = MinkowskiGlobalPooling()
        self.broadcast_mul = MinkowskiBroadcastMultiplication()

    def forward(self, x: SparseTensor) -> SparseTensor:
        return self.broadcast_mul(x, self.fc(self.pooling(x)))


class SEBasicBlock(BasicBlock):
    """`BasicBlock` with an `SELayer` behind its last norm; ``D`` is the number of axes."""

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        dilation: int = 1,
        downsample: torch.nn.Module | None = None,
        reduction: int = 16,
        D: int = -1,
    ) -> None:
        super().__init__(inplanes, planes, stride, dilation, downsample, dimension=D)
        self.se = SELayer(planes * self.expansion, reduction, D)

    def branch(self, x: SparseTensor) -> SparseTensor:
        return self.se(super().branch(x))


class SEBottleneck(Bottleneck):
    """`Bottleneck` with an `SELayer` behind its last norm; ``D`` is the number of axes."""

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        dilation: int = 1,
        downsample: torch.nn.Module | None = None,
        D: int = 3,
        reduction: int = 16,
    ) -> None:
        super().__init__(inplanes, planes, stride, dilation, downsample, dimension=D)
        self.se = SELayer(planes * self.expansion, reduction, D)

    def branch(self, x: SparseTensor) -> SparseTensor:
        return self.se(super().branch(x))
