"""What is made of all rows of a scene: sums, maxima and statistics, block by block in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.ranges import IndexRange, per_axis
from sparseconv.trace.program import Step

#: what a block has found, to be joined with what the others have
Part = tuple[torch.Tensor, ...]


@dataclass(kw_only=True)
class Total(Step):
    """A value made of all rows of the step ``of``: `part` of each block's own rows, `join` of all parts in order."""

    of: int
    grid: int
    reads = ("of",)

    def part(self, rows: torch.Tensor, coords: torch.Tensor, batch_size: int) -> Part:
        """What rows (M, C) of voxels (M, 1+D) add to the total."""
        raise NotImplementedError

    def join(self, parts: list[Part], dtype: torch.dtype) -> Any:
        raise NotImplementedError

    def run(self, values: Any) -> Any:
        """Of the sample, whose values nobody keeps."""
        rows, grid = values[self.of], values[self.grid]
        return self.join([self.part(rows, grid.coords, grid.batch_size)], rows.dtype)


def sums_by_item(rows: torch.Tensor, items: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Rows (M, C) summed by batch item, (B, C), in a fixed order on every device."""
    if batch_size == 1:
        return rows.sum(0, keepdim=True)
    return torch.stack([rows[items == b].sum(0) for b in range(batch_size)])


@dataclass(kw_only=True)
class PooledItems(Total):
    """The sum, average or maximum of each batch item; sums in fp64, 0 for an empty item."""

    how: str

    def part(self, rows: torch.Tensor, coords: torch.Tensor, batch_size: int) -> Part:
        items = coords[:, 0].long()
        counts = torch.bincount(items, minlength=batch_size)
        if self.how != "max":
            return counts, sums_by_item(rows.double(), items, batch_size)
        if not len(rows):
            return counts, rows.new_zeros((batch_size, *rows.shape[1:]))
        most = [rows[items == b] for b in range(batch_size)]
        return counts, torch.stack([own.amax(0) if len(own) else rows.new_zeros(rows.shape[1:]) for own in most])

    def join(self, parts: list[Part], dtype: torch.dtype) -> torch.Tensor:
        counts, total = parts[0]
        for count, value in parts[1:]:
            if self.how == "max":
                filled = (counts > 0)[:, None], (count > 0)[:, None]
                both = torch.where(filled[1], torch.maximum(total, value), total)
                total = torch.where(filled[0], both, value)
            else:
                total = total + value
            counts = counts + count
        if self.how == "average":
            total = total / counts.clamp_min(1)[:, None]
        return total.to(dtype)


def moments(rows: torch.Tensor, items: torch.Tensor, batch_size: int) -> Part:
    """Count (B,), mean (B, C) and sum of squared distances from it (B, C) of each item, fp64."""
    rows = rows.double()
    counts = torch.bincount(items, minlength=batch_size)
    mean = sums_by_item(rows, items, batch_size) / counts.clamp_min(1)[:, None]
    apart = (rows - mean[items]).square()
    return counts, mean, sums_by_item(apart, items, batch_size)


def joined_moments(parts: list[Part]) -> Part:
    """Moments of all rows, from those of blocks, one after another (Chan, Golub and LeVeque, 1979)."""
    counts, mean, apart = parts[0]
    for count, other, spread in parts[1:]:
        both = counts + count
        share = (count.double() / both.clamp_min(1))[:, None]
        gap = other - mean
        apart = apart + spread + gap.square() * share * counts[:, None]
        mean, counts = mean + gap * share, both
    return counts, mean, apart


@dataclass(kw_only=True)
class BatchStatistics(Total):
    """Mean and variance (C,) of each channel over all rows, and the running ones that follow them."""

    running: tuple[torch.Tensor | None, torch.Tensor | None]
    momentum: float

    @property
    def moves(self) -> bool:
        """Whether running ones follow, also where no result is made of the norm."""
        return any(kept is not None for kept in self.running)

    def part(self, rows: torch.Tensor, coords: torch.Tensor, batch_size: int) -> Part:
        return moments(rows, coords.new_zeros(len(coords), dtype=torch.long), 1)

    def join(self, parts: list[Part], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        counts, mean, apart = joined_moments(parts)
        wide = torch.promote_types(dtype, torch.float32)
        return mean[0].to(wide), (apart[0] / counts.clamp_min(1)).to(wide)

    @torch.no_grad()
    def follow(self, parts: list[Part]) -> None:
        """Move the running statistics as torch does; one row has no variance, and leaves them."""
        counts, mean, apart = joined_moments(parts)
        if int(counts) < 2:
            return
        for kept, now in zip(self.running, (mean[0], apart[0] / (counts - 1))):
            if kept is not None:
                kept.mul_(1 - self.momentum).add_(now.to(kept), alpha=self.momentum)


def normed_rows(
    rows: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, differentiable in the statistics as well."""
    y = (rows - mean) * torch.rsqrt(var + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(rows.dtype)


@dataclass(kw_only=True)
class ItemStatistics(Total):
    """Mean and variance (B, G) of groups of channels over the voxels of each batch item."""

    groups: int

    def part(self, rows: torch.Tensor, coords: torch.Tensor, batch_size: int) -> Part:
        return moments(rows, coords[:, 0].long(), batch_size)

    def join(self, parts: list[Part], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        counts, mean, apart = joined_moments(parts)
        mean, apart = (m.unflatten(1, (self.groups, -1)) for m in (mean, apart))
        middle = mean.mean(2)
        between = (mean - middle[..., None]).square().mean(2)
        var = apart.sum(2) / (counts.clamp_min(1)[:, None] * mean.shape[2]) + between
        wide = torch.promote_types(dtype, torch.float32)
        return middle.to(wide), var.to(wide)


def standardised_rows(
    rows: torch.Tensor, coords: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, eps: float
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) by the statistics (B, G) of each row's batch item."""
    items = coords[:, 0].long()
    grouped = rows.unflatten(1, (mean.shape[1], -1))
    scale = torch.rsqrt(var + eps)
    return ((grouped - mean[items][..., None]) * scale[items][..., None]).flatten(1).to(rows.dtype)


@dataclass(kw_only=True)
class Dense(Total):
    """Rows in a dense array (B, C, *shape), on the CPU."""

    extent: Any

    def box(self, rank: int) -> IndexRange:
        given = self.extent
        return given if isinstance(given, IndexRange) else IndexRange.of_shape(per_axis(given, rank, "extent"))

    def run(self, values: Any) -> torch.Tensor:
        grid, rows = values[self.grid], values[self.of]
        return rows.new_zeros(1).expand(grid.batch_size, rows.shape[1], *self.box(grid.rank).shape)

    def part(self, rows: torch.Tensor, coords: torch.Tensor, batch_size: int) -> Part:
        rows, coords = (t.to("cpu", copy=True) for t in (rows, coords))  # of the block's own alone, where it is a view
        return rows, coords, torch.tensor(batch_size)

    def join(self, parts: list[Part], dtype: torch.dtype) -> torch.Tensor:
        rows, coords = (torch.cat([part[at] for part in parts]) for at in range(2))
        grid = VoxelGrid(coords, int(parts[0][2]))
        return grid.to_dense(rows, self.box(grid.rank))
