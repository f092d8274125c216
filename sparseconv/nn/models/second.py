"""The encoders of detectors in voxels: SECOND's, and CenterPoint's with residual blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.geometry.ranges import Ints
from sparseconv.nn.containers import Sequential
from sparseconv.nn.convolution import ConvolutionModule, SubmanifoldConv
from sparseconv.nn.features import ReLU
from sparseconv.nn.geometry import Axes, grid_in
from sparseconv.nn.models.resnet import BasicBlock
from sparseconv.nn.module import SparseModule
from sparseconv.nn.normalization import BatchNorm
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.plan.within import dense_shape, plan_within
from sparseconv.tensor import SparseTensor

if TYPE_CHECKING:
    from jaxtyping import Float

BevNorm = partial(BatchNorm, eps=1e-3, momentum=0.01)


class ConvWithin(ConvolutionModule):
    """A strided convolution whose outputs stay within the shape that a dense one would have.

    Args:
        in_shape: cells of the input along each axis.

    The other arguments are those of `Conv`; ``padding`` defaults to 0. ``out_shape`` is the shape of the output.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes,
        in_shape: Sequence[int],
        *,
        stride: Axes = 1,
        padding: Axes = 0,
        dilation: Axes = 1,
        groups: int = 1,
        bias: bool = True,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            rank=len(in_shape),
            groups=groups,
            bias=bias,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        window = self.geometry
        self._size: tuple[Ints, Ints, Ints] = (window.kernel_size or (), window.stride, window.padding or ())
        self.out_shape = dense_shape(in_shape, *self._size, window.dilation)
        if min(self.out_shape) < 1:
            raise ValueError(f"a window of {window} leaves nothing of the shape {tuple(in_shape)}")

    def forward(self, x: SparseTensor) -> SparseTensor:
        """A `SparseTensor` -> one on the coarse voxels within ``out_shape``."""
        return self._execute(x, self.plan(x))

    def plan(self, x: SparseTensor) -> ConvolutionPlan:
        """The plan of this layer on the tensor's grid."""
        grid = grid_in(x, self)
        self.geometry.check(grid)
        kernel, stride, padding = self._size
        size: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": self.geometry.dilation}
        return plan_within(grid, self.out_shape, kernel, **size).with_groups(self.groups)


class _VoxelEncoder(SparseModule):
    """The shape that both encoders have: a stem, four levels, and a squeeze along z."""

    def __init__(
        self, in_channels: int, spatial_shape: Sequence[int], widths: Sequence[int], last_padding: int, residual: bool
    ) -> None:
        super().__init__()
        if len(spatial_shape) != 3:
            raise ValueError(f"spatial_shape is (z, y, x); got {tuple(spatial_shape)}")
        self.spatial_shape = tuple(spatial_shape)

        def block(c: int) -> SparseModule:
            if residual:
                return BasicBlock(c, c, bias=True, norm=BevNorm)
            return Sequential(SubmanifoldConv(c, c, 3, bias=False), BevNorm(c), ReLU())

        def down(c_in: int, c_out: int, shape: Ints, padding: Axes) -> tuple[Sequential, Ints]:
            conv = ConvWithin(c_in, c_out, 3, shape, stride=2, padding=padding, bias=False)
            return Sequential(conv, BevNorm(c_out), ReLU()), conv.out_shape

        first = widths[0]
        self.conv_input = Sequential(SubmanifoldConv(in_channels, first, 3, bias=False), BevNorm(first), ReLU())
        self.conv1 = Sequential(*(block(first) for _ in range(2 if residual else 1)))
        step2, shape = down(widths[0], widths[1], self.spatial_shape, 1)
        self.conv2 = Sequential(step2, block(widths[1]), block(widths[1]))
        step3, shape = down(widths[1], widths[2], shape, 1)
        self.conv3 = Sequential(step3, block(widths[2]), block(widths[2]))
        step4, shape = down(widths[2], widths[3], shape, (0, 1, 1))
        self.conv4 = Sequential(step4, block(widths[3]), block(widths[3]))
        squeeze = ConvWithin(
            widths[3], widths[4], (3, 1, 1), shape, stride=(2, 1, 1), padding=(last_padding, 0, 0), bias=False
        )
        self.conv_out = Sequential(squeeze, BevNorm(widths[4]), ReLU())
        self.out_shape = squeeze.out_shape

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Voxels (batch, z, y, x) within ``spatial_shape`` -> voxels within ``out_shape``."""
        return self.levels(x)[-1]

    def levels(self, x: SparseTensor) -> tuple[SparseTensor, ...]:
        """The tensors after each of the four levels and the last one, for heads that read several."""
        x1 = self.conv1(self.conv_input(x))
        x2 = self.conv2(x1)
        x3 = self.conv3(x2)
        x4 = self.conv4(x3)
        return x1, x2, x3, x4, self.conv_out(x4)

    def to_bev(self, x: SparseTensor) -> Float[torch.Tensor, "B C_out Y X"]:
        """The output of `forward` seen from above, dense (B, C * z, y, x)."""
        return x.to_dense(self.out_shape).flatten(1, 2)


class SecondEncoder(_VoxelEncoder):
    """The sparse encoder of SECOND (also VoxelNet's middle layers made sparse): submanifold blocks, four levels.

    Source: Yan et al., SECOND: Sparsely Embedded Convolutional Detection, 2018; OpenPCDet's VoxelBackBone8x, whose
    names of modules it has.

    Args:
        in_channels: of the voxels.
        spatial_shape: cells (z, y, x) of the scene, such as (41, 1600, 1408).
        last_padding: along z, of the last convolution.

    >>> from sparseconv import VoxelGrid
    >>> net = SecondEncoder(4, (41, 16, 16)).eval()
    >>> y = net(SparseTensor(VoxelGrid(torch.tensor([[0, 20, 8, 8]])), torch.ones(1, 4)))
    >>> y.channels, net.out_shape, net.to_bev(y).shape
    (128, (2, 2, 2), torch.Size([1, 256, 2, 2]))
    """

    def __init__(self, in_channels: int, spatial_shape: Sequence[int], *, last_padding: int = 0) -> None:
        super().__init__(in_channels, spatial_shape, (16, 32, 64, 64, 128), last_padding, False)


class VoxelResBackBone8x(_VoxelEncoder):
    """The sparse encoder of CenterPoint: `SecondEncoder` with residual blocks and a wider fourth level.

    Source: Yin et al., Center-based 3D Object Detection and Tracking, 2021; OpenPCDet's VoxelResBackBone8x.

    >>> from sparseconv import VoxelGrid
    >>> net = VoxelResBackBone8x(4, (41, 16, 16)).eval()
    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 20, 8, 8]])), torch.ones(1, 4))
    >>> [level.channels for level in net.levels(x)]
    [16, 32, 64, 128, 128]
    """

    def __init__(self, in_channels: int, spatial_shape: Sequence[int], *, last_padding: int = 0) -> None:
        super().__init__(in_channels, spatial_shape, (16, 32, 64, 128, 128), last_padding, True)
