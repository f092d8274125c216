"""A convolution plan of a scene in shards: the local plan, and the rows of other ranks that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from sparseconv.distributed.exchange import Exchange, agree, replicated, send_to
from sparseconv.distributed.grid import ShardedGrid
from sparseconv.geometry.edges import Window, coarse_grid, fine_grid, fits, torus_of, wrap
from sparseconv.geometry.grid import VoxelGrid, unique_coords
from sparseconv.geometry.ranges import Boundary
from sparseconv.plan.convolution import ConvolutionPlan, checked_window

Axes = int | Sequence[int]


class ShardedConvolutionPlan:
    """`ConvolutionPlan` over the shards of one scene; same arguments, same numbers, all ranks call it alike.

    Each rank computes the outputs that it owns. The inputs of other ranks that those outputs see, the halo, arrive by
    one differentiable all-to-all a call, while the outputs that need none of them are computed. Weights are held by every
    rank alike; their gradients are summed over the ranks.

    The halo is found exactly: the window's index projection gives the places that an output sees, the partition says who
    owns each, and the owners answer which of them hold a voxel.
    """

    def __init__(
        self,
        source: ShardedGrid,
        kernel_size: Axes | None = None,
        *,
        stride: Axes = 1,
        dilation: Axes = 1,
        padding: Axes | None = None,
        taps: torch.Tensor | Sequence[Sequence[int]] | None = None,
        target: ShardedGrid | Literal["full"] | None = None,
        boundary: Boundary | Literal["absent", "forbid"] = "absent",
        groups: int = 1,
        backend: str = "auto",
        deterministic: bool | None = None,
    ) -> None:
        window, edge = _checked(source, kernel_size, stride, dilation, padding, taps, boundary, groups, backend)
        _agree(source, window, edge, groups, backend, False, target)
        if isinstance(target, ShardedGrid):
            if fits(target, source, window, edge) is not target:
                raise ValueError(f"some windows of the given target leave the extent {edge.extent}")
            coarse = target
        elif target == "full" or (target is None and any(s != 1 for s in window.stride)):
            seen = coarse_grid(VoxelGrid(source.coords, source.batch_size), window, edge)
            coarse = _owned(source, seen.coords, window.stride, (1,) * source.rank)
        elif target is None:
            whole = fits(source, source, window, edge)
            coarse = whole
        else:
            raise ValueError(f"target must be a ShardedGrid, 'full' or None; got {target!r}")
        self._set(source, coarse, window, edge, kernel_size is not None, groups, backend, False)

    @classmethod
    def transposed(
        cls,
        source: ShardedGrid,
        kernel_size: Axes | None = None,
        *,
        stride: Axes = 1,
        dilation: Axes = 1,
        padding: Axes | None = None,
        taps: torch.Tensor | Sequence[Sequence[int]] | None = None,
        target: ShardedGrid | None = None,
        boundary: Boundary | Literal["absent", "forbid"] = "absent",
        groups: int = 1,
        backend: str = "auto",
        deterministic: bool | None = None,
    ) -> ShardedConvolutionPlan:
        """From coarse voxels to fine ones, onto ``target`` or onto every voxel that a tap reaches (generative)."""
        window, edge = _checked(None, kernel_size, stride, dilation, padding, taps, boundary, groups, backend, source)
        _agree(source, window, edge, groups, backend, True, target)
        fine = target
        if fine is None:
            seen = fine_grid(VoxelGrid(source.coords, source.batch_size), window, edge)
            fine = _owned(source, seen.coords, (1,) * source.rank, window.stride)
        plan = object.__new__(cls)
        plan._set(source, fine, window, edge, kernel_size is not None, groups, backend, True)
        return plan

    def _set(
        self,
        source: ShardedGrid,
        target: ShardedGrid,
        window: Window,
        boundary: Boundary,
        box: bool,
        groups: int,
        backend: str,
        is_transposed: bool,
    ) -> None:
        self.source, self.target, self.window, self.boundary = source, target, window, boundary
        self.groups, self.backend, self.is_transposed, self._box = groups, backend, is_transposed, box
        self.exchange, halo = _find_halo(source, target, window, boundary, is_transposed)
        #: what this rank's outputs see: its own rows, then the halo's, grouped by owner
        if len(halo):
            self.seen = VoxelGrid(torch.cat([source.coords, halo]), source.batch_size)
            self.local = self._local_plan(self.seen, target)
            rows = self.local.kernel_map
            touched = torch.zeros(len(target), dtype=torch.bool, device=source.device)
            touched[rows.out_rows[rows.in_rows >= len(source)].long()] = True
            self._split = self._two_parts(touched)
        else:
            self.seen = source
            self.local = self._local_plan(source, target)
            self._split = None

    def _local_plan(self, source: VoxelGrid, target: VoxelGrid) -> ConvolutionPlan:
        make = ConvolutionPlan.of_transposed_window if self.is_transposed else ConvolutionPlan.of_window
        return make(source, target, self.window, self.boundary, box=self._box, groups=self.groups, backend=self.backend)

    def _two_parts(self, touched: torch.Tensor) -> tuple[ConvolutionPlan, ConvolutionPlan, torch.Tensor]:
        """The plan of the outputs that need no halo, that of the others, and where each output's row comes to lie."""
        coords = self.target.coords
        plans = [
            self._local_plan(source, VoxelGrid(coords[part], self.target.batch_size))
            for source, part in ((VoxelGrid(self.source.coords, self.source.batch_size), ~touched), (self.seen, touched))
        ]
        place = torch.empty(len(coords), dtype=torch.int64, device=coords.device)
        inside = len(plans[0].target)
        place[~touched] = torch.arange(inside, device=coords.device)
        place[touched] = torch.arange(inside, len(coords), device=coords.device)
        return plans[0], plans[1], place

    # ---- executing

    def execute(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's outputs (N_out, C_out) from this rank's inputs (N_in, C_in); see `ConvolutionPlan.execute`.

        Differentiable to any order. Every rank must call it, with operands of one dtype and one number of channels.
        """
        if x.ndim != 2 or x.shape[0] != len(self.source):
            raise ValueError(f"x must be ({len(self.source)}, C_in), this rank's rows; got {tuple(x.shape)}")
        arrival = self.exchange.start(x)
        weight = replicated(weight, self.source.group)
        bias = None if bias is None else replicated(bias, self.source.group)
        if self._split is None:
            arrival.wait_unused()
            return self.local.execute(arrival.attach(x), weight, bias)
        inner, outer, place = self._split
        inside = inner.execute(x, weight, bias)
        outside = outer.execute(torch.cat([x, arrival.wait()]), weight, bias)
        return torch.cat([inside, outside]).index_select(0, place)

    def localize(self, x: torch.Tensor) -> tuple[torch.Tensor, ConvolutionPlan]:
        """This rank's rows with their halo, and the local plan over them: what any operation over edges needs."""
        return torch.cat([x, self.exchange(x)]), self.local
