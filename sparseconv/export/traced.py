"""Grids and plans while torch.export traces: they record operators, and know no number of voxels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch

from sparseconv.geometry.arguments import INTEGERS, Floats, checked_batch_size, numbers
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Boundary, IndexRange, Ints, per_axis
from sparseconv.kinds import check_count
from sparseconv.plan.arguments import Axes, as_epilogue, autocast, checked_window
from sparseconv.plan.weights import by_tap

if TYPE_CHECKING:
    from sparseconv.pointwise import Epilogue, PointwiseDynamicFunction

_ops: Any = torch.ops.sparseconv


class TracedGrid(VoxelGrid):
    """What ``VoxelGrid(coords, batch_size)`` makes while torch.export traces.

    The saved program makes the grid, and checks its coordinates, at every call. Here the number of rows is a symbol.
    """

    handle: torch.Tensor

    def __init__(
        self,
        coords: torch.Tensor,
        batch_size: int | None = None,
        voxel_size: float | Sequence[float] | None = None,
        origin: float | Sequence[float] | None = None,
        *,
        duplicates: Literal["error", "first"] = "error",
    ) -> None:
        if coords.ndim != 2 or not 2 <= coords.shape[1] <= 5:
            raise ValueError(f"coords must be (N, 1+D), D from 1 to 4; got {tuple(coords.shape)}")
        if coords.dtype not in INTEGERS:
            raise TypeError(f"coords must be integers; got {coords.dtype}")
        if batch_size is None:
            raise ValueError("an exported program has a fixed batch_size: pass VoxelGrid(coords, batch_size)")
        if duplicates != "error":
            raise ValueError("an exported program merges no voxels: call voxelize before it")
        rank = coords.shape[1] - 1
        size = None if voxel_size is None else numbers(voxel_size, rank, "voxel_size", positive=True)
        start = None if origin is None else numbers(origin, rank, "origin")
        items = checked_batch_size(batch_size)
        made = _ops.grid(coords, items, list(size or ()), list(start or ()))
        self._be(made, coords.to(torch.int32), items, size or (1.0,) * rank, start or (0.0,) * rank)
        self.is_placed = size is not None or start is not None

    def _be(self, made: torch.Tensor, coords: torch.Tensor, items: int, size: Floats, origin: Floats) -> None:
        self.handle, self.coords, self.batch_size = made, coords, items
        self.voxel_size, self.origin, self.derived = size, origin, {}

    def moved(self, found: tuple[torch.Tensor, torch.Tensor], scale: Sequence[float]) -> TracedGrid:
        """The grid of a handle and its coords, in the same scene; ``scale`` multiplies the voxel size."""
        made, coords = found
        grid = object.__new__(TracedGrid)
        grid._be(made, coords, self.batch_size, tuple(v * s for v, s in zip(self.voxel_size, scale)), self.origin)
        grid.is_placed = self.is_placed
        return grid

    def _unknown(self) -> Any:
        raise ValueError(
            "while torch.export traces, nobody knows where voxels lie or how many there are: give the shape or extent "
            "that is asked for, and leave what counts voxels to the caller"
        )

    extent: Any = property(_unknown)
    _space: Any = property(_unknown)
    batch_counts: Any = property(_unknown)
    batch_offsets: Any = property(_unknown)
    batch_rows: Any = property(_unknown)

    def lookup(self, coords: torch.Tensor) -> torch.Tensor:
        return _ops.lookup(self.handle, coords)

    def subset(self, mask: torch.Tensor) -> VoxelGrid:
        made, _ = _ops.subset(self.handle, mask, self.coords)
        return self.moved((made, self.coords[mask]), (1.0,) * self.rank)  # as many rows as torch counts features[mask]

    def to_dense(self, features: torch.Tensor, extent: IndexRange | Sequence[int] | None = None) -> torch.Tensor:
        box = self.extent if extent is None else extent
        box = box if isinstance(box, IndexRange) else IndexRange.of_shape(per_axis(box, self.rank, "extent"))
        return _ops.to_dense(self.handle, features, self.batch_size, list(box.start), list(box.shape))

    def pooled(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """Features (N, C) -> (B, C), pooled over each item: "sum", "average" or "max"."""
        return _ops.pool_items(self.handle, x, self.batch_size, how)

    def standardised(self, x: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
        """`ops.items.standardised`."""
        return _ops.standardise_items(self.handle, x, groups, eps)

    def __repr__(self) -> str:
        return f"TracedGrid(rank {self.rank}, batch {self.batch_size}, {self.device})"


class TracedPlan:
    """What `ConvolutionPlan` is on a `TracedGrid`: the same arguments, and operators in place of kernel maps."""

    def __init__(
        self,
        source: TracedGrid,
        kernel_size: Axes | None = None,
        *,
        stride: Axes = 1,
        dilation: Axes = 1,
        padding: Axes | None = None,
        taps: torch.Tensor | Sequence[Sequence[int]] | None = None,
        target: VoxelGrid | Literal["full"] | None = None,
        boundary: Boundary | Literal["absent", "forbid"] = "absent",
        groups: int = 1,
        backend: str = "auto",
        deterministic: bool | None = None,
        generative: bool = False,
        within: Ints | None = None,
    ) -> None:
        window, edge = checked_window(
            source, kernel_size, stride, dilation, padding, taps, boundary, groups, backend, deterministic
        )
        given = target if isinstance(target, TracedGrid) else None
        if target is not None and given is None and target != "full":
            raise ValueError(f"target must be a grid that was made within the trace, 'full' or None; got {target!r}")
        self.kernel_size = window.projection.counts if kernel_size is not None else None
        self.num_taps, self.groups, self.backend = len(window.offsets), groups, backend
        self.window, self.boundary, self.is_transposed = window, edge, generative
        outputs = "generative" if generative else "full" if target == "full" or window.is_strided else "same"
        outputs = outputs if given is None or generative else "given"
        if within is not None:
            outputs = "within generative" if generative else "within"
        axes = (source.rank, "padding")
        self.handle = _ops.plan(
            source.handle,
            None if given is None else given.handle,
            None if self.kernel_size is None else list(self.kernel_size),
            [] if taps is None else [index for tap in window.offsets for index in tap],
            list(window.stride),
            list(per_axis(dilation, source.rank, "dilation", 1)) if taps is None else [1] * source.rank,
            None if padding is None or taps is not None else list(per_axis(padding, *axes)),
            outputs,
            list(within or ()),
            edge.kind,
            [] if edge.extent is None else [*edge.extent.start, *edge.extent.end],
            backend,
        )
        self.source = source
        if given is not None:
            self.target: TracedGrid = given
        elif outputs == "same" and edge.kind != "forbid":
            self.target = source
        else:
            scale = [1 / s if generative else float(s) for s in window.stride]
            self.target = source.moved(_ops.target(self.handle, source.coords), scale)

    @classmethod
    def transposed(cls, source: TracedGrid, kernel_size: Axes | None = None, **options: Any) -> TracedPlan:
        """From coarse voxels to fine ones; arguments of `ConvolutionPlan.transposed`."""
        return cls(source, kernel_size, generative=True, **options)

    @classmethod
    def within(cls, source: TracedGrid, shape: Ints, kernel_size: Axes, generative: bool, **size: Any) -> TracedPlan:
        """`plan_within`: onto the voxels of [0, shape) that a window reaches."""
        return cls(source, kernel_size, generative=generative, within=shape, **size)

    @property
    def kernel_map(self) -> Any:
        raise ValueError(
            "while torch.export traces there are no edges to look at: an exported network may convolve, pool and look "
            "voxels up; what reads kernel maps runs before or after it"
        )

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def num_in(self) -> Any:
        return self.source.num_voxels

    @property
    def projection(self) -> Any:
        return self.window.projection

    def execute(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
        epilogue: Epilogue | PointwiseDynamicFunction | None = None,
    ) -> torch.Tensor:
        """`ConvolutionPlan.execute`, recorded."""
        x, weight, bias, residual = autocast(x, weight, bias, residual)
        taps = by_tap(weight, self.kernel_size, self.num_taps)
        if x.ndim != 2 or x.shape[1] != taps.shape[1] * self.groups:
            raise ValueError(
                f"x {tuple(x.shape)} does not fit the weight {tuple(weight.shape)} in {self.groups} groups"
            )
        after = as_epilogue(epilogue)
        name = "" if after is None else after.activation.schema.name
        inlined = after is not None and getattr(import_module("sparseconv.pointwise"), name, None) is after.activation
        numbers = [float(n) for n in after.numbers] if after is not None and inlined else []
        call = (self.handle, x, taps, bias, residual, self.target.coords, self.groups, name if inlined else "", numbers)
        y: torch.Tensor = _ops.execute(*call)
        return y if after is None or inlined else after.apply(y)

    def pooled(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """`ops.sum_pool` or `ops.avg_pool`: "sum", "average", "average_of_taps"."""
        return _ops.pool(self.handle, x, self.target.coords, how)

    def max_pooled(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`ops.max_pool`."""
        return _ops.max_pool(self.handle, x, self.target.coords)

    def max_unpooled(self, x: torch.Tensor, winners: torch.Tensor) -> torch.Tensor:
        """`ops.max_unpool`."""
        return _ops.max_unpool(self.handle, x, winners, self.target.coords)

    def localize(self, x: torch.Tensor) -> tuple[torch.Tensor, TracedPlan]:
        return x, self

    def transpose(self) -> TracedPlan:
        """The same edges reversed."""
        back = copy.copy(self)
        back.handle = _ops.transposed(self.handle)
        back.source, back.target, back.is_transposed = self.target, self.source, not self.is_transposed
        return back

    def with_groups(self, groups: int) -> TracedPlan:
        """The same edges for another number of channel groups."""
        check_count("groups", groups, 1)
        other = copy.copy(self)
        other.groups = groups
        return other

    def kept_with(self, grid: VoxelGrid) -> TracedPlan:
        return self


TracedGrid.plan_type = TracedPlan
VoxelGrid.traced_type = TracedGrid
