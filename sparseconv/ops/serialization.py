"""Voxels in a row along space-filling curves, batch item by batch item.

    z        bits of the axes in turn, the first axis highest
    hilbert  neighbors on the curve are neighbors in space
    -trans   the same curve with the first two axes exchanged

A curve visits all children of a coarse cell before it goes on: the code of ``c >> 1`` is that of c without its last D
bits. So a coarser grid has the order of its parts.

Sources: Morton, 1966; Skilling, Programming the Hilbert curve, 2004; for the orders of point transformers Wu et al.,
Point Transformer V3, 2024, whose codes these are, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING

import torch

from sparseconv import transforms
from sparseconv.checks import INTEGERS, bounds, check_choice, check_count, check_values
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.ops.rows import check_grid, on_kernels
from sparseconv.torch_private import exporting, leave_to_python

if TYPE_CHECKING:
    from jaxtyping import Bool, Int64, Integer

#: names of the curves
ORDERS = ("z", "z-trans", "hilbert", "hilbert-trans")
#: bits of a code, whose sign is not used
BITS = 63
#: the largest code, of rows that no scene has
LAST = (1 << BITS) - 1
#: bits on each axis: a number that the CPU knows, or one on the device, () int64
Depth = int | torch.Tensor


def serial_codes(coords: Integer[torch.Tensor, "N 1+D"], order: str = "z", *, depth: int) -> Int64[torch.Tensor, " N"]:
    """The position of each voxel along a space-filling curve.

    Args:
        coords: (N, 1+D) integers, D from 1 to 4: the batch item (>= 0), then voxel indices in 0 .. 2^depth - 1.
        order: ``"z"``, ``"hilbert"``, or one of them with ``"-trans"``.
        depth: bits on each axis, >= 0.

    Returns:
        (N,) int64: the batch item above depth * D bits of the curve; distinct for distinct voxels.

    Raises:
        TypeError: coords are not integers.
        ValueError: another order, voxels outside of the curve, or more than 63 bits.

    >>> coords = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0]])
    >>> serial_codes(coords, "z", depth=1).tolist(), serial_codes(coords, "hilbert", depth=1).tolist()
    ([0, 1, 2, 3, 4], [0, 1, 3, 2, 4])
    """
    check_values("coords", coords, "(N, 1+D) integers")
    if coords.dtype not in INTEGERS:
        raise TypeError(f"coords must be integers; got {coords.dtype}")
    if coords.ndim != 2 or not 2 <= coords.shape[1] <= 5:
        raise ValueError(f"coords must be (N, 1+D), D from 1 to 4, the batch first; got {tuple(coords.shape)}")
    low, high = bounds(coords)
    rank = coords.shape[1] - 1
    _check_curve(order, rank)
    if low and low[0] < 0:
        raise ValueError(f"batch items (column 0 of coords) start at 0; got {low[0]}")
    _check_depth(depth, min(low[1:], default=0), max(high[1:], default=0), rank, high[0] if high else 0, False)
    return _codes_of(coords, (order,), depth, depth, False)[0]


@dataclass(frozen=True)
class Serialization:
    """Orders of one grid's voxels; make it by `serialize`.

    Attributes:
        orders: names of the curves.
        codes: one (N,) int64 for each curve: `serial_codes`.
        order: one (N,) int64 for each curve: the rows along it, item after item.
        inverse: one (N,) int64 for each curve: the place of each row.
        depth: bits on each axis.
        signed: whether voxels lie below 0, which moves all of them up by half of the curve's edge, 2^(depth - 1).

    >>> curves = serialize(VoxelGrid(torch.tensor([[0, 0, 1], [0, 1, 0]])), ("z", "z-trans"))
    >>> [order.tolist() for order in curves.order]
    [[0, 1], [1, 0]]
    """

    orders: tuple[str, ...]
    codes: tuple[Int64[torch.Tensor, " N"], ...]
    order: tuple[Int64[torch.Tensor, " N"], ...]
    inverse: tuple[Int64[torch.Tensor, " N"], ...]
    depth: Depth
    signed: bool | Bool[torch.Tensor, ""]

    def coarser(self, grid: VoxelGrid, levels: int, rows: Integer[torch.Tensor, " N_out"]) -> Serialization:
        """The same curves over the coarse voxels c >> levels.

        ``grid`` holds them in any order. ``rows`` (N,) integers names for each of them a row here that lies in it.
        """
        check_count("levels", levels)
        depth = self.depth - levels
        if isinstance(depth, torch.Tensor):
            depth = torch.maximum(depth, torch.as_tensor(self.signed).to(depth.dtype))
        else:
            depth = max(depth, int(self.signed))
        shift = (self.depth - depth) * grid.rank
        codes = torch.stack(self.codes).index_select(1, rows) >> shift
        if grid.count is not None:
            codes = torch.where(grid.coords[:, 0] < 0, LAST, codes)
        return _of(self.orders, _sorted(codes), depth, self.signed)

    def shuffled(self) -> Serialization:
        """The curves in random order, drawn by torch's generator of the CPU, or of the GPU in a captured step."""
        if torch.compiler.is_dynamo_compiling():
            leave_to_python("which curve comes first is drawn on the CPU")
        curves = list(zip(self.codes, self.order, self.inverse))
        if isinstance(self.depth, torch.Tensor):
            turn = torch.rand(len(curves), device=self.depth.device).argsort()
            codes, order, inverse = (torch.stack(rows)[turn].unbind() for rows in zip(*curves))
            return Serialization(self.orders, codes, order, inverse, self.depth, self.signed)
        turns = torch.randperm(len(curves)).tolist()
        return _of(tuple(self.orders[t] for t in turns), [curves[t] for t in turns], self.depth, self.signed)


