"""From a window to the edges between two grids, and to the grid that a window reaches."""

from __future__ import annotations

import torch

from sparseconv import transforms
from sparseconv.checks import close, row
from sparseconv.geometry.coord_ops import reached, unique_coords
from sparseconv.geometry.cpu import compiled
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.geometry.ranges import DENSE_KINDS, Boundary, IndexRange, check_box, outside
from sparseconv.geometry.window import Window, symmetry
from sparseconv.gpu.cuda_capability import has_kernels
from sparseconv.gpu.streams import map_stream


@transforms.constant
def find_edges(fine: VoxelGrid, coarse: VoxelGrid, window: Window, boundary: Boundary) -> KernelMap:
    """The map fine -> coarse of every (tap, fine row, coarse row) that the window joins.

    Equal coordinates on two grids are not enough for an identity tap: it is known where both are one grid object and
    a tap's offset is zero.
    """
    if coarse is not fine:
        check_pair(fine, coarse, window)
    if fine.on_host is not None and coarse.on_host is not None:
        return find_edges(fine.on_host, coarse.on_host, window, boundary).to(fine.device)
    torus = torus_of(fine, window, boundary)
    if torus is not None:
        check_coarse(coarse, window, torus)
    identity, mirror = None, None
    if coarse is fine:
        identity, mirror = window.symmetry if torus is None else symmetry(window, torus)
    sizes = len(fine), len(coarse), len(window.offsets)
    if has_kernels(fine.device):
        from sparseconv.geometry.gpu.edge_lists import find_edges_on_gpu  # Triton is loaded where it is used

        most = None if fine.count is None else fine.most_pairs(coarse, window, boundary)  # type: ignore[attr-defined]
        with map_stream() as streams:
            source = find_edges_on_gpu(fine, coarse.coords, window, torus, most)
        found = KernelMap(*sizes, source=source, identity_tap=identity, mirror=mirror)
        if streams is not None:
            streams.keep(found)
        if fine.count is not None:
            found.num_pairs = fine.pairs_like(coarse, window, boundary)  # type: ignore[attr-defined]
        return found
    if torus is None and compiled.serves(fine):
        pairs = compiled.find_edges(fine, coarse, window)
        if pairs is not None:
            return KernelMap(*sizes, pairs=pairs, identity_tap=identity, mirror=mirror)
    queries = coarse.coords.long()
    table = torch.empty(len(window.offsets), len(queries), dtype=torch.int32, device=fine.device)
    for tap in range(len(table)):
        table[tap] = fine.lookup(wrap(window.fine(queries, tap), torus))
    return KernelMap(*sizes, neighbors=table, identity_tap=identity, mirror=mirror)


@transforms.untraced
@transforms.constant
def coarse_grid(
    fine: VoxelGrid,
    window: Window,
    boundary: Boundary,
    within: IndexRange | None = None,
    ends: torch.Tensor | None = None,
) -> VoxelGrid:
    """Every coarse voxel that sees a fine one, in lexicographic order; under ``forbid``, those whose window fits; of
    these the ones ``within`` a box, which of a grid of fixed size ends at ``ends`` (D,) int32 on the device."""
    if fine.count is not None:
        return fine.reached(window, boundary, within, ends, to_fine=False)  # type: ignore[attr-defined]
    if fine.on_host is not None:
        return coarse_grid(fine.on_host, window, boundary, within).to(fine.device)
    torus = torus_of(fine, window, boundary)
    return fits(_reached_grid(fine, window, torus, within, to_fine=False), fine, window, boundary)


@transforms.untraced
@transforms.constant
def fine_grid(coarse: VoxelGrid, window: Window, boundary: Boundary) -> VoxelGrid:
    """Every fine voxel that a coarse one sees, in lexicographic order; under ``forbid``, within the extent."""
    if coarse.on_host is not None:
        return fine_grid(coarse.on_host, window, boundary).to(coarse.device)
    torus = torus_of(None, window, boundary)
    if torus is not None:
        check_coarse(coarse, window, torus)
    if coarse.count is not None:
        return coarse.reached(window, boundary, to_fine=True)  # type: ignore[attr-defined]
    within = boundary.extent if boundary.kind == "forbid" else None
    if boundary.kind == "forbid" and within is None:
        raise ValueError("a generative transposed plan under 'forbid' needs Boundary.forbid(extent)")
    return _reached_grid(coarse, window, torus, within, to_fine=True)


