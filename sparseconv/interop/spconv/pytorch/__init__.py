"""What ``import spconv.pytorch as spconv`` serves."""

from sparseconv.interop.spconv.core import ConvAlgo
from sparseconv.interop.spconv.pytorch import functional, ops
from sparseconv.interop.spconv.pytorch.conv import (
    SparseConv1d, SparseConv2d, SparseConv3d, SparseConv4d, SparseConvTranspose1d, SparseConvTranspose2d,
    SparseConvTranspose3d, SparseConvTranspose4d, SparseInverseConv1d, SparseInverseConv2d, SparseInverseConv3d,
    SparseInverseConv4d, SubMConv1d, SubMConv2d, SubMConv3d, SubMConv4d
)  # fmt: skip
from sparseconv.interop.spconv.pytorch.core import SparseConvTensor
from sparseconv.interop.spconv.pytorch.modules import (
    AddTable, AddTableMisaligned, ConcatTable, Identity, JoinTable, RemoveGrid, SparseBatchNorm, SparseIdentity,
    SparseModule, SparseReLU, SparseSequential, SparseSyncBatchNorm, ToDense, assign_name_for_sparse_modules
)  # fmt: skip
from sparseconv.interop.spconv.pytorch.pool import (
    SparseAvgPool1d, SparseAvgPool2d, SparseAvgPool3d, SparseAvgPool4d, SparseGlobalAvgPool, SparseGlobalMaxPool,
    SparseMaxPool1d, SparseMaxPool2d, SparseMaxPool3d, SparseMaxPool4d
)  # fmt: skip

__all__ = [
    "AddTable", "AddTableMisaligned", "ConcatTable", "ConvAlgo", "Identity", "JoinTable", "RemoveGrid",
    "SparseAvgPool1d", "SparseAvgPool2d", "SparseAvgPool3d", "SparseAvgPool4d", "SparseBatchNorm", "SparseConv1d",
    "SparseConv2d", "SparseConv3d", "SparseConv4d", "SparseConvTensor", "SparseConvTranspose1d",
    "SparseConvTranspose2d", "SparseConvTranspose3d", "SparseConvTranspose4d", "SparseGlobalAvgPool",
    "SparseGlobalMaxPool", "SparseIdentity", "SparseInverseConv1d", "SparseInverseConv2d", "SparseInverseConv3d",
    "SparseInverseConv4d", "SparseMaxPool1d", "SparseMaxPool2d", "SparseMaxPool3d", "SparseMaxPool4d", "SparseModule",
    "SparseReLU", "SparseSequential", "SparseSyncBatchNorm", "SubMConv1d", "SubMConv2d", "SubMConv3d", "SubMConv4d",
    "ToDense", "assign_name_for_sparse_modules", "functional", "ops",
]  # fmt: skip
