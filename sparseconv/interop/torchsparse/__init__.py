"""torchsparse by its own names, on sparseconv: change one import, keep the model and its weights.

    import sparseconv.interop.torchsparse as torchsparse
    import sparseconv.interop.torchsparse.nn as spnn

For code that cannot be edited, `install` makes ``import torchsparse`` resolve to this package. Coordinates are those of
version 2.1, the batch first; `set_version` chooses those of 1.4 and 2.0.
"""

from __future__ import annotations

import sys

from sparseconv.interop.installing import Names, moved
from sparseconv.interop.torchsparse import backbones, backend, backends, conventions, nn, operators, tensor, utils
from sparseconv.interop.torchsparse.backbones import blocks, networks
from sparseconv.interop.torchsparse.conventions import set_version
from sparseconv.interop.torchsparse.nn import bev, conv_config, functional, modules
from sparseconv.interop.torchsparse.nn import utils as nn_utils
from sparseconv.interop.torchsparse.operators import cat, generative_add
from sparseconv.interop.torchsparse.tensor import PointTensor, SparseTensor
from sparseconv.interop.torchsparse.utils import collate, quantize
from sparseconv.interop.torchsparse.utils import tune as tuning
from sparseconv.interop.torchsparse.utils.tune import tune

#: the version whose surface this is
__version__ = "2.1.0"


#: by torchsparse's names
_MODULES = {
    "backbones": backbones,
    "backbones.modules": blocks,
    "backbones.modules.blocks": blocks,
    "backbones.resnet": networks,
    "backbones.unet": networks,
    "backend": backend,
    "backends": backends,
    "nn": nn,
    "nn.functional": functional,
    **{
        f"nn.functional.{name}": functional
        for name in ("activation", "conv", "count", "crop", "devoxelize", "hash", "pooling", "query", "voxelize")
    },
    "nn.functional.downsample": functional,
    "nn.functional.conv.conv_config": conv_config,
    **{
        f"nn.functional.conv.{name}": functional
        for name in ("conv", "conv_mode", "hash", "hash.hash", "hash.query", "kmap", "kmap.downsample")
    },
    "nn.modules": modules,
    "nn.modules.bev": bev,
    **{f"nn.modules.{name}": modules for name in ("activation", "conv", "crop", "norm", "pooling")},
    "nn.utils": nn_utils,
    "nn.utils.apply": nn_utils,
    "nn.utils.kernel": nn_utils,
    "operators": operators,
    "tensor": tensor,
    "utils": utils,
    "utils.collate": collate,
    "utils.quantize": quantize,
    "utils.tensor_cache": tensor,
    "utils.to_dense": utils,
    "utils.tune": tuning,
    "utils.utils": utils,
}
_NAMES = Names("torchsparse", sys.modules[__name__], _MODULES)

_UTILS = "it is in torchsparse.utils.{} since version 1.4"
__getattr__ = moved(
    "torchsparse",
    {
        "sparse_quantize": _UTILS.format("quantize"),
        "sparse_collate": _UTILS.format("collate"),
        "sparse_collate_fn": _UTILS.format("collate"),
        "sparse_tensor": "torchsparse.SparseTensor, or torchsparse.tensor, since version 1.4",
        "point_tensor": "torchsparse.PointTensor, or torchsparse.tensor, since version 1.4",
    },
)


def install(*, version: str = "2.1", force: bool = False) -> None:
    """Make ``import torchsparse`` and its submodules resolve to this package in this process.

    Args:
        version: whose coordinates tensors have, see `set_version`.
        force: hide the real torchsparse until `uninstall`, where it is imported already.

    Raises:
        RuntimeError: the real torchsparse is imported already.

    >>> install(force=True)
    >>> import torchsparse.nn as spnn
    >>> spnn.Conv3d.__module__
    'sparseconv.interop.torchsparse.nn.modules'
    >>> uninstall()
    """
    set_version(version)
    _NAMES.install(force)


def uninstall() -> None:
    """Undo `install`: take its names away, and give a library that it replaced its own back."""
    _NAMES.uninstall()


__all__ = [
    "PointTensor",
    "SparseTensor",
    "backbones",
    "backend",
    "backends",
    "cat",
    "conventions",
    "generative_add",
    "install",
    "nn",
    "set_version",
    "tensor",
    "tune",
    "uninstall",
    "utils",
]
