"""Features between voxels and points at any position: interpolation, and its transpose, splatting.

    interpolate:  values[p] = sum over the corners v of p of weight[p, v] * x[v]
    splat:        x[v]      = sum over the points p that v is a corner of, of weight[p, v] * values[p]

Features sit at the centers of their voxels. Linear weights are those of the 2^D centers around a point; the nearest
voxel is the one that holds it. A corner without a voxel has weight zero, as in a dense array of zeros around the
voxels; with ``renormalize`` the weights of the others are divided by their sum instead, so that a constant stays one.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from sparseconv import transforms
from sparseconv.checks import INT32, check_choice, check_tensor
from sparseconv.geometry.coord_ops import places_of
from sparseconv.geometry.fixed_grid import FixedGrid
from sparseconv.geometry.fixed_grid_io import POINTS, note_fault
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.gpu.cuda_capability import has_kernels
from sparseconv.gpu.streams import following, keep
from sparseconv.ops.rows import check_grid, check_rows
from sparseconv.products import SparseProductInfo, SparseScaleInfo, sparse_scale, sparse_vecsca
from sparseconv.products.info import known_right
from sparseconv.products.schedule import TABLE

if TYPE_CHECKING:
    from jaxtyping import Float, Integer

Mode = Literal["linear", "nearest"]


class Interpolation:
    """An interpolation plan: the corner voxels of each point and their weights, computed once and executed many times.

    It is frozen and holds no autograd graph. For gradients to the positions, pass them again to the call as ``points``.

    Args:
        grid: the voxels that hold features.
        points: (M, D) floating point on the grid's device, in the length unit of its voxel size.
        batch: (M,) integers, the batch item of each point; may be left out where the grid has one item.
        mode: ``"linear"`` (in 1 to 4 axes) or ``"nearest"``.
        renormalize: divide a point's weights by their sum, where some of its corners are absent.

    Raises:
        TypeError: points are not floating point, or batch is not integer.
        ValueError: shapes, devices, points that are not finite, batch items that the grid lacks, or a sharded grid.

    >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 1]]), voxel_size=2.0)
    >>> plan = Interpolation(grid, torch.tensor([[1.0], [1.5], [0.5]]))
    >>> plan
    Interpolation(linear, 3 points in 2 voxels, 5 corners, cpu)
    >>> plan.interpolate(torch.tensor([[4.0], [8.0]])).tolist()
    [[4.0], [5.0], [3.0]]
    """

    @transforms.constant
    def __init__(
        self,
        grid: VoxelGrid,
        points: Float[torch.Tensor, "M D"],
        batch: Integer[torch.Tensor, " M"] | None = None,
        *,
        mode: Mode = "linear",
        renormalize: bool = False,
    ) -> None:
        _check(grid, points, batch, mode)
        self.num_voxels, self.num_points, self.rank = len(grid), len(points), grid.rank
        self.mode, self.renormalize, self.device = mode, renormalize, grid.device
        self._voxel_size, self._origin = grid.voxel_size, grid.origin
        self._is_fixed = grid.count is not None
        if batch is None:
            batch = torch.zeros(len(points), dtype=torch.int32, device=points.device)
        with following() if self._is_fixed else nullcontext():
            _check_values(grid, points, batch)
            self._find(grid, points.detach(), batch)
        if self._is_fixed:
            keep(self)

    def _find(self, grid: VoxelGrid, points: torch.Tensor, items: torch.Tensor) -> None:
        """Corners that are voxels, by point and by voxel, and their weights; no value waits for the CPU but the
        number of such corners on an ordinary grid."""
        # where all corners lie outside of the extent one cell is like another: none leaves 32 bits, none is infinite
        cells = torch.floor(self._in_voxels(points))
        limits = zip(cells.unbind(1), grid.extent.start, grid.extent.end)
        #: (M, D) float64, the lowest corner of each point
        self._cells = torch.stack([torch.clamp(axis, low - 2, high) for axis, low, high in limits], 1)
        corners = 2**self.rank if self.mode == "linear" else 1
        numbers = torch.arange(corners, device=self.device)
        steps = torch.stack([(numbers >> (self.rank - 1 - axis)) & 1 for axis in range(self.rank)], 1)
        at = self._cells.long()[:, None] + steps
        at = torch.cat([items.long()[:, None, None].expand(*at.shape[:2], 1), at], 2).flatten(0, 1)
        fits = min(grid.extent.start) - 2 >= INT32.min and max(grid.extent.end) + 1 <= INT32.max
        quick = fits and has_kernels(self.device)  # a grid's table there is of int32
        rows = grid.lookup(at.int() if quick else at)
        self._present = (rows >= 0).view(self.num_points, corners)  # (M, 2^D)
        bounds = torch.zeros(self.num_points + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(self._present.sum(1), 0, out=bounds[1:])
        if self._is_fixed and self.num_points:  # places for all corners, and for more than a written-out structure has
            slots, live = places_of(self._present.flatten(), max(self._present.numel(), TABLE + 1))
            rows = torch.where(live, rows[slots], self.num_voxels)  # what is behind them sorts behind all
        else:
            # (T,) of the M * 2^D corners, those that are voxels
            slots = self._present.flatten().nonzero()[:, 0] if self.num_points else bounds[:0]
            rows = rows[slots]
        ordered, by_row = torch.sort(rows, stable=True)
        row_bounds = torch.searchsorted(ordered, torch.arange(self.num_voxels + 1, device=self.device))
        weights = None if self.mode == "nearest" else self.weights(points).flatten()[slots]
        width = torch.int32 if self._present.numel() < 2**31 else torch.int64
        self._slots, self._by_row = slots.to(width), by_row.to(width)
        self._rows = rows.clamp_max(self.num_voxels - 1).to(width) if self._is_fixed else rows.to(width)
        self._points = torch.div(self._slots, corners, rounding_mode="floor")
        self._row_bounds, self._point_bounds = row_bounds.to(width), bounds.to(width)
        back = None if weights is None else weights[self._by_row]
        sizes = self.num_points, self.num_voxels
        self._scale_infos = (
            known_right(SparseScaleInfo, weights, self._rows, self._point_bounds, None, *sizes),
            known_right(SparseScaleInfo, back, self._points[self._by_row], self._row_bounds, None, *sizes[::-1]),
        )

    def interpolate(
        self, x: Float[torch.Tensor, "N C"], points: Float[torch.Tensor, "M D"] | None = None
    ) -> Float[torch.Tensor, "M C"]:
        """The values of features at the points.

        Args:
            x: (N, C) floating point on the plan's device, rows in the order of the grid.
            points: the points that the plan was made of, given again where they should get a gradient.

        Returns:
            (M, C), dtype of x; summed in fp32 (fp64 for fp64), the same bits in every run. Differentiable to any order
            in x, and in ``points`` within a cell; the nearest voxel does not change with a point, whose gradient is
            none.

        Raises:
            ValueError, TypeError: shapes, devices or dtypes that do not fit the plan.
        """
        check_rows("x", x, self.num_voxels, "voxel of the grid", self.device, "the plan")
        return self._execute(x, points, splat=False)

    def splat(
        self, values: Float[torch.Tensor, "M C"], points: Float[torch.Tensor, "M D"] | None = None
    ) -> Float[torch.Tensor, "N C"]:
        """Values (M, C) of the points, added to their corners with their weights: (N, C), the transpose.

        Arguments, results and errors are those of `interpolate`, with the two sides exchanged.
        """
        check_rows("values", values, self.num_points, "point", self.device, "the plan")
        return self._execute(values, points, splat=True)

    def weights(self, points: Float[torch.Tensor, "M D"]) -> Float[torch.Tensor, "M 2**D"]:
        """(M, 2^D) weights of the corners, the last axis fastest, 0 where absent; differentiable in the points.

        Computed in fp64; kept in the dtype of the points, in fp32 at least.
        """
        self._check_points(points)
        dtype = torch.promote_types(points.dtype, torch.float32)
        if self.mode == "nearest":
            return self._present.to(dtype)
        part = (self._in_voxels(points) - self._cells).clamp(0, 1)  # past its ends only outside of the extent
        weights = part.new_ones(self.num_points, 1)
        for axis in range(self.rank):
            pair = torch.stack([1 - part[:, axis], part[:, axis]], 1)
            weights = (weights[:, :, None] * pair[:, None]).flatten(1)
        weights = weights * self._present
        if self.renormalize:
            total = weights.sum(1, keepdim=True)
            weights = weights / torch.where(total > 0, total, 1)
        return weights.to(dtype)

    def _execute(self, x: torch.Tensor, points: torch.Tensor | None, splat: bool) -> torch.Tensor:
        if points is not None:
            self._check_points(points)
        there, back = self._scale_infos[::-1] if splat else self._scale_infos
        with torch.autocast(x.device.type, enabled=False):  # positions need more bits than halves have
            follows = points is not None and (points.requires_grad or transforms.active())
            if points is None or not follows or self.mode == "nearest":
                return sparse_scale(x, there, back)
            if self._is_fixed:
                raise ValueError("positions get no gradient on a grid of fixed size: detach the points")
            infos = self._splat_infos if splat else self._product_infos
            return sparse_vecsca(x, self.weights(points).flatten(), *infos).to(x.dtype)

    def _check_points(self, points: torch.Tensor) -> None:
        check_tensor("points", points)
        if points.shape != self._cells.shape or points.device != self.device:
            raise ValueError(
                f"points must be those of the plan, {tuple(self._cells.shape)} on {self.device}; "
                f"got {tuple(points.shape)} on {points.device}"
            )

    def _in_voxels(self, points: torch.Tensor) -> torch.Tensor:
        """Points in voxels, so that corners are integers: centers of voxels if linear, lower corners if nearest."""
        axes = zip(points.double().unbind(1), self._origin, self._voxel_size)
        scaled = torch.stack([(axis - origin) / size for axis, origin, size in axes], 1)
        return scaled - 0.5 if self.mode == "linear" else scaled

    @cached_property
    def _product_infos(self) -> tuple[SparseProductInfo, SparseProductInfo, SparseProductInfo]:
        """(voxel, weight -> point), (weight, point -> voxel), (point, voxel -> weight)."""
        rows, slots, points = self._rows, self._slots, self._points
        voxels, weights, number = self.num_voxels, self._present.numel(), self.num_points
        return (
            known_right(SparseProductInfo, None, rows, slots, self._point_bounds, None, None, number, voxels, weights),
            known_right(
                SparseProductInfo, None, slots, points, self._row_bounds, self._by_row, None, voxels, weights, number
            ),
            known_right(SparseProductInfo, None, points, rows, None, None, slots, weights, number, voxels),
        )

    @cached_property
    def _splat_infos(self) -> tuple[SparseProductInfo, SparseProductInfo, SparseProductInfo]:
        """The same with points and voxels exchanged."""
        rows, slots, points = self._rows, self._slots, self._points
        voxels, weights, number = self.num_voxels, self._present.numel(), self.num_points
        return (
            known_right(
                SparseProductInfo, None, points, slots, self._row_bounds, self._by_row, None, voxels, number, weights
            ),
            known_right(SparseProductInfo, None, slots, rows, self._point_bounds, None, None, number, weights, voxels),
            known_right(SparseProductInfo, None, rows, points, None, None, slots, weights, voxels, number),
        )

    def __repr__(self) -> str:
        kind = f"{self.mode}{', renormalized' if self.renormalize else ''}"
        return (
            f"Interpolation({kind}, {self.num_points:,} points in {self.num_voxels:,} voxels, "
            f"{len(self._slots):,} corners, {self.device})"
        )


def interpolate(
    x: Float[torch.Tensor, "N C"],
    grid: VoxelGrid,
    points: Float[torch.Tensor, "M D"],
    mode: Mode = "linear",
    *,
    batch: Integer[torch.Tensor, " M"] | None = None,
    renormalize: bool = False,
) -> Float[torch.Tensor, "M C"]:
    """The values (M, C) of features x (N, C) at points (M, D): devoxelisation, differentiable in x and in the points.

    Arguments are those of `Interpolation`, which is what to make where the same points are asked more than once.

    >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 1]]))
    >>> points = torch.tensor([[0.75]], requires_grad=True)
    >>> y = interpolate(torch.tensor([[4.0], [8.0]]), grid, points)
    >>> y.tolist(), torch.autograd.grad(y, points)[0].tolist()
    ([[5.0]], [[4.0]])
    """
    return Interpolation(grid, points, batch, mode=mode, renormalize=renormalize).interpolate(x, points)


def splat(
    values: Float[torch.Tensor, "M C"],
    grid: VoxelGrid,
    points: Float[torch.Tensor, "M D"],
    mode: Mode = "linear",
    *,
    batch: Integer[torch.Tensor, " M"] | None = None,
    renormalize: bool = False,
) -> Float[torch.Tensor, "N C"]:
    """Point values (M, C), spread over the voxels around each point: (N, C), the transpose of `interpolate`.

    Contributions to absent voxels are dropped, unless ``renormalize`` gives them to the point's other corners.

    >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 1]]))
    >>> splat(torch.tensor([[4.0]]), grid, torch.tensor([[0.75]])).tolist()
    [[3.0], [1.0]]
    """
    return Interpolation(grid, points, batch, mode=mode, renormalize=renormalize).splat(values, points)


def _check(grid: VoxelGrid, points: torch.Tensor, batch: torch.Tensor | None, mode: str) -> None:
    """All that can be said against the arguments without a look at their values."""
    check_choice("mode", mode, ("linear", "nearest"))
    check_grid(grid)
    check_tensor("points", points)
    if grid.is_shared:
        raise ValueError("points are not looked up across shards: gather the scene, or interpolate within each shard")
    if not points.is_floating_point():
        raise TypeError(f"points must be floating point, in the unit of voxel_size; got {points.dtype}")
    if points.ndim != 2 or points.shape[1] != grid.rank:
        raise ValueError(f"points must be (M, {grid.rank}), one column per axis of the grid; got {tuple(points.shape)}")
    if points.device != grid.device:
        raise ValueError(f"the grid is on {grid.device} but points are on {points.device}: move one of them")
    if batch is None:
        if grid.batch_size > 1:
            raise ValueError(f"the grid has {grid.batch_size} batch items: give batch (M,), the item of each point")
        return
    check_tensor("batch", batch)
    if batch.is_floating_point() or batch.dtype == torch.bool:
        raise TypeError(f"batch must be integers; got {batch.dtype}")
    if batch.shape != (len(points),) or batch.device != points.device:
        raise ValueError(
            f"batch must be ({len(points)},) on {points.device}; got {tuple(batch.shape)} on {batch.device}"
        )


def _check_values(grid: VoxelGrid, points: torch.Tensor, batch: torch.Tensor) -> None:
    """Points are finite and of the grid's batch items; else an error, or a fault on a grid of fixed size."""
    if isinstance(grid, FixedGrid):
        is_good = torch.isfinite(points).all() & ((batch >= 0) & (batch < grid.batch_size)).all()
        note_fault(grid.fault, ~is_good, POINTS)
        return
    finite = torch.isfinite(points).all(1)
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise ValueError(f"points must be finite, but point {bad} is {points[bad].tolist()}: drop it")
    if len(batch) and not 0 <= int(batch.min()) <= int(batch.max()) < grid.batch_size:
        low, high = int(batch.min()), int(batch.max())
        raise ValueError(f"batch items must lie within 0 .. {grid.batch_size - 1}; got {low} .. {high}")
