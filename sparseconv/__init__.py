"""Sparse convolution with plan objects: plan once, execute many times.

>>> import torch, sparseconv as sc
>>> grid, point_rows = sc.voxelize(torch.rand(1000, 3), voxel_size=0.1)
>>> plan = sc.ConvolutionPlan(grid, kernel_size=3)
>>> y = plan.execute(torch.randn(len(grid), 16), torch.randn(27, 16, 32))
>>> y.shape == (len(grid), 32)
True
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any


def _prints_help(argv: list[str]) -> bool:
    """Whether this process is the ``sparseconv`` command and only prints its help or version, without torch.

    >>> _prints_help(["bin/sparseconv", "convert", "--help"]), _prints_help(["train.py", "--help"])
    (True, False)
    """
    command = bool(argv) and (argv[0] == "-m" or Path(argv[0]).stem == "sparseconv")
    return command and (argv[1:] in ([], ["--version"]) or "--help" in argv[1:])


if TYPE_CHECKING:
    from sparseconv import distributed as distributed
    from sparseconv import export as export
    from sparseconv import geometry as geometry
    from sparseconv import interop as interop
    from sparseconv import nn as nn
    from sparseconv import ops as ops
    from sparseconv import plan as plan
    from sparseconv import pointwise as pointwise
    from sparseconv import products as products
    from sparseconv import quantization as quantization
    from sparseconv import viz as viz
    from sparseconv.geometry import Boundary, IndexProjection, IndexRange, KernelMap, VoxelGrid
    from sparseconv.geometry.voxelize import voxelize
    from sparseconv.nn import accelerate as accelerate
    from sparseconv.plan import ConvolutionPlan
    from sparseconv.quantization import quantize as quantize
    from sparseconv.streaming import stream as stream
    from sparseconv.tensor import SparseTensor

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
MODULES = (
    *("distributed", "export", "geometry", "interop", "nn", "ops"),
    *("plan", "pointwise", "products", "quantization", "viz"),
)

#: public functions of these modules, loaded with them
FUNCTIONS = {"accelerate": "nn", "quantize": "quantization", "stream": "streaming"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        rooms = (import_module(f"{__name__}.{room}") for room in ("geometry", "plan", "tensor"))
        return next(getattr(room, name) for room in rooms if hasattr(room, name))
    if name in FUNCTIONS:
        return getattr(import_module(f"{__name__}.{FUNCTIONS[name]}"), name)
    if name in MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *FUNCTIONS, *MODULES, "__version__"])


if not _prints_help(sys.argv):
    from torch.serialization import add_safe_globals

    from sparseconv.geometry.window import Window
    from sparseconv.plan import PlanSet

    import_module(f"{__name__}.operators")  # registers those of convolutions
    import_module(f"{__name__}.export")  # and those that exported programs call
    globals().update({name: __getattr__(name) for name in __all__})
    #: what ``torch.load(weights_only=True)`` may construct: each of them checks what a file claims
    add_safe_globals([*(thing for thing in map(__getattr__, __all__) if isinstance(thing, type)), PlanSet, Window])
