"""spconv 2.x by its own names, on sparseconv: change one import, keep the model and its weights.

    import sparseconv.interop.spconv.pytorch as spconv

For code that cannot be edited, `install` makes ``import spconv`` resolve to this package.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from sparseconv.interop.installing import Names
from sparseconv.interop.spconv import constants, core, hash, pytorch, utils
from sparseconv.interop.spconv.core import AlgoHint, ConvAlgo

#: the version whose surface this is
__version__ = "2.3.8"
SPCONV_VERSION_NUMBERS = [2, 3, 8]

_PYTORCH = {
    name: import_module(f"{__name__}.pytorch.{name}")
    for name in ("constants", "conv", "core", "functional", "modules", "ops", "pool", "utils")
}
_PYTORCH |= {"hash": hash, **dict.fromkeys(("identity", "spatial", "tables"), _PYTORCH["modules"])}
_NAMES = Names(
    "spconv",
    sys.modules[__name__],
    {
        "constants": constants,
        "core": core,
        "utils": utils,
        "pytorch": pytorch,
        **{f"pytorch.{name}": module for name, module in _PYTORCH.items()},
    },
)
install, uninstall = _NAMES.install, _NAMES.uninstall


def __getattr__(name: str) -> Any:
    """What to write for names that spconv 1.x had here."""
    advice = ""
    if name.startswith(("Sparse", "SubM")) or name in ("ops", "functional", "modules", "ToDense", "RemoveGrid"):
        advice = f": spconv 2 has it in spconv.pytorch, so write `import spconv.pytorch as spconv` for spconv.{name}"
    raise AttributeError(f"module 'spconv' has no attribute {name!r}{advice}")


__all__ = [
    "SPCONV_VERSION_NUMBERS", "AlgoHint", "ConvAlgo", "constants", "install", "uninstall",
]  # fmt: skip
