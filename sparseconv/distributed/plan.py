"""A convolution plan of a scene in shards: the local plan, and the rows of other ranks that it needs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist

from sparseconv.distributed.agreement import agreed, agreed_call
from sparseconv.distributed.exchange import joined, replicated, send_to
from sparseconv.distributed.grid import ShardedGrid, check_rows, learns
from sparseconv.distributed.halo import find_halo
from sparseconv.distributed.passage import Passage
from sparseconv.geometry.coord_ops import unique_coords
from sparseconv.geometry.edges import coarse_grid, fine_grid, fits
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Boundary
from sparseconv.geometry.window import Window
from sparseconv.plan.convolution import ConvolutionPlan, as_epilogue, checked_window
from sparseconv.pointwise import Epilogue, PointwiseDynamicFunction

if TYPE_CHECKING:
    from jaxtyping import Float, Integer, Shaped

Axes = int | Sequence[int]


class ShardedConvolutionPlan:
    """A `ConvolutionPlan` over the shards of one scene, with the same arguments and results; all ranks call it.

    Each rank computes the outputs that it owns. The halo is the inputs of other ranks that those outputs see. It
    arrives in one differentiable all-to-all per call, while the outputs that do not need it are computed. Every rank
    holds the same weights; their gradients are summed over the ranks.

    The halo is exact. The window's index projection gives the places that an output sees. The partition gives their
    owners, and the owners answer which places hold a voxel.

    >>> from sparseconv.distributed import shard
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> plan = ShardedConvolutionPlan(shard(torch.tensor([[0, 0], [0, 1]])), 3)
    >>> plan.execute(torch.ones(2, 1), torch.ones(3, 1, 1)).tolist()
    [[2.0], [2.0]]
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        source: ShardedGrid,
        kernel_size: Axes | None = None,
        *,
        stride: Axes = 1,
        dilation: Axes = 1,
        padding: Axes | None = None,
        taps: Integer[torch.Tensor, "K D"] | Sequence[Sequence[int]] | None = None,
        target: ShardedGrid | Literal["full"] | None = None,
        boundary: Boundary | Literal["absent", "forbid"] = "absent",
        groups: int = 1,
        backend: str = "auto",
        deterministic: bool | None = None,
    ) -> None:
        given = kernel_size, stride, dilation, padding, taps, boundary, groups, backend
        self._make(source, given, target, False)

    @classmethod
    def transposed(
        cls,
        source: ShardedGrid,
        kernel_size: Axes | None = None,
        *,
        stride: Axes = 1,
        dilation: Axes = 1,
        padding: Axes | None = None,
        taps: Integer[torch.Tensor, "K D"] | Sequence[Sequence[int]] | None = None,
        target: ShardedGrid | None = None,
        boundary: Boundary | Literal["absent", "forbid"] = "absent",
        groups: int = 1,
        backend: str = "auto",
        deterministic: bool | None = None,
    ) -> ShardedConvolutionPlan:
        """From coarse voxels to fine ones, onto ``target`` or onto every voxel that a tap reaches (generative)."""

        given = kernel_size, stride, dilation, padding, taps, boundary, groups, backend
        plan = object.__new__(cls)
        plan._make(source, given, target, True)
        return plan

    def _make(self, source: ShardedGrid, given: tuple[Any, ...], target: Any, is_transposed: bool) -> None:
        """What both constructors do: ``given`` are arguments of `checked_window`, which the ranks must agree in."""
        if not isinstance(source, ShardedGrid):
            raise TypeError(f"source must be a ShardedGrid, made by shard(); got {type(source).__name__}")
        kernel_size, *_, groups, backend = given

        def checked() -> tuple[tuple[Window, Boundary, VoxelGrid | None], dict[str, Any]]:
            window, edge = checked_window(source, *given)
            if edge.kind == "forbid" and edge.extent is None and not is_transposed:
                edge = Boundary.forbid(source.global_extent)
            same = {
                "source": (source.counts, source.batch_size, source.partition),
                "window": window,
                "boundary": edge,
                "groups": groups,
                "backend": backend,
                "direction": is_transposed,
                "target": target.counts if isinstance(target, ShardedGrid) else target,
            }
            return (window, edge, _reached(source, target, window, edge, is_transposed)), same

        window, edge, seen = agreed(checked, source.group)
        ones = (1,) * source.rank
        onto = source
        if isinstance(target, ShardedGrid):
            onto = target
        elif is_transposed:
            onto = _owned(source, cast(VoxelGrid, seen).coords, ones, window.stride)
        elif target == "full" or window.is_strided:
            onto = _owned(source, cast(VoxelGrid, seen).coords, window.stride, ones)
        elif edge.kind == "forbid" and _any(seen is not None, source):
            onto = source._like(source.coords if seen is None else seen.coords)
        self.source, self.target, self.window, self.boundary = source, onto, window, edge
        self.groups, self.backend, self.is_transposed = groups, backend, is_transposed
        self._box = kernel_size is not None
        self._transposed: ShardedConvolutionPlan | None = None
        self._meet()

    def _meet(self) -> None:
        """Find the halo; all ranks call it."""
        #: kinds of call that the ranks have compared: each kind is compared once, since it costs a round trip
        self._agreed: set[tuple] = set()
        self.exchange, self.halo = find_halo(self.source, self.target, self.window, self.boundary, self.is_transposed)
        self._split()

    def _between(self, source: VoxelGrid, target: VoxelGrid) -> ConvolutionPlan:
        return ConvolutionPlan.between(
            source, target, self.window, self.boundary, self._box, self.groups, self.backend, self.is_transposed
        )

    def _split(self) -> None:
        """The interior, which is what this rank's own rows make of its outputs, and the border, which sees the halo.

        The interior computes the border's rows too, without their halo, and the border's results are written over
        them: so the interior of a submanifold plan stays one grid with itself, with its identity tap and its mirror
        symmetry. Gradients go by what is beyond the shard alone, since the interior has its own part. Every rank has
        all three plans, be they empty, so that all meet their collectives in one order.
        """
        batch, own = self.source.batch_size, self.source.coords
        inner = self._between(self.source, self.target)
        rows = torch.unique(self._between(VoxelGrid(self.halo, batch), self.target).kernel_map.out_rows.long())
        border = VoxelGrid(self.target.coords[rows], self.target.batch_size)
        needed = torch.unique(self._between(self.source, border).kernel_map.in_rows.long())
        outer = self._between(VoxelGrid(torch.cat([own[needed], self.halo]), batch), border)
        beyond = self._between(VoxelGrid(self.halo, batch), border)
        self._passage = Passage(self.exchange, inner, outer, beyond, needed, rows)

    @property
    def _inner(self) -> ConvolutionPlan:
        return self._passage.inner

    @cached_property
    def local(self) -> ConvolutionPlan:
        """The plan from this rank's rows and its halo, grouped by owner, to its outputs."""
        if not len(self.halo):
            return self._inner
        seen = VoxelGrid(torch.cat([self.source.coords, self.halo]), self.source.batch_size)
        return self._between(seen, self.target)

    # ---- executing

    def execute(
        self,
        x: Float[torch.Tensor, "N_in C_in"],
        weight: Float[torch.Tensor, "K C_in/G C_out"] | Float[torch.Tensor, "C_out C_in/G *kernel"],
        bias: Float[torch.Tensor, " C_out"] | None = None,
        *,
        residual: Float[torch.Tensor, "N_out C_out"] | None = None,
        epilogue: Epilogue | PointwiseDynamicFunction | None = None,
    ) -> Float[torch.Tensor, "N_out C_out"]:
        """This rank's outputs (N_out, C_out) from this rank's inputs (N_in, C_in); see `ConvolutionPlan.execute`.

        Differentiable to any order. Every rank must call it, with operands of one dtype and one number of channels.
        ``residual`` is this rank's (N_out, C_out); it and the epilogue run after the convolution.
        """
        group = self.source.group

        def checked() -> tuple[tuple, tuple]:
            check_rows("x", x, len(self.source))
            activation = as_epilogue(epilogue)
            operands = self._inner.operands(
                x, replicated(weight, group), None if bias is None else replicated(bias, group), residual
            )
            kinds = [None if t is None else (tuple(t.shape), t.dtype, learns(t)) for t in (weight, bias)]
            call = ("x", x.shape[1], operands[0].dtype, learns(x), "weight", kinds[0], "bias", kinds[1])
            return (*operands, activation), call

        x, taps, bias, residual, activation = agreed_call(
            checked, "the operands of execute", group, self.device, self._agreed
        )
        y = self._passage.convolve(x, taps, bias)
        y = y if residual is None else y + residual
        return y if activation is None else activation.apply(y)

    def localize(
        self, x: Shaped[torch.Tensor, "N_in ..."]
    ) -> tuple[Shaped[torch.Tensor, "N_local ..."], ConvolutionPlan]:
        """This rank's rows with their halo, and the local plan over them."""

        def checked() -> tuple[None, tuple]:
            check_rows("x", x, len(self.source))
            return None, ("rows", x.shape[1], x.dtype, learns(x))

        agreed_call(checked, "the rows that are asked for", self.source.group, self.device)
        return joined(x, self.exchange(x)), self.local

    # ---- reading

    @property
    def kernel_size(self) -> tuple[int, ...] | None:
        return self._inner.kernel_size

    @property
    def num_taps(self) -> int:
        return self._inner.num_taps

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def num_in(self) -> int:
        """This rank's inputs, without the halo."""
        return len(self.source)

    @property
    def halo_rows(self) -> int:
        """Rows of other ranks that this rank's outputs see."""
        return self.exchange.num_received

    def halo_bytes(self, c_in: int, dtype: torch.dtype = torch.float32) -> int:
        """What a forward call receives from other ranks, in bytes; a backward call sends as much back."""
        return self.halo_rows * c_in * dtype.itemsize

    @property
    def overlapped(self) -> float:
        """The share of the work that is done while the halo is on its way: the interior's pairs over all pairs."""
        inner, outer = self._inner.kernel_map.num_pairs, self._passage.outer.kernel_map.num_pairs
        return inner / max(1, inner + outer)

    # ---- other plans

    def transpose(self) -> ShardedConvolutionPlan:
        """The same edges reversed, from this plan's target back onto its source; all ranks call it.

        The way back has a halo of its own, on the target's side, so this is a new plan, found once and kept.
        """
        if self._transposed is None:
            plan = self._copy()
            plan.source, plan.target, plan.is_transposed = self.target, self.source, not self.is_transposed
            plan._meet()
            plan._transposed = self
            self._transposed = plan
        return self._transposed

    def with_groups(self, groups: int) -> ShardedConvolutionPlan:
        """The same edges and exchange for another number of channel groups; itself if it has that number."""
        if groups == self.groups:
            return self
        plan = self._copy()
        plan.groups, plan._transposed = groups, None
        plan._passage = self._passage.with_groups(groups)
        return plan

    def _copy(self) -> ShardedConvolutionPlan:
        plan = copy.copy(self)
        plan.__dict__.pop("local", None)
        return plan

    def weak_copy(self, grid: VoxelGrid) -> ShardedConvolutionPlan:
        """This plan: a shard's memory goes when Python finds that grid and plan hold only each other."""
        return self

    def __repr__(self) -> str:
        return (
            f"Sharded{self._inner!r}, {self.halo_rows:,} halo rows, {self.overlapped:.0%} of pairs overlapped, rank "
            f"{self.source.process_rank} of {self.exchange.world_size}"
        )


