"""The blocks of torchsparse's networks."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from sparseconv.interop.torchsparse import nn as spnn
from sparseconv.interop.torchsparse.tensor import SparseTensor


class SparseConvBlock(nn.Sequential):
    """A convolution, its norm, ReLU."""

    transposed = False

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, dilation: Any = 1
    ) -> None:
        options = {"stride": stride, "dilation": dilation, "transposed": self.transposed}
        conv = spnn.Conv3d(in_channels, out_channels, kernel_size, **options)
        super().__init__(conv, spnn.BatchNorm(out_channels), spnn.ReLU(True))


class SparseConvTransposeBlock(SparseConvBlock):
    """A transposed convolution, its norm, ReLU."""

    transposed = True


class SparseResBlock(nn.Module):
    """Two convolutions with their norms, added to the input or to a convolution of one tap of it."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, dilation: Any = 1
    ) -> None:
        super().__init__()
        self.main = nn.Sequential(
            spnn.Conv3d(in_channels, out_channels, kernel_size, dilation=dilation, stride=stride),
            spnn.BatchNorm(out_channels),
            spnn.ReLU(True),
            spnn.Conv3d(out_channels, out_channels, kernel_size, dilation=dilation),
            spnn.BatchNorm(out_channels),
        )
        strides = (stride,) if isinstance(stride, int) else stride
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels or math.prod(strides) != 1:
            conv = spnn.Conv3d(in_channels, out_channels, 1, stride=stride)
            self.shortcut = nn.Sequential(conv, spnn.BatchNorm(out_channels))
        self.relu = spnn.ReLU(True)

    def forward(self, x: SparseTensor) -> SparseTensor:
        return self.relu(self.main(x) + self.shortcut(x))
