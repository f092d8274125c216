"""Collation, quantisation, initialisation and summaries, by their names in ``MinkowskiEngine.utils``."""

from sparseconv.interop.minkowski.utils.collation import (
    SparseCollation,
    batch_sparse_collate,
    batched_coordinates,
    sparse_collate,
)
from sparseconv.interop.minkowski.utils.init import kaiming_normal_
from sparseconv.interop.minkowski.utils.quantization import (
    fnv_hash_vec,
    ravel_hash_vec,
    sparse_quantize,
    unique_coordinate_map,
)
from sparseconv.interop.minkowski.utils.summary import summary

__all__ = [
    "SparseCollation",
    "batch_sparse_collate",
    "batched_coordinates",
    "fnv_hash_vec",
    "kaiming_normal_",
    "ravel_hash_vec",
    "sparse_collate",
    "sparse_quantize",
    "summary",
    "unique_coordinate_map",
]
