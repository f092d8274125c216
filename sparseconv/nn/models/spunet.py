"""SparseUNet (SpUNet v1m1): the U-Net of Pointcept, with its names of modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from sparseconv.nn.containers import Sequential
from sparseconv.nn.convolution import Conv, InverseConv, SubmanifoldConv
from sparseconv.nn.features import ReLU
from sparseconv.nn.fused.fusion import concatenated, conv_norm_act
from sparseconv.nn.models.resnet import BasicBlock
from sparseconv.nn.module import SparseModule
from sparseconv.nn.normalization import BatchNorm
from sparseconv.ops.global_pooling import global_avg_pool
from sparseconv.tensor import SparseTensor

if TYPE_CHECKING:
    from jaxtyping import Float


class SpUNet(SparseModule):
    """The U-Net of residual blocks of Pointcept's benchmarks.

    Source: Pointcept, SpUNet-v1m1; after Graham et al., 3D Semantic Segmentation with Submanifold Sparse Convolutional
    Networks, 2018. With 6 channels and 20 classes it has 39.2 million parameters.

    Args:
        in_channels: channels of the input.
        num_classes: channels of the output, one per class; 0 gives the last features.
        base_channels: width of the stem.
        channels: widths of the stages, down then up.
        layers: blocks a stage, down then up.
        cls_mode: no way up; scores (B, num_classes) of whole batch items.
        rank: number of spatial axes.

    >>> sum(p.numel() for p in SpUNet(6, 20).parameters())
    39157844
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        base_channels: int = 32,
        channels: Sequence[int] = (32, 64, 128, 256, 256, 128, 96, 96),
        layers: Sequence[int] = (2, 3, 4, 6, 2, 2, 2, 2),
        cls_mode: bool = False,
        rank: int = 3,
    ) -> None:
        super().__init__()
        if len(layers) % 2 or len(layers) != len(channels):
            raise ValueError(f"layers and channels must name as many stages, an even number; got {layers}, {channels}")
        norm = partial(BatchNorm, eps=1e-3, momentum=0.01)
        self.cls_mode, levels = cls_mode, len(layers) // 2

        def blocks(c_in: int, c_out: int, count: int) -> Sequential:
            widths = [c_in] + [c_out] * (count - 1)
            return Sequential(
                OrderedDict(
                    (f"block{i}", BasicBlock(width, c_out, norm=norm, rank=rank)) for i, width in enumerate(widths)
                )
            )

        self.conv_input = Sequential(
            SubmanifoldConv(in_channels, base_channels, 5, bias=False, rank=rank), norm(base_channels), ReLU()
        )
        self.down, self.enc = torch.nn.ModuleList(), torch.nn.ModuleList()
        self.up, self.dec = torch.nn.ModuleList(), torch.nn.ModuleList()
        before = [base_channels, *channels[: levels - 1]]  # widths at each level of the way down
        for s in range(levels):
            down = Conv(before[s], channels[s], 2, stride=2, bias=False, rank=rank)
            self.down.append(Sequential(down, norm(channels[s]), ReLU()))
            self.enc.append(blocks(channels[s], channels[s], layers[s]))
            if not cls_mode:
                below, here = channels[len(channels) - s - 2], channels[len(channels) - s - 1]
                up = InverseConv(below, here, 2, stride=2, bias=False, rank=rank)
                self.up.append(Sequential(up, norm(here), ReLU()))
                self.dec.append(blocks(here + before[s], here, layers[len(channels) - s - 1]))
        last = channels[levels - 1] if cls_mode else channels[-1]
        self.final = SubmanifoldConv(last, num_classes, 1, rank=rank) if num_classes else None

    def forward(self, x: SparseTensor) -> SparseTensor | Float[torch.Tensor, "B C_out"]:
        """A `SparseTensor` -> one with num_classes on the same grid, or scores (B, num_classes)."""
        x = self.conv_input(x)
        skips = []
        for down, enc in zip(self.down, self.enc):
            skips.append(x)
            x = enc(down(x))
        for s in reversed(range(len(self.up))):
            skip, up = skips.pop(), cast(Sequential, self.up[s])
            x = concatenated(conv_norm_act(x, *up, onto=skip), skip, again=s > 0)
            x = self.dec[s](x)
        if self.final is not None:
            x = self.final(x)
        return global_avg_pool(x.features, x.grid) if self.cls_mode else x
