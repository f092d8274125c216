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
from sparseconv.interop.minkowski import backend, modules, utils
from sparseconv.interop.minkowski.backend import (
    cuda_version,
    cudart_version,
    get_gpu_memory_info,
    is_cuda_available,
)
from sparseconv.interop.minkowski.coordinate_manager import (
    CoordinateManager,
)
from sparseconv.interop.minkowski.kernel_generator import (
    KernelGenerator,
    convert_region_type,
    get_kernel_volume,
)
from sparseconv.interop.minkowski.keys import (
    CoordinateMapKey,
)
from sparseconv.interop.minkowski.kinds import (
    BroadcastMode,
    ConvolutionMode,
    CoordinateMapType,
    GPUMemoryAllocatorType,
    MinkowskiAlgorithm,
    PoolingMode,
    RegionType,
    SparseTensorOperationMode,
    SparseTensorQuantizationMode,
    convert_to_int_list,
    convert_to_int_tensor,
)
from sparseconv.interop.minkowski.modules import resnet_block, senet_block
from sparseconv.interop.minkowski.nn import functional as MinkowskiFunctional
from sparseconv.interop.minkowski.nn.broadcast import (
    MinkowskiBroadcast,
    MinkowskiBroadcastAddition,
    MinkowskiBroadcastConcatenation,
    MinkowskiBroadcastFunction,
    MinkowskiBroadcastMultiplication,
)
from sparseconv.interop.minkowski.nn.convolution import (
    MinkowskiChannelwiseConvolution,
    MinkowskiConvolution,
    MinkowskiConvolutionBase,
    MinkowskiConvolutionFunction,
    MinkowskiConvolutionTranspose,
    MinkowskiConvolutionTransposeFunction,
    MinkowskiGenerativeConvolutionTranspose,
    MinkowskiModuleBase,
)
from sparseconv.interop.minkowski.nn.nonlinearity import (
    MinkowskiAdaptiveLogSoftmaxWithLoss,
    MinkowskiAlphaDropout,
    MinkowskiCELU,
    MinkowskiDropout,
    MinkowskiELU,
    MinkowskiGELU,
    MinkowskiHardshrink,
    MinkowskiHardsigmoid,
    MinkowskiHardswish,
    MinkowskiHardtanh,
    MinkowskiLeakyReLU,
    MinkowskiLogSigmoid,
    MinkowskiLogSoftmax,
    MinkowskiNonlinearityBase,
    MinkowskiPReLU,
    MinkowskiReLU,
    MinkowskiReLU6,
    MinkowskiRReLU,
    MinkowskiSELU,
    MinkowskiSigmoid,
    MinkowskiSiLU,
    MinkowskiSinusoidal,
    MinkowskiSoftmax,
    MinkowskiSoftmin,
    MinkowskiSoftplus,
    MinkowskiSoftshrink,
    MinkowskiSoftsign,
    MinkowskiTanh,
    MinkowskiTanhshrink,
    MinkowskiThreshold,
)
from sparseconv.interop.minkowski.nn.normalization import (
    MinkowskiBatchNorm,
    MinkowskiInstanceNorm,
    MinkowskiInstanceNormFunction,
    MinkowskiStableInstanceNorm,
    MinkowskiSyncBatchNorm,
)
from sparseconv.interop.minkowski.nn.operations import (
    MinkowskiLinear,
    MinkowskiNetwork,
    MinkowskiStackCat,
    MinkowskiStackMean,
    MinkowskiStackSum,
    MinkowskiStackVar,
    MinkowskiToDenseTensor,
    MinkowskiToFeature,
    MinkowskiToSparseTensor,
    _sum,
    cat,
    dense_coordinates,
    mean,
    to_sparse,
    to_sparse_all,
    var,
)
from sparseconv.interop.minkowski.nn.pooling import (
    MinkowskiAvgPooling,
    MinkowskiDirectMaxPoolingFunction,
    MinkowskiGlobalAvgPooling,
    MinkowskiGlobalMaxPooling,
    MinkowskiGlobalPooling,
    MinkowskiGlobalPoolingFunction,
    MinkowskiGlobalSumPooling,
    MinkowskiLocalPoolingFunction,
    MinkowskiLocalPoolingTransposeFunction,
    MinkowskiMaxPooling,
    MinkowskiPoolingBase,
    MinkowskiPoolingTranspose,
    MinkowskiSumPooling,
)
from sparseconv.interop.minkowski.nn.voxels import (
    MinkowskiInterpolation,
    MinkowskiInterpolationFunction,
    MinkowskiPruning,
    MinkowskiPruningFunction,
    MinkowskiUnion,
    MinkowskiUnionFunction,
)
from sparseconv.interop.minkowski.products import (
    MinkowskiSPMMAverageFunction,
    MinkowskiSPMMFunction,
    spmm,
)
from sparseconv.interop.minkowski.sparse_tensor import (
    SparseTensor,
    TensorField,
)
from sparseconv.interop.minkowski.tensor import (
    clear_global_coordinate_manager,
    global_coordinate_manager,
    set_global_coordinate_manager,
    set_sparse_tensor_operation_mode,
    sparse_tensor_operation_mode,
)
from sparseconv.interop.minkowski.utils import collation, gradcheck, init, quantization

