"""Sparse voxel grids: a set of integer coordinates with a fixed order of rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from sparseconv import transforms
from sparseconv.checks import (
    INT32,
    INTEGERS,
    Floats,
    bounds,
    check_choice,
    check_indices,
    check_kind,
    check_mask,
    check_same_space,
    check_several,
    check_values,
    checked_batch_size,
    checked_coords,
    checked_device,
    items_of,
    no_grid,
    numbers,
    own,
)
from sparseconv.device_mixin import Movable
from sparseconv.geometry.coord_ops import checked_factors, coarser, finer, morton_rows, near
from sparseconv.geometry.example import ExampleSizes
from sparseconv.geometry.keys import KEY_LIMIT, KeySpace, SortedTable
from sparseconv.geometry.ranges import IndexRange, per_axis
from sparseconv.geometry.views.dense import checked_box, filled, sites_of
from sparseconv.geometry.views.picture import html
from sparseconv.gpu.cuda_capability import SORTING, has_kernels
from sparseconv.transforms import tracing

if TYPE_CHECKING:
    from jaxtyping import Bool, Float32, Int32, Int64, Integer, Shaped

    from sparseconv.geometry.gpu.table import CoordinateTable

#: what stays behind where a grid is pickled
UNTRAVELLED = ("_table", "_space", "_hash_table", "sizes", "on_host")


class VoxelGrid(Movable):
    """An immutable set of voxels in a batch of scenes, in the caller's row order.

    Args:
        coords: (N, 1+D) integer tensor, D from 1 to 4; column 0 is the batch item (>= 0), the others are voxel indices,
            negatives allowed. The grid keeps an int32 copy, so later writes to ``coords`` do not change it.
        batch_size: number of batch items, empty ones included; default: the largest one present + 1.
        voxel_size: edge of a voxel in the user's length unit, one number or one per axis; default 1.
        origin: position of the lower corner of voxel 0, same unit; default 0.
        duplicates: ``"error"`` or ``"first"``, which keeps the first row of each voxel.

    Raises:
        TypeError: coords are not integers.
        ValueError: wrong shape or rank, duplicate rows, a batch item out of range, or an extent past 63 bits.

    >>> grid = VoxelGrid(torch.tensor([[0, 2, 3], [0, 2, 4], [1, -1, 0]]), voxel_size=0.1)
    >>> grid
    VoxelGrid(3 voxels, rank 2, batch 2, extent [-1, 3) x [0, 5), voxel size 0.1, cpu)
    >>> grid.lookup(torch.tensor([[0, 2, 4], [0, 9, 9]])).tolist()
    [1, -1]
    """

    def __new__(cls, *_: Any, **__: Any) -> VoxelGrid:
        traced = cls.traced_type if cls is VoxelGrid else None
        return object.__new__(traced if traced is not None and tracing() else cls)

    @transforms.constant
    def __init__(
        self,
        coords: Integer[torch.Tensor, "N 1+D"],
        batch_size: int | None = None,
        voxel_size: float | Sequence[float] | None = None,
        origin: float | Sequence[float] | None = None,
        *,
        duplicates: Literal["error", "first"] = "error",
    ) -> None:
        given = checked_coords(coords)
        if given.device.type not in SORTING:
            on_host = VoxelGrid(given.cpu(), batch_size, voxel_size, origin, duplicates=duplicates)
            self.__dict__.update(on_host.to(given.device).__dict__)
            return
        by_kernels = has_kernels(given.device)  # which fill the coords with their table
        coords = own(given, filled=not by_kernels) if given is coords else given
        rank = coords.shape[1] - 1
        batch_size = None if batch_size is None else checked_batch_size(batch_size)
        check_choice("duplicates", duplicates, ("error", "first"))
        self.voxel_size, self.origin = (1.0,) * rank, (0.0,) * rank
        if voxel_size is not None:
            self.voxel_size, self.is_placed = numbers(voxel_size, rank, "voxel_size", positive=True), True
        if origin is not None:
            self.origin, self.is_placed = numbers(origin, rank, "origin"), True
        #: what the floors above derive from this grid and keep with it (shared plans), under keys of their own
        self.derived: dict[Any, Any] = {}
        self.coords = coords
        table = self._table_on_gpu(given) if by_kernels else None
        low, high = bounds(coords) if table is None else _on_gpu().read_table(table)
        if high and max(high) == INT32.max:
            check_indices(low, high)
        batch_size = items_of(coords, low, high, batch_size)
        self.batch_size, self._low, self._high = batch_size, low, high
        longest = max(high) - min(low) + 1 if low else 1  # of all columns: no axis has more cells
        if batch_size * longest**rank >= KEY_LIMIT:
            self._space  # noqa: B018 (raises where there are so many indeed)
        pair = self._table.first_duplicate() if low and (table is None or table.has_duplicates) else None
        if pair is not None and duplicates == "error":
            raise ValueError(
                f"rows {pair[0]} and {pair[1]} of coords are the same voxel {tuple(coords[pair[0]].tolist())}: remove "
                "one, pass duplicates='first', or use voxelize() to merge points"
            )
        if pair is not None:
            self.coords = coords[self._table.first_rows()]
            del self.__dict__["_table"]
            self._hash_table = None

    @cached_property
    def extent(self) -> IndexRange:
        """The bounding box of the voxels, without the batch."""
        low, high = (self._low, self._high) if self._box is None else bounds(self.coords)
        if not low:
            return IndexRange((0,) * self.rank, (0,) * self.rank)
        return IndexRange(low[1:], [h + 1 for h in high[1:]])

    @property
    def known_box(self) -> tuple[IndexRange, bool]:
        """A bounding box that is known without reading the coordinates, and whether it is the exact extent."""
        if self._box is None or "extent" in self.__dict__:
            return self.extent, True
        return self._box, False

    @cached_property
    def _space(self) -> KeySpace:
        return KeySpace(IndexRange((0, *self.extent.start), (self.batch_size, *self.extent.end)))

    @cached_property
    def sizes(self) -> ExampleSizes[VoxelGrid]:
        """Sizes that grids of fixed size have asked for, where this grid is their example."""
        return ExampleSizes()

    @property
    def hash_table(self) -> CoordinateTable:
        """The hash table of the rows, which a grid on a GPU keeps."""
        if self._hash_table is None:
            self._hash_table = _on_gpu().build_table(self.coords)
        return self._hash_table

    def _table_on_gpu(self, given: torch.Tensor) -> CoordinateTable | None:
        """A table of a GPU's rows, on its way, whose launch copies them; None for no rows."""
        if given.shape[0] == 0:
            return None
        self._hash_table = _on_gpu().build_table(given, copy=self.coords)
        return self._hash_table

    @property
    def _here(self) -> VoxelGrid:
        """The grid on the device that computes this one's geometry."""
        return self if self.on_host is None else self.on_host

    @cached_property
    @transforms.constant
    def _table(self) -> SortedTable:
        return SortedTable(self._space.keys(self.coords))

    #: the same voxels on the CPU, which computes geometry for devices that may not sort or search; else None
    on_host: VoxelGrid | None = None
    #: a box that the voxels lie in, of a grid whose extent nobody has measured yet
    _box: IndexRange | None = None
    #: on a GPU: the table of the rows
    _hash_table: CoordinateTable | None = None
    #: whether voxel_size or origin was given: indices alone say nothing of where voxels lie
    is_placed = False
    #: True where other processes hold the rest of the scene
    is_shared = False
    #: of a `FixedGrid` alone: how many of its rows are real, and what did not fit, each (1,) int32 on the device
    count: Int32[torch.Tensor, " 1"] | None = None
    fault: Int32[torch.Tensor, " 1"] | None = None
    #: True of a sample's grid, while what a network does is written down
    is_watched = False
    #: the class of this kind of grid's plans, where floors above give it one of its own
    plan_type: type | None = None
    #: what a grid is while torch.export traces: one of unknown voxels, of the room `sparseconv.export`
    traced_type: type[VoxelGrid] | None = None

    def all_sum(self, values: Shaped[torch.Tensor, "*shape"]) -> Shaped[torch.Tensor, "*shape"]:
        """The sum of ``values`` over the processes that share the scene; ``values`` itself in a single process."""
        return values

    # ---- reading

    @property
    def num_voxels(self) -> int:
        return self.coords.shape[0]

    def __len__(self) -> int:
        return self.coords.shape[0]

    @property
    def rank(self) -> int:
        """D, the number of spatial axes."""
        return len(self.origin)

    @property
    def device(self) -> torch.device:
        return self.coords.device

    @cached_property
    @transforms.constant
    def batch_counts(self) -> Int64[torch.Tensor, " B"]:
        """(B,) int64: voxels of each batch item."""
        return torch.bincount(self._here.coords[:, 0].long(), minlength=self.batch_size).to(self.device)

    @cached_property
    @transforms.constant
    def batch_offsets(self) -> Int64[torch.Tensor, " B+1"]:
        """(B+1,) int64: item b owns rows [offsets[b], offsets[b+1]) where rows are grouped by item (`batch_rows`)."""
        return torch.cat([self.batch_counts.new_zeros(1), self.batch_counts.cumsum(0)])

    @cached_property
    @transforms.constant
    def batch_rows(self) -> Int64[torch.Tensor, " N"] | None:
        """The rows in an order that groups them by batch item, (N,) int64; None where they already are."""
        items = self._here.coords[:, 0]
        is_grouped = bool((items[1:] >= items[:-1]).all())
        return None if is_grouped else torch.argsort(items, stable=True).to(self.device)

    def positions(self) -> Float32[torch.Tensor, "N D"]:
        """Centers of the voxels, (N, D) float32 in the length unit of voxel_size."""
        like = self.coords.new_empty(0, dtype=torch.float32)
        return like.new_tensor(self.origin) + like.new_tensor(self.voxel_size) * (self.coords[:, 1:].float() + 0.5)

    @transforms.constant
    def lookup(self, coords: Integer[torch.Tensor, "M 1+D"]) -> Int64[torch.Tensor, " M"]:
        """Rows (M,) int64 of coords (M, 1+D) of any integer dtype on the grid's device, -1 where absent."""
        check_values("coords", coords, f"(M, {self.rank + 1}) integers")
        if coords.ndim != 2 or coords.shape[1] != self.rank + 1:
            raise ValueError(f"expected coords (M, {self.rank + 1}), the batch first; got {tuple(coords.shape)}")
        if coords.dtype not in INTEGERS:
            raise TypeError(f"coords must be integers; got {coords.dtype}")
        if coords.device != self.device:
            there = str(coords.device)
            raise ValueError(f"coords are on {there}, the grid is on {self.device}: move one, grid.to({there!r})")
        if self.on_host is not None:
            return self.on_host.lookup(coords.cpu()).to(self.device)
        if len(self) and coords.dtype == torch.int32 and has_kernels(self.device):
            return _on_gpu().lookup(self.hash_table, coords).long()
        inside = self._space.contains(coords)
        return torch.where(inside, self._table.find(self._space.keys(coords.long())), -1)

    # ---- other grids

    def _like(self, coords: torch.Tensor, scale: Floats | None = None) -> VoxelGrid:
        """A grid of other voxels in the same scene; ``scale`` multiplies the voxel size."""
        grid = VoxelGrid(coords, self.batch_size, self._scaled(scale), self.origin)
        grid.is_placed = self.is_placed
        return grid if self.on_host is None else grid.to(self.device)

    def _scaled(self, scale: Floats | None) -> Floats:
        return tuple(v * s for v, s in zip(self.voxel_size, scale)) if scale else self.voxel_size

    def _known(
        self, coords: torch.Tensor, box: IndexRange, scale: Floats | None = None, fills: bool = False
    ) -> VoxelGrid:
        """`_like` for contiguous int32 coords, distinct and within ``box``, which they may fill; launches nothing."""
        grid = object.__new__(VoxelGrid)
        grid.batch_size, grid.origin, grid.voxel_size = self.batch_size, self.origin, self._scaled(scale)
        grid._box, grid.coords, grid.derived, grid.is_placed = box, coords, {}, self.is_placed
        if fills:
            grid.extent = box
        return grid

    @transforms.constant
    def subset(self, mask: Bool[torch.Tensor, " N"]) -> VoxelGrid:
        """The voxels where mask (N,) bool is true, in the same order."""
        check_mask(mask, self.num_voxels)
        return self._like(self._here.coords[mask.to(self._here.device)])

    def union(self, other: VoxelGrid) -> VoxelGrid:
        """This grid's voxels, then those of ``other`` that it lacks."""
        self._check_same_space(other)
        return self._like(torch.cat([self.coords, other.coords[self.lookup(other.coords) < 0]]))

    def intersection(self, other: VoxelGrid) -> VoxelGrid:
        """The voxels of this grid that ``other`` has too."""
        self._check_same_space(other)
        return self.subset(other.lookup(self.coords) >= 0)

    def difference(self, other: VoxelGrid) -> VoxelGrid:
        """The voxels of this grid that ``other`` lacks."""
        self._check_same_space(other)
        return self.subset(other.lookup(self.coords) < 0)

    def coarsen(self, factor: int | Sequence[int]) -> VoxelGrid:
        """Every coarse voxel floor(c / factor) that holds at least one voxel, in lexicographic order."""
        factors = checked_factors(factor, self.rank)
        return self._like(coarser(self._here.coords, factors), tuple(float(f) for f in factors))

    def refine(self, factor: int | Sequence[int]) -> VoxelGrid:
        """Split every voxel into factor^D finer ones; the children of a voxel are adjacent rows."""
        factors = checked_factors(factor, self.rank)
        return self._like(finer(self._here.coords, self.extent, factors), tuple(1 / f for f in factors))

    def dilate(self, radius: int | Sequence[int] = 1) -> VoxelGrid:
        """Every voxel within ``radius`` cells of one along each axis, in lexicographic order."""
        return self._like(near(self._here.coords, self.extent, per_axis(radius, self.rank, "radius", 0)))

    def sorted(
        self, order: Literal["lexicographic", "morton"] = "lexicographic"
    ) -> tuple[VoxelGrid, Int64[torch.Tensor, " N"]]:
        """The voxels in sorted order, and the old row of each: ``new.coords == old.coords[rows]``."""
        check_choice("order", order, ("lexicographic", "morton"))
        here = self._here
        rows = here._table.rows if order == "lexicographic" else morton_rows(here.coords, here.extent)
        return self._like(here.coords[rows]), rows.to(self.device)

    def to(self, device: torch.device | str) -> VoxelGrid:
        """This grid on another device; returns itself if it is already there."""
        place = checked_device(device)
        if place == self.device:
            return self
        if place.type not in SORTING:
            on_host = self.to("cpu")
            grid = on_host._known(on_host.coords.to(place), on_host.extent, fills=True)
            grid.on_host = on_host
            return grid
        if self.on_host is not None:
            return self.on_host.to(place)
        return self._like(self.coords.to(place))

    @staticmethod
    def cat(grids: Sequence[VoxelGrid]) -> VoxelGrid:
        """Concatenate grids along the batch: the items of all given grids, one after another."""
        check_several(grids)
        first, total, parts = grids[0], 0, []
        for grid in grids:
            VoxelGrid._check_same_space(first, grid, batch=False)
            part = grid._here.coords.clone()
            part[:, 0] += total
            parts.append(part)
            total += grid.batch_size
        made = VoxelGrid(torch.cat(parts), total, first.voxel_size, first.origin)
        made.is_placed = first.is_placed
        made = made if first.on_host is None else made.to(first.device)
        return made

    def _check_same_space(self, other: VoxelGrid, batch: bool = True) -> None:
        check_grid("other", other)
        check_same_space(self, other, batch)

    # ---- dense arrays

    @classmethod
    def from_dense(
        cls,
        dense: Shaped[torch.Tensor, "B C *shape"],
        voxel_size: float | Sequence[float] | None = None,
        origin: float | Sequence[float] | None = None,
        *,
        rank: int | None = None,
    ) -> tuple[VoxelGrid, Shaped[torch.Tensor, "N C"]]:
        """The sites of dense (B, C, *spatial) where any channel is not zero -> the grid and its features (N, C).

        ``rank`` is the number of spatial axes, checked where it is given. A volume (D, H, W) is ``dense[None, None]``.
        """
        sites, features = sites_of(dense, rank)
        return cls(sites, dense.shape[0], voxel_size, origin), features

    def to_dense(
        self, features: Shaped[torch.Tensor, "N C"], extent: IndexRange | Sequence[int] | None = None
    ) -> Shaped[torch.Tensor, "B C *shape"]:
        """Features (N, C) -> (B, C, *shape), zero where there is no voxel; differentiable.

        ``extent`` is the box to fill (a range, or a shape from the origin); default: the grid's own. Voxels outside of
        it are an error.
        """
        box = checked_box(self, features, extent)
        if not box.encloses(self._box or self.extent) and not box.encloses(self.extent):
            raise ValueError(f"the grid's extent {self.extent} leaves the box {box} to fill")
        return filled(features, self.coords, self.batch_size, box)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in UNTRAVELLED} | {"derived": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A file is believed in its coords alone: a search within bounds that are not theirs would leave its arrays."""
        self.__dict__.update(state)
        if self.count is not None:
            return
        self.coords, self._box = checked_coords(self.coords), None
        self._low, self._high = low, high = bounds(self.coords)
        if low and not (low[0] >= 0 and high[0] < self.batch_size and max(high) < INT32.max):
            raise ValueError(f"the file of a grid of {self.batch_size} batch items is damaged: it has {low} to {high}")
        for name in ("extent", "batch_counts", "batch_offsets", "batch_rows"):
            self.__dict__.pop(name, None)
        if self.device.type not in SORTING:
            self.on_host = VoxelGrid(self.coords.cpu(), self.batch_size, self.voxel_size, self.origin)

    def __repr__(self) -> str:
        size = " x ".join(f"{v:g}" for v in self.voxel_size[: 1 if len(set(self.voxel_size)) == 1 else None])
        return (
            f"VoxelGrid({self.num_voxels:,} voxels, rank {self.rank}, batch {self.batch_size}, extent {self.extent}, "
            f"voxel size {size}, {self.device})"
        )

    def _repr_html_(self) -> str:
        return html(self.coords, self.voxel_size, repr(self))


def check_grid(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a grid, and say how to come by one."""
    if not isinstance(value, VoxelGrid):
        check_kind(name, value, VoxelGrid, no_grid(value))


@transforms.constant
def in_trace(grid: Any) -> Any:
    """A grid as operators know it while torch traces: what stands for one that was made before; else itself."""
    kind: Any = VoxelGrid.traced_type
    return kind.of(grid) if kind is not None and tracing() else grid


def left_trace(place: Any) -> bool:
    """Whether this is a grid that a compiled program returned: it records nothing any more."""
    return VoxelGrid.traced_type is not None and isinstance(place, VoxelGrid.traced_type) and not tracing()


@cache
def _on_gpu() -> Any:
    from sparseconv.geometry.gpu import table  # Triton is loaded where it is used

    return table
