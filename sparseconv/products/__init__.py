"""Sparse scale and the seven sparse products: gather, multiply, sum in segments; differentiable to any order."""

from sparseconv.products.build import (
    backward_infos,
    sparse_product_info,
    sparse_product_infos,
    sparse_scale_info,
    sparse_scale_infos,
)
from sparseconv.products.classes import (
    SparseInner,
    SparseMatTVec,
    SparseMul,
    SparseOuter,
    SparseScale,
    SparseScaVec,
    SparseVecMat,
    SparseVecSca,
)
from sparseconv.products.functional import (
    sparse_inner,
    sparse_mat_t_vec,
    sparse_mul,
    sparse_outer,
    sparse_scale,
    sparse_scavec,
    sparse_vecmat,
    sparse_vecsca,
)
from sparseconv.products.info import SparseProductInfo, SparseScaleInfo

__all__ = [
    "SparseInner",
    "SparseMatTVec",
    "SparseMul",
    "SparseOuter",
    "SparseProductInfo",
    "SparseScaVec",
    "SparseScale",
    "SparseScaleInfo",
    "SparseVecMat",
    "SparseVecSca",
    "backward_infos",
    "sparse_inner",
    "sparse_mat_t_vec",
    "sparse_mul",
    "sparse_outer",
    "sparse_product_info",
    "sparse_product_infos",
    "sparse_scale",
    "sparse_scale_info",
    "sparse_scale_infos",
    "sparse_scavec",
    "sparse_vecmat",
    "sparse_vecsca",
]
