"""Dense arrays (B, C, *spatial) of the features of voxels, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparseconv import transforms
from sparseconv.checks import check_values, warn
from sparseconv.geometry.keys import KeySpace
from sparseconv.geometry.ranges import IndexRange, per_axis
from sparseconv.gpu.cuda_capability import has_kernels


def sites_of(dense: torch.Tensor, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The sites of dense (B, C, *spatial) where any channel is not zero: coords (N, 1+D) and features (N, C).

    ``rank`` is the number of spatial axes, where the caller says it.
    """
    check_values("dense", dense, "(B, C, *spatial)")
    if not 3 <= dense.ndim <= 6 or rank not in (None, dense.ndim - 2):
        axes = "1 to 4 spatial axes" if rank is None else f"rank={rank} spatial axes"
        raise ValueError(
            f"expected dense (B, C, *spatial) with {axes}; got {tuple(dense.shape)}: a volume without batch and "
            "channels is passed as dense[None, None]"
        )
    if rank is None and dense.ndim == 3 and not torch.compiler.is_compiling():
        items, channels, _ = dense.shape
        warn(
            f"dense {tuple(dense.shape)} is taken as {items} batch items of {channels} channels along one axis; a "
            "volume (D, H, W) is passed as dense[None, None]. If one axis is meant, pass rank=1"
        )
    sites = (dense != 0).any(1).nonzero()
    features = dense.movedim(1, -1)[tuple(sites.unbind(1))]
    return sites, features


def checked_box(grid: Any, features: torch.Tensor, extent: IndexRange | Sequence[int] | None) -> IndexRange:
    """The box of that many axes that ``extent`` means, the grid's own by default; features are (N, C)."""
    box = grid.extent if extent is None else extent
    box = box if isinstance(box, IndexRange) else IndexRange.of_shape(per_axis(box, grid.rank, "extent"))
    check_values("features", features, f"({len(grid)}, C)")
    if features.ndim != 2 or features.shape[0] != len(grid):
        raise ValueError(f"features must be ({len(grid)}, C); got {tuple(features.shape)}")
    if box.rank != grid.rank:
        raise ValueError(f"the grid's extent {grid.extent} leaves the box {box}, which does not have {grid.rank} axes")
    return box


def filled(features: torch.Tensor, coords: torch.Tensor, items: int, box: IndexRange) -> torch.Tensor:
    """Features (N, C) of voxels that lie within a box -> (B, C, *shape), zero elsewhere; differentiable."""
    transforms.check_not_recorded()
    if has_kernels(features.device) and not torch.compiler.is_compiling() and not transforms.present():
        dense = dense_on_gpu(features, coords, items, box)
        if dense is not None:
            return dense
    cells = KeySpace(box).keys(coords[:, 1:])
    dense = features.new_zeros(items, features.shape[1], box.size).movedim(1, -1)  # channels first in memory
    return dense.index_put((coords[:, 0].long(), cells), features).movedim(-1, 1).unflatten(2, box.shape)


def filled_within(features: torch.Tensor, coords: torch.Tensor, items: int, box: IndexRange) -> torch.Tensor:
    """`filled` by rows of which some may lie outside of the box, and are left out."""
    if has_kernels(features.device):
        dense = dense_on_gpu(features, coords, items, box)
        if dense is not None:
            return dense
    space = KeySpace(IndexRange((0, *box.start), (items, *box.end)))
    count = items * box.size
    keys = torch.where(space.contains(coords), space.keys(coords.long()), count)
    flat = features.new_zeros(count + 1, features.shape[1]).index_copy(0, keys, features)[:count]
    return flat.view(items, *box.shape, features.shape[1]).movedim(-1, 1)


def dense_on_gpu(features: torch.Tensor, coords: torch.Tensor, items: int, box: IndexRange) -> torch.Tensor | None:
    """`VoxelGrid.to_dense` by one kernel; None where it does not serve."""
    from sparseconv.geometry.gpu import dense  # Triton is loaded where it is used

    if not dense.serves(features, coords):
        return None
    return dense.to_dense(features, coords, dense.Box(items, box.start, box.shape))
