"""Residual networks with MinkowskiEngine's strides, and the blocks that published networks are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.nn.containers import Sequential
from sparseconv.nn.convolution import Conv, SubmanifoldConv
from sparseconv.nn.features import Linear, ReLU
from sparseconv.nn.fused.fusion import conv_norm_act, two_layers
from sparseconv.nn.module import SparseModule
from sparseconv.nn.normalization import BatchNorm
from sparseconv.nn.pooling import AvgPool, GlobalMaxPool
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.tensor import SparseTensor

if TYPE_CHECKING:
    from jaxtyping import Float

Norm = Callable[[int], torch.nn.Module]


def coarsened(grid: VoxelGrid, stride: int) -> VoxelGrid:
    """The grid of every voxel floor(c / stride), where MinkowskiEngine's strides lead; callers share one object.

    A window of ``stride`` reaches just these voxels; a larger one reaches more, which MinkowskiEngine leaves out.
    """
    if stride == 1:
        return grid
    key = ("coarsened", stride)
    coarse = grid.derived.get(key)
    if coarse is None:
        coarse = grid.derived.setdefault(key, grid.coarsen(stride))
    return coarse


class FloorConv(Conv):
    """A strided convolution onto `coarsened` voxels, whatever its kernel."""

    def plan(self, x: SparseTensor, target: Any = None) -> ConvolutionPlan:
        return super().plan(x, coarsened(x.grid, self.geometry.stride[0]) if target is None else target)


class FloorAvgPool(AvgPool):
    """Average pooling onto `coarsened` voxels."""

    def forward(self, x: SparseTensor) -> SparseTensor:  # type: ignore[override]
        return super().forward(x, target=coarsened(x.grid, self.geometry.stride[0]))


def convolution(
    c_in: int, c_out: int, kernel_size: int, stride: int = 1, *, bias: bool = False, rank: int = 3
) -> Conv | SubmanifoldConv:
    """A submanifold convolution at stride 1, else one onto `coarsened` voxels."""
    if stride == 1:
        return SubmanifoldConv(c_in, c_out, kernel_size, bias=bias, rank=rank)
    return FloorConv(c_in, c_out, kernel_size, stride=stride, bias=bias, rank=rank)


class BasicBlock(SparseModule):
    """Two 3^D convolutions around a skip: y = relu(norm2(conv2(relu(norm1(conv1(x))))) + downsample(x)).

    The skip is the identity, or a convolution of one tap and a norm where width or stride change. Source: He et al.,
    Deep residual learning, 2016; module names are MinkowskiEngine's.
    """

    expansion = 1

    def __init__(
        self,
        in_channels: int,
        planes: int,
        *,
        stride: int = 1,
        bias: bool = False,
        norm: Norm = BatchNorm,
        rank: int = 3,
    ) -> None:
        super().__init__()
        out = planes * self.expansion
        self.conv1 = convolution(in_channels, planes, 3, stride, bias=bias, rank=rank)
        self.norm1 = norm(planes)
        self.conv2 = convolution(planes, planes, 3, bias=bias, rank=rank)
        self.norm2 = norm(planes)
        self.relu = ReLU()
        self.downsample = _skip(in_channels, out, stride, norm, rank)

    def forward(self, x: SparseTensor) -> SparseTensor:
        skip = x if self.downsample is None else self.downsample(x)
        first, second = (self.conv1, self.norm1, self.relu), (self.conv2, self.norm2, self.relu)
        return two_layers(x, first, second, skip)


class BottleneckBlock(SparseModule):
    """A 3^D convolution between two of one tap, four times as wide outside as inside, around a skip.

    Arguments are those of `BasicBlock`; the output has 4 * planes channels.
    """

    expansion = 4

    def __init__(
        self, in_channels: int, planes: int, *, stride: int = 1, norm: Norm = BatchNorm, rank: int = 3
    ) -> None:
        super().__init__()
        out = planes * self.expansion
        self.conv1 = convolution(in_channels, planes, 1, rank=rank)
        self.norm1 = norm(planes)
        self.conv2 = convolution(planes, planes, 3, stride, rank=rank)
        self.norm2 = norm(planes)
        self.conv3 = convolution(planes, out, 1, rank=rank)
        self.norm3 = norm(out)
        self.relu = ReLU()
        self.downsample = _skip(in_channels, out, stride, norm, rank)

    def forward(self, x: SparseTensor) -> SparseTensor:
        y = conv_norm_act(x, self.conv1, self.norm1, self.relu)
        y = conv_norm_act(y, self.conv2, self.norm2, self.relu)
        skip = x if self.downsample is None else self.downsample(x)
        return conv_norm_act(y, self.conv3, self.norm3, self.relu, skip)


def _skip(c_in: int, c_out: int, stride: int, norm: Norm, rank: int) -> Sequential | None:
    if stride == 1 and c_in == c_out:
        return None
    return Sequential(convolution(c_in, c_out, 1, stride, rank=rank), norm(c_out))


Block = type[BasicBlock] | type[BottleneckBlock]


def stage(block: Block, c_in: int, planes: int, count: int, *, stride: int = 1, rank: int = 3) -> Sequential:
    """``count`` blocks, the first with the stride."""
    blocks = [block(c_in, planes, stride=stride, rank=rank)]
    blocks += [block(planes * block.expansion, planes, rank=rank) for _ in range(count - 1)]
    return Sequential(*blocks)


#: depth -> (block, blocks a stage)
DEPTHS: dict[int, tuple[Block, tuple[int, ...]]] = {
    14: (BasicBlock, (1, 1, 1, 1)),
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (BottleneckBlock, (3, 4, 6, 3)),
    101: (BottleneckBlock, (3, 4, 23, 3)),
}


class ResNet(SparseModule):
    """A residual network that classifies whole batch items.

    Source: Choy et al., 4D Spatio-Temporal ConvNets, 2019, and the ResNet among MinkowskiEngine's examples: a 5^D
    convolution and average pooling, four stages at stride 2, a 3^D convolution at stride 3, global maximum, linear.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, one per class.
        depth: 14, 18, 34, 50 or 101.
        planes: widths of the stages.
        rank: number of spatial axes.

    >>> import sparseconv as sc
    >>> grid, _ = sc.voxelize(torch.rand(300, 3), voxel_size=0.05)
    >>> net = ResNet(3, 10, depth=14, planes=(8, 8, 8, 8))
    >>> net(SparseTensor(grid, torch.randn(len(grid), 3))).shape
    torch.Size([1, 10])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        depth: int = 18,
        planes: Sequence[int] = (64, 128, 256, 512),
        rank: int = 3,
    ) -> None:
        super().__init__()
        if depth not in DEPTHS:
            raise ValueError(f"depth must be one of {', '.join(map(str, DEPTHS))}; got {depth}")
        block, counts = DEPTHS[depth]
        width = planes[0]
        self.conv1 = convolution(in_channels, width, 5, 2, rank=rank)
        self.bn1 = BatchNorm(width)
        self.relu = ReLU()
        self.pool = FloorAvgPool(2, rank=rank)
        for index, (plane, count) in enumerate(zip(planes, counts, strict=True), 1):
            self.add_module(f"layer{index}", stage(block, width, plane, count, stride=2, rank=rank))
            width = plane * block.expansion
        self.conv5 = convolution(width, width, 3, 3, rank=rank)
        self.bn5 = BatchNorm(width)
        self.glob_avg = GlobalMaxPool()
        self.final = Linear(width, out_channels)

    def forward(self, x: SparseTensor) -> Float[torch.Tensor, "B C_out"]:
        """A `SparseTensor` -> scores (B, out_channels)."""
        x = self.pool(conv_norm_act(x, self.conv1, self.bn1, self.relu))
        for index in range(1, 5):
            x = self.get_submodule(f"layer{index}")(x)
        x = conv_norm_act(x, self.conv5, self.bn5, self.relu)
        return self.final(self.glob_avg(x))
