"""Sequences, joins, and the way out to dense arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.geometry.ranges import IndexRange
from sparseconv.nn.convolution import ConvolutionModule
from sparseconv.nn.fused.fusion import conv_norm_act, is_activation, norm_act
from sparseconv.nn.geometry import grid_in
from sparseconv.nn.module import SparseModule, apply
from sparseconv.nn.normalization import BatchNorm
from sparseconv.tensor import SparseTensor

if TYPE_CHECKING:
    from jaxtyping import Shaped


class Sequential(SparseModule, torch.nn.Sequential):
    """`torch.nn.Sequential` of sparse and plain modules: plain ones are applied to the features.

    A `SparseModule` receives the whole `SparseTensor`. After a module that returns a dense tensor (`ToDense`, global
    pooling), the remaining modules receive that tensor.

    >>> from sparseconv.nn import SubmanifoldConv
    >>> net = Sequential(SubmanifoldConv(4, 8, 3), torch.nn.LayerNorm(8), torch.nn.ReLU())
    """

    def forward(self, x: Any) -> Any:
        return run(tuple(self), x)


def run(modules: tuple[torch.nn.Module, ...], x: Any) -> Any:
    """One module after another; a batch norm runs together with the convolution before it and the activation after."""
    at = 0
    while at < len(modules):
        conv = modules[at] if isinstance(modules[at], ConvolutionModule) else None
        norm = modules[at + (conv is not None) : at + (conv is not None) + 1]
        if not norm or not isinstance(norm[0], BatchNorm):
            x, at = apply(modules[at], x), at + 1
            continue
        at += 1 + (conv is not None)
        activation = modules[at] if at < len(modules) and is_activation(modules[at]) else None
        at += activation is not None
        x = norm_act(x, norm[0], activation) if conv is None else conv_norm_act(x, conv, norm[0], activation)
    return x


class Cat(SparseModule):
    """Channels of several tensors on one grid, side by side.

    >>> from sparseconv.geometry.grid import VoxelGrid
    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0, 0, 0]])), torch.ones(1, 4))
    >>> Cat()(x, x).channels
    8
    """

    def forward(self, *tensors: SparseTensor) -> SparseTensor:
        return tensors[0].cat(*tensors[1:])


class Add(SparseModule):
    """The sum of several tensors on one grid.

    >>> from sparseconv.geometry.grid import VoxelGrid
    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0, 0, 0]])), torch.ones(1, 2))
    >>> Add()(x, x, x).features.tolist()
    [[3.0, 3.0]]
    """

    def forward(self, *tensors: SparseTensor) -> SparseTensor:
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor
        return total


class Residual(SparseModule):
    """A residual connection: x + module(x).

    >>> from sparseconv.nn import SubmanifoldConv
    >>> block = Residual(SubmanifoldConv(8, 8, 3))
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: SparseTensor) -> SparseTensor:
        return x + self.module(x)


class ToDense(SparseModule):
    """A `SparseTensor` -> a dense (B, C, *shape), zero where there is no voxel.

    Args:
        extent: the box to fill, an `IndexRange` or a shape from the origin; default: the grid's own extent, which
            differs from scene to scene.

    >>> from sparseconv.geometry.grid import VoxelGrid
    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 1, 2]])), torch.ones(1, 4))
    >>> ToDense((3, 3))(x).shape
    torch.Size([1, 4, 3, 3])
    """

    def __init__(self, extent: IndexRange | Sequence[int] | None = None) -> None:
        super().__init__()
        self.extent = extent

    def forward(self, x: SparseTensor) -> Shaped[torch.Tensor, "B C *shape"]:
        grid_in(x, self, instead="nothing else: Sequential passes it on")
        return x.to_dense(self.extent)

    def extra_repr(self) -> str:
        return "" if self.extent is None else f"extent={self.extent}"
