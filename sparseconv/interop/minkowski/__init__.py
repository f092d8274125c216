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
from sparseconv.interop.minkowski import common, coordinate_manager, features, sparse_tensor
from sparseconv.interop.minkowski.backend import cuda_version, cudart_version, get_gpu_memory_info, is_cuda_available
from sparseconv.interop.minkowski.common import *  # noqa: F403
from sparseconv.interop.minkowski.common import GPUMemoryAllocatorType
from sparseconv.interop.minkowski.coordinate_manager import *  # noqa: F403
from sparseconv.interop.minkowski.features import *  # noqa: F403
from sparseconv.interop.minkowski.features import add as sum
from sparseconv.interop.minkowski.layers import *  # noqa: F403
from sparseconv.interop.minkowski.sparse_tensor import *  # noqa: F403

#: the version whose surface this is
__version__ = "0.5.4"

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
    """Print what a bug report needs: machine, versions, and the GPU where there is one."""
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
    *common.__all__, *coordinate_manager.__all__, *features.__all__, *layers.__all__, *sparse_tensor.__all__,
    "MinkowskiFunctional", "MinkowskiOps", "cuda_version", "cudart_version", "get_gpu_memory_info", "install",
    "is_cuda_available", "modules", "print_diagnostics", "set_gpu_allocator", "set_memory_manager_backend", "sum",
    "uninstall", "utils",
]  # fmt: skip
