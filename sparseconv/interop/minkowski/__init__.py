"""MinkowskiEngine 0.5 by its own names, on sparseconv: change one import, keep the model and its weights.

    import sparseconv.interop.minkowski as ME

For code that cannot be edited, `install` makes ``import MinkowskiEngine`` resolve to this package.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import torch

from sparseconv.info import facts
from sparseconv.interop.installing import Names, moved
from sparseconv.interop.minkowski import functional as MinkowskiFunctional
from sparseconv.interop.minkowski import backend, blocks, layers, utils
from sparseconv.interop.minkowski.backend import cuda_version, cudart_version, get_gpu_memory_info, is_cuda_available
from sparseconv.interop.minkowski.common import (
    BroadcastMode, ConvolutionMode, CoordinateMapKey, CoordinateMapType, GPUMemoryAllocatorType, KernelGenerator,
    MinkowskiAlgorithm, PoolingMode, RegionType, SparseTensorOperationMode, SparseTensorQuantizationMode,
    convert_region_type, convert_to_int_list, convert_to_int_tensor, get_kernel_volume
)  # fmt: skip
from sparseconv.interop.minkowski.coordinate_manager import CoordinateManager
from sparseconv.interop.minkowski.features import (
    MinkowskiAdaptiveLogSoftmaxWithLoss, MinkowskiAlphaDropout, MinkowskiBatchNorm, MinkowskiCELU, MinkowskiDropout,
    MinkowskiELU, MinkowskiGELU, MinkowskiHardshrink, MinkowskiHardsigmoid, MinkowskiHardswish, MinkowskiHardtanh,
    MinkowskiInstanceNorm, MinkowskiInstanceNormFunction, MinkowskiLeakyReLU, MinkowskiLinear, MinkowskiLogSigmoid,
    MinkowskiLogSoftmax, MinkowskiNetwork, MinkowskiNonlinearityBase, MinkowskiPReLU, MinkowskiReLU, MinkowskiReLU6,
    MinkowskiRReLU, MinkowskiSELU, MinkowskiSigmoid, MinkowskiSiLU, MinkowskiSinusoidal, MinkowskiSoftmax,
    MinkowskiSoftmin, MinkowskiSoftplus, MinkowskiSoftshrink, MinkowskiSoftsign, MinkowskiSPMMAverageFunction,
    MinkowskiSPMMFunction, MinkowskiStableInstanceNorm, MinkowskiStackCat, MinkowskiStackMean, MinkowskiStackSum,
    MinkowskiStackVar, MinkowskiSyncBatchNorm, MinkowskiTanh, MinkowskiTanhshrink, MinkowskiThreshold,
    MinkowskiToDenseTensor, MinkowskiToFeature, MinkowskiToSparseTensor, _sum, cat, dense_coordinates, mean, spmm,
    to_sparse, to_sparse_all, var
)  # fmt: skip
from sparseconv.interop.minkowski.layers import (
    MinkowskiAvgPooling, MinkowskiBroadcast, MinkowskiBroadcastAddition, MinkowskiBroadcastConcatenation,
    MinkowskiBroadcastFunction, MinkowskiBroadcastMultiplication, MinkowskiChannelwiseConvolution, MinkowskiConvolution,
    MinkowskiConvolutionBase, MinkowskiConvolutionFunction, MinkowskiConvolutionTranspose,
    MinkowskiConvolutionTransposeFunction, MinkowskiDirectMaxPoolingFunction, MinkowskiGenerativeConvolutionTranspose,
    MinkowskiGlobalAvgPooling, MinkowskiGlobalMaxPooling, MinkowskiGlobalPooling, MinkowskiGlobalPoolingFunction,
    MinkowskiGlobalSumPooling, MinkowskiInterpolation, MinkowskiInterpolationFunction, MinkowskiLocalPoolingFunction,
    MinkowskiLocalPoolingTransposeFunction, MinkowskiMaxPooling, MinkowskiModuleBase, MinkowskiPoolingBase,
    MinkowskiPoolingTranspose, MinkowskiPruning, MinkowskiPruningFunction, MinkowskiSumPooling, MinkowskiUnion,
    MinkowskiUnionFunction
)  # fmt: skip
from sparseconv.interop.minkowski.sparse_tensor import (
    SparseTensor, TensorField, clear_global_coordinate_manager, global_coordinate_manager,
    set_global_coordinate_manager, set_sparse_tensor_operation_mode, sparse_tensor_operation_mode
)  # fmt: skip

#: the version whose surface this is
__version__ = "0.5.4"

sum = _sum

#: modules of MinkowskiEngine whose names this package has itself
_OWN = (
    *("MinkowskiBroadcast", "MinkowskiChannelwiseConvolution", "MinkowskiCommon", "MinkowskiConvolution"),
    *("MinkowskiCoordinateManager", "MinkowskiInterpolation", "MinkowskiKernelGenerator", "MinkowskiNetwork"),
    *("MinkowskiNonlinearity", "MinkowskiNormalization", "MinkowskiOps", "MinkowskiPooling", "MinkowskiPruning"),
    *("MinkowskiSparseTensor", "MinkowskiTensor", "MinkowskiTensorField", "MinkowskiUnion"),
    "sparse_matrix_functions",
)


class _Module(ModuleType):
    """A module of MinkowskiEngine: its names are those of this package."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(sys.modules[__package__], name)


_SUBMODULES: dict[str, ModuleType] = {name: _Module(f"{__name__}.{name}") for name in _OWN}
_SUBMODULES["MinkowskiFunctional"] = MinkowskiFunctional
MinkowskiOps = _SUBMODULES["MinkowskiOps"]


