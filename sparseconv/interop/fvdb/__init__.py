"""fVDB's convolution plans by its own names, on sparseconv: grids of indices, jagged rows, plans and their layers.

    from sparseconv.interop import fvdb
    from sparseconv.interop.fvdb import ConvolutionPlan, GridBatch, JaggedTensor

For code that cannot be edited, `install` makes ``import fvdb`` resolve to this package.
"""

from __future__ import annotations

import sys

from sparseconv.interop.fvdb import convolution_plan, grid_batch, jagged_tensor, nn
from sparseconv.interop.fvdb.convolution_plan import (
    ConvolutionCoverageReport, ConvolutionCoverageWarning, ConvolutionPhasePolicy, ConvolutionPlan,
    ConvolutionTopologyPolicy, ConvolutionTopologyProvenance, ConvolutionTransformCompatibility
)  # fmt: skip
from sparseconv.interop.fvdb.grid_batch import GridBatch
from sparseconv.interop.fvdb.jagged_tensor import JaggedTensor
from sparseconv.interop.installing import Names, moved

_NAMES = Names(
    "fvdb",
    sys.modules[__name__],
    {
        "convolution_plan": convolution_plan,
        "enums": convolution_plan,
        "grid_batch": grid_batch,
        "jagged_tensor": jagged_tensor,
        "nn": nn,
        "nn.modules": nn,
    },
)

_PLAN = "ConvolutionPlan.from_grid_batch(kernel_size, stride, grid) is its plan, plan.execute(data, weights) its run"
__getattr__ = moved(
    "fvdb",
    {
        "SparseConvPackInfo": _PLAN,
        "sparse_conv_kernel_map": _PLAN,
        "gridbatch_from_ijk": "GridBatch.from_ijk(ijk, voxel_sizes, origins)",
        "sparse_grid_from_ijk": "GridBatch.from_ijk(ijk, voxel_sizes, origins)",
        "JaggedTensorBackend": "JaggedTensor",
    },
)


install, uninstall = _NAMES.install, _NAMES.uninstall

__all__ = [
    "ConvolutionCoverageReport", "ConvolutionCoverageWarning", "ConvolutionPhasePolicy", "ConvolutionPlan",
    "ConvolutionTopologyPolicy", "ConvolutionTopologyProvenance", "ConvolutionTransformCompatibility", "GridBatch",
    "JaggedTensor", "install", "nn", "uninstall",
]  # fmt: skip
