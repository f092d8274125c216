"""``MinkowskiEngine.modules``: residual blocks, with squeeze and excitation or without."""

from __future__ import annotations

import torch

from sparseconv.interop.minkowski.features import MinkowskiBatchNorm, MinkowskiLinear, MinkowskiReLU, MinkowskiSigmoid
from sparseconv.interop.minkowski.layers import (
    MinkowskiBroadcastMultiplication,
    MinkowskiConvolution,
    MinkowskiGlobalPooling,
)
from sparseconv.interop.minkowski.sparse_tensor import SparseTensor


class _Block(torch.nn.Module):
    """Convolutions with their norms, added to the input or to what ``downsample`` makes of it.

    Args:
        inplanes, planes: channels of the input and of the convolutions.
        stride, dilation: of the first convolution of 3 taps per axis; the dilation of all such.
        downsample: what the input goes through before it is added.
        bn_momentum: of the norms.
        dimension: number of axes.
    """

    expansion = 1
    #: taps per axis of each convolution, the place of the strided one, and where channels are expanded
    sizes: tuple[int, ...] = (3, 3)
    strided = 0

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        dilation: int = 1,
        downsample: torch.nn.Module | None = None,
        bn_momentum: float = 0.1,
        dimension: int = -1,
    ) -> None:
        super().__init__()
        channels = [inplanes, *[planes] * (len(self.sizes) - 1), planes * self.expansion]
        for place, size in enumerate(self.sizes):
            conv = MinkowskiConvolution(
                channels[place],
                channels[place + 1],
                kernel_size=size,
                stride=stride if place == self.strided else 1,
                dilation=dilation if size > 1 else 1,
                dimension=dimension,
            )
            setattr(self, f"conv{place + 1}", conv)
            setattr(self, f"norm{place + 1}", MinkowskiBatchNorm(channels[place + 1], momentum=bn_momentum))
        self.relu = MinkowskiReLU(inplace=True)
        self.downsample = downsample

    def branch(self, x: SparseTensor) -> SparseTensor:
        """What is added to the input."""
        for place in range(1, len(self.sizes) + 1):
            x = getattr(self, f"norm{place}")(getattr(self, f"conv{place}")(x))
            if place < len(self.sizes):
                x = self.relu(x)
        return x

    def forward(self, x: SparseTensor) -> SparseTensor:
        out = self.branch(x)
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class BasicBlock(_Block):
    """Two convolutions of 3 taps per axis."""


class Bottleneck(_Block):
    """A convolution of 3 taps per axis between two of one tap, with four times the channels behind."""

    expansion = 4
    sizes = (1, 3, 1)
    strided = 1


# ---- ``modules.senet_block``


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


class _Excited(_Block):
    """A block with an `SELayer` behind its last norm; ``D`` is the number of axes, other arguments are the block's."""

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


class SEBasicBlock(_Excited, BasicBlock):
    """`BasicBlock` with an `SELayer` behind its last norm; ``D`` is the number of axes."""


class SEBottleneck(_Excited, Bottleneck):
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
        super().__init__(inplanes, planes, stride, dilation, downsample, reduction, D)
