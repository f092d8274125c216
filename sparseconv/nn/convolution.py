"""Convolution modules: a weight, a bias, and the plan that the grid keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sparseconv.checks import check_count
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Boundary
from sparseconv.nn.geometry import Axes, LayerGeometry, checked_target, grid_in, grid_of
from sparseconv.nn.module import Features, SparseModule, features_of, placed
from sparseconv.other_names import constructor
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.tensor import SparseTensor

if TYPE_CHECKING:
    from jaxtyping import Integer


class ConvolutionModule(SparseModule):
    """What all convolution modules share: ``weight`` (K, C_in/G, C_out), ``bias`` (C_out,) and a geometry.

    Both start uniform in +-1/sqrt(K C_in/G), as torch.nn.Conv3d's do.
    """

    #: whether outputs may lie on other voxels than the inputs
    has_stride: ClassVar[bool] = True

    @constructor
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes | None = None,
        stride: Axes = 1,
        padding: Axes | None = None,
        *,
        dilation: Axes = 1,
        taps: Integer[torch.Tensor, "K D"] | Sequence[Sequence[int]] | None = None,
        boundary: Boundary | str = "absent",
        groups: int = 1,
        bias: bool = True,
        rank: int = 3,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, count in (("in_channels", in_channels), ("out_channels", out_channels), ("groups", groups)):
            check_count(name, count, 1)
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"in_channels and out_channels must be positive multiples of groups; got {in_channels}, {out_channels} "
                f"and groups={groups}"
            )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.geometry = LayerGeometry(
            rank,
            kernel_size,
            stride=stride,
            dilation=dilation,
            padding=padding,
            taps=taps,
            boundary=boundary,
            groups=groups,
            backend=backend,
        )
        if not self.has_stride and set(self.geometry.stride) != {1}:
            raise TypeError(f"a submanifold convolution has no stride, use Conv(..., stride=...); got stride={stride}")
        shape = (self.geometry.num_taps, in_channels // groups, out_channels)
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias: torch.nn.Parameter | None
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias anew."""
        bound = 1 / math.sqrt(self.weight.shape[0] * self.weight.shape[1])
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                torch.nn.init.uniform_(parameter, -bound, bound)

    plan: Callable[..., ConvolutionPlan]

    def _execute(self, x: Any, plan: ConvolutionPlan) -> Any:
        """Convolve over a plan; a sparse tensor comes back on the plan's target."""
        y = plan.execute(features_of(x, self, self.in_channels), self.weight, self.bias)
        return placed(x, plan, y)

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        return f"{self.in_channels}, {self.out_channels}, {self.geometry}{bias}"


class SubmanifoldConv(ConvolutionModule):
    """Convolution whose outputs are the voxels of its input.

        y[o] = bias + sum over taps k with a voxel at o + dilation * k - padding of x[that voxel] @ weight[k]

    Args:
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: taps along each axis, one integer or one per axis; None where ``taps`` (K, D) are given.
        stride: 1, since outputs lie on the input's voxels.
        padding, dilation, taps, boundary, groups, backend: those of `ConvolutionPlan`. Without one, padding centers
            the window, where torch's and spconv's layers pad by 0.
        bias: whether to add one.
        rank: number of spatial axes, 1 to 4.

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]])), torch.ones(2, 4))
    >>> SubmanifoldConv(4, 8, 3)(x).features.shape
    torch.Size([2, 8])
    """

    has_stride = False

    def forward(self, x: Features, *, plan: ConvolutionPlan | None = None) -> Features:
        """A `SparseTensor` -> one on the same grid; or features (N, C_in) with ``plan`` -> (N, C_out)."""
        return self._execute(x, self.plan(x) if plan is None else self.geometry.checked_plan(plan, x))

    def plan(self, x: Any) -> ConvolutionPlan:
        """The plan of this layer on the tensor's grid."""
        return self.geometry.plan(grid_in(x, self))


