"""Another library's module names, made to resolve to modules of ours in this process, and given back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


class Names:
    """Module names and what they are to resolve to.

    Args:
        library: the name of the other library.
        package: ours, which takes its place.
        modules: module of ours for each of its submodules, ``"nn.functional"``. Below our package they resolve by
            their names there, too, so that code with one import changed finds them.
        beside: full names of its other modules. Further submodules of the library are hidden while it is installed.
    """

    def __init__(
        self,
        library: str,
        package: ModuleType,
        modules: Mapping[str, ModuleType],
        beside: Mapping[str, ModuleType] | None = None,
    ) -> None:
        self._modules = {library: package, **{f"{library}.{name}": m for name, m in modules.items()}, **(beside or {})}
        self._tops = {name.split(".")[0] for name in self._modules}
        #: modules of the real library while they are hidden
        self._hidden: dict[str, ModuleType] = {}
        for name in sorted(modules, key=lambda name: name.count(".")):
            resolve(f"{package.__name__}.{name}", modules[name])

    def install(self, *, force: bool = False) -> None:
        """Make ``import`` of the other library's names give these modules, in this process.

        Raises:
            RuntimeError: the real library is imported already; ``force=True`` hides it until `uninstall`.
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
        """Undo `install`: take the names away, and give a library that they replaced its own back."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.modules.update(self._hidden)
        self._hidden.clear()


def resolve(name: str, module: ModuleType) -> None:
    """Let a name of this package be imported that has no file, as a module and as an attribute of the one above it.

    Where the module above has such an attribute, a function of the same name, it stays.
    """
    sys.modules.setdefault(name, module)
    above, _, last = name.rpartition(".")
    if last not in vars(sys.modules[above]):
        setattr(sys.modules[above], last, module)


def moved(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """``__getattr__`` of a module: what to write in place of names that older versions of a library had there."""

    def missing(name: str) -> Any:
        advice = f": {places[name]}" if name in places else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{advice}")

    return missing
