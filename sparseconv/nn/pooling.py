"""Pooling modules: windows over the voxels there are, whole batch items, and the ways back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Boundary
from sparseconv.nn.geometry import Axes, LayerGeometry, checked_target, grid_in, grid_of
from sparseconv.nn.module import Features, SparseModule, features_of, placed
from sparseconv.ops import global_pooling, pooling
from sparseconv.other_names import constructor
from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.tensor import SparseTensor

if TYPE_CHECKING:
    from jaxtyping import Float, Integer


class WindowPool(SparseModule):
    """What the pooling modules share: a window, and how a plan for it is found.

    Args:
        kernel_size: voxels along each axis of the window, one integer or one per axis; None where ``taps`` are given.
        stride: default ``kernel_size``; 1 where ``taps`` are given.
        target: ``"full"`` or None, as in `Conv`.
        rank: number of spatial axes.
        padding, dilation, taps, boundary, backend: those of `ConvolutionPlan`. Without one, padding centers the window,
            where torch's and spconv's pools pad by 0.
    """

    @constructor
    def __init__(
        self,
        kernel_size: Axes | None = None,
        stride: Axes | None = None,
        padding: Axes | None = None,
        *,
        target: str | None = None,
        rank: int = 3,
        dilation: Axes = 1,
        taps: Integer[torch.Tensor, "K D"] | Sequence[Sequence[int]] | None = None,
        boundary: Boundary | str = "absent",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if stride is None:
            stride = 1 if kernel_size is None else kernel_size
        self.geometry = LayerGeometry(
            rank,
            kernel_size,
            stride=stride,
            dilation=dilation,
            padding=padding,
            taps=taps,
            boundary=boundary,
            backend=backend,
        )
        self.target = checked_target(target)

    def _down(self, x: Any, target: VoxelGrid | SparseTensor | None, plan: ConvolutionPlan | None) -> ConvolutionPlan:
        if plan is not None:
            return self.geometry.checked_plan(plan, x)
        return self.geometry.plan(grid_in(x, self), self.target if target is None else grid_of(target))

    def _back(self, x: Any, onto: VoxelGrid | SparseTensor | None, plan: ConvolutionPlan | None) -> ConvolutionPlan:
        if plan is not None:
            return self.geometry.checked_plan(plan, x)
        return self.geometry.inverse(grid_in(x, self), onto, self.target)

    def extra_repr(self) -> str:
        return f"{self.geometry}"


class SumPool(WindowPool):
    """The sum of the voxels in each window; see `sparseconv.ops.sum_pool`.

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 4]])), torch.tensor([[1.0], [3.0], [5.0]]))
    >>> SumPool(2, rank=1)(x).features.tolist()
    [[4.0], [5.0]]
    """

    def forward(
        self, x: Features, *, target: VoxelGrid | SparseTensor | None = None, plan: ConvolutionPlan | None = None
    ) -> Features:
        """A `SparseTensor` -> one on the coarse grid, or on ``target``; or features (N, C) with ``plan``."""
        plan = self._down(x, target, plan)
        return placed(x, plan, pooling.sum_pool(features_of(x, self), plan))


class AvgPool(WindowPool):
    """The mean of the voxels in each window; see `sparseconv.ops.avg_pool`.

    Args:
        count_absent: divide by the number of taps, as torch's dense pooling does, and not by that of the voxels.

    The other arguments are those of `WindowPool`.

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 4]])), torch.tensor([[1.0], [3.0], [5.0]]))
    >>> AvgPool(2, rank=1)(x).features.tolist()
    [[2.0], [5.0]]
    """

    @constructor
    def __init__(
        self,
        kernel_size: Axes | None = None,
        stride: Axes | None = None,
        padding: Axes | None = None,
        *,
        count_absent: bool = False,
        target: str | None = None,
        rank: int = 3,
        dilation: Axes = 1,
        taps: Integer[torch.Tensor, "K D"] | Sequence[Sequence[int]] | None = None,
        boundary: Boundary | str = "absent",
        backend: str = "auto",
    ) -> None:
        super().__init__(
            kernel_size,
            stride,
            target=target,
            rank=rank,
            dilation=dilation,
            padding=padding,
            taps=taps,
            boundary=boundary,
            backend=backend,
        )
        self.count_absent = count_absent

    def forward(
        self, x: Features, *, target: VoxelGrid | SparseTensor | None = None, plan: ConvolutionPlan | None = None
    ) -> Features:
        """A `SparseTensor` -> one on the coarse grid, or on ``target``; or features (N, C) with ``plan``."""
        plan = self._down(x, target, plan)
        return placed(x, plan, pooling.avg_pool(features_of(x, self), plan, count_absent=self.count_absent))

    def extra_repr(self) -> str:
        return super().extra_repr() + (", count_absent=True" if self.count_absent else "")


class MaxPool(WindowPool):
    """The largest of the voxels in each window, channel by channel; see `sparseconv.ops.max_pool`.

    Args:
        return_winners: also return the tap of each maximum (N_out, C), for `MaxUnpool`.

    The other arguments are those of `WindowPool`.

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 4]])), torch.tensor([[1.0], [3.0], [5.0]]))
    >>> MaxPool(2, rank=1)(x).features.tolist()
    [[3.0], [5.0]]
    """

    @constructor
    def __init__(
        self,
        kernel_size: Axes | None = None,
        stride: Axes | None = None,
        padding: Axes | None = None,
        *,
        return_winners: bool = False,
        target: str | None = None,
        rank: int = 3,
        dilation: Axes = 1,
        taps: Integer[torch.Tensor, "K D"] | Sequence[Sequence[int]] | None = None,
        boundary: Boundary | str = "absent",
        backend: str = "auto",
    ) -> None:
        super().__init__(
            kernel_size,
            stride,
            target=target,
            rank=rank,
            dilation=dilation,
            padding=padding,
            taps=taps,
            boundary=boundary,
            backend=backend,
        )
        self.return_winners = return_winners

    def forward(
        self, x: Any, *, target: VoxelGrid | SparseTensor | None = None, plan: ConvolutionPlan | None = None
    ) -> Any:
        """A `SparseTensor` -> one on the coarse grid, or on ``target``; or features (N, C) with ``plan``."""
        plan = self._down(x, target, plan)
        y, winners = pooling.max_pool(features_of(x, self), plan)
        return (placed(x, plan, y), winners) if self.return_winners else placed(x, plan, y)


class Unpool(WindowPool):
    """Copy coarse voxels onto the grid that they were pooled from; see `sparseconv.ops.unpool`.

    Arguments are those of the pooling, or of the strided `Conv`, that it undoes.

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 4]])), torch.tensor([[1.0], [3.0], [5.0]]))
    >>> Unpool(2, rank=1)(MaxPool(2, rank=1)(x), onto=x).features.tolist()
    [[3.0], [3.0], [5.0]]
    """

    def forward(
        self, x: Features, onto: VoxelGrid | SparseTensor | None = None, *, plan: ConvolutionPlan | None = None
    ) -> Features:
        """A `SparseTensor` and the finer grid (or a tensor on it) -> one there; or features with ``plan``."""
        plan = self._back(x, onto, plan)
        return placed(x, plan, pooling.unpool(features_of(x, self), plan))


class MaxUnpool(WindowPool):
    """Puts values back where a `MaxPool` found them, and 0 elsewhere; see `sparseconv.ops.max_unpool`.

    Arguments are those of the `MaxPool` that it undoes.

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 4]])), torch.tensor([[1.0], [3.0], [5.0]]))
    >>> y, winners = MaxPool(2, rank=1, return_winners=True)(x)
    >>> MaxUnpool(2, rank=1)(y, winners, onto=x).features.tolist()
    [[0.0], [3.0], [5.0]]
    """

    def forward(
        self,
        x: Features,
        winners: Integer[torch.Tensor, "N_in C"],
        onto: VoxelGrid | SparseTensor | None = None,
        *,
        plan: ConvolutionPlan | None = None,
    ) -> Features:
        """A `SparseTensor`, the winners of the `MaxPool`, and the finer grid -> a `SparseTensor` there."""
        plan = self._back(x, onto, plan)
        return placed(x, plan, pooling.max_unpool(features_of(x, self), winners, plan))


class GlobalSumPool(SparseModule):
    """The sum over the voxels of each batch item: a `SparseTensor` -> (B, C), 0 for an empty item.

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 4]])), torch.tensor([[1.0], [3.0], [5.0]]))
    >>> GlobalSumPool()(x)
    tensor([[9.]])
    """

    def forward(self, x: Features, *, grid: VoxelGrid | None = None) -> Float[torch.Tensor, "B C"]:
        """A `SparseTensor`, or features (N, C) with their ``grid`` -> (B, C)."""
        return global_pooling.global_sum_pool(features_of(x, self), grid_in(x, self, "grid=") if grid is None else grid)


class GlobalAvgPool(SparseModule):
    """The mean over the voxels of each batch item: a `SparseTensor` -> (B, C), 0 for an empty item.

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 4]])), torch.tensor([[1.0], [3.0], [5.0]]))
    >>> GlobalAvgPool()(x)
    tensor([[3.]])
    """

    def forward(self, x: Features, *, grid: VoxelGrid | None = None) -> Float[torch.Tensor, "B C"]:
        """A `SparseTensor`, or features (N, C) with their ``grid`` -> (B, C)."""
        return global_pooling.global_avg_pool(features_of(x, self), grid_in(x, self, "grid=") if grid is None else grid)


class GlobalMaxPool(SparseModule):
    """The maximum over the voxels of each batch item: a `SparseTensor` -> (B, C), 0 for an empty item.

    >>> x = SparseTensor(VoxelGrid(torch.tensor([[0, 0], [0, 1], [0, 4]])), torch.tensor([[1.0], [3.0], [5.0]]))
    >>> GlobalMaxPool()(x)
    tensor([[5.]])
    """

    def forward(self, x: Features, *, grid: VoxelGrid | None = None) -> Float[torch.Tensor, "B C"]:
        """A `SparseTensor`, or features (N, C) with their ``grid`` -> (B, C)."""
        return global_pooling.global_max_pool(features_of(x, self), grid_in(x, self, "grid=") if grid is None else grid)
