"""A U-Net over sparse voxels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparseconv.checks import check_count, check_kind
from sparseconv.nn.blocks import Activation, Bottleneck, ConvBlock, Norm, ResidualBlock
from sparseconv.nn.containers import Sequential
from sparseconv.nn.convolution import Conv, InverseConv
from sparseconv.nn.features import Linear, ReLU
from sparseconv.nn.fused.fusion import concatenated, conv_norm_act, hooked
from sparseconv.nn.geometry import Axes
from sparseconv.nn.module import SparseModule
from sparseconv.nn.normalization import BatchNorm
from sparseconv.tensor import SparseTensor

BLOCKS = {"residual": ResidualBlock, "bottleneck": Bottleneck, "plain": ConvBlock}


class UNet(SparseModule):
    """A U-Net: down by strided convolutions, up by the inverses of the same maps, skips by concatenation.

    Source: Ronneberger et al., 2015; with residual blocks as in Choy et al., 2019. With the defaults, ``UNet(4, 20)``
    has 7.18 million parameters.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, one per class.
        channels: width of each level, finest first.
        blocks: blocks per level on the way down, one integer or one per level.
        decoder_blocks: blocks a level on the way up, one integer or one for each level but the deepest.
        kernel_size: of the blocks.
        stem_kernel: of the first convolution.
        down_kernel, down_stride: of the convolutions between levels.
        block: ``"residual"``, ``"bottleneck"``, ``"plain"``, or a function (c_in, c_out) -> module.
        norm, activation: makers, as in `ResidualBlock`.
        rank: number of spatial axes.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(500, 3), voxel_size=0.1)
    >>> net = UNet(4, 20, channels=(8, 16))
    >>> net(SparseTensor(grid, torch.randn(len(grid), 4))).channels
    20
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        channels: Sequence[int] = (32, 64, 128, 256),
        *,
        blocks: int | Sequence[int] = 1,
        decoder_blocks: int | Sequence[int] = 1,
        kernel_size: Axes = 3,
        stem_kernel: Axes = 3,
        down_kernel: Axes = 2,
        down_stride: Axes = 2,
        block: str | Callable[[int, int], torch.nn.Module] = "residual",
        norm: Norm = BatchNorm,
        activation: Activation = ReLU,
        rank: int = 3,
    ) -> None:
        super().__init__()
        check_count("in_channels", in_channels, 1)
        check_count("out_channels", out_channels, 1)
        check_kind("channels", channels, (list, tuple), "pass one number per level, such as (32, 64)")
        for level, width in enumerate(channels):
            check_count(f"channels[{level}]", width, 1)
        if not channels:
            raise ValueError("channels must name at least one level")
        if isinstance(block, str) and block not in BLOCKS:
            raise ValueError(f"block must be one of {', '.join(BLOCKS)}, or a function (c_in, c_out); got {block!r}")

        def stage(c_in: int, c_out: int, count: int) -> Sequential:
            widths = [c_in] + [c_out] * count
            if not isinstance(block, str):
                return Sequential(*(block(a, b) for a, b in itertools.pairwise(widths)))
            kind, options = BLOCKS[block], {"norm": norm, "activation": activation, "rank": rank}
            return Sequential(*(kind(a, b, kernel_size, **options) for a, b in itertools.pairwise(widths)))

        down_counts = _per_level(blocks, len(channels), "blocks", 0)
        up_counts = _per_level(decoder_blocks, len(channels) - 1, "decoder_blocks", 1)
        steps = list(itertools.pairwise(channels))
        self.stem = ConvBlock(in_channels, channels[0], stem_kernel, norm=norm, activation=activation, rank=rank)
        self.encoder = torch.nn.ModuleList(stage(c, c, n) for c, n in zip(channels, down_counts))
        self.down = torch.nn.ModuleList(
            Sequential(Conv(a, b, down_kernel, stride=down_stride, bias=False, rank=rank), norm(b), activation())
            for a, b in steps
        )
        self.up = torch.nn.ModuleList(
            InverseConv(b, a, down_kernel, stride=down_stride, bias=False, rank=rank) for a, b in steps
        )
        self.up_norm = torch.nn.ModuleList(Sequential(norm(a), activation()) for a, _ in steps)
        self.decoder = torch.nn.ModuleList(stage(2 * a, a, n) for (a, _), n in zip(steps, up_counts))
        self.head = Linear(channels[0], out_channels)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """A `SparseTensor` with in_channels -> one with out_channels on the same grid."""
        x = self.stem(x)
        skips = []
        for level, block in enumerate(self.encoder):
            x = block(x)
            if level < len(self.down):
                skips.append(x)
                x = self.down[level](x)
        for level in reversed(range(len(self.up))):
            skip = skips.pop()
            # the finest comes first in the backward pass, which needs it before anything has made room
            x = concatenated(skip, self._raise(level, x, skip), again=level > 0)
            x = self.decoder[level](x)
        return self.head(x)

    def _raise(self, level: int, x: SparseTensor, onto: SparseTensor) -> SparseTensor:
        """Up one level, norm, activation."""
        after: Any = self.up_norm[level]
        if len(after) == 2 and not hooked(after):
            return conv_norm_act(x, self.up[level], *after, onto=onto)
        return after(self.up[level](x, onto=onto))


def _per_level(counts: int | Sequence[int], levels: int, name: str, least: int) -> tuple[int, ...]:
    listed = (counts,) * levels if isinstance(counts, int) else tuple(counts)
    if len(listed) != levels or any(n < least for n in listed):
        raise ValueError(f"{name} must be one integer or {levels}, each at least {least}; got {counts!r}")
    return listed
