"""What ``import spconv.pytorch as spconv`` serves."""

from importlib import import_module

import torch

from sparseconv.interop.installing import resolve
from sparseconv.interop.spconv.core import ConvAlgo
from sparseconv.interop.spconv.pytorch import functional, ops
from sparseconv.interop.spconv.pytorch.conv import (
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConv4d,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseConvTranspose3d,
    SparseConvTranspose4d,
    SparseInverseConv1d,
    SparseInverseConv2d,
    SparseInverseConv3d,
    SparseInverseConv4d,
    SubMConv1d,
    SubMConv2d,
    SubMConv3d,
    SubMConv4d,
)
from sparseconv.interop.spconv.pytorch.core import SparseConvTensor
from sparseconv.interop.spconv.pytorch.identity import Identity
from sparseconv.interop.spconv.pytorch.modules import (
    SparseBatchNorm,
    SparseIdentity,
    SparseModule,
    SparseReLU,
    SparseSequential,
    SparseSyncBatchNorm,
    assign_name_for_sparse_modules,
)
from sparseconv.interop.spconv.pytorch.pool import (
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseAvgPool4d,
    SparseGlobalAvgPool,
    SparseGlobalMaxPool,
    SparseMaxPool1d,
    SparseMaxPool2d,
    SparseMaxPool3d,
    SparseMaxPool4d,
)
from sparseconv.interop.spconv.pytorch.tables import AddTable, AddTableMisaligned, ConcatTable, JoinTable
from sparseconv.interop.spconv.pytorch.tracing import leaf


class ToDense(SparseModule):
    """A `SparseConvTensor` -> dense (B, C, *spatial)."""

    def forward(self, x: SparseConvTensor) -> torch.Tensor:
        return x.dense() if isinstance(x, SparseConvTensor) else leaf(self, x)


class RemoveGrid(SparseModule):
    """Drop the ``grid`` attribute."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        if not isinstance(x, SparseConvTensor):
            return leaf(self, x)
        x.grid = None
        return x


for _name in ("hash", "spatial"):  # whose files lie beside this package
    resolve(f"{__name__}.{_name}", import_module(f"sparseconv.interop.spconv.{_name}"))

__all__ = [
    "AddTable",
    "AddTableMisaligned",
    "ConcatTable",
    "ConvAlgo",
    "Identity",
    "JoinTable",
    "RemoveGrid",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseAvgPool4d",
    "SparseBatchNorm",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTensor",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseGlobalAvgPool",
    "SparseGlobalMaxPool",
    "SparseIdentity",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
    "SparseModule",
    "SparseReLU",
    "SparseSequential",
    "SparseSyncBatchNorm",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
    "ToDense",
    "assign_name_for_sparse_modules",
    "functional",
    "ops",
]
