"""From a window to the edges between two grids, and to the grid that a window reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from sparseconv import transforms
from sparseconv.geometry.cpu.line_search import edges_by_lines
from sparseconv.geometry.grid import VoxelGrid, unique_coords
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.geometry.projection import IndexProjection
from sparseconv.geometry.ranges import Boundary, IndexRange, Ints, per_axis
from sparseconv.gpu.streams import building

if TYPE_CHECKING:
    from sparseconv.geometry.gpu.window.taps import TapWindow


@dataclass(frozen=True)
class Window:
    """An `IndexProjection` from coarse voxels to fine ones, and the points of its region that carry a weight.

    fine = stride * coarse + offsets[k]        (offsets[k] = dilation * tap - padding)
    """

    projection: IndexProjection
    stride: Ints
    offsets: tuple[Ints, ...]

    @classmethod
    def of(
        cls,
        rank: int,
        kernel_size: int | Sequence[int] | None,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        padding: int | Sequence[int] | None = None,
        taps: torch.Tensor | Sequence[Sequence[int]] | None = None,
    ) -> Window:
        """A box of ``kernel_size`` taps, or an explicit list of them (K, D), whose padding defaults to 0."""
        if (kernel_size is None) == (taps is None):
            raise ValueError(
                "give either kernel_size (a box of taps) or taps (an explicit list), not both, not neither"
            )
        if taps is None and _is_plain(kernel_size) and _is_plain(stride) and _is_plain(dilation) and _is_plain(padding):
            return _box_window(rank, kernel_size, stride, dilation, padding)
        listed = taps.tolist() if isinstance(taps, torch.Tensor) else taps
        return _window(
            rank,
            None if kernel_size is None else per_axis(kernel_size, rank, "kernel_size", 1),
            per_axis(stride, rank, "stride", 1),
            per_axis(dilation, rank, "dilation", 1),
            None if padding is None else per_axis(padding, rank, "padding"),
            None if listed is None else tuple(tuple(tap) for tap in listed),
        )

    def fine(self, coarse: torch.Tensor, tap: int) -> torch.Tensor:
        """What coords (M, 1+D) int64 of coarse voxels see through a tap, (M, 1+D) int64."""
        return coarse * _row((1, *self.stride), coarse) + _row((0, *self.offsets[tap]), coarse)

    @cached_property
    def is_strided(self) -> bool:
        """Whether coarse voxels lie farther apart than fine ones, along an axis."""
        return any(s != 1 for s in self.stride)

    @cached_property
    def encoded(self) -> dict[int, TapWindow]:
        """The window as kernels on a device read it, on no torus, by the device's number."""
        return {}

    def __reduce__(self) -> tuple:
        return Window, (self.projection, self.stride, self.offsets)

    @cached_property
    def symmetry(self) -> tuple[int | None, tuple[int, ...] | None]:
        """The identity tap and the mirrored tap of each, where both sides are one grid on no torus."""
        return _symmetry(self, None)

    @cached_property
    def _spans(self) -> tuple[tuple[int, int, int], ...]:
        """(smallest offset, largest offset, stride) of each axis."""
        return tuple((min(column), max(column), s) for column, s in zip(zip(*self.offsets), self.stride))

    @cached_property
    def _sees_all(self) -> bool:
        """Whether every fine voxel has a coarse one that sees it, and the first and last of them move with it."""
        if all(s == 1 for s in self.stride):
            return True
        box = math.prod(last - first + 1 for first, last, _ in self._spans)
        return len(self.offsets) == box and all(last - first + 1 >= s for first, last, s in self._spans)

    @cached_property
    def is_tiling(self) -> bool:
        """Whether the windows of the coarse voxels lie side by side, so that one of them sees each fine voxel, once."""
        box = math.prod(self.stride)
        return len(self.offsets) == box and all(last - first + 1 == s for first, last, s in self._spans)

    def coarse_extent(self, extent: IndexRange) -> IndexRange | None:
        """The bounding box of all coarse voxels that see fine ones with this one; None where that takes a look."""
        return self.coarse_bounds(extent) if self._sees_all else None

    def coarse_bounds(self, extent: IndexRange) -> IndexRange:
        """A box around all coarse voxels that see a fine one in this box."""
        edges = list(zip(self._spans, extent.start, extent.end))
        start = tuple(-((last - lo) // s) for (_, last, s), lo, _ in edges)
        return IndexRange(start, tuple((hi - 1 - first) // s + 1 for (first, _, s), _, hi in edges))

    def fine_extent(self, extent: IndexRange) -> IndexRange:
        """The bounding box of all fine voxels that coarse ones with this one see."""
        edges = list(zip(self._spans, extent.start, extent.end))
        start = tuple(s * lo + first for (first, _, s), lo, _ in edges)
        return IndexRange(start, tuple(s * (hi - 1) + last + 1 for (_, last, s), _, hi in edges))

    def coarse_torus(self, torus: IndexRange | None) -> IndexRange | None:
        """The torus of the coarse voxels, where the fine ones live on one."""
        if torus is None:
            return None
        start = tuple(lo // s for lo, s in zip(torus.start, self.stride))
        return IndexRange(start, tuple(lo + n // s for lo, n, s in zip(start, torus.shape, self.stride)))

    def coarse(self, fine: torch.Tensor, tap: int) -> torch.Tensor:
        """The coarse voxels that see fine ones (M, 1+D) int64 through a tap; fewer rows, where strides skip some."""
        stride = _row((1, *self.stride), fine)
        moved = fine - _row((0, *self.offsets[tap]), fine)
        return torch.div(moved[(moved % stride == 0).all(1)], stride, rounding_mode="floor")


def _is_plain(value: Any) -> bool:
    """Whether equal arguments mean the same: an integer, a tuple of them, or None, and no bool or float among them."""
    return type(value) is int or value is None or (type(value) is tuple and all(type(v) is int for v in value))


@lru_cache(maxsize=1024)
def _box_window(rank: int, kernel_size: Any, stride: Any, dilation: Any, padding: Any) -> Window:
    """`_window` of a box, by its arguments as they were given."""
    return _window(
        rank,
        per_axis(kernel_size, rank, "kernel_size", 1),
        per_axis(stride, rank, "stride", 1),
        per_axis(dilation, rank, "dilation", 1),
        None if padding is None else per_axis(padding, rank, "padding"),
        None,
    )


@lru_cache(maxsize=1024)
def _window(
    rank: int, kernel: Ints | None, strides: Ints, steps: Ints, padding: Ints | None, taps: tuple[Ints, ...] | None
) -> Window:
    """The window of checked arguments, made once for all plans that ask for it: it takes as long as a small map."""
    if kernel is not None:
        projection = IndexProjection.window(kernel, strides, steps, padding)
        points = projection.taps().tolist()
    else:
        listed = taps or ()
        if not listed or any(len(tap) != rank or not all(isinstance(t, int) for t in tap) for tap in listed):
            raise ValueError(f"taps must be a non-empty list of integer points (K, {rank}); got {listed[:4]}")
        if len(set(listed)) < len(listed):
            raise ValueError("taps must be distinct: add the weights of equal ones")
        pad = (0,) * rank if padding is None else padding
        low = [min(tap[i] for tap in listed) for i in range(rank)]
        size = [max(tap[i] for tap in listed) - low[i] + 1 for i in range(rank)]
        projection = IndexProjection.window(
            size, strides, steps, tuple(p - d * lo for p, d, lo in zip(pad, steps, low))
        )
        points = [[d * (t - lo) for d, t, lo in zip(steps, tap, low)] for tap in listed]
    offsets = tuple(tuple(o + p for o, p in zip(projection.offset, point)) for point in points)
    return Window(projection, strides, offsets)


@transforms.constant
def find_edges(fine: VoxelGrid, coarse: VoxelGrid, window: Window, boundary: Boundary) -> KernelMap:
    """The map fine -> coarse of every (tap, fine row, coarse row) that the window joins.

    Equal coordinates on two grids are not enough for an identity tap: it is known where both are one grid object and
    a tap's offset is zero.
    """
    if coarse is not fine:
        check_pair(fine, coarse)
    torus = torus_of(fine, window, boundary)
    identity, mirror = None, None
    if coarse is fine:
        identity, mirror = window.symmetry if torus is None else _symmetry(window, torus)
    if fine.coords.is_cuda:
        most = None if fine.count is None else fine.most_pairs(coarse, window, boundary)  # type: ignore[attr-defined]
        with building() as streams:
            source = _on_gpu().find_edges_on_gpu(fine, coarse.coords, window, torus, most)
        sizes = source.num_in, coarse.num_voxels, len(window.offsets)
        found = KernelMap(*sizes, source=source, identity_tap=identity, mirror=mirror)
        if streams is not None:
            streams.keep(found)
        if fine.count is not None:
            found.num_pairs = fine.pairs_like(coarse, window, boundary)  # type: ignore[attr-defined]
        return found
    if torus is None and fine.device.type == "cpu" and fine.count is None:
        pairs = edges_by_lines(fine, coarse, window.stride, window.offsets)
        if pairs is not None:
            sizes = len(fine), len(coarse), len(window.offsets)
            return KernelMap(*sizes, pairs=pairs, identity_tap=identity, mirror=mirror)
    queries = coarse.coords.long()
    table = torch.empty(len(window.offsets), len(coarse), dtype=torch.int32, device=fine.device)
    for tap in range(len(window.offsets)):
        table[tap] = fine.lookup(wrap(window.fine(queries, tap), torus))
    return KernelMap(len(fine), len(coarse), len(window.offsets), neighbors=table, identity_tap=identity, mirror=mirror)


@cache
def _on_gpu() -> Any:
    from sparseconv.geometry.gpu.pairs import found_edges  # Triton is loaded where it is used

    return found_edges


@transforms.untraced
@transforms.constant
def coarse_grid(fine: VoxelGrid, window: Window, boundary: Boundary) -> VoxelGrid:
    """Every coarse voxel that sees a fine one, in lexicographic order; under ``forbid``, those whose window fits."""
    if fine.count is not None:
        return fine.reached(window, boundary, to_fine=False)  # type: ignore[attr-defined]
    torus = torus_of(fine, window, boundary)
    scale = tuple(float(s) for s in window.stride)
    found = _reach_on_gpu(fine, window, window.coarse_torus(torus), to_fine=False)
    if found is not None:
        extent = window.coarse_extent(fine.extent) if torus is None and not fine.is_shared else None
        grid = fine._like(found, scale) if extent is None else fine._reached(found, extent, scale)
        return fits(grid, fine, window, boundary)
    coords = fine.coords.long()
    seen = torch.cat([window.coarse(wrap(coords, torus), tap) for tap in range(len(window.offsets))])
    seen = wrap(seen, window.coarse_torus(torus))
    return fits(fine._like(unique_coords(seen), scale), fine, window, boundary)


@transforms.untraced
@transforms.constant
def fine_grid(coarse: VoxelGrid, window: Window, boundary: Boundary) -> VoxelGrid:
    """Every fine voxel that a coarse one sees, in lexicographic order; under ``forbid``, within the extent."""
    if coarse.count is not None:
        return coarse.reached(window, boundary, to_fine=True)  # type: ignore[attr-defined]
    torus = torus_of(None, window, boundary)
    if boundary.kind == "forbid" and boundary.extent is None:
        raise ValueError("a generative transposed plan under 'forbid' needs Boundary.forbid(extent)")
    found = _reach_on_gpu(coarse, window, torus, boundary.extent if boundary.kind == "forbid" else None, to_fine=True)
    if found is not None:
        scale = tuple(1 / s for s in window.stride)
        if torus is not None or boundary.kind == "forbid" or coarse.is_shared:
            return coarse._like(found, scale)
        return coarse._reached(found, window.fine_extent(coarse.extent), scale)
    coords = coarse.coords.long()
    seen = torch.cat([wrap(window.fine(coords, tap), torus) for tap in range(len(window.offsets))])
    if boundary.kind == "forbid" and boundary.extent is not None:
        inside = torch.ones(len(seen), dtype=torch.bool, device=seen.device)
        for axis, (start, end) in enumerate(zip(boundary.extent.start, boundary.extent.end), 1):
            inside &= (seen[:, axis] >= start) & (seen[:, axis] < end)
        seen = seen[inside]
    return coarse._like(unique_coords(seen), tuple(1 / s for s in window.stride))


def _reach_on_gpu(
    grid: VoxelGrid, window: Window, torus: IndexRange | None, within: IndexRange | None = None, *, to_fine: bool
) -> torch.Tensor | None:
    """What the window reaches from a grid on a GPU, (M, 1+D) int32; None elsewhere, and where keys are too short."""
    if grid.device.type != "cuda" or len(grid) == 0:
        return None
    from sparseconv.geometry.gpu.reached.output_coords import reach  # Triton is loaded where it is used

    size = grid.batch_size, window.offsets, window.stride, torus
    return reach(grid.coords, grid.extent, *size, to_fine=to_fine, within=within)


def fits(coarse: VoxelGrid, fine: VoxelGrid, window: Window, boundary: Boundary) -> VoxelGrid:
    """The coarse voxels whose whole window lies in the extent under ``forbid``; under other boundaries all of them."""
    return coarse if boundary.kind != "forbid" else _whole(coarse, fine, window, boundary)


@transforms.constant
def _whole(coarse: VoxelGrid, fine: VoxelGrid, window: Window, boundary: Boundary) -> VoxelGrid:
    if coarse.count is not None:
        raise ValueError("a grid of fixed size cannot lose voxels, as it would under the boundary 'forbid'")
    extent = boundary.extent or fine.extent
    starts = window.projection(coarse.coords[:, 1:])
    ends = starts + _row(window.projection.shape, starts)
    whole = ((starts >= _row(extent.start, starts)) & (ends <= _row(extent.end, starts))).all(1)
    return coarse if bool(whole.all()) else coarse.subset(whole)


def check_pair(one: VoxelGrid, other: VoxelGrid) -> None:
    """Raise ValueError where two grids cannot be the two ends of one map."""
    for name in ("rank", "batch_size", "device"):
        a, b = getattr(one, name), getattr(other, name)
        if a != b:
            raise ValueError(f"source and target must have the same {name}; got {a} and {b}")
    if (one.count is None) != (other.count is None):
        raise ValueError(f"source and target must both be of fixed size, or neither; got {one} and {other}")


def _row(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def torus_of(fine: VoxelGrid | None, window: Window, boundary: Boundary) -> IndexRange | None:
    """The extent of a periodic boundary, checked against the grid and the stride; None for other boundaries."""
    if boundary.kind == "negative":
        raise ValueError("numpy's negative indices are for dense arrays: on a voxel grid -1 is a voxel")
    if boundary.kind != "periodic":
        return None
    extent = boundary.extent
    if extent is None:
        raise ValueError("a periodic boundary needs its extent: Boundary.periodic(shape or IndexRange)")
    if extent.rank != len(window.stride) or extent.size == 0:
        raise ValueError(f"a periodic extent must have {len(window.stride)} non-empty axes; got {extent}")
    uneven = [n for n, s in zip(extent.shape, window.stride) if n % s]
    if uneven:
        raise ValueError(f"the periodic extent {extent} must be a multiple of the stride {window.stride} on every axis")
    if fine is not None and not extent.encloses(fine.extent):
        raise ValueError(f"the grid's extent {fine.extent} leaves the periodic extent {extent}")
    return extent


def wrap(coords: torch.Tensor, torus: IndexRange | None) -> torch.Tensor:
    """Coords (M, 1+D) int64 folded into a torus."""
    if torus is None:
        return coords
    start = _row((0, *torus.start), coords)
    folded = (coords - start) % _row((1, *torus.shape), coords) + start
    folded[:, 0] = coords[:, 0]
    return folded


@lru_cache(maxsize=1024)
def _symmetry(window: Window, torus: IndexRange | None) -> tuple[int | None, tuple[int, ...] | None]:
    """The identity tap and the mirrored tap of each, for a window at stride 1 whose two sides are one grid."""
    if any(s != 1 for s in window.stride):
        return None, None

    def folded(offset: Sequence[int]) -> Ints:
        return tuple(offset) if torus is None else tuple(o % n for o, n in zip(offset, torus.shape))

    taps = {folded(offset): tap for tap, offset in reversed(list(enumerate(window.offsets)))}
    identity = taps.get(folded((0,) * len(window.stride)))
    opposite = [taps.get(folded([-o for o in offset])) for offset in window.offsets]
    return identity, None if None in opposite else tuple(t for t in opposite if t is not None)
