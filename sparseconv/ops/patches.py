"""Rows in patches of one size, and attention within each patch.

An item of n > K rows takes ceil(n / K) patches of K slots. Slots behind its last row borrow the rows K places before:
row l + K >= n, for as long as the patch lasts. They are keys and queries there too, and their results are left. An item
of n <= K rows is a patch by itself, whose empty slots nobody sees.

Source: Wu et al., Point Transformer V3: Simpler, Faster, Stronger, 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sparseconv import transforms
from sparseconv.checks import INTEGERS, check_count, check_tensor, row
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import Ints, per_axis
from sparseconv.ops.items import split_sizes
from sparseconv.ops.rows import check_grid, check_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int64, Integer, Shaped

#: patches of one call of torch's attention, whose kernels count them in 16 bits
PATCHES_A_CALL = 1 << 15
#: numbers that rows of a mask begin at multiples of, for torch not to copy it
ALIGNED = 8
#: items that are laid out one by one, where the CPU knows their rows
MOST_ITEMS = 8


class Patches:
    """A division of rows into patches for attention, and a mask of the slots that attend to each other.

    Make it by `Patches.along` for the batch items of a grid, by `Patches.windows` for windows.

    Args:
        counts: (B,) integers, rows of each item.
        size: slots of a patch, K.
        num_patches: P, at least as many as the items take; those left over are patches of row 0 that nobody reads.
        num_rows: N, at least as many as the items have.

    Attributes:
        size: slots of a patch.
        num_patches: patches.
        num_rows: N.
        places: (patches * slots,) int64: the place among the items' rows that each slot shows.
        slots: (N,) int64: the slot of each place.
        seen: (patches, slots) bool, whether others in the patch see a slot; None where all do.

    >>> patches = Patches(torch.tensor([5, 1]), size=2, num_patches=4, num_rows=6)
    >>> patches.places.view(4, 2).tolist()
    [[0, 1], [2, 3], [4, 3], [5, 5]]
    >>> patches.seen[-1].tolist(), patches.slots.tolist()
    ([True, False], [0, 1, 2, 3, 4, 6])
    """

    @transforms.constant
    def __init__(
        self, counts: Integer[torch.Tensor, " B"], size: int, num_patches: int, num_rows: int, *, all_seen: bool = False
    ) -> None:
        check_tensor("counts", counts)
        if counts.dtype not in INTEGERS:
            raise TypeError(f"counts must be integers; got {counts.dtype}")
        check_count("size", size, 1)
        self.size, self.num_patches, self.num_rows, self.device = size, num_patches, num_rows, counts.device
        counts = counts.long()
        taken = (counts + size - 1) // size
        ends, rows_before = taken.cumsum(0), counts.cumsum(0) - counts
        patch = torch.arange(num_patches, device=self.device)
        item = torch.searchsorted(ends, patch, right=True).clamp_max(max(0, len(counts) - 1))
        own, before = (values.index_select(0, item)[:, None] for values in (counts, rows_before))
        place = (patch - (ends - taken).index_select(0, item))[:, None] * size
        place = place + torch.arange(size, device=self.device)
        shown = before + torch.where(place < own, place, place - size).clamp_min(0)
        spare = (patch >= (ends[-1] if len(ends) else 0))[:, None]
        self.places = torch.where(spare, 0, shown).flatten()
        self.seen = None if all_seen else (place < own) | (own >= size) | spare
        place = torch.arange(num_rows, device=self.device)
        owner = torch.searchsorted(rows_before + counts, place, right=True)
        held = owner < len(counts)
        owner = owner.clamp_max(max(0, len(counts) - 1))
        moved = place + ((ends - taken) * size - rows_before).index_select(0, owner) if len(counts) else place
        self.slots = torch.where(held, moved, 0)

    @staticmethod
    def along(grid: VoxelGrid, size: int, *, shrink: bool = False) -> Patches:
        """Patches of the batch items of a grid, for its rows along a curve; kept with the grid.

        Args:
            grid: whose items are cut.
            size: slots of a patch, K; less where no item has as many rows.
            shrink: use smaller patches where an item has fewer rows, as many slots as the smallest item has rows.

        >>> grid = VoxelGrid(torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 0, 1]]))
        >>> Patches.along(grid, 48).num_patches, Patches.along(grid, 48, shrink=True).size
        (2, 2)
        """
        check_grid(grid)
        check_count("size", size, 1)
        key = ("patches", size, shrink)
        kept = grid.derived.get(key)
        if kept is None:
            if grid.count is not None:
                if shrink:
                    raise ValueError("a grid of fixed size cannot shrink patches: the CPU knows no item's rows")
                size = min(size, len(grid))
                kept = Patches(grid.batch_counts, size, len(grid) // size + grid.batch_size, len(grid))
            else:
                sizes = split_sizes(grid)
                taken = [n for n in sizes if n]
                held = taken or [1]
                size = min(size, *held) if shrink else min(size, max(held))  # no slots that no item fills
                most = sum((n + size - 1) // size for n in sizes)
                full = all(n == 0 or n >= size for n in sizes)
                if full and 1 <= len(taken) <= MOST_ITEMS:
                    kept = _of_known(taken, size, most, grid.device)
                else:
                    kept = Patches(grid.batch_counts, size, most, len(grid), all_seen=full)
            grid.derived[key] = kept
        return kept

    @staticmethod
    def windows(
        grid: VoxelGrid, size: int | Sequence[int], shift: int | Sequence[int] = 0
    ) -> tuple[Patches, Int64[torch.Tensor, " N"], Int64[torch.Tensor, " N"]]:
        """A patch for each window floor((c + shift) / size) that holds a voxel; kept with the grid.

        Args:
            grid: whose voxels are grouped, not one of fixed size.
            size: voxels of a window along each axis, one number or one per axis.
            shift: of the windows' corners, in voxels.

        Returns:
            (patches, order, inverse), as `split` and `join` take them. All patches have as many slots as the fullest
            window has voxels.

        >>> grid = VoxelGrid(torch.tensor([[0, 0], [0, 5], [0, 1], [0, 2]]))
        >>> patches, order, _ = Patches.windows(grid, 2)
        >>> order.tolist(), patches.num_patches, patches.size
        ([0, 2, 3, 1], 3, 2)
        """
        check_grid(grid)
        if grid.count is not None or grid.is_shared:
            raise ValueError("windows are grouped on ordinary grids alone: the CPU must know how many there are")
        sizes, shifts = per_axis(size, grid.rank, "size", 1), per_axis(shift, grid.rank, "shift")
        key = ("windows", sizes, shifts)
        kept: tuple[Patches, torch.Tensor, torch.Tensor] | None = grid.derived.get(key)
        if kept is None:
            kept = grid.derived[key] = _windows(grid.coords, sizes, shifts)
        return kept

    def split(
        self, x: Shaped[torch.Tensor, "N C"], order: Integer[torch.Tensor, " N"] | None = None
    ) -> Shaped[torch.Tensor, "patches slots C"]:
        """Features (N, C) -> (patches, slots, C); ``order`` (N,) integers is the row at each place.

        A row is shown by two slots at most that others see, so gradients are the same bits in every run.
        """
        check_rows("x", x, self.num_rows, "voxel", self.device, "the patches")
        return x.index_select(0, self.rows(order)).unflatten(0, (self.num_patches, self.size))

    def rows(self, order: Integer[torch.Tensor, " N"] | None = None) -> Int64[torch.Tensor, " patches*slots"]:
        """(patches * slots,) int64: the row that each slot shows."""
        return self.places if order is None else self._of_rows("order", order).index_select(0, self.places)

    def join(
        self, y: Shaped[torch.Tensor, "patches slots C"], inverse: Integer[torch.Tensor, " N"] | None = None
    ) -> Shaped[torch.Tensor, "N C"]:
        """The results of slots (patches, slots, C) -> (N, C); ``inverse`` (N,) integers is the place of each row."""
        if y.shape[:2] != (self.num_patches, self.size):
            raise ValueError(f"y must be ({self.num_patches}, {self.size}, C), slots of patches; got {tuple(y.shape)}")
        slots = self.slots if inverse is None else self.slots.index_select(0, self._of_rows("inverse", inverse))
        return y.flatten(0, 1).index_select(0, slots)

    def _of_rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape != (self.num_rows,):
            raise ValueError(f"{name} must be ({self.num_rows},), a number for each row; got {tuple(rows.shape)}")
        return rows

    def attend(
        self,
        q: Float[torch.Tensor, "patches H slots C"],
        k: Float[torch.Tensor, "patches H slots C"],
        v: Float[torch.Tensor, "patches H slots C"],
        *,
        bias: Float[torch.Tensor, "patches H slots slots"] | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> Float[torch.Tensor, "patches H slots C"]:
        """Softmax attention within each patch, by torch's `scaled_dot_product_attention`.

            y[p, h, i] = sum over the slots j of p that are seen of softmax(scale * <q[i], k[j]> + bias[i, j]) * v[j]

        Args:
            q, k, v: (patches, H, slots, C), heads first.
            bias: (patches, H, slots, slots), added to the logits.
            scale: default 1 / sqrt(C).
            dropout: share of the weights that are dropped.

        Returns:
            (patches, H, slots, C). Torch chooses the kernel, which says which derivatives there are: within
            `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` those of any order.
        """
        mask = self._mask(q, bias)
        if not self.num_patches:
            return v * 1
        if self.num_patches <= PATCHES_A_CALL:  # without parts, whose gradients torch would copy together
            return _attention(q, k, v, mask=mask, dropout=dropout, scale=scale)
        parts = zip(*(t.split(PATCHES_A_CALL) for t in (q, k, v)))
        masks = iter(() if mask is None else mask.split(PATCHES_A_CALL))
        return torch.cat([_attention(*part, mask=next(masks, None), dropout=dropout, scale=scale) for part in parts])

    def _mask(self, q: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """What is added to the logits, of the dtype that they are computed in; None for nothing.

        Slots that nobody sees get -inf. Where that is all, it is one row per patch for all rows: of a mask of
        booleans torch would make numbers for every pair of slots, and keep them for the gradients.
        """
        empty = None if self.seen is None else ~self.seen[:, None, None]
        if bias is not None:
            bias = bias.to(q.dtype)
            return bias if empty is None else bias.masked_fill(empty, -torch.inf)
        if empty is None:
            return None
        is_lowered = torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64
        dtype = torch.get_autocast_dtype(q.device.type) if is_lowered else q.dtype
        wide = -(-self.size // ALIGNED) * ALIGNED
        added = torch.zeros((self.num_patches, 1, 1, wide), dtype=dtype, device=q.device)[..., : self.size]
        return added.masked_fill_(empty, -torch.inf).expand(-1, -1, self.size, -1)


@transforms.constant
def _of_known(counts: Sequence[int], size: int, num_patches: int, device: torch.device) -> Patches:
    """`Patches` of items of ``size`` rows or more, which the CPU knows: three launches per item, not thirty in all."""
    made, rows, slot = object.__new__(Patches), 0, 0
    places, slots = [], []
    for n in counts:
        end, spare = rows + n, -n % size
        borrowed = torch.arange(end - size, end - size + spare, device=device)
        places += [torch.arange(rows, end, device=device), borrowed]
        slots.append(torch.arange(slot, slot + n, device=device))
        rows, slot = end, slot + n + spare
    made.size, made.num_patches, made.num_rows, made.device = size, num_patches, rows, device
    made.places, made.slots, made.seen = torch.cat(places), torch.cat(slots), None
    return made


@transforms.constant
def _windows(coords: torch.Tensor, sizes: Ints, shifts: Ints) -> tuple[Patches, torch.Tensor, torch.Tensor]:
    moved = coords.long() + row((0, *shifts), coords)
    windows, owner, counts = torch.unique(
        torch.div(moved, row((1, *sizes), coords), rounding_mode="floor"),
        dim=0,
        return_inverse=True,
        return_counts=True,
    )
    order = torch.argsort(owner, stable=True)
    places = torch.arange(len(coords), device=coords.device)
    most = int(counts.max()) if len(coords) else 1
    return Patches(counts, most, len(windows), len(coords)), order, torch.empty_like(order).scatter_(0, order, places)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None, dropout: float, scale: float | None
) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)
