"""spconv 2.x by its own names, on sparseconv: change one import, keep the model and its weights.

    import sparseconv.interop.spconv.pytorch as spconv

For code that cannot be edited, `install` makes ``import spconv`` resolve to this package.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Any

from sparseconv.interop.installing import Names
from sparseconv.interop.spconv import constants
from sparseconv.interop.spconv.core import AlgoHint, ConvAlgo

#: the version whose surface this is
__version__ = "2.3.8"
SPCONV_VERSION_NUMBERS = [2, 3, 8]

#: by spconv's names
_MODULES = {
    "constants": "constants",
    "core": "core",
    "utils": "utils",
    "pytorch": "pytorch",
    "pytorch.hash": "hash",
    "pytorch.identity": "pytorch.modules",
    "pytorch.spatial": "pytorch.modules",
    "pytorch.tables": "pytorch.modules",
    **{
        f"pytorch.{name}": f"pytorch.{name}"
        for name in ("constants", "conv", "core", "functional", "modules", "ops", "pool", "utils")
    },
}


@cache
def _names() -> Names:
    found = {name: importlib.import_module(f"{__name__}.{ours}") for name, ours in _MODULES.items()}
    return Names("spconv", sys.modules[__name__], found)


def __getattr__(name: str) -> Any:
    """What to write for names that spconv 1.x had here."""
    advice = ""
    if name.startswith(("Sparse", "SubM")) or name in ("ops", "functional", "modules", "ToDense", "RemoveGrid"):
        advice = f": spconv 2 has it in spconv.pytorch, so write `import spconv.pytorch as spconv` for spconv.{name}"
    raise AttributeError(f"module 'spconv' has no attribute {name!r}{advice}")


def install(*, force: bool = False) -> None:
    """Make ``import spconv`` and its submodules resolve to this package in this process.

    Raises:
        RuntimeError: the real spconv is imported already; ``force=True`` hides it until `uninstall`.

    >>> install(force=True)
    >>> import spconv.pytorch as spconv
    >>> spconv.SubMConv3d.__module__
    'sparseconv.interop.spconv.pytorch.conv'
    >>> uninstall()
    """
    _names().install(force=force)


def uninstall() -> None:
    """Undo `install`: take its names away, and give a library that it replaced its own back."""
    _names().uninstall()


__all__ = [
    "SPCONV_VERSION_NUMBERS", "AlgoHint", "ConvAlgo", "constants", "install", "uninstall",
]  # fmt: skip