#: the version whose surface this is
__version__ = "0.5.4"

sum = _sum

#: modules of MinkowskiEngine whose names this package has itself
_OWN = (
    "MinkowskiBroadcast",
    "MinkowskiChannelwiseConvolution",
    "MinkowskiCommon",
    "MinkowskiConvolution",
    "MinkowskiCoordinateManager",
    "MinkowskiInterpolation",
    "MinkowskiKernelGenerator",
    "MinkowskiNetwork",
    "MinkowskiNonlinearity",
    "MinkowskiNormalization",
    "MinkowskiOps",
    "MinkowskiPooling",
    "MinkowskiPruning",
    "MinkowskiSparseTensor",
    "MinkowskiTensor",
    "MinkowskiTensorField",
    "MinkowskiUnion",
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


_NAMES = Names(
    "MinkowskiEngine",
    sys.modules[__name__],
    {
        **_SUBMODULES,
        "modules": modules,
        "modules.resnet_block": resnet_block,
        "modules.senet_block": senet_block,
        "utils": utils,
        "utils.collation": collation,
        "utils.gradcheck": gradcheck,
        "utils.init": init,
        "utils.quantization": quantization,
        "utils.summary": sys.modules[utils.summary.__module__],
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


def install(*, force: bool = False) -> None:
    """Make ``import MinkowskiEngine`` resolve to this package in this process.

    So do its submodules, ``MinkowskiEngineBackend._C``, and the modules that MinkowskiEngine puts beside itself,
    ``MinkowskiOps`` and the like.

    Raises:
        RuntimeError: the real MinkowskiEngine is imported already; ``force=True`` hides it until `uninstall`.

    >>> install(force=True)
    >>> import MinkowskiEngine as ME
    >>> ME.MinkowskiConvolution.__module__
    'sparseconv.interop.minkowski.nn.convolution'
    >>> uninstall()
    """
    _NAMES.install(force)


def uninstall() -> None:
    """Undo `install`: take its names away, and give a library that it replaced its own back."""
    _NAMES.uninstall()


__all__ = [
    "BroadcastMode",
    "ConvolutionMode",
    "CoordinateManager",
    "CoordinateMapKey",
    "CoordinateMapType",
    "GPUMemoryAllocatorType",
    "KernelGenerator",
    "MinkowskiAdaptiveLogSoftmaxWithLoss",
    "MinkowskiAlgorithm",
    "MinkowskiAlphaDropout",
    "MinkowskiAvgPooling",
    "MinkowskiBatchNorm",
    "MinkowskiBroadcast",
    "MinkowskiBroadcastAddition",
    "MinkowskiBroadcastConcatenation",
    "MinkowskiBroadcastFunction",
    "MinkowskiBroadcastMultiplication",
    "MinkowskiCELU",
    "MinkowskiChannelwiseConvolution",
    "MinkowskiConvolution",
    "MinkowskiConvolutionBase",
    "MinkowskiConvolutionFunction",
    "MinkowskiConvolutionTranspose",
    "MinkowskiConvolutionTransposeFunction",
    "MinkowskiDirectMaxPoolingFunction",
    "MinkowskiDropout",
    "MinkowskiELU",
    "MinkowskiFunctional",
    "MinkowskiGELU",
    "MinkowskiGenerativeConvolutionTranspose",
    "MinkowskiGlobalAvgPooling",
    "MinkowskiGlobalMaxPooling",
    "MinkowskiGlobalPooling",
    "MinkowskiGlobalPoolingFunction",
    "MinkowskiGlobalSumPooling",
    "MinkowskiHardshrink",
    "MinkowskiHardsigmoid",
    "MinkowskiHardswish",
    "MinkowskiHardtanh",
    "MinkowskiInstanceNorm",
    "MinkowskiInstanceNormFunction",
    "MinkowskiInterpolation",
    "MinkowskiInterpolationFunction",
    "MinkowskiLeakyReLU",
    "MinkowskiLinear",
    "MinkowskiLocalPoolingFunction",
    "MinkowskiLocalPoolingTransposeFunction",
    "MinkowskiLogSigmoid",
    "MinkowskiLogSoftmax",
    "MinkowskiMaxPooling",
    "MinkowskiModuleBase",
    "MinkowskiNetwork",
    "MinkowskiNonlinearityBase",
    "MinkowskiOps",
    "MinkowskiPReLU",
    "MinkowskiPoolingBase",
    "MinkowskiPoolingTranspose",
    "MinkowskiPruning",
    "MinkowskiPruningFunction",
    "MinkowskiRReLU",
    "MinkowskiReLU",
    "MinkowskiReLU6",
    "MinkowskiSELU",
    "MinkowskiSPMMAverageFunction",
    "MinkowskiSPMMFunction",
    "MinkowskiSiLU",
    "MinkowskiSigmoid",
    "MinkowskiSinusoidal",
    "MinkowskiSoftmax",
    "MinkowskiSoftmin",
    "MinkowskiSoftplus",
    "MinkowskiSoftshrink",
    "MinkowskiSoftsign",
    "MinkowskiStableInstanceNorm",
    "MinkowskiStackCat",
    "MinkowskiStackMean",
    "MinkowskiStackSum",
    "MinkowskiStackVar",
    "MinkowskiSumPooling",
    "MinkowskiSyncBatchNorm",
    "MinkowskiTanh",
    "MinkowskiTanhshrink",
    "MinkowskiThreshold",
    "MinkowskiToDenseTensor",
    "MinkowskiToFeature",
    "MinkowskiToSparseTensor",
    "MinkowskiUnion",
    "MinkowskiUnionFunction",
    "PoolingMode",
    "RegionType",
    "SparseTensor",
    "SparseTensorOperationMode",
    "SparseTensorQuantizationMode",
    "TensorField",
    "cat",
    "clear_global_coordinate_manager",
    "convert_region_type",
    "convert_to_int_list",
    "convert_to_int_tensor",
    "cuda_version",
    "cudart_version",
    "dense_coordinates",
    "get_gpu_memory_info",
    "get_kernel_volume",
    "global_coordinate_manager",
    "install",
    "is_cuda_available",
    "mean",
    "modules",
    "print_diagnostics",
    "set_global_coordinate_manager",
    "set_gpu_allocator",
    "set_memory_manager_backend",
    "set_sparse_tensor_operation_mode",
    "sparse_tensor_operation_mode",
    "spmm",
    "sum",
    "to_sparse",
    "to_sparse_all",
    "uninstall",
    "utils",
    "var",
]
