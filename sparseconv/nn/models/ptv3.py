"""What Point Transformer V3 asks of sparse convolutions: its stem, and its conditional positional encoding."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from sparseconv.nn.containers import Sequential
from sparseconv.nn.convolution import SubmanifoldConv
from sparseconv.nn.features import GELU, Linear
from sparseconv.nn.module import SparseModule
from sparseconv.nn.normalization import BatchNorm, LayerNorm
from sparseconv.tensor import SparseTensor


class PointEmbedding(SparseModule):
    """The stem: a 5^3 submanifold convolution without bias, norm, GELU.

    Source: Wu et al., Point Transformer V3: Simpler, Faster, Stronger, 2024; module names are Pointcept's.

    Args:
        in_channels, embed_channels: widths before and after.

    >>> sum(p.numel() for p in PointEmbedding(6, 32).parameters())
    24064
    """

    def __init__(self, in_channels: int, embed_channels: int, *, rank: int = 3) -> None:
        super().__init__()
        norm = partial(BatchNorm, eps=1e-3, momentum=0.01)
        self.stem = Sequential(
            OrderedDict(
                conv=SubmanifoldConv(in_channels, embed_channels, 5, bias=False, rank=rank),
                norm=norm(embed_channels),
                act=GELU(),
            )
        )

    def forward(self, x: SparseTensor) -> SparseTensor:
        return self.stem(x)


class ConditionalPositionalEncoding(SparseModule):
    """x + norm(linear(conv(x))), a 3^3 submanifold convolution that tells a point where it is among its neighbours.

    Source: as `PointEmbedding`.

    Args:
        channels: width.

    >>> sum(p.numel() for p in ConditionalPositionalEncoding(32).parameters())
    28800
    """

    def __init__(self, channels: int, *, rank: int = 3) -> None:
        super().__init__()
        self.cpe = Sequential(
            SubmanifoldConv(channels, channels, 3, rank=rank), Linear(channels, channels), LayerNorm(channels)
        )

    def forward(self, x: SparseTensor) -> SparseTensor:
        return x + self.cpe(x)