def serialize(
    grid: VoxelGrid, orders: Sequence[str] | str = ("z", "z-trans"), depth: int | None = None
) -> Serialization:
    """The voxels of a grid along one or several curves.

    Args:
        grid: of any rank, device and order of rows. Sorting is torch's, on the grid's device.
        orders: names of curves, see `serial_codes`.
        depth: bits on each axis; default: those of the largest index + 1, and a bit more where an index is negative.
            The direction of a Hilbert curve depends on it.

    Returns:
        A `Serialization`; each curve is kept with the grid and found once.

    Raises:
        ValueError: another name, a depth that is too small for the voxels, or one that needs more than 63 bits.

    >>> grid = VoxelGrid(torch.tensor([[0, 1, 1], [0, 0, 1], [0, 1, 0], [0, 0, 0]]))
    >>> curves = serialize(grid, ("z", "hilbert"), depth=1)
    >>> curves.order[0].tolist(), curves.order[1].tolist(), curves.inverse[1].tolist()
    ([3, 1, 2, 0], [3, 1, 0, 2], [2, 1, 3, 0])
    """
    if torch.compiler.is_dynamo_compiling() and not exporting():
        leave_to_python("the curves of a grid depend on where its voxels lie")
    check_grid(grid)
    if grid.is_shared:
        raise ValueError("curves over shards are not supported: each process would have to know all voxels")
    names = (orders,) if isinstance(orders, str) else tuple(orders)
    if not names:
        raise ValueError("orders must name at least one curve")
    for name in names:
        _check_curve(name, grid.rank)
    if grid.count is not None:
        return _serialized(grid, names, *_measured(grid, depth))
    low, high = min(grid.extent.start), max(grid.extent.end)
    if depth is None:
        depth = high.bit_length() if low >= 0 else 1 + max(high, -low).bit_length()
    signed = low < 0
    _check_depth(depth, low, high - bool(len(grid)), grid.rank, grid.batch_size - 1, signed)
    return _serialized(grid, names, depth, signed)


def _check_curve(order: str, rank: int) -> None:
    check_choice("order", order, ORDERS)
    if rank == 1 and order.endswith("-trans"):
        raise ValueError(f"{order!r} exchanges the first two axes, and there is one: use {order[:-6]!r}")


def _check_depth(depth: int, low: int, high: int, rank: int, last_item: int, signed: bool) -> None:
    """Raise ValueError unless the curve holds low .. high, and its code 63 bits."""
    check_count("depth", depth)
    half = 1 << depth >> 1 if signed else 0
    if low < -half or high >= (1 << depth) - half:
        raise ValueError(
            f"a curve of depth {depth} holds indices {-half} .. {(1 << depth) - half - 1}, but the voxels reach from "
            f"{low} to {high}: give a larger depth, or move them to the origin"
        )
    if depth * rank + int(last_item).bit_length() > BITS:
        raise ValueError(
            f"depth {depth} on {rank} axes and batch items up to {last_item} need "
            f"{depth * rank + int(last_item).bit_length()} bits, a code has {BITS}: use larger voxels, a smaller "
            "extent or fewer items"
        )


