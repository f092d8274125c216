"""spconv 2.x by its own names, on sparseconv: change one import, keep the model and its weights.

    import sparseconv.interop.spconv.pytorch as spconv

For code that cannot be edited, `install` makes ``import spconv`` resolve to this package.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from sparseconv.interop.spconv import constants
from sparseconv.interop.spconv.core import AlgoHint, ConvAlgo

#: the version whose surface this is
__version__ = "2.3.8"
SPCONV_VERSION_NUMBERS = [2, 3, 8]

_MODULES = (
    "constants",
    "core",
    "utils",
    "pytorch",
    *(
        f"pytorch.{name}"
        for name in ("constants", "conv", "core", "functional", "identity", "modules", "ops", "pool", "tables", "utils")
    ),
)

#: modules of the real library while `install` hides them
_hidden: dict[str, ModuleType] = {}


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
    present = sys.modules.get("spconv")
    if present is not None and present.__name__ != __name__ and not force:
        raise RuntimeError(
            f"spconv is imported already, from {getattr(present, '__file__', '?')}: call install() before anything "
            "imports it, or pass force=True"
        )
    uninstall()
    for name in [n for n in sys.modules if n.split(".")[0] == "spconv"]:
        _hidden[name] = sys.modules.pop(name)
    sys.modules["spconv"] = sys.modules[__name__]
    for name in _MODULES:
        sys.modules[f"spconv.{name}"] = importlib.import_module(f"{__name__}.{name}")


def uninstall() -> None:
    """Undo `install`: take its names away, and give a library that it replaced its own back."""
    for name in ("spconv", *(f"spconv.{n}" for n in _MODULES)):
        module = sys.modules.get(name)
        if module is not None and module.__name__.startswith(__name__):
            del sys.modules[name]
    sys.modules.update(_hidden)
    _hidden.clear()


__all__ = ["SPCONV_VERSION_NUMBERS", "AlgoHint", "ConvAlgo", "constants", "install", "uninstall"]
