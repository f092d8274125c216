"""What a layer asks of the grid that it meets: the plan, found once and kept with the grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparseconv.backends.registry import check_backend
from sparseconv.checks import as_tensor, check_choice, check_count, check_kind, check_tensor, no_batch, shortened
from sparseconv.compiler import traced as traced
from sparseconv.geometry.edges import torus_of
from sparseconv.geometry.grid import VoxelGrid, in_trace
from sparseconv.geometry.ranges import KINDS, Boundary, Ints, per_axis
from sparseconv.geometry.window import Window
from sparseconv.ops.rows import check_plan
from sparseconv.plan.convolution import ConvolutionPlan, checked_boundary
from sparseconv.plan.shared import plan_under, shared_key, shared_plan
from sparseconv.tensor import SparseTensor
from sparseconv.transforms import tracing

Axes = int | Sequence[int]


class LayerGeometry:
    """The window of a layer, and how it finds its plan on a grid.

        fine = stride * coarse + dilation * tap - padding

    Layers of equal geometry on one grid object share one plan. The first call on a grid builds it.
    Later calls read it from the grid: one look-up in a dictionary, which `torch.compile` can trace.
    """

    def __init__(
        self,
        rank: int,
        kernel_size: Axes | None,
        *,
        stride: Axes = 1,
        dilation: Axes = 1,
        padding: Axes | None = None,
        taps: torch.Tensor | Sequence[Sequence[int]] | None = None,
        boundary: Boundary | str = "absent",
        groups: int = 1,
        backend: str = "auto",
    ) -> None:
        check_count("groups", groups, 1)
        if not isinstance(rank, int) or not 1 <= rank <= 4:
            raise ValueError(f"rank is the number of spatial axes, 1 to 4; got {rank!r}")
        if (kernel_size is None) == (taps is None):
            raise ValueError(
                "give either kernel_size (a box of taps) or taps (an explicit list), not both, not neither"
            )
        check_kind("boundary", boundary, (Boundary, str), "pass 'absent', 'periodic' or another kind of Boundary")
        if isinstance(boundary, str):
            check_choice("boundary", boundary, KINDS)
        check_backend(backend)
        for name, axes in (
            ("kernel_size", kernel_size),
            ("stride", stride),
            ("dilation", dilation),
            ("padding", padding),
        ):
            if isinstance(axes, torch.Tensor):
                check_tensor(name, axes)
        self.rank, self.groups, self.backend, self.boundary = rank, groups, backend, boundary
        self.kernel_size: Ints | None = None if kernel_size is None else per_axis(kernel_size, rank, "kernel_size", 1)
        self.taps = None if taps is None else _as_tuples(taps)
        self.stride = per_axis(stride, rank, "stride", 1)
        self.dilation = per_axis(dilation, rank, "dilation", 1)
        self.padding = None if padding is None else per_axis(padding, rank, "padding")
        window = Window.of(rank, self.kernel_size, self.stride, self.dilation, self.padding, self.taps)
        torus_of(None, window, checked_boundary(boundary, rank))  # refuses what no grid would be taken with
        # spelled as a user of shared_plan would spell it, so that both find one plan
        self._options: dict[str, Any] = {"kernel_size": self.kernel_size}
        given = {
            "stride": (self.stride, (1,) * rank),
            "dilation": (self.dilation, (1,) * rank),
            "padding": (self.padding, None),
            "taps": (self.taps, None),
            "boundary": (boundary, "absent"),
            "backend": (backend, "auto"),
        }
        self._options.update({name: value for name, (value, default) in given.items() if value != default})
        self._key = (*sorted(self._options.items()), ("groups", groups))
        self._shared_key = shared_key(rank, False, self._options)

    @property
    def num_taps(self) -> int:
        if self.taps is not None:
            return len(self.taps)
        taps = 1
        for size in self.kernel_size or ():
            taps *= size
        return taps

    # ---- plans

    def plan(self, grid: VoxelGrid, target: VoxelGrid | str | None = None) -> ConvolutionPlan:
        """From this grid to ``target`` (of `ConvolutionPlan`)."""
        self.check(grid)
        key = ("layer", self._key, target)
        plan = grid.derived.get(key)
        if plan is None:
            if target is None:
                plan = plan_under(self._shared_key, grid, self._options, self.groups)
            else:
                plan = shared_plan(grid, groups=self.groups, **self._options, target=target)
            plan = plan.weak_copy(grid)
            grid.derived[key] = plan
        return plan

    def inverse(
        self, coarse: VoxelGrid, onto: VoxelGrid | SparseTensor | None, target: str | None = None
    ) -> ConvolutionPlan:
        """From ``coarse`` back onto the grid that it was made from, over the edges of that plan."""
        if onto is None:
            raise TypeError("the way back needs the grid it leads to: module(x, onto=the encoder's tensor), or plan=")
        self.check(coarse)
        fine = grid_of(onto)
        if tracing():
            traced_coarse: Any = coarse
            found = traced_coarse.standing_for(onto.grid if isinstance(onto, SparseTensor) else onto)
            fine = fine if found is None else found  # a grid's truth value would read its number of voxels
        # the key names no grid, since torch.compile would guard on that object and compile anew for every scene
        plan = fine.derived.get(("inverse", self._key))
        if plan is None or plan.source is not coarse:
            plan = self._undone(coarse, fine, target).transpose().weak_copy(fine)
            fine.derived[("inverse", self._key)] = plan
        return plan

    def _undone(self, coarse: VoxelGrid, fine: VoxelGrid, target: str | None) -> ConvolutionPlan:
        """The plan that led from ``fine`` to ``coarse``."""
        plan = fine.derived.get(("layer", self._key, coarse)) or self.plan(fine, target)
        if plan.target is not coarse:
            raise ValueError(
                f"this window leads from {fine} to {plan.target}, not to the given {coarse}: the inverse needs "
                "the kernel_size, stride, dilation and padding of the layer that it undoes, and the same grid objects"
            )
        return plan

    def generative(self, grid: VoxelGrid, target: VoxelGrid | None = None) -> ConvolutionPlan:
        """From coarse voxels to fine ones: onto ``target``, or onto every voxel that a tap reaches."""
        self.check(grid)
        key = ("generative", self._key, target)
        plan = grid.derived.get(key)
        if plan is None:
            options = self._options if target is None else {**self._options, "target": target}
            plan = shared_plan(grid, generative=True, groups=self.groups, **options).weak_copy(grid)
            grid.derived[key] = plan
        return plan

    def checked_plan(self, plan: ConvolutionPlan, x: Any) -> ConvolutionPlan:
        """A plan that the caller made, checked against this layer and the tensor it is for."""
        check_plan(plan)
        if plan.num_taps != self.num_taps:
            raise ValueError(f"the plan has {plan.num_taps} taps, the layer has {self.num_taps}: {plan}")
        if plan.groups != self.groups:
            raise ValueError(f"the plan has groups={plan.groups}, the layer {self.groups}: use plan.with_groups(...)")
        if (
            isinstance(x, SparseTensor)
            and x.grid is not plan.source
            and (x.grid.batch_size != plan.source.batch_size or not torch.equal(x.grid.coords, plan.source.coords))
        ):
            raise ValueError(f"the plan starts from {plan.source}, the tensor lives on {x.grid}")
        return plan

    def check(self, grid: VoxelGrid) -> None:
        """Raise ValueError where the grid is of another rank."""
        if grid.rank != self.rank:
            likely = no_batch(grid.rank) if grid.rank < self.rank else "Columns that are no position are features"
            raise ValueError(
                f"the layer was made for rank {self.rank}, the grid has rank {grid.rank}. {likely}. Where the grid is "
                f"meant to have {grid.rank} spatial axes, pass rank={grid.rank} to the layer"
            )

    def __repr__(self) -> str:
        told: dict[str, Any] = {"kernel_size": self.kernel_size} if self.taps is None else {"taps": self.num_taps}
        usual = {"groups": 1, "rank": 3}
        own = {**self._options, "groups": self.groups, "rank": self.rank}
        for name in ("stride", "dilation", "padding", "boundary", "groups", "rank", "backend"):
            if own.get(name) != usual.get(name):
                told[name] = own[name]
        return ", ".join(f"{name}={_short(value)!r}" for name, value in told.items())


def checked_target(target: str | None) -> str | None:
    """The ``target`` of a layer before it meets a grid: "full" or None."""
    if target not in (None, "full"):
        raise ValueError(f"target is 'full' or None here, and a grid at the call; got {shortened(target)}")
    return target


def _short(value: Any) -> Any:
    """One number for axes that are alike."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def _as_tuples(taps: torch.Tensor | Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    listed = as_tensor("taps", taps)
    if listed.is_floating_point() or listed.is_complex() or listed.dtype == torch.bool:
        raise TypeError(f"taps must be integers, but their dtype is {listed.dtype}: round them first")
    if listed.ndim != 2:
        raise ValueError(f"taps must be (K, D), one row per tap; got {tuple(listed.shape)}")
    return tuple(tuple(tap) for tap in listed.tolist())


def grid_of(x: VoxelGrid | SparseTensor) -> VoxelGrid:
    """The grid itself, or that of a sparse tensor."""
    if isinstance(x, SparseTensor):
        x = x.grid
    if not isinstance(x, VoxelGrid):
        raise TypeError(f"expected a VoxelGrid or a SparseTensor; got {type(x).__name__}")
    return in_trace(x)


def grid_in(x: Any, module: torch.nn.Module, instead: str = "plan=") -> VoxelGrid:
    """The grid of a sparse tensor; a TypeError that says what to do for anything else."""
    if isinstance(x, (list, tuple)) and x and all(isinstance(scene, SparseTensor) for scene in x):
        raise TypeError(
            f"{type(module).__name__} takes one SparseTensor; got a {type(x).__name__} of {len(x)}: "
            "torch.utils.data.default_collate(scenes) makes one batch of them"
        )
    if not isinstance(x, SparseTensor):
        raise TypeError(
            f"{type(module).__name__} takes a SparseTensor, or features (N, C) together with {instead}; got "
            f"{type(x).__name__} alone. (Inside Sequential, modules that want a SparseTensor derive from SparseModule: "
            "others are given its features.)"
        )
    return in_trace(x.grid)
