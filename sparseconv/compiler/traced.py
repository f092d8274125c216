"""Grids and plans while torch.compile or torch.export traces: they record operators, and know no number of voxels."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import torch

from sparseconv.checks import INTEGERS, Floats, check_count, checked_batch_size, numbers
from sparseconv.compiler.operators import held_by
from sparseconv.compiler.settings import while_tracing
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Boundary, IndexRange, Ints, per_axis
from sparseconv.plan.convolution import Axes, ConvolutionPlan, as_epilogue, autocast, checked_window
from sparseconv.plan.weights import by_tap
from sparseconv.torch_private import exporting, settable
from sparseconv.transforms import tracing

if TYPE_CHECKING:
    from sparseconv.pointwise import Epilogue, PointwiseDynamicFunction

_ops: Any = torch.ops.sparseconv


def begin_program() -> None:
    """What a program of torch.compile depends on besides what it reads: guards, and Dynamo's settings."""
    if not torch.compiler.is_dynamo_compiling():
        return
    of_all = torch.nn.modules.module
    # read, so that Dynamo traces anew where a hook of every module comes or goes
    list(of_all._global_forward_hooks), list(of_all._global_forward_pre_hooks)
    list(of_all._global_backward_hooks), list(of_all._global_backward_pre_hooks)
    while_tracing()


def settled(x: torch.Tensor) -> torch.Tensor:
    """Rows whose number of columns the trace knows: a program is for as many axes, or channels, as its first scene had.
    All sizes are symbols to begin with."""
    for size in x.shape[1:]:
        index(size)  # what torch.compile takes for a question about its value
    return x


