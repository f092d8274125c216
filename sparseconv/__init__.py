"""Sparse convolution with plan objects: plan once, execute many times.

>>> import torch, sparseconv as sc
>>> grid, point_rows = sc.voxelize(torch.rand(1000, 3), voxel_size=0.1)
>>> plan = sc.ConvolutionPlan(grid, kernel_size=3)
>>> y = plan.execute(torch.randn(len(grid), 16), torch.randn(27, 16, 32))
>>> y.shape == (len(grid), 32)
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.serialization import add_safe_globals

import sparseconv.export  # noqa: F401 (registers the operators that exported programs call)
from sparseconv.geometry import Boundary, IndexProjection, IndexRange, KernelMap, VoxelGrid, voxelize
from sparseconv.geometry.window import Window
from sparseconv.plan import ConvolutionPlan, PlanSet
from sparseconv.tensor import SparseTensor

if TYPE_CHECKING:
    from sparseconv import distributed as distributed
    from sparseconv import export as export
    from sparseconv import geometry as geometry
    from sparseconv import interop as interop
    from sparseconv import nn as nn
    from sparseconv import ops as ops
    from sparseconv import pointwise as pointwise
    from sparseconv import products as products
    from sparseconv import quantization as quantization
    from sparseconv import viz as viz
    from sparseconv.nn import accelerate as accelerate
    from sparseconv.quantization import quantize as quantize
    from sparseconv.streaming import stream as stream

__version__ = "0.1.0"

__all__ = [
    "Boundary",
    "ConvolutionPlan",
    "IndexProjection",
    "IndexRange",
    "KernelMap",
    "SparseTensor",
    "VoxelGrid",
    "voxelize",
]

#: public modules; each is loaded when it is first used
MODULES = ("distributed", "export", "geometry", "interop", "nn", "ops", "pointwise", "products", "quantization", "viz")

#: public functions of these modules, loaded with them
FUNCTIONS = {"accelerate": "nn", "quantize": "quantization", "stream": "streaming"}


#: what ``torch.load(weights_only=True)`` may make: each checks what a file says of it
add_safe_globals(
    [Boundary, ConvolutionPlan, IndexProjection, IndexRange, KernelMap, PlanSet, SparseTensor, VoxelGrid, Window]
)


def __getattr__(name: str) -> Any:
    if name in FUNCTIONS:
        return getattr(import_module(f"{__name__}.{FUNCTIONS[name]}"), name)
    if name in MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *FUNCTIONS, *MODULES, "__version__"])