def _measured(grid: VoxelGrid, depth: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Depth and sign, () on the device, of a grid whose number of rows the CPU does not know."""
    voxels = grid.coords[:, 1:].masked_fill(grid.coords[:, :1] < 0, 0).long()
    low, high = voxels.amin().clamp_max(0), voxels.amax() + 1
    signed = low < 0
    if depth is not None:
        return torch.full_like(high, depth), signed
    reach = torch.where(signed, torch.maximum(high, -low), high)
    bits = (reach >> torch.arange(32, device=grid.device) > 0).sum()
    return bits + signed, signed


@transforms.constant
def _serialized(grid: VoxelGrid, names: tuple[str, ...], depth: Depth, signed: bool | torch.Tensor) -> Serialization:
    """Curves whose names and depth are known to fit."""
    if isinstance(depth, torch.Tensor):
        return _of(names, _sorted(_codes_of(grid.coords, names, depth, _most(grid), signed)), depth, signed)
    keys = [("curve", name, depth) for name in names]
    missing = [name for name, key in zip(names, keys) if key not in grid.derived]
    if missing:
        made = _sorted(_codes_of(grid.coords, missing, depth, depth, signed))
        grid.derived.update((("curve", name, depth), curve) for name, curve in zip(missing, made))
    return _of(names, [grid.derived[key] for key in keys], depth, signed)


def _most(grid: VoxelGrid) -> int:
    """The largest depth that voxels within the box of a grid of fixed size ask for."""
    return min(1 + max(*grid.extent.end, *(-v for v in grid.extent.start)).bit_length(), BITS // grid.rank)


def _of(
    orders: tuple[str, ...],
    curves: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    depth: Depth,
    signed: bool | torch.Tensor,
) -> Serialization:
    codes, order, inverse = zip(*curves)
    return Serialization(orders, codes, order, inverse, depth, signed)


def _sorted(codes: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Codes (M, N) -> for each curve its codes, the rows in their order, and the place of each row."""
    # a GPU sorts all curves by one call; a CPU sorts a single row faster, digit by digit
    rows = torch.argsort(codes) if codes.is_cuda else torch.stack([torch.argsort(row) for row in codes])
    places = torch.arange(codes.shape[1], device=codes.device).expand_as(rows)
    places = torch.empty_like(rows).scatter_(1, rows, places)
    return list(zip(codes.unbind(), rows.unbind(), places.unbind()))


def _codes_of(
    coords: torch.Tensor, orders: Sequence[str], depth: Depth, most: int, signed: bool | torch.Tensor
) -> torch.Tensor:
    """`_codes` (M, N) of several curves; by one launch on a GPU."""
    if coords.dtype == torch.int32 and on_kernels(coords):
        from sparseconv.ops.gpu.curves import codes  # Triton is loaded where it is used

        return codes(coords, orders, depth, signed)
    return torch.stack([_codes(coords, order, depth, most, signed) for order in orders])


def _codes(coords: torch.Tensor, order: str, depth: Depth, most: int, signed: bool | torch.Tensor) -> torch.Tensor:
    """`serial_codes` of coords that fit; ``most`` is the largest depth that may be, rows of item -1 come last."""
    rank = coords.shape[1] - 1
    voxels = coords[:, 1:].long()
    if signed is not False:
        half = (torch.ones_like(voxels[:1, :1]) << depth) >> 1 & LAST  # of 63 bits, the first shift sets the sign
        voxels = voxels + half * torch.as_tensor(signed, device=voxels.device)
    axes = list(voxels.unbind(1))
    if order.endswith("-trans"):
        axes[0], axes[1] = axes[1], axes[0]
    hilbert = order.startswith("hilbert")
    if hilbert:
        axes = _turned(axes, depth, most)
    code = torch.zeros_like(axes[0])
    for number, axis in enumerate(starmap(_spread, ((axis, rank) for axis in axes))):
        code |= axis << (rank - 1 - number)
    if hilbert:  # a Gray code -> the number whose code it is
        for shift in (1, 2, 4, 8, 16, 32):
            code ^= code >> shift
    items = coords[:, 0].long()
    code |= items << depth * rank
    return code if isinstance(depth, int) else torch.where(items < 0, LAST, code)


def _turned(axes: list[torch.Tensor], depth: Depth, most: int) -> list[torch.Tensor]:
    """Each level's cell in the directions in which the curve runs there, from the coarsest level down.

    Where an axis has its bit, the first axis is mirrored below this level; where not, both are exchanged there.
    """
    axes = list(axes)
    for level in range(most - 1, 0, -1):
        below: int | torch.Tensor = (1 << level) - 1
        if isinstance(depth, torch.Tensor):
            below = below * (depth > level)
        for number, axis in enumerate(axes):
            on = (axis >> level) & 1
            exchanged = (axes[0] ^ axis) & (on - 1) & below
            axes[number] = axis ^ exchanged
            axes[0] = axes[0] ^ (-on & below | exchanged)
    return axes


def _spread(values: torch.Tensor, rank: int) -> torch.Tensor:
    """Bit b of each number at bit b * rank, by halves, quarters and so on."""
    for width in (16, 8, 4, 2, 1) if rank > 1 else ():
        blocks = sum(((1 << width) - 1) << at for at in range(0, BITS, rank * width))
        values = (values | values << width * (rank - 1)) & (blocks & LAST)
    return values
