"""A voxel grid in shards: each rank holds its own rows and knows the rule by which every voxel has an owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sparseconv.checks import check_choice, check_count, check_kind, check_tensor
from sparseconv.distributed.agreement import agreed, agreed_call
from sparseconv.distributed.exchange import Exchange, send_to, sendable, summed
from sparseconv.distributed.partition import Order, Partition, common_box, find_partition
from sparseconv.geometry.coord_ops import unique_coords
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange

if TYPE_CHECKING:
    from jaxtyping import Bool, Integer, Shaped


class ShardedGrid(VoxelGrid):
    """The voxels of one scene that this rank owns; a `VoxelGrid` of them, so that features are plain local tensors.

    Made by `shard`, by `load`, and by sharded plans. ``batch_size``, ``global_extent`` and ``counts`` (voxels of each
    rank) speak of the whole scene, everything else of this rank's rows, which are in lexicographic order.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> scene = VoxelGrid(torch.tensor([[0, 0, 0], [0, 0, 1], [0, 5, 5]]))
    >>> shard(scene)
    ShardedGrid(3 of 3 voxels on rank 0 of 1, rank 2, batch 1, cpu)
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        coords: Integer[torch.Tensor, "N 1+D"],
        batch_size: int,
        partition: Partition,
        group: dist.ProcessGroup | None,
        voxel_size: float | Sequence[float] | None = None,
        origin: float | Sequence[float] | None = None,
    ) -> None:
        super().__init__(coords, batch_size, voxel_size, origin)
        self.partition, self.group = partition, group
        box = common_box(self.coords, batch_size, group)
        self.global_extent = IndexRange(box.start[1:], box.end[1:])
        counts = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(counts, torch.tensor([len(self)], device=self.device), group=group)
        self.counts = tuple(torch.cat(counts).tolist())
        #: how features travel from where `shard` was called with them to the owners of their voxels
        self.arrivals: Arrivals | None = None

    is_shared = True

    def all_sum(self, values: Shaped[torch.Tensor, "*shape"]) -> Shaped[torch.Tensor, "*shape"]:
        """The sum of ``values`` over the ranks, on each of them; differentiable."""
        return summed(values, self.group)

    @property
    def process_rank(self) -> int:
        """This process among those that share the scene."""
        return dist.get_rank(self.group)

    @property
    def num_global_voxels(self) -> int:
        return sum(self.counts)

    def bring(
        self, features: Shaped[torch.Tensor, "M C"], reduce: Literal["first", "sum", "mean"] = "first"
    ) -> Shaped[torch.Tensor, "N C"]:
        """Features (M, C) of the rows that this rank gave to `shard` -> features (N, C) of the rows that it owns.

        ``reduce`` combines the features of a voxel that several ranks gave; integers sum to int64. Differentiable.
        """
        if self.arrivals is None:
            raise ValueError("this grid was made by a plan, not by shard(): no rank holds other rows of it")
        return self.arrivals.bring(features, len(self), reduce)

    def gather(
        self, features: Shaped[torch.Tensor, "N C"] | None = None
    ) -> tuple[VoxelGrid, Shaped[torch.Tensor, "N_all C"] | None]:
        """The whole scene on every rank, rank after rank, with its features, without a gradient: for small scenes."""

        def checked() -> tuple[None, tuple]:
            if features is not None:
                check_rows("features", features, len(self))
            return None, (None if features is None else (features.shape[1], features.dtype),)

        agreed_call(checked, "the features of gather", self.group, self.device)
        grid = VoxelGrid(
            gather_rows(self.coords, self.counts, self.group), self.batch_size, self.voxel_size, self.origin
        )
        return grid, None if features is None else gather_rows(features.detach(), self.counts, self.group)

    def subset(self, mask: Bool[torch.Tensor, " N"]) -> ShardedGrid:
        """The voxels where mask (N,) bool of this rank's rows is true; all ranks call it."""

        def checked() -> tuple[torch.Tensor, dict[str, Any]]:
            check_tensor("mask", mask)
            if mask.dtype != torch.bool or mask.shape != (len(self),):
                raise ValueError(f"mask must be ({len(self)},) bool; got {tuple(mask.shape)} {mask.dtype}")
            return self.coords[mask], {}

        return self._like(agreed(checked, self.group))

    def _like(self, coords: torch.Tensor, scale: tuple[float, ...] | None = None) -> Any:
        if scale is not None:
            raise ValueError("coarsen and refine a sharded grid through plans, which know who owns the result")
        grid = ShardedGrid(coords, self.batch_size, self.partition, self.group, self.voxel_size, self.origin)
        grid.is_placed = self.is_placed
        return grid

    def __repr__(self) -> str:
        return (
            f"ShardedGrid({len(self):,} of {self.num_global_voxels:,} voxels on rank {self.process_rank} of "
            f"{len(self.counts)}, rank {self.rank}, batch {self.batch_size}, {self.device})"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a ShardedGrid holds a process group and does not pickle: use distributed.save and load")


class Arrivals:
    """Where the rows given to `shard` went: an exchange, and the owned row of each that arrived."""

    def __init__(self, exchange: Exchange, rows: torch.Tensor) -> None:
        self.exchange, self.rows = exchange, rows

    def bring(self, features: torch.Tensor, num_rows: int, reduce: str) -> torch.Tensor:
        def checked() -> tuple[None, tuple]:
            check_rows("features", features, self.exchange.num_rows)
            if reduce not in ("first", "sum", "mean"):
                raise ValueError(f"reduce must be 'first', 'sum' or 'mean'; got {reduce!r}")
            return None, (features.shape[1], features.dtype, reduce, learns(features))

        agreed_call(checked, "the features of bring", self.exchange.group, self.rows.device)
        came = self.exchange(features)
        sizes = torch.bincount(self.rows, minlength=num_rows)
        if reduce == "first":
            order = torch.argsort(self.rows, stable=True)  # by voxel, then by the rank that sent it
            return came[order[sizes.cumsum(0) - sizes]]
        is_whole = not (came.is_floating_point() or came.is_complex())
        wide = torch.int64 if is_whole else came.dtype if came.dtype.itemsize >= 4 else torch.float32
        total, counts = came.new_zeros((num_rows, came.shape[1]), dtype=wide), self.exchange.receive_counts
        for rows, part in zip(self.rows.split(counts), came.split(counts)):
            total = total.index_add(0, rows, part.to(wide))  # a rank gives a voxel once: no two adds meet
        total = total if reduce == "sum" else total / sizes[:, None]
        return total if is_whole else total.to(came.dtype)


def shard(
    grid: VoxelGrid | Integer[torch.Tensor, "M 1+D"],
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    by: Order = "morton",
    *,
    batch_size: int | None = None,
    voxel_size: float | Sequence[float] | None = None,
    origin: float | Sequence[float] | None = None,
) -> ShardedGrid:
    """Give every rank an equal share of the voxels that the ranks hold together.

    Each rank passes what it holds: all of a scene on one rank and an empty grid on the others, or its own points'
    voxels on each. A voxel that several ranks hold becomes one. No rank sees all coordinates: cuts are found from
    counts, and voxels travel to their owners only. All ranks call it.

    Args:
        grid: a `VoxelGrid`, or coords (M, 1+D) integers.
        mesh: a one-dimensional `DeviceMesh` or a process group; default: the world.
        by: ``"morton"`` (compact shards), ``"slab"`` (cuts across the longest axis) or ``"kd"`` (boxes).
        batch_size, voxel_size, origin: those of the scene; default: the grid's.

    Returns:
        The rank's `ShardedGrid`; ``bring(features)`` takes features the same way.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> grid = shard(torch.tensor([[0, 7], [0, 3]]), by="slab")
    >>> grid.coords.tolist(), grid.bring(torch.tensor([[7.0], [3.0]])).tolist()
    ([[0, 3], [0, 7]], [[3.0], [7.0]])
    >>> dist.destroy_process_group()
    """
    group = group_of(mesh)

    def checked() -> tuple[VoxelGrid, dict[str, Any]]:
        check_kind("grid", grid, (VoxelGrid, torch.Tensor), "pass a VoxelGrid, or coordinates (M, 1+D)")
        check_choice("by", by, ("morton", "slab", "kd"))
        if batch_size is not None:
            check_count("batch_size", batch_size)
        whole, given = grid, cast(Any, (batch_size, voxel_size, origin))
        if isinstance(whole, VoxelGrid) and given != (None, None, None):
            own = (whole.batch_size, *((whole.voxel_size, whole.origin) if whole.is_placed else (None, None)))
            whole, given = whole.coords, tuple(mine if one is None else one for one, mine in zip(given, own))
        whole = VoxelGrid(whole, *given) if isinstance(whole, torch.Tensor) else whole
        same = {"by": by, "voxel_size": whole.voxel_size, "origin": whole.origin, "rank of the grid": whole.rank}
        return whole, same

    grid = agreed(checked, group)
    sizes = torch.tensor([grid.batch_size], device=grid.device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX, group=group)
    partition = find_partition(grid.coords, by, int(sizes), group)
    owners = partition.owners(grid.coords)
    came, received, order, sent = send_to(grid.coords, owners, group)
    coords = unique_coords(came)
    sharded = ShardedGrid(coords, int(sizes), partition, group, grid.voxel_size, grid.origin)
    sharded.is_placed = grid.is_placed
    exchange = Exchange(group, order, sent, received, len(grid))
    sharded.arrivals = Arrivals(exchange, sharded.lookup(came))
    return sharded


def check_rows(name: str, x: torch.Tensor, rows: int) -> None:
    """Raise unless x is a tensor (rows, C)."""
    check_tensor(name, x)
    if x.ndim != 2 or x.shape[0] != rows:
        raise ValueError(f"{name} must be ({rows}, C), this rank's rows; got {tuple(x.shape)}")


def learns(x: torch.Tensor) -> bool:
    """Whether a call on x has a way back, which is a collective where rows travelled."""
    return torch.is_grad_enabled() and x.requires_grad


def group_of(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The process group of a one-dimensional mesh, or the group itself."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed is not initialized: start with torchrun and init_process_group()")
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"expected one dimension of a mesh, mesh['name']; got dimensions {mesh.mesh_dim_names}")
        return mesh.get_group()
    return mesh


def gather_rows(rows: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """All ranks' rows, rank after rank, on every rank."""
    longest = max(counts)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather([sendable(part) for part in parts], sendable(padded), group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts)])
