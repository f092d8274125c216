"""Another library's module names, made to resolve to modules of ours in this process, and given back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType


class Names:
    """Module names and what they are to resolve to.

    Args:
        modules: full name -> module; the first one names the library. Its other submodules are hidden meanwhile.
    """

    def __init__(self, modules: Mapping[str, ModuleType]) -> None:
        self._modules = dict(modules)
        self._tops = {name.split(".")[0] for name in self._modules}
        #: modules of the real library while they are hidden
        self._hidden: dict[str, ModuleType] = {}

    def install(self, force: bool) -> None:
        """Make the names resolve to the modules.

        Raises:
            RuntimeError: the real library is imported already, and ``force`` does not ask to hide it.
        """
        name, ours = next(iter(self._modules.items()))
        present = sys.modules.get(name)
        if present is not None and present is not ours and not force:
            raise RuntimeError(
                f"{name} is imported already, from {getattr(present, '__file__', '?')}: call install() before anything "
                "imports it, or pass force=True"
            )
        self.uninstall()
        for name in [n for n in sys.modules if n.split(".")[0] in self._tops]:
            self._hidden[name] = sys.modules.pop(name)
        sys.modules.update(self._modules)

    def uninstall(self) -> None:
        """Take the names away, and give a library that they replaced its own back."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.modules.update(self._hidden)
        self._hidden.clear()
