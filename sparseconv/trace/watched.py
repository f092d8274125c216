"""Grids and plans of a sample: what is asked of them is written down as steps."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Boundary, per_axis
from sparseconv.geometry.window import Window
from sparseconv.plan.convolution import checked_window
from sparseconv.trace.boxes import Scale
from sparseconv.trace.program import (
    Call,
    Coords,
    GridStep,
    MadeGrid,
    OverEdges,
    Pick,
    PlanStep,
    Ref,
    SubsetGrid,
    TargetGrid,
)
from sparseconv.trace.record import Recorded, Recording, referring
from sparseconv.trace.totals import Dense, ItemStatistics, PooledItems, standardised_rows


def boundary_is_local(boundary: Boundary) -> bool:
    """Whether a block knows by itself what lies outside of the scene."""
    return boundary.kind == "absent" or (boundary.kind == "forbid" and boundary.extent is not None)


def scale_after(scale: Scale, window: Window, is_transposed: bool) -> Scale:
    """The scale of the grid that a plan reaches."""
    return tuple(f / s if is_transposed else f * s for f, s in zip(scale, map(Fraction, window.stride)))


class WatchedGrid(VoxelGrid):
    """A grid of the sample: what is asked of it is written down."""

    recording: Recording
    number: int
    _rows: Recorded | None
    is_watched = True

    @classmethod
    def of(cls, recording: Recording, number: int) -> WatchedGrid:
        real: VoxelGrid = recording.values[number]
        grid = object.__new__(cls)
        grid.recording, grid.number = recording, number
        grid.batch_size, grid.voxel_size, grid.origin = real.batch_size, real.voxel_size, real.origin
        grid.is_placed, grid.derived, grid._rows = real.is_placed, {}, None
        recording.grids[number] = grid
        return grid

    @property
    def coords(self) -> Any:  # type: ignore[override]
        """Where the voxels lie, as rows."""
        if self._rows is None:
            self._rows = self.recording.rows(Coords(place=self.number))
        return self._rows

    @property
    def real(self) -> VoxelGrid:
        """The sample's own grid."""
        return self.recording.values[self.number]

    @property
    def num_voxels(self) -> int:
        return self.real.num_voxels

    @property
    def device(self) -> torch.device:
        return self.real.device

    def _unknown(self, *_: Any, **__: Any) -> Any:
        self.recording.refuse(
            "it asks which voxels the whole scene has", "blocks know their surroundings only; give extents as numbers"
        )

    extent: Any = property(_unknown)
    _space: Any = property(_unknown)
    batch_counts: Any = property(_unknown)
    batch_offsets: Any = property(_unknown)
    batch_rows: Any = property(_unknown)
    cells: Any = property(_unknown)
    lookup: Any = _unknown
    union: Any = _unknown
    intersection: Any = _unknown
    difference: Any = _unknown
    sorted: Any = _unknown

    def coarsen(self, factor: Any) -> VoxelGrid:
        return self._other("coarsen", factor, Window.of(self.rank, factor, factor, padding=0), False)

    def refine(self, factor: Any) -> VoxelGrid:
        return self._other("refine", factor, Window.of(self.rank, factor, factor, padding=0), True)

    def dilate(self, radius: Any = 1) -> VoxelGrid:
        width = [2 * r + 1 for r in per_axis(radius, self.rank, "radius", 0)]
        return self._other("dilate", radius, Window.of(self.rank, width), False)

    def _other(self, method: str, amount: Any, window: Window, is_transposed: bool) -> VoxelGrid:
        own: Any = self.recording.steps[self.number]
        step = MadeGrid(
            of=self.number,
            method=method,
            amount=amount,
            window=window,
            is_transposed=is_transposed,
            scale=scale_after(own.scale, window, is_transposed),
        )
        return WatchedGrid.of(self.recording, self.recording.add(step))

    def subset(self, mask: torch.Tensor) -> VoxelGrid:
        chosen: Any = mask
        if not isinstance(chosen, Recorded):
            self.recording.refuse("voxels are chosen by a mask that is not made of features", "make it of features")
        own: Any = self.recording.steps[self.number]
        step = SubsetGrid(of=self.number, mask=chosen.number, scale=own.scale)
        return WatchedGrid.of(self.recording, self.recording.add(step))

    def to_dense(self, features: Any, extent: Any = None) -> torch.Tensor:
        if extent is None:
            self._unknown()
        return self.recording.rows(Dense(of=features.number, grid=self.number, extent=extent))

    def pooled(self, x: Any, how: str) -> torch.Tensor:
        """Features (N, C) -> (B, C), pooled over each item: "sum", "average" or "max"."""
        return self.recording.rows(PooledItems(of=x.number, grid=self.number, how=how))

    def standardised(self, x: Any, groups: int, eps: float) -> torch.Tensor:
        """`ops.items.standardised`: statistics are one step, and norming by them is another."""
        found = self.recording.add(ItemStatistics(of=x.number, grid=self.number, groups=groups))
        mean, var = (self.recording.rows(Pick(of=found, at=at)) for at in range(2))
        arguments = (Ref(x.number), Ref(self.coords.number), Ref(mean.number), Ref(var.number), eps)
        rows = (x.number, self.coords.number)
        step = Call(function=standardised_rows, args=arguments, kwargs={}, rows=rows, place=self.number)
        return self.recording.rows(step)

    def __repr__(self) -> str:
        return f"WatchedGrid({self.num_voxels} voxels)"


