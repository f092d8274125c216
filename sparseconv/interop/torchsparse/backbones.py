"""``torchsparse.backbones``: blocks, a residual encoder and a residual U-Net, with torchsparse's parameter names."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from sparseconv.interop.torchsparse import nn as spnn
from sparseconv.interop.torchsparse.tensor import SparseTensor, cat


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


class SparseResNet(nn.ModuleList):
    """Stages of a convolution and residual blocks; returns every stage's output.

    Args:
        blocks: (number of blocks, channels, kernel size, stride) of each stage.
    """

    def __init__(self, blocks: list[tuple], *, in_channels: int = 4, width_multiplier: float = 1.0) -> None:
        super().__init__()
        self.blocks, self.in_channels, self.width_multiplier = blocks, in_channels, width_multiplier
        for count, channels, kernel_size, stride in blocks:
            width = int(channels * width_multiplier)
            stage: list[nn.Module] = [SparseConvBlock(in_channels, width, kernel_size, stride=stride)]
            stage += [SparseResBlock(width, width, kernel_size) for _ in range(count - 1)]
            self.append(nn.Sequential(*stage))
            in_channels = width

    def forward(self, x: SparseTensor) -> list[SparseTensor]:
        outputs = []
        for stage in self:
            x = stage(x)
            outputs.append(x)
        return outputs


class SparseResNet21D(SparseResNet):
    """The encoder with 21 convolutions."""

    def __init__(self, **kwargs: Any) -> None:
        stages = [(3, 16, 3, 1), (3, 32, 3, 2), (3, 64, 3, 2), (3, 128, 3, 2), (1, 128, (1, 3, 1), (1, 2, 1))]
        super().__init__(stages, **kwargs)


class SparseResUNet(nn.Module):
    """Four strided stages down and four up; returns the outputs of the stem and of every stage."""

    def __init__(
        self,
        stem_channels: int,
        encoder_channels: list[int],
        decoder_channels: list[int],
        *,
        in_channels: int = 4,
        width_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.stem_channels, self.encoder_channels = stem_channels, encoder_channels
        self.decoder_channels, self.in_channels, self.width_multiplier = decoder_channels, in_channels, width_multiplier
        width = [int(width_multiplier * c) for c in [stem_channels, *encoder_channels, *decoder_channels]]
        self.stem = nn.Sequential(*SparseConvBlock(in_channels, width[0], 3), *SparseConvBlock(width[0], width[0], 3))
        self.encoders = nn.ModuleList(
            nn.Sequential(
                SparseConvBlock(width[k], width[k], 2, stride=2),
                SparseResBlock(width[k], width[k + 1], 3),
                SparseResBlock(width[k + 1], width[k + 1], 3),
            )
            for k in range(4)
        )
        self.decoders = nn.ModuleList(
            nn.ModuleDict(
                {
                    "upsample": SparseConvTransposeBlock(width[k + 4], width[k + 5], 2, stride=2),
                    "fuse": nn.Sequential(
                        SparseResBlock(width[k + 5] + width[3 - k], width[k + 5], 3),
                        SparseResBlock(width[k + 5], width[k + 5], 3),
                    ),
                }
            )
            for k in range(4)
        )

    def forward(self, x: SparseTensor) -> list[SparseTensor]:
        down = [self.stem(x)]
        for encoder in self.encoders:
            down.append(encoder(down[-1]))
        outputs = list(down)
        decoders: Any = self.decoders
        for decoder, skip in zip(decoders, down[-2::-1]):
            outputs.append(decoder["fuse"](cat([decoder["upsample"](outputs[-1]), skip])))
        return outputs


class SparseResUNet42(SparseResUNet):
    """The U-Net with 42 convolutions."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(32, [32, 64, 128, 256], [256, 128, 96, 96], **kwargs)
