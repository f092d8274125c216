"""MinkUNet: the U-Net of MinkowskiEngine, with its names of modules."""

from __future__ import annotations

from collections.abc import Sequence

from sparseconv.nn.convolution import Conv, InverseConv, SubmanifoldConv
from sparseconv.nn.features import ReLU
from sparseconv.nn.fused.fusion import concatenated, conv_norm_act
from sparseconv.nn.models.resnet import BasicBlock, Block, BottleneckBlock, stage
from sparseconv.nn.module import SparseModule
from sparseconv.nn.normalization import BatchNorm
from sparseconv.tensor import SparseTensor

#: depth -> (block, blocks a stage, down then up)
DEPTHS: dict[int, tuple[Block, tuple[int, ...]]] = {
    14: (BasicBlock, (1,) * 8),
    18: (BasicBlock, (2,) * 8),
    34: (BasicBlock, (2, 3, 4, 6, 2, 2, 2, 2)),
    50: (BottleneckBlock, (2, 3, 4, 6, 2, 2, 2, 2)),
    101: (BottleneckBlock, (2, 3, 4, 23, 2, 2, 2, 2)),
}
PLANES = {
    "": (32, 64, 128, 256, 256, 128, 96, 96),
    "14A": (32, 64, 128, 256, 128, 128, 96, 96),
    "14B": (32, 64, 128, 256, 128, 128, 128, 128),
    "14C": (32, 64, 128, 256, 192, 192, 128, 128),
    "14D": (32, 64, 128, 256, 384, 384, 384, 384),
    "18A": (32, 64, 128, 256, 128, 128, 96, 96),
    "18B": (32, 64, 128, 256, 128, 128, 128, 128),
    "18D": (32, 64, 128, 256, 384, 384, 384, 384),
    "34A": (32, 64, 128, 256, 256, 128, 64, 64),
    "34B": (32, 64, 128, 256, 256, 128, 64, 32),
    "34C": (32, 64, 128, 256, 256, 128, 96, 96),
}


class MinkUNet(SparseModule):
    """The U-Net of residual blocks that segments scans: down four times by 2^D, back over the same maps.

    Source: Choy et al., 4D Spatio-Temporal ConvNets, 2019; the MinkUNet among MinkowskiEngine's examples. MinkUNet-34C
    with 3 channels and 20 classes has 37.9 million parameters.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, one per class.
        variant: depth and letter, such as ``"34C"``, ``"18A"``, ``"14"`` or ``"50"``.
        planes: widths of the eight stages instead of the variant's.
        init_channels: width of the stem.
        rank: number of spatial axes.

    >>> import torch, sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(300, 3), voxel_size=0.1)
    >>> net = MinkUNet(3, 20, variant="14", planes=(8,) * 8)
    >>> net(SparseTensor(grid, torch.randn(len(grid), 3))).channels
    20
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        variant: str = "34C",
        planes: Sequence[int] | None = None,
        init_channels: int = 32,
        rank: int = 3,
    ) -> None:
        super().__init__()
        depth = "".join(c for c in variant if c.isdigit())
        if not depth or int(depth) not in DEPTHS or (variant != depth and variant not in PLANES):
            known = [*map(str, DEPTHS), *(name for name in PLANES if name)]
            raise ValueError(f"variant must be one of {', '.join(known)}; got {variant!r}")
        block, counts = DEPTHS[int(depth)]
        widths = tuple(planes or PLANES.get(variant, PLANES[""]))
        if len(widths) != 8:
            raise ValueError(f"planes must name eight stages; got {planes}")
        wide = [init_channels, *(w * block.expansion for w in widths)]  # channels after the stem and each stage
        self.conv0p1s1 = SubmanifoldConv(in_channels, init_channels, 5, bias=False, rank=rank)
        self.bn0 = BatchNorm(init_channels)
        self.relu = ReLU()
        self._down, self._up = [], []
        for s in range(4):
            names = (f"conv{s + 1}p{2**s}s2", f"bn{s + 1}", f"block{s + 1}")
            self.add_module(names[0], Conv(wide[s], wide[s], 2, stride=2, bias=False, rank=rank))
            self.add_module(names[1], BatchNorm(wide[s]))
            self.add_module(names[2], stage(block, wide[s], widths[s], counts[s], rank=rank))
            self._down.append(names)
        for s in range(4):
            names = (f"convtr{s + 4}p{2 ** (4 - s)}s2", f"bntr{s + 4}", f"block{s + 5}")
            plane, skip = widths[s + 4], wide[3 - s]
            self.add_module(names[0], InverseConv(wide[s + 4], plane, 2, stride=2, bias=False, rank=rank))
            self.add_module(names[1], BatchNorm(plane))
            self.add_module(names[2], stage(block, plane + skip, plane, counts[s + 4], rank=rank))
            self._up.append(names)
        self.final = SubmanifoldConv(wide[8], out_channels, 1, rank=rank)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """A `SparseTensor` with in_channels -> one with out_channels on the same grid."""
        part = self.get_submodule
        x = conv_norm_act(x, self.conv0p1s1, self.bn0, self.relu)
        skips = []
        for conv, norm, block in self._down:
            skips.append(x)
            x = part(block)(conv_norm_act(x, part(conv), part(norm), self.relu))
        for conv, norm, block in self._up:
            skip = skips.pop()
            x = concatenated(conv_norm_act(x, part(conv), part(norm), self.relu, onto=skip), skip, again=len(skips) > 0)
            x = part(block)(x)
        return self.final(x)