#: what both constructors of plans take after source and kernel_size
DEFAULTS = {
    "stride": 1,
    "dilation": 1,
    "padding": None,
    "taps": None,
    "boundary": "absent",
    "groups": 1,
    "backend": "auto",
}


class WatchedPlan:
    """What `ConvolutionPlan` is on a `WatchedGrid`: the same arguments, and steps in the place of results."""

    def __init__(self, source: WatchedGrid, kernel_size: Any = None, **options: Any) -> None:
        self._make(source, kernel_size, options, False)

    def _make(self, source: WatchedGrid, kernel_size: Any, options: dict[str, Any], generative: bool) -> None:
        recording, target = source.recording, options.pop("target", None)
        deterministic, shape = options.pop("deterministic", None), options.pop("shape", None)
        given: Any = [*(options.get(name, default) for name, default in DEFAULTS.items()), deterministic]
        window, edge = checked_window(source, kernel_size, *given)
        if not boundary_is_local(edge):
            words = "give Boundary.forbid(extent)" if edge.kind == "forbid" else "its two ends are far apart"
            recording.refuse(f"the boundary {edge.kind!r} looks at the whole scene", words)
        self.groups, self.window, self.is_transposed = options.pop("groups", 1), window, generative
        onto = target if isinstance(target, WatchedGrid) else None
        reaches = target == "full" or generative or window.is_strided or shape is not None
        if target is not None and onto is None and target != "full":
            raise ValueError(f"target must be a grid that the network made, 'full' or None; got {target!r}")
        if generative:
            options["generative"] = True
        if target == "full":
            options["target"] = "full"
        if shape is not None:
            options["shape"] = shape
        made = {"kernel_size": kernel_size, **options}
        goal = onto.number if onto is not None else None if reaches or edge.kind == "forbid" else source.number
        self.source, self.recording = source, recording
        self.number = recording.add(
            PlanStep(source=source.number, target=goal, window=window, is_transposed=generative, options=made)
        )
        if goal is None:
            own: Any = recording.steps[source.number]
            scale = scale_after(own.scale, window, generative)
            step: GridStep = TargetGrid(plan=self.number, same=not reaches, scale=scale)
            self.target = WatchedGrid.of(recording, recording.add(step))
        else:
            self.target = onto if onto is not None else source

    @classmethod
    def transposed(cls, source: WatchedGrid, kernel_size: Any = None, **options: Any) -> WatchedPlan:
        """From coarse voxels to fine ones; arguments of `ConvolutionPlan.transposed`."""
        plan = object.__new__(cls)
        plan._make(source, kernel_size, options, True)
        return plan

    @classmethod
    def within(cls, source: WatchedGrid, shape: Any, kernel_size: Any, generative: bool, **size: Any) -> WatchedPlan:
        """`plan_within`: onto the voxels of [0, shape) that a window reaches."""
        plan = object.__new__(cls)
        plan._make(source, kernel_size, {"shape": shape, **size}, generative)
        return plan

    @property
    def kernel_map(self) -> Any:
        self.recording.refuse("it works on the edges of a kernel map", "use convolutions and poolings of sparseconv.nn")

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def num_in(self) -> int:
        return self.source.num_voxels

    @property
    def num_taps(self) -> int:
        return len(self.window.offsets)

    @property
    def boundary(self) -> Boundary:
        return Boundary.absent()

    def _over(self, kind: str, x: Any, *args: Any, **kwargs: Any) -> int:
        names, options = referring((args, kwargs))
        if not isinstance(x, Recorded) or self.recording.steps[x.number].place != self.source.number:
            self.recording.refuse("a plan is given rows of other voxels", "give it those of its source")
        return self.recording.add(
            OverEdges(
                plan=self.number,
                x=x.number,
                kind=kind,
                args=names,
                kwargs=options,
                groups=self.groups,
                place=self.target.number,
            )
        )

    def execute(self, x: Any, weight: torch.Tensor, bias: Any = None, **after: Any) -> torch.Tensor:
        """`ConvolutionPlan.execute`, written down."""
        return self.recording.shown(self._over("convolve", x, weight, bias, **after))

    def pooled(self, x: Any, how: str) -> torch.Tensor:
        """`ops.sum_pool` or `ops.avg_pool`: "sum", "average", "average_of_taps"."""
        return self.recording.shown(self._over(how, x))

    def max_pooled(self, x: Any) -> tuple[torch.Tensor, ...]:
        """`ops.max_pool`."""
        made, place = self._over("max", x), self.target.number
        return tuple(self.recording.rows(Pick(of=made, at=at, place=place)) for at in range(2))

    def max_unpooled(self, x: Any, winners: Any) -> torch.Tensor:
        """`ops.max_unpool`."""
        return self.recording.shown(self._over("max_unpool", x, winners))

    def localize(self, x: torch.Tensor) -> tuple[torch.Tensor, WatchedPlan]:
        return x, self

    def transpose(self) -> WatchedPlan:
        """The same edges reversed."""
        back = copy.copy(self)
        back.source, back.target, back.is_transposed = self.target, self.source, not self.is_transposed
        step = PlanStep(
            source=back.source.number,
            target=back.target.number,
            window=self.window,
            is_transposed=back.is_transposed,
            of=self.number,
        )
        back.number = self.recording.add(step)
        return back

    def with_groups(self, groups: int) -> WatchedPlan:
        """The same edges for another number of channel groups."""
        other = copy.copy(self)
        other.groups = groups
        return other

    def weak_copy(self, grid: VoxelGrid) -> WatchedPlan:
        return self


WatchedGrid.plan_type = WatchedPlan
Recording.grid_type = WatchedGrid
