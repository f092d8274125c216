"""Modules of voxels alone."""

from __future__ import annotations

import torch

from sparseconv.interop.spconv.pytorch.core import SparseConvTensor
from sparseconv.interop.spconv.pytorch.modules import SparseModule
from sparseconv.interop.spconv.pytorch.tracing import leaf


class RemoveDuplicate(SparseModule):
    """Keep the first row of each voxel; features of the others are left out."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        if not isinstance(x, SparseConvTensor):
            return leaf(self, x)
        _, found = torch.unique(x.indices, dim=0, return_inverse=True)
        count = int(found.max()) + 1 if len(found) else 0
        first = torch.full((count,), len(found), dtype=torch.int64, device=found.device)
        first.scatter_reduce_(0, found, torch.arange(len(found), device=found.device), "amin")
        rows = first.sort().values
        return SparseConvTensor(x.features[rows], x.indices[rows], x.spatial_shape, x.batch_size, x.grid)