def _reached_grid(
    grid: VoxelGrid, window: Window, torus: IndexRange | None, within: IndexRange | None, *, to_fine: bool
) -> VoxelGrid:
    """What the window reaches from a grid, ``within`` a box; ``torus`` is that of the fine voxels."""
    known, fills = grid.known_box
    box = window.fine_extent(known) if to_fine else window.coarse_bounds(known)
    if within is not None:
        whole, box = within.encloses(box), box.intersect(within)
        within = None if whole else within
    scale = tuple(1 / s if to_fine else float(s) for s in window.stride)
    folded, found = torus if to_fine else window.coarse_torus(torus), None
    if len(grid) and has_kernels(grid.device):
        from sparseconv.geometry.gpu.reached import reach  # Triton is loaded where it is used

        size = grid.batch_size, window.offsets, window.stride, folded
        found = reach(grid.coords, known, *size, to_fine=to_fine, within=within)
    if found is not None and torus is None and not grid.is_shared and len(found):
        made = grid._known(found, box, scale, fills and within is None and (to_fine or window.sees_all))
        made.hash_table  # noqa: B018 (on its way)
        return made
    if torus is None and len(grid) and not grid.is_shared and not outside(box) and compiled.serves(grid):
        listed = compiled.reached_voxels(grid, window, box, to_fine=to_fine)
        if listed is not None:
            return grid._known(*listed, scale, True)
    if found is None:  # past the keys of a GPU, on a torus, and where no compiled loop serves
        coords = grid.coords if to_fine else wrap(grid.coords.long(), torus)
        found = unique_coords(reached(coords, window, to_fine=to_fine, torus=folded, within=within))
    return grid._like(found, scale)


def fits(coarse: VoxelGrid, fine: VoxelGrid, window: Window, boundary: Boundary) -> VoxelGrid:
    """The coarse voxels whose whole window lies in the extent under ``forbid``; under other boundaries all of them."""
    return coarse if boundary.kind != "forbid" else _whole(coarse, fine, window, boundary)


@transforms.constant
def _whole(coarse: VoxelGrid, fine: VoxelGrid, window: Window, boundary: Boundary) -> VoxelGrid:
    if coarse.count is not None:
        raise ValueError("a grid of fixed size cannot lose voxels, as it would under the boundary 'forbid'")
    extent = boundary.extent or fine.extent
    starts = window.projection(coarse.coords[:, 1:])
    ends = starts + row(window.projection.shape, starts)
    whole = ((starts >= row(extent.start, starts)) & (ends <= row(extent.end, starts))).all(1)
    return coarse if bool(whole.all()) else coarse.subset(whole)


def inside(fine: VoxelGrid, boundary: Boundary) -> VoxelGrid:
    """A given fine grid; ValueError where ``forbid`` has an extent that it leaves."""
    extent = boundary.extent if boundary.kind == "forbid" else None
    if extent is not None and not extent.encloses(fine.extent):
        raise ValueError(f"the target's extent {fine.extent} leaves {extent}, and the boundary forbids indices outside")
    return fine


def check_pair(fine: VoxelGrid, coarse: VoxelGrid, window: Window) -> None:
    """Raise ValueError where two grids cannot be the two ends of one map."""
    for name in ("rank", "batch_size", "device"):
        a, b = getattr(fine, name), getattr(coarse, name)
        if a != b:
            raise ValueError(f"source and target must have the same {name}; got {a} and {b}")
    if (fine.count is None) != (coarse.count is None):
        raise ValueError(f"source and target must both be of fixed size, or neither; got {fine} and {coarse}")
    if fine.is_placed and coarse.is_placed:
        size = tuple(v * s for v, s in zip(fine.voxel_size, window.stride))
        if not (close(size, coarse.voxel_size, size) and close(fine.origin, coarse.origin, size)):
            raise ValueError(
                f"at stride {window.stride}, fine voxels of size {fine.voxel_size} with origin {fine.origin} meet "
                f"coarse ones of size {size} with that origin; got {coarse.voxel_size} and {coarse.origin}. Give the "
                "target those, or neither voxel_size nor origin"
            )


def check_coarse(coarse: VoxelGrid, window: Window, torus: IndexRange) -> None:
    """Raise ValueError where coarse voxels lie outside of their torus: two of them would then be one."""
    folded = window.coarse_torus(torus)
    if folded is not None and not folded.encloses(coarse.extent):
        raise ValueError(
            f"the coarse voxels' extent {coarse.extent} leaves {folded}, the periodic extent {torus} at stride "
            f"{window.stride}"
        )


def torus_of(fine: VoxelGrid | None, window: Window, boundary: Boundary) -> IndexRange | None:
    """The extent of a periodic boundary, checked against the grid and the stride; None for other boundaries."""
    if boundary.kind in DENSE_KINDS:
        raise ValueError(
            f"the boundary {boundary.kind!r} is for dense arrays, where an axis has ends: on a voxel grid -1 is a voxel"
        )
    if boundary.kind != "periodic":
        return None
    extent = boundary.extent
    if extent is None:
        raise ValueError("a periodic boundary needs its extent: Boundary.periodic(shape or IndexRange)")
    if extent.rank != len(window.stride) or extent.size == 0:
        raise ValueError(f"a periodic extent must have {len(window.stride)} non-empty axes; got {extent}")
    check_box(extent, "a periodic extent")
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
    start = row((0, *torus.start), coords)
    folded = (coords - start) % row((1, *torus.shape), coords) + start
    folded[:, 0] = coords[:, 0]
    return folded
