"""Operations with FlexGEMM's names."""

from sparseconv.interop.flex_gemm.ops import grid_sample, serialize, spconv

__all__ = ["grid_sample", "serialize", "spconv"]