class TracedGrid(VoxelGrid):
    """What ``VoxelGrid(coords, batch_size)`` makes while torch traces, and what stands for a grid made before.

    The program makes the grid, and checks its coordinates, at every call. While it is traced, the number of rows is a
    symbol. One that a compiled program returns is an ordinary grid of its coordinates.

    Attributes:
        handle: int64 (1,), by which the program's operators know the grid.
        base: the grid of the caller that this one stands for, or lies in one scene with; None for one of the trace.
        scale: edges of its voxels over those of ``base``.
        made_by: the plan whose target this is, None for the first grid of a scene.
    """

    handle: torch.Tensor
    base: VoxelGrid | None
    made_by: TracedPlan | None
    _plans: dict[Any, Any] | None = None

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
            raise ValueError("a traced program has a given batch_size: pass VoxelGrid(coords, batch_size)")
        if duplicates != "error":
            raise ValueError("a traced program merges no voxels: call voxelize before it")
        if not exporting():
            begin_program()
        rank = coords.shape[1] - 1
        size = None if voxel_size is None else numbers(voxel_size, rank, "voxel_size", positive=True)
        start = None if origin is None else numbers(origin, rank, "origin")
        items = checked_batch_size(batch_size) if exporting() else batch_size
        made = _ops.grid(coords, items, list(size or ()), list(start or ()))
        self._be(made, coords.to(torch.int32), items, None, (1.0,) * rank)
        self._size, self._start = size or (1.0,) * rank, start or (0.0,) * rank
        self._is_placed = size is not None or start is not None

    @classmethod
    def of(cls, grid: VoxelGrid) -> TracedGrid:
        """What stands for a grid that was made before the trace: itself for one of the trace."""
        if isinstance(grid, TracedGrid):
            return grid
        begin_program()
        made = object.__new__(TracedGrid)
        made._be(_ops.grid(grid.coords, grid.batch_size, [], []), grid.coords, grid.batch_size, grid, None)
        return made

    def _be(
        self, made: torch.Tensor, coords: torch.Tensor, items: int, base: VoxelGrid | None, scale: Floats | None
    ) -> None:
        settled(coords)
        self.handle, self.coords, self.batch_size = made, coords, items
        self.base, self.scale, self.made_by = base, scale, None

    def moved(self, found: tuple[torch.Tensor, torch.Tensor], scale: Sequence[float] | None) -> TracedGrid:
        """The grid of a handle and its coords, in the same scene; ``scale`` multiplies the voxel size."""
        made, coords = found
        grid = object.__new__(TracedGrid)
        mine = self.scale or (1.0,) * self.rank
        grid._be(made, coords, self.batch_size, self.base, tuple(v * s for v, s in zip(mine, scale)) if scale else mine)
        if self.base is None:
            grid._size, grid._start, grid._is_placed = self._size, self._start, self._is_placed
        return grid

    def standing_for(self, grid: VoxelGrid) -> TracedGrid | None:
        """Of this grid and those that it was made from, the one that is ``grid`` or stands for it."""
        found: TracedGrid | None = self
        while found is not None:
            if found is grid or (found.base is grid and found.scale is None):
                return found
            found = None if found.made_by is None else found.made_by.source
        return None

    def stands_with(self, other: TracedGrid) -> bool:
        """Whether both stand for one grid of the caller."""
        return self.base is not None and self.base is other.base and self.scale is None and other.scale is None

    def leave_trace(self, error: str) -> None:
        """What only a run knows is asked for."""
        _leave_trace(error)

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.coords.shape[1] - 1

    @property
    def voxel_size(self) -> Floats:  # type: ignore[override]
        size = self._size if self.base is None else self.base.voxel_size
        return size if self.scale is None else tuple(v * s for v, s in zip(size, self.scale))

    @property
    def origin(self) -> Floats:  # type: ignore[override]
        return self._start if self.base is None else self.base.origin

    @settable
    def is_placed(self) -> bool:  # type: ignore[override]
        return self._is_placed if self.base is None else self.base.is_placed

    @is_placed.setter
    def is_placed(self, placed: bool) -> None:
        self._is_placed = placed

    @property
    def plan_type(self) -> type | None:  # type: ignore[override]
        return TracedPlan if tracing() else None

    @property
    def derived(self) -> dict[Any, Any]:  # type: ignore[override]
        """Plans of the trace; those of the grid itself, once the program has run."""
        if not tracing():
            return self.real.derived
        if self._plans is None:
            self._plans = {}
        return self._plans

    @property
    def real(self) -> VoxelGrid:
        """The grid that the program made."""
        return held_by(self.handle, VoxelGrid)

    #: the shape that `lie_within` was asked for
    _within: list[int] | None = None

    def lie_within(self, shape: Sequence[int]) -> None:
        """Have the program check that the voxels are in [0, shape)."""
        if self._within is None or self._within != list(shape):
            self._within = list(shape)
            self.handle = _ops.inside(self.handle, self._within)

    def lookup(self, coords: torch.Tensor) -> torch.Tensor:
        return _ops.lookup(self.handle, coords)

    def subset(self, mask: torch.Tensor) -> VoxelGrid:
        if not tracing():
            return self.real.subset(mask)
        made, _ = _ops.subset(self.handle, mask, self.coords)
        return self.moved((made, self.coords[mask]), None)  # as many rows as torch counts features[mask]

    def to_dense(self, features: torch.Tensor, extent: IndexRange | Sequence[int] | None = None) -> torch.Tensor:
        if not tracing():
            return self.real.to_dense(features, extent)
        box = self.extent if extent is None else extent
        box = box if isinstance(box, IndexRange) else IndexRange.of_shape(per_axis(box, self.rank, "extent"))
        return self.dense(features, list(box.start), list(box.shape))

    def dense(self, features: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """(B, C, *shape) over the box from ``start`` on."""
        return _ops.to_dense(self.handle, settled(features), self.batch_size, start, shape)

    def pooled(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """Features (N, C) -> (B, C), pooled over each item: "sum", "average" or "max"."""
        if how == "max" and not exporting():
            return _ops.max_items(self.handle, settled(x), self.batch_size)[0]
        return _ops.pool_items(self.handle, settled(x), self.batch_size, how)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Features of batch items (B, C) -> (N, C), each voxel those of its item."""
        return _ops.spread_items(self.handle, settled(x), self.coords.shape[0])

    def standardised(self, x: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
        """`ops.items.standardised`."""
        if exporting():
            return _ops.standardise_items(self.handle, settled(x), groups, eps)
        items, each = self.batch_size, x.shape[1] // groups
        ones = torch.ones((x.shape[0], 1), dtype=x.dtype, device=x.device)
        terms = (_ops.pool_items(self.handle, ones, items, "sum") * each).clamp_min(1)

        def mean(values: torch.Tensor) -> torch.Tensor:
            of_groups = _ops.pool_items(self.handle, values, items, "sum").unflatten(1, (groups, each)).sum(2) / terms
            return of_groups.repeat_interleave(each, 1)

        off = x - _ops.spread_items(self.handle, mean(x), x.shape[0])
        std = torch.rsqrt(mean(off * off) + eps)
        return off * _ops.spread_items(self.handle, std, x.shape[0])

    def to(self, device: torch.device | str) -> VoxelGrid:  # type: ignore[override]
        return self.real.to(device)

    def __reduce__(self) -> tuple:
        return _ordinary, (self.real,)

    def __repr__(self) -> str:
        if not tracing():
            return repr(self.real)
        return f"TracedGrid(rank {self.rank}, {self.device})"


def _ordinary(grid: VoxelGrid) -> VoxelGrid:
    """A grid that a program made, as it is pickled."""
    return grid


def _leave_trace(error: str) -> None:
    """Called for what only a run knows: torch.compile runs the caller eagerly, and torch.export gets the error."""
    if tracing():
        if exporting() or not torch.compiler.is_dynamo_compiling():
            raise ValueError(error)
        torch._dynamo.graph_break("this asks where voxels lie")


def _of_the_grid(name: str) -> Any:
    """An attribute that nobody knows while torch traces, and that the grid itself has afterwards."""

    def found(self: TracedGrid) -> Any:
        _leave_trace(
            "while torch traces, nobody knows where voxels lie or how many there are: give the shape or extent that is "
            "asked for, and leave what counts voxels to the caller"
        )
        return getattr(self.real, name)

    return property(found)


for _name in ("extent", "_space", "_table", "cells", "batch_counts", "batch_offsets", "batch_rows", "known_box"):
    setattr(TracedGrid, _name, _of_the_grid(_name))


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
        rank = source.rank
        if not exporting():
            begin_program()  # the grid may be of a program before this one
        else:  # a compiled layer has checked them when it was made
            checked_window(
                source, kernel_size, stride, dilation, padding, taps, boundary, groups, backend, deterministic
            )
        given = TracedGrid.of(target) if isinstance(target, VoxelGrid) else None
        if target is not None and given is None and target != "full":
            raise ValueError(f"target must be a grid that was made within the trace, 'full' or None; got {target!r}")
        self.kernel_size = None if kernel_size is None else per_axis(kernel_size, rank, "kernel_size", 1)
        strides, gaps = per_axis(stride, rank, "stride", 1), per_axis(dilation, rank, "dilation", 1)
        pads = None if padding is None else per_axis(padding, rank, "padding")
        points: list[list[int]] = []
        if taps is not None:  # as offsets, which need neither dilation nor padding
            listed = taps.tolist() if isinstance(taps, torch.Tensor) else taps
            points = [[d * t - p for d, t, p in zip(gaps, tap, pads or (0,) * rank)] for tap in listed]
            gaps, pads = (1,) * rank, None
        self.num_taps = len(points) or prod(self.kernel_size or ())
        self.groups, self.backend, self.is_transposed = groups, backend, generative
        kind, extent = (boundary, None) if isinstance(boundary, str) else (boundary.kind, boundary.extent)
        is_strided = any([n != 1 for n in strides])
        outputs = "generative" if generative else "full" if target == "full" or is_strided else "same"
        outputs = outputs if given is None or generative else "given"
        if within is not None:
            outputs = "within generative" if generative else "within"
        self.handle = _ops.plan(
            source.handle,
            None if given is None else given.handle,
            None if self.kernel_size is None else list(self.kernel_size),
            [index for point in points for index in point],
            list(strides),
            list(gaps),
            None if pads is None else list(pads),
            outputs,
            [] if within is None else list(within),
            kind,
            [] if extent is None else [*extent.start, *extent.end],
            backend,
        )
        self.source = source
        if given is not None:
            self.target: TracedGrid = given
        elif outputs == "same" and kind != "forbid":
            self.target = source
        else:
            scale = [1 / s if generative else float(s) for s in strides]
            self.target = source.moved(_ops.target(self.handle, source.coords), scale)
            self.target.made_by = self

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
        _leave_trace(
            "while torch.export traces there are no edges to look at: an exported network may convolve, pool and look "
            "voxels up; what reads kernel maps runs before or after it"
        )
        return self.real.kernel_map

    @property
    def real(self) -> ConvolutionPlan:
        """The plan that the program made."""
        return held_by(self.handle, ConvolutionPlan)

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def num_in(self) -> Any:
        return self.source.num_voxels

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
        if not exporting():  # a program of torch.compile has derivatives, and fuses by itself
            y: torch.Tensor = _ops.convolve(self.handle, x, taps, bias, self.target.coords.shape[0], self.groups, False)
            y = y if residual is None else y + residual
            return y if after is None else after.apply(y)
        name = "" if after is None else after.activation.schema.name
        inlined = after is not None and getattr(import_module("sparseconv.pointwise"), name, None) is after.activation
        numbers = [float(n) for n in after.numbers] if after is not None and inlined else []
        call = (self.handle, x, taps, bias, residual, self.target.coords, self.groups, name if inlined else "", numbers)
        y = _ops.execute(*call)
        return y if after is None or inlined else after.apply(y)

    def pooled(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """`ops.sum_pool` or `ops.avg_pool`: "sum", "average", "average_of_taps"."""
        return _ops.pool(self.handle, settled(x), self.target.coords, how)

    def max_pooled(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`ops.max_pool`."""
        return _ops.max_pool(self.handle, settled(x), self.target.coords)

    def max_unpooled(self, x: torch.Tensor, winners: torch.Tensor) -> torch.Tensor:
        """`ops.max_unpool`."""
        return _ops.max_unpool(self.handle, settled(x), winners, self.target.coords)

    def localize(self, x: torch.Tensor) -> tuple[torch.Tensor, TracedPlan]:
        return x, self

    def _copy(self) -> TracedPlan:
        made = object.__new__(TracedPlan)  # Dynamo of torch 2.11 does not follow the module copy
        made.handle, made.source, made.target, made.is_transposed = (
            self.handle,
            self.source,
            self.target,
            self.is_transposed,
        )
        made.kernel_size, made.num_taps, made.groups, made.backend = (
            self.kernel_size,
            self.num_taps,
            self.groups,
            self.backend,
        )
        return made

    def transpose(self) -> TracedPlan:
        """The same edges reversed."""
        back = self._copy()
        back.handle = _ops.transposed(self.handle)
        back.source, back.target, back.is_transposed = self.target, self.source, not self.is_transposed
        return back

    def with_groups(self, groups: int) -> TracedPlan:
        """The same edges for another number of channel groups."""
        check_count("groups", groups, 1)
        other = self._copy()
        other.groups = groups
        return other

    def weak_copy(self, grid: VoxelGrid) -> TracedPlan:
        return self


VoxelGrid.traced_type = TracedGrid