class _TargetedConv(ConvolutionModule):
    """What `Conv` and `InverseConv` share: ``target``, which says on which voxels a layer at stride 1 ends."""

    @constructor
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes | None = None,
        stride: Axes = 1,
        padding: Axes | None = None,
        *,
        target: str | None = None,
        dilation: Axes = 1,
        taps: Integer[torch.Tensor, "K D"] | Sequence[Sequence[int]] | None = None,
        boundary: Boundary | str = "absent",
        groups: int = 1,
        bias: bool = True,
        rank: int = 3,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            dilation=dilation,
            padding=padding,
            taps=taps,
            boundary=boundary,
            groups=groups,
            bias=bias,
            rank=rank,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self.target = checked_target(target)


class Conv(_TargetedConv):
    """Convolution onto coarse voxels, onto every reachable voxel, or onto a grid given at the call.

    Args:
        stride: one integer or one per axis. Where it is not 1, outputs are all coarse voxels that see an input.
        target: ``"full"`` for every reachable voxel at stride 1 too; None as in `ConvolutionPlan`.

    The other arguments are those of `SubmanifoldConv`.

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 5, 5, 5]])), torch.ones(2, 4))
    >>> Conv(4, 8, 2, stride=2)(x).grid.coords.tolist()
    [[0, 0, 0, 0], [0, 2, 2, 2]]
    """

    def forward(
        self,
        x: Features,
        *,
        target: VoxelGrid | SparseTensor | None = None,
        plan: ConvolutionPlan | None = None,
    ) -> Features:
        """A `SparseTensor` -> one on the coarse grid, or on ``target``; or features with ``plan`` -> features."""
        return self._execute(x, self.plan(x, target) if plan is None else self.geometry.checked_plan(plan, x))

    def plan(self, x: Any, target: VoxelGrid | SparseTensor | None = None) -> ConvolutionPlan:
        """The plan of this layer from the tensor's grid, onto ``target`` if given."""
        return self.geometry.plan(grid_in(x, self), self.target if target is None else grid_of(target))

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", target={self.target!r}" if self.target else "")


class InverseConv(_TargetedConv):
    """Convolution from coarse voxels back onto the grid that they came from, over the same edges reversed.

    Arguments are those of the `Conv` that it undoes, with its own channels.

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0, 0, 0], [0, 5, 5, 5]])), torch.ones(2, 4))
    >>> coarse = Conv(4, 8, 2, stride=2)(x)
    >>> InverseConv(8, 4, 2, stride=2)(coarse, onto=x).grid is x.grid
    True
    """

    def forward(
        self,
        x: Features,
        onto: VoxelGrid | SparseTensor | None = None,
        *,
        plan: ConvolutionPlan | None = None,
    ) -> Features:
        """A `SparseTensor` and the finer grid (or a tensor on it) -> a `SparseTensor` there.

        Or features with ``plan`` (the transposed one, `ConvolutionPlan.transpose`) -> features.
        """
        return self._execute(x, self.plan(x, onto) if plan is None else self.geometry.checked_plan(plan, x))

    def plan(self, x: Any, onto: VoxelGrid | SparseTensor | None = None) -> ConvolutionPlan:
        """The plan of this layer from the tensor's grid back onto a finer one."""
        return self.geometry.inverse(grid_in(x, self), onto, self.target)


class ConvTranspose(ConvolutionModule):
    """Transposed convolution that makes new voxels: all that a tap reaches from an input, or those of a given grid.

    Arguments are those of `Conv`, the strides those of the fine voxels.

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 1]])), torch.ones(1, 4))
    >>> ConvTranspose(4, 8, 2, stride=2, rank=1)(x).grid.coords.tolist()
    [[0, 2], [0, 3]]
    """

    def forward(
        self,
        x: Features,
        *,
        target: VoxelGrid | SparseTensor | None = None,
        plan: ConvolutionPlan | None = None,
    ) -> Features:
        """A `SparseTensor` -> one on the finer voxels, or on ``target``; or features with ``plan`` -> features."""
        return self._execute(x, self.plan(x, target) if plan is None else self.geometry.checked_plan(plan, x))

    def plan(self, x: Any, target: VoxelGrid | SparseTensor | None = None) -> ConvolutionPlan:
        """The plan of this layer from the tensor's grid to finer voxels, those of ``target`` if given."""
        return self.geometry.generative(grid_in(x, self), None if target is None else grid_of(target))
