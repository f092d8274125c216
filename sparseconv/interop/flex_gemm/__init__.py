"""FlexGEMM by its own names, on sparseconv: change one import, keep the model and its weights.

    import sparseconv.interop.flex_gemm as flex_gemm
    from sparseconv.interop.flex_gemm.ops.spconv import sparse_submanifold_conv3d

For code that cannot be edited, `install` makes ``import flex_gemm`` resolve to this package.
"""

from __future__ import annotations

import sys

from sparseconv.interop.flex_gemm import ops, utils
from sparseconv.interop.flex_gemm.ops import grid_sample, serialize, spconv
from sparseconv.interop.installing import Names

#: settings of FlexGEMM's own autotuner, without effect
USE_AUTOTUNE_CACHE = False
AUTOSAVE_AUTOTUNE_CACHE = False
AUTOTUNE_CACHE_PATH = ""


_NAMES = Names(
    "flex_gemm",
    sys.modules[__name__],
    {
        "ops": ops,
        "ops.grid_sample": grid_sample,
        "ops.grid_sample.grid_sample": grid_sample,
        "ops.grid_sample.grid_sample_torch": grid_sample,
        "ops.serialize": serialize,
        "ops.spconv": spconv,
        "ops.spconv.sparse_conv3d": spconv,
        "ops.spconv.submanifold_conv3d": spconv,
        "utils": utils,
        "utils.autotuner": utils,
    },
)


install, uninstall = _NAMES.install, _NAMES.uninstall

__all__ = [
    "AUTOSAVE_AUTOTUNE_CACHE", "AUTOTUNE_CACHE_PATH", "USE_AUTOTUNE_CACHE", "install", "ops", "uninstall", "utils",
]  # fmt: skip
