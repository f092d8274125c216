"""torchsparse by its own names, on sparseconv: change one import, keep the model and its weights.

    import sparseconv.interop.torchsparse as torchsparse
    import sparseconv.interop.torchsparse.nn as spnn

For code that cannot be edited, `install` makes ``import torchsparse`` resolve to this package. Coordinates are those of
version 2.1, the batch first; `set_version` chooses those of 1.4 and 2.0.
"""

from __future__ import annotations

import sys

from sparseconv.interop.installing import Names, moved
from sparseconv.interop.torchsparse import backbones, backend, conventions, nn, tensor, utils
from sparseconv.interop.torchsparse.backend import tune
from sparseconv.interop.torchsparse.conventions import set_version
from sparseconv.interop.torchsparse.nn import functional, modules
from sparseconv.interop.torchsparse.tensor import PointTensor, SparseTensor, cat, generative_add

#: the version whose surface this is
__version__ = "2.1.0"


_FUNCTIONS = (
    "activation conv conv.conv conv.conv_mode conv.hash conv.hash.hash conv.hash.query conv.kmap conv.kmap.downsample "
    "count crop devoxelize downsample hash pooling query voxelize"
)
#: submodules of torchsparse, and the modules here that have their names
_MODULES = {
    **dict.fromkeys(("backbones", "backbones.modules", "backbones.modules.blocks"), backbones),
    **dict.fromkeys(("backbones.resnet", "backbones.unet"), backbones),
    **dict.fromkeys(("backend", "backends", "utils.tune"), backend),
    "nn": nn,
    "nn.functional": functional,
    **dict.fromkeys((f"nn.functional.{name}" for name in _FUNCTIONS.split()), functional),
    "nn.functional.conv.conv_config": conventions,
    "nn.modules": modules,
    **dict.fromkeys(
        (f"nn.modules.{name}" for name in ("activation", "bev", "conv", "crop", "norm", "pooling")), modules
    ),
    **dict.fromkeys(("nn.utils", "nn.utils.apply", "nn.utils.kernel"), modules),
    **dict.fromkeys(("operators", "tensor", "utils.tensor_cache"), tensor),
    **dict.fromkeys(("utils", "utils.collate", "utils.quantize", "utils.to_dense", "utils.utils"), utils),
}
backends = backend
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
    _NAMES.install(force=force)


uninstall = _NAMES.uninstall

__all__ = [
    "PointTensor", "SparseTensor", "backbones", "backend", "backends", "cat", "conventions", "generative_add",
    "install", "nn", "set_version", "tensor", "tune", "uninstall", "utils",
]  # fmt: skip
