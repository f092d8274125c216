"""Networks as programs that hold their geometry: for any process with sparseconv, or for C++ without Python."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparseconv.compiler import operators as operators
from sparseconv.compiler import traced as traced

if TYPE_CHECKING:
    from sparseconv.export.gpu_package import package_for_gpu as package_for_gpu
    from sparseconv.export.packaging import CPP as CPP
    from sparseconv.export.packaging import package as package
    from sparseconv.export.program import export as export

#: public names and their modules, loaded when they are first used: every process needs the operators alone
HOMES = {"CPP": "packaging", "export": "program", "package": "packaging", "package_for_gpu": "gpu_package"}

__all__ = ["CPP", "export", "package", "package_for_gpu"]


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
