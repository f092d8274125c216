"""A U-Net of ConvNeXt blocks: wide depthwise kernels, few parameters in space, many across channels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from sparseconv.nn.containers import Sequential
from sparseconv.nn.convolution import Conv, InverseConv, SubmanifoldConv
from sparseconv.nn.features import GELU, Linear
from sparseconv.nn.geometry import Axes
from sparseconv.nn.module import SparseModule
from sparseconv.nn.normalization import LayerNorm
from sparseconv.tensor import SparseTensor


class ConvNeXtBlock(SparseModule):
    """A depthwise convolution, then two linear layers, around a skip.

        y = x + gamma * contract(gelu(expand(norm(depthwise(x)))))

    Source: Liu et al., A ConvNet for the 2020s, 2022.

    Args:
        channels: width.
        kernel_size: of the depthwise convolution.
        expansion: width of the middle over ``channels``.
        layer_scale: what gamma (C,) starts from; 0 for none.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: Axes = 5,
        *,
        expansion: int = 4,
        layer_scale: float = 1e-6,
        rank: int = 3,
    ) -> None:
        super().__init__()
        self.depthwise = SubmanifoldConv(channels, channels, kernel_size, groups=channels, rank=rank)
        self.norm = LayerNorm(channels, eps=1e-6)
        self.expand = Linear(channels, expansion * channels)
        self.activation = GELU()
        self.contract = Linear(expansion * channels, channels)
        self.gamma: torch.nn.Parameter | None
        if layer_scale:
            self.gamma = torch.nn.Parameter(torch.full((channels,), layer_scale))
        else:
            self.register_parameter("gamma", None)

    def forward(self, x: SparseTensor) -> SparseTensor:
        y = self.contract(self.activation(self.expand(self.norm(self.depthwise(x)))))
        return x + (y if self.gamma is None else y.with_features(y.features * self.gamma))


class ConvNeXtUNet(SparseModule):
    """A U-Net of `ConvNeXtBlock`: a norm and a strided convolution between levels, back over the same maps.

    Sources: Liu et al., 2022; Roy et al., MedNeXt, 2023, for the shape of a U-Net.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, one per class.
        channels: width of each level, finest first.
        blocks: blocks of each level on the way down.
        decoder_blocks: blocks of each level on the way up.
        kernel_size: of the depthwise convolutions.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(300, 3), voxel_size=0.1)
    >>> ConvNeXtUNet(4, 5, channels=(8, 16), blocks=(1, 1))(SparseTensor(grid, torch.randn(len(grid), 4))).channels
    5
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        channels: Sequence[int] = (48, 96, 192, 384),
        blocks: Sequence[int] = (2, 2, 6, 2),
        decoder_blocks: int = 1,
        kernel_size: Axes = 5,
        layer_scale: float = 1e-6,
        rank: int = 3,
    ) -> None:
        super().__init__()
        if len(channels) != len(blocks):
            raise ValueError(f"channels and blocks must name as many levels; got {channels} and {blocks}")

        def level(width: int, count: int) -> Sequential:
            return Sequential(
                *(ConvNeXtBlock(width, kernel_size, layer_scale=layer_scale, rank=rank) for _ in range(count))
            )

        steps = list(itertools.pairwise(channels))
        self.stem = Sequential(SubmanifoldConv(in_channels, channels[0], 3, rank=rank), LayerNorm(channels[0]))
        self.encoder = torch.nn.ModuleList(level(c, n) for c, n in zip(channels, blocks))
        self.down = torch.nn.ModuleList(
            Sequential(LayerNorm(a, eps=1e-6), Conv(a, b, 2, stride=2, rank=rank)) for a, b in steps
        )
        self.up = torch.nn.ModuleList(InverseConv(b, a, 2, stride=2, rank=rank) for a, b in steps)
        self.merge = torch.nn.ModuleList(Linear(2 * a, a) for a, _ in steps)
        self.decoder = torch.nn.ModuleList(level(a, decoder_blocks) for a, _ in steps)
        self.head = Sequential(LayerNorm(channels[0], eps=1e-6), Linear(channels[0], out_channels))

    def forward(self, x: SparseTensor) -> SparseTensor:
        """A `SparseTensor` with in_channels -> one with out_channels on the same grid."""
        x = self.encoder[0](self.stem(x))
        skips = []
        for down, encoder in zip(self.down, self.encoder[1:]):
            skips.append(x)
            x = encoder(down(x))
        for up, merge, decoder in zip(reversed(self.up), reversed(self.merge), reversed(self.decoder)):
            skip = skips.pop()
            x = decoder(merge(up(x, onto=skip).cat(skip)))
        return self.head(x)