def set_gpu_allocator(backend: GPUMemoryAllocatorType) -> None:
    """Accepted, without effect: torch allocates."""


set_memory_manager_backend = set_gpu_allocator


def print_diagnostics() -> None:
    """Print what a bug report needs: machine, versions, and the card where there is one."""
    found = facts("cuda" if torch.cuda.is_available() else "cpu")
    sys.stdout.write(json.dumps(found, indent=1, default=str) + "\n")


modules = blocks
_NAMES = Names(
    "MinkowskiEngine",
    sys.modules[__name__],
    {
        **_SUBMODULES,
        **dict.fromkeys(("modules", "modules.resnet_block", "modules.senet_block"), blocks),
        "utils": utils,
        **{f"utils.{name}": utils for name in ("collation", "init", "quantization", "summary")},
        "utils.gradcheck": layers,
    },
    {"MinkowskiEngineBackend": backend, "MinkowskiEngineBackend._C": backend, **_SUBMODULES},
)

__getattr__ = moved(
    "MinkowskiEngine",
    {
        "CoordsKey": "it is CoordinateMapKey since version 0.5",
        "CoordsManager": "it is CoordinateManager since version 0.5",
        "KernelRegion": "it is KernelGenerator since version 0.5",
        "MemoryManagerBackend": "it is GPUMemoryAllocatorType since version 0.5",
        "clear_global_coords_man": "it is clear_global_coordinate_manager since version 0.5",
        "initialize_nthreads": "torch.set_num_threads sets the number of threads",
    },
)


install, uninstall = _NAMES.install, _NAMES.uninstall

__all__ = [
    "BroadcastMode", "ConvolutionMode", "CoordinateManager", "CoordinateMapKey", "CoordinateMapType",
    "GPUMemoryAllocatorType", "KernelGenerator", "MinkowskiAdaptiveLogSoftmaxWithLoss", "MinkowskiAlgorithm",
    "MinkowskiAlphaDropout", "MinkowskiAvgPooling", "MinkowskiBatchNorm", "MinkowskiBroadcast",
    "MinkowskiBroadcastAddition", "MinkowskiBroadcastConcatenation", "MinkowskiBroadcastFunction",
    "MinkowskiBroadcastMultiplication", "MinkowskiCELU", "MinkowskiChannelwiseConvolution", "MinkowskiConvolution",
    "MinkowskiConvolutionBase", "MinkowskiConvolutionFunction", "MinkowskiConvolutionTranspose",
    "MinkowskiConvolutionTransposeFunction", "MinkowskiDirectMaxPoolingFunction", "MinkowskiDropout", "MinkowskiELU",
    "MinkowskiFunctional", "MinkowskiGELU", "MinkowskiGenerativeConvolutionTranspose", "MinkowskiGlobalAvgPooling",
    "MinkowskiGlobalMaxPooling", "MinkowskiGlobalPooling", "MinkowskiGlobalPoolingFunction",
    "MinkowskiGlobalSumPooling", "MinkowskiHardshrink", "MinkowskiHardsigmoid", "MinkowskiHardswish",
    "MinkowskiHardtanh", "MinkowskiInstanceNorm", "MinkowskiInstanceNormFunction", "MinkowskiInterpolation",
    "MinkowskiInterpolationFunction", "MinkowskiLeakyReLU", "MinkowskiLinear", "MinkowskiLocalPoolingFunction",
    "MinkowskiLocalPoolingTransposeFunction", "MinkowskiLogSigmoid", "MinkowskiLogSoftmax", "MinkowskiMaxPooling",
    "MinkowskiModuleBase", "MinkowskiNetwork", "MinkowskiNonlinearityBase", "MinkowskiOps", "MinkowskiPReLU",
    "MinkowskiPoolingBase", "MinkowskiPoolingTranspose", "MinkowskiPruning", "MinkowskiPruningFunction",
    "MinkowskiRReLU", "MinkowskiReLU", "MinkowskiReLU6", "MinkowskiSELU", "MinkowskiSPMMAverageFunction",
    "MinkowskiSPMMFunction", "MinkowskiSiLU", "MinkowskiSigmoid", "MinkowskiSinusoidal", "MinkowskiSoftmax",
    "MinkowskiSoftmin", "MinkowskiSoftplus", "MinkowskiSoftshrink", "MinkowskiSoftsign", "MinkowskiStableInstanceNorm",
    "MinkowskiStackCat", "MinkowskiStackMean", "MinkowskiStackSum", "MinkowskiStackVar", "MinkowskiSumPooling",
    "MinkowskiSyncBatchNorm", "MinkowskiTanh", "MinkowskiTanhshrink", "MinkowskiThreshold", "MinkowskiToDenseTensor",
    "MinkowskiToFeature", "MinkowskiToSparseTensor", "MinkowskiUnion", "MinkowskiUnionFunction", "PoolingMode",
    "RegionType", "SparseTensor", "SparseTensorOperationMode", "SparseTensorQuantizationMode", "TensorField", "cat",
    "clear_global_coordinate_manager", "convert_region_type", "convert_to_int_list", "convert_to_int_tensor",
    "cuda_version", "cudart_version", "dense_coordinates", "get_gpu_memory_info", "get_kernel_volume",
    "global_coordinate_manager", "install", "is_cuda_available", "mean", "modules", "print_diagnostics",
    "set_global_coordinate_manager", "set_gpu_allocator", "set_memory_manager_backend",
    "set_sparse_tensor_operation_mode", "sparse_tensor_operation_mode", "spmm", "sum", "to_sparse", "to_sparse_all",
    "uninstall", "utils", "var",
]  # fmt: skip
