"""Functions on sparse tensors."""

from __future__ import annotations

from functools import reduce

import torch

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.interop.spconv.pooled_pairs import (
    SparseAvgPoolImplicitGemmFunction,
    SparseMaxPoolFunction,
    SparseMaxPoolImplicitGemmFunction,
    indice_avgpool_implicit_gemm,
    indice_maxpool,
    indice_maxpool_implicit_gemm,
)
from sparseconv.interop.spconv.pytorch.core import SparseConvTensor
from sparseconv.interop.spconv.pytorch.geometry import Place
from sparseconv.interop.spconv.pytorch.tracing import recorded
from sparseconv.interop.spconv.rulebooks import (
    SparseConvFunction,
    SparseImplicitGemmFunction,
    SparseInverseConvFunction,
    SubMConvFunction,
    implicit_gemm,
    indice_conv,
    indice_inverse_conv,
    indice_subm_conv,
)

__all__ = [
    "SparseAvgPoolImplicitGemmFunction",
    "SparseConvFunction",
    "SparseImplicitGemmFunction",
    "SparseInverseConvFunction",
    "SparseMaxPoolFunction",
    "SparseMaxPoolImplicitGemmFunction",
    "SubMConvFunction",
    "implicit_gemm",
    "indice_avgpool_implicit_gemm",
    "indice_conv",
    "indice_inverse_conv",
    "indice_maxpool",
    "indice_maxpool_implicit_gemm",
    "indice_subm_conv",
    "sparse_add",
    "sparse_add_hash_based",
]


def sparse_add(*tens: SparseConvTensor) -> SparseConvTensor:
    """The sum of tensors at any indices, over the union of them, in lexicographic order; differentiable.

    All must have one spatial shape, batch size and width. Where the union is the indices of one of them, what its keys
    remember is kept.
    """
    if not all(isinstance(t, SparseConvTensor) for t in tens):
        if (node := recorded(sparse_add, tens)) is not None:
            return node
        raise TypeError(f"sparse_add takes SparseConvTensors; got {[type(t).__name__ for t in tens]}")
    if not tens:
        raise TypeError("sparse_add takes one SparseConvTensor or more; got none")
    first = tens[0]
    for t in tens:
        t.to_sparse_tensor()  # which says where features are not (N, C), one row an index
    for other in tens[1:]:
        mine, theirs = ((t.spatial_shape, t.batch_size, t.features.shape[1], t.features.device) for t in (first, other))
        if mine != theirs:
            raise ValueError(
                f"tensors must agree in spatial shape, batch size, channels and device; got {mine} and {theirs}"
            )
    union = first.inside
    for other in tens[1:]:
        union = union.union(_beside(union, other.inside))
    union, _ = union.sorted("lexicographic")
    rows = [union.lookup(t.voxels.coords) for t in tens]
    dtype = reduce(torch.promote_types, (t.features.dtype for t in tens))
    total = first.features.new_zeros(len(union), first.features.shape[1], dtype=dtype)
    for t, at in zip(tens, rows):
        total = total.index_add(0, at, t.features.to(total.dtype))
    largest = max(range(len(tens)), key=lambda i: len(tens[i].voxels))
    if len(tens[largest].voxels) == len(union):
        return tens[largest].replace_feature(total[rows[largest]])
    return first.replace_feature(total)._leave_keys()._at(Place(None, 0, union))


def _beside(grid: VoxelGrid, other: VoxelGrid) -> VoxelGrid:
    """``other`` in the space of ``grid``: of two grids in one spatial shape, one may know that it is coarser."""
    if (grid.voxel_size, grid.origin) == (other.voxel_size, other.origin):
        return other
    return VoxelGrid(other.coords, other.batch_size, grid.voxel_size, grid.origin)


#: the same sum; in spconv the two differ in how they find the union
sparse_add_hash_based = sparse_add
