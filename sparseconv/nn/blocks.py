"""Blocks of layers on one grid."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparseconv.nn.containers import Sequential, run
from sparseconv.nn.convolution import SubmanifoldConv
from sparseconv.nn.features import Linear, ReLU
from sparseconv.nn.fused.fusion import conv_norm_act, hooked, is_activation, two_layers
from sparseconv.nn.geometry import Axes
from sparseconv.nn.module import SparseModule
from sparseconv.nn.normalization import BatchNorm
from sparseconv.tensor import SparseTensor

#: makes a module for a number of channels
Norm = Callable[[int], torch.nn.Module]
Activation = Callable[[], torch.nn.Module]


class ConvBlock(Sequential):
    """Submanifold convolution without bias, norm, activation.

    >>> ConvBlock(4, 32)[0]
    SubmanifoldConv(4, 32, kernel_size=3, bias=False)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes = 3,
        *,
        dilation: Axes = 1,
        groups: int = 1,
        norm: Norm = BatchNorm,
        activation: Activation = ReLU,
        rank: int = 3,
    ) -> None:
        conv = SubmanifoldConv(
            in_channels, out_channels, kernel_size, dilation=dilation, groups=groups, bias=False, rank=rank
        )
        super().__init__(conv, norm(out_channels), activation())


class _SkipBlock(SparseModule):
    """activation(body(x) + skip(x)); the skip is a linear layer where the widths differ."""

    def __init__(self, in_channels: int, out_channels: int, body: Sequential, activation: Activation) -> None:
        super().__init__()
        self.body = body
        self.skip = Linear(in_channels, out_channels, bias=False) if in_channels != out_channels else None
        self.activation = Sequential(activation())

    def forward(self, x: SparseTensor) -> SparseTensor:
        joined = len(self.activation) == 1 and not hooked(self.body, self.activation)
        *before, conv, norm = self.body
        if joined and len(before) == 3 and is_activation(before[2]):
            ends = (before[0], before[1], before[2]), (conv, norm, self.activation[0])
            return two_layers(x, *ends, x if self.skip is None else None, self.skip)
        skip = x if self.skip is None else self.skip(x)
        if joined:
            return conv_norm_act(run(tuple(before), x), conv, norm, self.activation[0], skip)
        return self.activation(self.body(x) + skip)


class ResidualBlock(_SkipBlock):
    """Two submanifold convolutions, each with its norm, around a skip.

        y = act(norm(conv(act(norm(conv(x))))) + skip(x))

    Source: He et al., Deep residual learning, 2016, the block of ResNet-18. ``skip`` is the identity, or a linear layer
    where the widths differ.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size, dilation, groups: of both convolutions.
        norm: makes a norm for a number of channels, such as ``BatchNorm`` or ``lambda c: GroupNorm(8, c)``.
        activation: makes an activation, such as ``ReLU``.
        rank: number of spatial axes.

    >>> from sparseconv.geometry.grid import VoxelGrid
    >>> ResidualBlock(16, 32)(SparseTensor(VoxelGrid(torch.tensor([[0, 0, 0, 0]])), torch.ones(1, 16))).channels
    32
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes = 3,
        *,
        dilation: Axes = 1,
        groups: int = 1,
        norm: Norm = BatchNorm,
        activation: Activation = ReLU,
        rank: int = 3,
    ) -> None:
        def conv(c_in: int) -> SubmanifoldConv:
            return SubmanifoldConv(
                c_in, out_channels, kernel_size, dilation=dilation, groups=groups, bias=False, rank=rank
            )

        body = Sequential(conv(in_channels), norm(out_channels), activation(), conv(out_channels), norm(out_channels))
        super().__init__(in_channels, out_channels, body, activation)


class Bottleneck(_SkipBlock):
    """A submanifold convolution between two linear layers, narrow in the middle, around a skip.

        y = act(norm(up(act(norm(conv(act(norm(down(x)))))))) + skip(x))

    Source: He et al., 2016, the block of ResNet-50.

    Args:
        reduction: the middle has out_channels / reduction channels, rounded up to a multiple of ``groups``.

    The other arguments are those of `ResidualBlock`.

    >>> from sparseconv.geometry.grid import VoxelGrid
    >>> Bottleneck(16, 32)(SparseTensor(VoxelGrid(torch.tensor([[0, 0, 0, 0]])), torch.ones(1, 16))).channels
    32
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes = 3,
        *,
        reduction: int = 4,
        dilation: Axes = 1,
        groups: int = 1,
        norm: Norm = BatchNorm,
        activation: Activation = ReLU,
        rank: int = 3,
    ) -> None:
        if reduction < 1:
            raise ValueError(f"reduction must be at least 1; got {reduction}")
        middle = -(-out_channels // (reduction * groups)) * groups
        body = Sequential(
            Linear(in_channels, middle, bias=False),
            norm(middle),
            activation(),
            SubmanifoldConv(middle, middle, kernel_size, dilation=dilation, groups=groups, bias=False, rank=rank),
            norm(middle),
            activation(),
            Linear(middle, out_channels, bias=False),
            norm(out_channels),
        )
        super().__init__(in_channels, out_channels, body, activation)