ShardedGrid.plan_type = ShardedConvolutionPlan


def _reached(source: ShardedGrid, target: Any, window: Window, edge: Boundary, is_transposed: bool) -> VoxelGrid | None:
    """Voxels of the output that this rank sees, whoever owns them; None for the target as it is."""
    words = "a ShardedGrid or None" if is_transposed else "a ShardedGrid, 'full' or None"
    is_full = target == "full" and not is_transposed
    if not (target is None or is_full or isinstance(target, ShardedGrid)):
        raise ValueError(f"target must be {words}; got {target!r}")
    is_new = is_full or (target is None and (is_transposed or window.is_strided))
    if not is_new and (is_transposed or edge.kind != "forbid"):
        return None
    own = VoxelGrid(source.coords, source.batch_size)
    if is_new:
        return (fine_grid if is_transposed else coarse_grid)(own, window, edge)
    given = own if target is None else VoxelGrid(target.coords, target.batch_size)
    left = fits(given, own, window, edge)
    if target is not None and left is not given:
        raise ValueError(f"some windows of the given target leave the extent {edge.extent}")
    return None if left is given else left


def _any(flag: bool, grid: ShardedGrid) -> bool:
    """Whether a flag is set on any rank."""
    flags = torch.tensor([flag], dtype=torch.int32, device=grid.device)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=grid.group)
    return bool(flags)


def _owned(
    source: ShardedGrid, seen: torch.Tensor, numerator: Sequence[int], denominator: Sequence[int]
) -> ShardedGrid:
    """The grid whose voxels the ranks have seen (M, 1+D), each of them with the owner of its place in ``source``."""
    partition = source.partition.scaled(tuple(numerator), tuple(denominator))
    came = send_to(seen, partition.owners(seen), source.group)[0]
    size = tuple(v * n / d for v, n, d in zip(source.voxel_size, numerator, denominator))
    grid = ShardedGrid(unique_coords(came), source.batch_size, partition, source.group, size, source.origin)
    grid.is_placed = source.is_placed
    return grid
