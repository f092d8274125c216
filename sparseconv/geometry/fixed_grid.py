"""Grids whose number of rows never changes: for whole steps, map building included, captured in one CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from sparseconv import transforms
from sparseconv.checks import INT32, Floats, check_mask, check_values, checked_device
from sparseconv.geometry.coord_ops import places_of, reached, unique_coords
from sparseconv.geometry.edges import coarse_grid, find_edges, fine_grid, torus_of, wrap
from sparseconv.geometry.example import BARRIERS, zeros_for
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.keys import SortedTable
from sparseconv.geometry.ranges import Boundary, IndexRange, check_box
from sparseconv.geometry.views.dense import checked_box, filled_within
from sparseconv.geometry.window import Window
from sparseconv.gpu.cuda_capability import check_kernels
from sparseconv.gpu.streams import following, keep, map_stream
from sparseconv.torch_private import no_transforms

if TYPE_CHECKING:
    from jaxtyping import Bool, Int32, Int64, Shaped

    from sparseconv.geometry.gpu.table import CoordinateTable
    from sparseconv.gpu.cooperative import DeviceCount

#: rows of derived grids come in multiples of this
ROWS = 256
#: edges of every map, at least, for which there is room
EDGES = 1 << 14


class FixedGrid(VoxelGrid):
    """A grid with a fixed number C of rows; the first ``count`` are real, and ``count`` stays on the device.

    Grids and maps made from it never wait for the device. Their sizes depend on the example alone. So a step over it,
    maps included, can be captured in a CUDA graph and replayed for other scenes. Dead rows have batch item -1 and no
    neighbors. A convolution gives them epilogue(bias), and no weight gradient sees them. ``len(grid)`` and
    ``num_voxels`` are C. On a CPU it works eagerly, with the same results.

    ``like``, an ordinary grid, gives what the CPU must decide: rows of coarser grids, and numbers of pairs. Its maps
    are built when a fixed grid first needs them, which waits for the device. So run a step once before its capture, on
    the capture's stream. What a graph reads lives as long as the grids and plans that were made during its capture.

    Args:
        coords: (C, 1+D) int32, contiguous, C > 0: (batch item, voxel) of the real rows, then rows of batch item -1.
        count: (1,) int32 on the device of coords: the number of real rows.
        like: the example, an ordinary grid on the same device: batch size, voxel size and origin are its.
        extent: the box that real voxels lie in; default: the example's, grown by an eighth of its length, and by 16
            cells at least, to each side.
        room: factor over the example, for the rows of a coarser (or finer) grid and for the average edges of a voxel.

    Attributes:
        count: (1,) int32, of this very grid.
        fault: (1,) int32, shared with all grids made of this one: 0, or the bits of `scene.FAULTS`, which say what did
            not fit. Results are then wrong and may not be finite; nothing is ever written out of bounds.

    Raises:
        TypeError, ValueError: arguments of the wrong kind, shape or device, or an extent too large for keys.

    >>> example = VoxelGrid(torch.tensor([[0, 0, 0], [0, 0, 1], [0, 2, 2]]))
    >>> coords = torch.tensor([[0, 4, 4], [0, 4, 5], [-1, 0, 0], [-1, 0, 0]], dtype=torch.int32)
    >>> grid = FixedGrid(coords, torch.tensor([2], dtype=torch.int32), example)
    >>> grid
    FixedGrid(4 rows, rank 2, batch 1, extent [-16, 19) x [-16, 19), voxel size 1, cpu)
    >>> grid.lookup(torch.tensor([[0, 4, 5], [-1, 0, 0]])).tolist(), grid.fault.tolist()
    ([1, -1], [0])
    >>> grid.subset(torch.tensor([False, True, False, True])).count.tolist()
    [1]
    """

    count: Int32[torch.Tensor, " 1"]
    fault: Int32[torch.Tensor, " 1"]

    @transforms.constant
    def __init__(
        self,
        coords: Int32[torch.Tensor, "N 1+D"],
        count: Int32[torch.Tensor, " 1"],
        like: VoxelGrid,
        *,
        extent: IndexRange | Sequence[int] | None = None,
        room: float = 1.25,
    ) -> None:
        if not isinstance(like, VoxelGrid) or like.count is not None or like.is_shared:
            raise TypeError(f"like must be an ordinary VoxelGrid; got {like!r}")
        wanted = f"(C, {like.rank + 1}) int32"
        check_values("coords", coords, wanted)
        check_values("count", count, "(1,) int32")
        if coords.dtype != torch.int32 or coords.ndim != 2 or coords.shape[1] != like.rank + 1 or not len(coords):
            raise ValueError(f"coords must be {wanted}, C > 0; got {tuple(coords.shape)} {coords.dtype}")
        if count.dtype != torch.int32 or count.shape != (1,):
            raise ValueError(f"count must be (1,) int32; got {tuple(count.shape)} {count.dtype}")
        if not coords.device == count.device == like.device:
            places = coords.device, count.device, like.device
            raise ValueError(f"coords, count and like must be on one device; got {places}")
        check_kernels(coords.device, "a grid of fixed size")
        if not 0 < room < math.inf:
            raise ValueError(f"room must be positive and finite; got {room}")
        if extent is None:
            extent = _grown(like.extent)
        elif not isinstance(extent, IndexRange):
            extent = IndexRange.of_shape(extent)
        if extent.rank != like.rank or extent.size == 0:
            raise ValueError(f"the extent must have {like.rank} axes, none of them empty; got {extent}")
        coords = coords.detach().contiguous()
        with map_stream():
            zeros = zeros_for(coords, like.sizes)
        keep(self)
        self._set(coords, count, zeros[BARRIERS : BARRIERS + 1], zeros[:BARRIERS], extent, like.voxel_size, like, room)
        if self.device.type == "cuda":
            self._hash_table = self._make_hash_table(checked=True)
        else:
            live = torch.arange(len(coords), device=coords.device) < count
            self.fault |= (self._table.keys.unique().numel() != count) | ((coords[:, 0] >= 0) != live).any()

    def _set(
        self,
        coords: torch.Tensor,
        count: torch.Tensor,
        fault: torch.Tensor,
        barriers: torch.Tensor,
        extent: IndexRange,
        voxel_size: tuple[float, ...],
        example: VoxelGrid,
        room: float,
        family: dict[int, torch.Tensor] | None = None,
    ) -> None:
        check_box(extent, "the extent of a grid of fixed size")
        self.coords, self.count, self.fault, self._barriers = coords, count, fault, barriers
        self.is_placed = example.is_placed
        self.batch_size, self.origin = example.batch_size, example.origin
        self.voxel_size, self.extent, self.example, self.room = voxel_size, extent, example, room
        self.derived = {}
        #: of all grids made of one another: rows -> count. No two have as many rows, so rows tell whose they are
        self.family = {} if family is None else family
        self.family[len(coords)] = count
        #: constants on the device that launches read: kept as long as a graph that holds those launches may run
        self._kept: list[torch.Tensor] = []
        self._space  # noqa: B018 (raises where keys are too short)

    # ---- rows

    @property
    def hash_table(self) -> CoordinateTable:
        """The table of the real rows that a grid on a GPU keeps."""
        if self._hash_table is None:
            self._hash_table = self._make_hash_table()
        return self._hash_table

    def _make_hash_table(self, checked: bool = False) -> CoordinateTable:
        from sparseconv.geometry.gpu.table import build_table  # Triton is loaded where it is used

        with map_stream():
            return build_table(self.coords, self._ranges, device_count=self.device_count, checked=checked)

    @property
    def device_count(self) -> DeviceCount:
        """What kernels take for rows whose number the CPU does not know."""
        from sparseconv.gpu.cooperative import DeviceCount

        return DeviceCount(self.count, self.fault, self._barriers)

    @property
    def _ranges(self) -> torch.Tensor:
        """The extent as the table takes it, on the device; kept with the example."""
        ranges = self.example.sizes.ranges.get(self.extent)
        if ranges is None:
            from sparseconv.geometry.gpu.table import block_volume, encode_ranges

            low, high = (0, *self.extent.start), (self.batch_size - 1, *(end - 1 for end in self.extent.end))
            if block_volume(low, high) >= 2**62:
                raise ValueError(f"the extent {self.extent} is too large for 64-bit keys: give a smaller one")
            ranges = self.example.sizes.ranges[self.extent] = encode_ranges(low, high).to(self.device)
        return ranges

    @cached_property
    def _real(self) -> torch.Tensor:
        """(C,) bool: the rows that can be found."""
        return self._space.contains(self.coords)

    @cached_property
    def _table(self) -> SortedTable:
        rows = self._real.nonzero()[:, 0]
        table = SortedTable(self._space.keys(self.coords[rows]))
        table.rows = rows[table.rows]
        return table

    @cached_property
    def batch_counts(self) -> Int64[torch.Tensor, " B"]:
        """(B,) int64: voxels of each batch item."""
        items = self.coords[:, 0].long().clamp(-1, self.batch_size) + 1
        counts = items.new_zeros(self.batch_size + 2)
        return counts.index_add_(0, items, torch.ones_like(items))[1:-1]

    @property
    def batch_rows(self) -> Int64[torch.Tensor, " N"] | None:
        raise _unknown("rows by batch item")

    # ---- other grids

    def reached(
        self,
        window: Window,
        boundary: Boundary,
        within: IndexRange | None = None,
        ends: Int32[torch.Tensor, " D"] | None = None,
        *,
        to_fine: bool,
    ) -> FixedGrid:
        """Every coarse voxel that sees a real one, or every fine one that is seen, ``within`` a box and before ``ends``
        (D,) int32 on the device, where they are given.

        In lexicographic order, like `coarse_grid` and `fine_grid`, which call this.
        """
        if boundary.kind == "forbid" and (boundary.extent is None or not to_fine):
            raise _unknown("voxels under the boundary 'forbid'")
        torus = torus_of(None if to_fine else self, window, boundary)
        torus = torus if to_fine else window.coarse_torus(torus)
        extent = torus or (window.fine_extent(self.extent) if to_fine else window.coarse_bounds(self.extent))
        for box in (boundary.extent if boundary.kind == "forbid" else None, within):
            extent = extent if box is None else extent.intersect(box)
        if extent.size == 0:
            raise ValueError(f"no voxel of {self.extent} reaches into the box: it would leave {extent}")
        scale = tuple((1 / s if to_fine else float(s)) for s in window.stride)
        example = self._example(window, boundary, within, to_fine)
        most = min(self.batch_size * extent.size, len(self) * len(window.offsets))
        rows = self._free_rows(min(most, max(1, math.ceil(self.room * len(example) / ROWS)) * ROWS))
        with map_stream():
            coords, count = self._reach(window, boundary, torus, extent, ends, rows, to_fine)
        size = tuple(v * s for v, s in zip(self.voxel_size, scale))
        return self._made(coords, count, extent, size, example)

    def _example(self, window: Window, boundary: Boundary, within: IndexRange | None, to_fine: bool) -> VoxelGrid:
        """What the example's voxels reach; kept with it."""
        reached, key = self.example.sizes.reached, (window, boundary, within, to_fine)
        found = reached.get(key)
        if found is None:
            self._may_look()
            example = self.example
            found = fine_grid(example, window, boundary) if to_fine else coarse_grid(example, window, boundary, within)
            reached[key] = found
        return found

    def _reach(
        self,
        window: Window,
        boundary: Boundary,
        torus: IndexRange | None,
        extent: IndexRange,
        ends: torch.Tensor | None,
        rows: int,
        to_fine: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Voxels (rows, 1+D) int32 on the ``torus`` of the result, dead from the last one on; their number (1,)."""
        if self.device.type == "cuda":
            from sparseconv.geometry.gpu.reached import reach_fixed  # Triton is loaded where it is used

            size = self.batch_size, window.offsets, window.stride, torus
            limits: dict[str, Any] = {"to_fine": to_fine, "within": extent, "rows": rows, "ends": ends}
            with no_transforms():  # voxels do not depend on what torch.func differentiates
                on_gpu = reach_fixed(self.coords, self.extent, *size, **limits, device_count=self.device_count)
            if on_gpu is None:
                raise ValueError(f"the extent {extent} has too many cells for a grid of fixed size: give a smaller one")
            self._kept.append(on_gpu[2])
            return on_gpu[:2]
        coords = wrap(self.coords[self._real].long(), torus_of(None, window, boundary))
        seen = reached(coords, window, to_fine=to_fine, torus=torus, within=extent)
        found = unique_coords(seen if ends is None else seen[(seen[:, 1:] < ends).all(1)])
        self.fault |= 2 * (len(found) > rows)
        dead = self.coords.new_full((max(0, rows - len(found)), self.coords.shape[1]), -1)
        return torch.cat([found[:rows].int(), dead]), self.count.new_tensor([min(len(found), rows)])

    @torch.no_grad()
    def end_at(self, ends: Int32[torch.Tensor, " D"]) -> None:
        """Note a fault where a voxel lies at or behind ``ends``, (D,) int32 on the device."""
        with map_stream():
            self.fault |= 8 * (self.coords[:, 1:] >= ends).any().to(torch.int32)

    def pairs_like(self, coarse: FixedGrid, window: Window, boundary: Boundary) -> int:
        """About how many edges a window joins between this grid, the fine one, and a coarse one: as in the example."""
        other = None if coarse.example is self.example else coarse.example
        kept, key = self.example.sizes.pairs, (other, window, boundary)
        pairs = kept.get(key)
        if pairs is None:
            self._may_look()
            pairs = find_edges(self.example, coarse.example, window, boundary).num_pairs
            kept[key] = pairs
        return max(1, round(pairs * len(coarse) / max(1, len(coarse.example))))

    def most_pairs(self, coarse: FixedGrid, window: Window, boundary: Boundary) -> int:
        """Places for the pairs of a window between this grid, the fine one, and a coarse one.

        Those of the example for the rows that there are, times the room: for as many more edges per voxel.
        """
        if window.is_tiling:
            return max(len(self), len(coarse))
        room = max(EDGES, len(coarse), math.ceil(self.room * self.pairs_like(coarse, window, boundary)))
        return min(len(coarse) * len(window.offsets), room)

    def _may_look(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a map of this kind was never built on the example: run the step once before its capture"
            )

    def _like(self, coords: torch.Tensor, scale: tuple[float, ...] | None = None) -> VoxelGrid:
        raise _unknown("voxels chosen one by one")

    def subset(self, mask: Bool[torch.Tensor, " N"]) -> FixedGrid:
        """The real voxels where mask (C,) bool is true, in the same order, then dead rows."""
        return self.chosen(mask, self.coords)[0]

    def chosen(
        self, mask: Bool[torch.Tensor, " N"], features: Shaped[torch.Tensor, "N C"]
    ) -> tuple[FixedGrid, Shaped[torch.Tensor, "_M C"]]:
        """`subset` and its rows of features, 0 in dead rows; differentiable by the features."""
        grid, rows = self._subset(mask)
        return grid, torch.where(grid.coords[:, :1] >= 0, features.index_select(0, rows), 0)

    @transforms.constant
    def _subset(self, mask: torch.Tensor) -> tuple[FixedGrid, torch.Tensor]:
        """The grid, and the row here of each of its rows."""
        check_mask(mask, len(self))
        rows = self._free_rows(len(self))
        with following():
            found, live = places_of(mask & (self.coords[:, 0] >= 0), rows)
            coords = torch.where(live[:, None], self.coords.index_select(0, found), -1)
            count = live.sum(0, keepdim=True, dtype=torch.int32)
        return self._made(coords, count, self.extent, self.voxel_size, self.example, found), found

    def _free_rows(self, rows: int) -> int:
        """So many rows, or some more, that no grid of the family has."""
        while rows in self.family:
            rows += ROWS
        return rows

    def _made(
        self, coords: torch.Tensor, count: torch.Tensor, box: IndexRange, size: Floats, example: VoxelGrid, *kept: Any
    ) -> FixedGrid:
        """Another grid of the family."""
        grid = object.__new__(FixedGrid)
        grid._set(coords, count, self.fault, self._barriers, box, size, example, self.room, self.family)
        keep((grid, *kept))
        if self.device.type == "cuda":
            grid.hash_table  # noqa: B018 (kept)
        return grid

    def to(self, device: torch.device | str) -> FixedGrid:
        """Returns itself if the grid is already on that device."""
        if checked_device(device) == self.device:
            return self
        raise ValueError(f"a FixedGrid stays on its device, {self.device}: make another one on {device}")

    def to_dense(
        self, features: Shaped[torch.Tensor, "N C"], extent: IndexRange | Sequence[int] | None = None
    ) -> Shaped[torch.Tensor, "B C *shape"]:
        """(B, C, *shape) over an extent that holds all voxels (default: the grid's), zero elsewhere."""
        return filled_within(features, self.coords, self.batch_size, checked_box(self, features, extent))

    def __repr__(self) -> str:
        return super().__repr__().replace("VoxelGrid(", "FixedGrid(").replace(" voxels,", " rows,")


def forget_tables(example: VoxelGrid) -> None:
    """Let go of an example's tables, plans and maps, where their sizes are all that will be asked for."""
    example._hash_table = None
    example.derived.clear()
    for kept in example.sizes.reached.values():
        forget_tables(kept)


def _grown(extent: IndexRange) -> IndexRange:
    more = [max(16, n // 8) for n in extent.shape]
    low = (max(INT32.min, v - m) for v, m in zip(extent.start, more))
    return IndexRange(low, (min(INT32.max, v + m) for v, m in zip(extent.end, more)))


def _unknown(what: str) -> ValueError:
    return ValueError(
        f"a grid of fixed size has no {what}, whose number the CPU would have to know: make it from an ordinary grid"
    )
