"""Features of points -> features of the voxels that hold them, and back.

    sum, mean, max:  y[v] = sum, mean or maximum over the points p with rows[p] = v of features[p]
    spread:          y[p] = x[rows[p]]

A voxel without a point is 0 and takes no gradient; so is a point without a voxel (row -1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from sparseconv import transforms
from sparseconv.autograd_function import Function
from sparseconv.checks import check_choice, check_count, check_tensor
from sparseconv.ops.rows import check_rows, kept
from sparseconv.products import SparseScaleInfo, sparse_scale
from sparseconv.products.info import known_right

if TYPE_CHECKING:
    from jaxtyping import Float, Integer

Reduce = Literal["mean", "sum", "max"]


class PointGroups:
    """The grouping of points by voxel, computed once and reduced many times.

    Args:
        point_rows: (M,) integers, the voxel row of each point as `voxelize` returns it; -1 for none.
        num_voxels: rows of the result.

    Raises:
        TypeError: rows are not integers. ValueError: they are not (M,), or not within -1 .. num_voxels - 1.

    >>> groups = PointGroups(torch.tensor([2, 0, 2]), num_voxels=3)
    >>> y = groups.reduce(torch.tensor([[1.0], [2.0], [5.0]]), "mean")
    >>> y.tolist(), groups.spread(y).tolist()
    ([[2.0], [0.0], [3.0]], [[3.0], [2.0], [3.0]])
    """

    @transforms.constant
    def __init__(self, point_rows: Integer[torch.Tensor, " M"], num_voxels: int) -> None:
        check_tensor("point_rows", point_rows)
        check_count("num_voxels", num_voxels)
        if point_rows.is_floating_point() or point_rows.is_complex() or point_rows.dtype == torch.bool:
            raise TypeError(f"point_rows must be integers; got {point_rows.dtype}")
        if point_rows.ndim != 1:
            raise ValueError(f"point_rows must be (M,), one row per point; got {tuple(point_rows.shape)}")
        rows = point_rows.to(torch.int64, copy=True)  # nobody else writes to it
        ordered, order = torch.sort(rows, stable=True)
        ends = ordered[[0, -1]].tolist() if len(rows) else [-1, -1]
        if ends[0] < -1 or ends[1] >= num_voxels:
            raise ValueError(
                f"point_rows must lie within -1 (no voxel) .. {num_voxels - 1}, there being {num_voxels} voxels; "
                f"got {ends[0]} .. {ends[1]}"
            )
        self.num_points, self.num_voxels, self.device = len(rows), num_voxels, rows.device
        self._rows = rows
        bounds = torch.searchsorted(ordered, torch.arange(num_voxels + 1, device=rows.device))
        #: (N,) int64: points of each voxel
        self.counts = bounds.diff()
        if len(rows) and ends[0] < 0:
            held = (rows >= 0).nonzero()[:, 0]
            spread = known_right(SparseScaleInfo, None, rows[held], None, held, len(rows), num_voxels)
        else:
            spread = known_right(SparseScaleInfo, None, rows, None, None, len(rows), num_voxels)
        self._infos = known_right(SparseScaleInfo, None, order, bounds, None, num_voxels, len(rows)), spread

    def reduce(self, features: Float[torch.Tensor, "M C"], how: Reduce = "mean") -> Float[torch.Tensor, "N C"]:
        """The mean, sum or maximum of each voxel's points.

        Args:
            features: (M, C) floating point on the device of the rows.
            how: ``"mean"``, ``"sum"`` or ``"max"``, channel by channel; of equal ones the first point takes the
                gradient, and NaN wins.

        Returns:
            (N, C), dtype of the features; summed in fp32 (fp64 for fp64), the same bits in every run. Differentiable
            to any order.

        Raises:
            ValueError, TypeError: shapes, dtypes or devices that do not fit, or another ``how``.
        """
        check_rows("features", features, self.num_points, "point", self.device, "the plan")
        check_choice("how", how, ("mean", "sum", "max"))
        if how == "max":
            return _choice(features, self._winners(features.detach()), self._rows, False)
        with torch.autocast(features.device.type, enabled=False):
            if how == "sum":
                return sparse_scale(features, *self._infos)
            total = sparse_scale(features.to(torch.promote_types(features.dtype, torch.float32)), *self._infos)
            return (total / self.counts.clamp_min(1)[:, None]).to(features.dtype)

    def spread(self, x: Float[torch.Tensor, "N C"]) -> Float[torch.Tensor, "M C"]:
        """Each point takes the features of its voxel: (N, C) -> (M, C); the transpose of the sum."""
        check_rows("x", x, self.num_voxels, "voxel", self.device, "the plan")
        with torch.autocast(x.device.type, enabled=False):
            return sparse_scale(x, *self._infos[::-1])

    def _winners(self, features: torch.Tensor) -> torch.Tensor:
        """(N, C) integers: the first point that has the maximum of its voxel, M where there is no point."""
        shape = (self.num_voxels + 1, features.shape[1])  # a row more for points without a voxel
        bins = torch.where(self._rows < 0, self.num_voxels, self._rows)
        each = bins[:, None].expand_as(features)
        most = features.new_full(shape, -torch.inf).scatter_reduce_(0, each, features, "amax")
        best = (features == most.index_select(0, bins)) | (features != features)
        kind = torch.int32 if self.num_points < 2**31 else torch.int64  # half the memory to walk through
        # the earlier the point the larger its number, 0 where it has not won: torch.where is slow on the CPU
        left = torch.arange(self.num_points, 0, -1, dtype=kind, device=self.device)[:, None]
        first = features.new_zeros(shape, dtype=kind)  # one for each of a batch under torch.func.vmap
        first.scatter_reduce_(0, each, best.to(kind).mul_(left), "amax")
        return self.num_points - first[:-1]


class _Choice(Function):
    """Each voxel takes the features of its winning points; the adjoint gives them back. Both only gather."""

    @staticmethod
    def forward(x: torch.Tensor, winners: torch.Tensor, rows: torch.Tensor, adjoint: bool) -> torch.Tensor:
        sources = winners.shape[0] if adjoint else rows.shape[0]
        if sources == 0:
            return x.new_zeros((rows if adjoint else winners).shape[0], x.shape[1])
        if not adjoint:
            return kept(x.gather(0, winners.clamp_max(sources - 1).long()), winners < sources)
        held = rows.clamp_min(0)
        numbers = torch.arange(len(rows), dtype=winners.dtype, device=rows.device)[:, None]
        won = winners.index_select(0, held) == numbers  # -1 reads row 0, which such a point has not won
        return kept(x.index_select(0, held), won)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        _, winners, rows, ctx.adjoint = inputs
        ctx.save_for_backward(winners, rows)
        ctx.save_for_forward(winners, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return _choice(grad, *ctx.saved_tensors, not ctx.adjoint), None, None, None


class _SeenChoice(_Choice):
    """The same with rules for tangents and batches, which tracing must not see."""

    @staticmethod
    def jvp(ctx: Any, along: torch.Tensor, *_: None) -> torch.Tensor:
        return _choice(along, *ctx.saved_tensors, ctx.adjoint)

    @staticmethod
    def vmap(info: Any, dims: tuple, x: torch.Tensor, winners: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, int]:
        size = info.batch_size
        y = _choice(*(transforms.stack_channels(t, dim, size) for t, dim in zip((x, winners), dims)), *rest)
        return transforms.unstack_channels(y, size, x, dims[0]), 1


def _choice(*args: Any) -> torch.Tensor:
    transforms.check_no_batch(args[0])
    return (_SeenChoice if transforms.active() else _Choice).apply(*args)


def voxelize_features(
    point_features: Float[torch.Tensor, "M C"],
    point_rows: Integer[torch.Tensor, " M"],
    num_voxels: int,
    reduce: Reduce = "mean",
) -> Float[torch.Tensor, "N C"]:
    """The mean, sum or maximum (N, C) of the features (M, C) of each voxel's points.

    Arguments, results and errors are those of `PointGroups`, which is what to make where points are reduced again.

    >>> from sparseconv import voxelize
    >>> grid, rows = voxelize(torch.tensor([[0.1], [0.2], [1.5]]), voxel_size=1.0)
    >>> voxelize_features(torch.tensor([[1.0], [3.0], [7.0]]), rows, len(grid)).tolist()
    [[2.0], [7.0]]
    """
    return PointGroups(point_rows, num_voxels).reduce(point_features, reduce)
