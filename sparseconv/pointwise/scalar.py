"""The scalar function of a pointwise function, jitted on first use."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparseconv.pointwise.kernel import cache as files
from sparseconv.pointwise.kernel import codegen


@dataclass(frozen=True)
class Deferred:
    """A scalar function named by its module, which is imported when a kernel is first needed.

    It lets a module offer pointwise functions where Triton is missing: on CPU tensors the twin runs.

    Example:
        >>> Deferred("sparseconv.pointwise.scalars.activations", "relu").name
        'relu'
    """

    module: str
    name: str

    def load(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


@dataclass(frozen=True)
class Composed:
    """A scalar function that calls others: ``def name(parameters): return expression``, ``bindings`` known in it."""

    name: str
    parameters: str
    expression: str
    bindings: tuple[tuple[str, ScalarFunction], ...]

    def load(self) -> Any:
        text = codegen.call_source(self.name, self.parameters, self.expression, f"The scalar function `{self.name}`.")
        module = files.load(files.store(self.name, text), text, {name: f.jitted for name, f in self.bindings})
        return getattr(module, self.name)


class ScalarFunction:
    """A function of scalars written in Triton's language: jitted already, to be jitted, or to be imported.

    Args:
        given: what ``triton.jit`` returned, a plain function, a `Deferred` or a `Composed`.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._jitted: Any = None
        self._lock = threading.Lock()
        self.name: str = given.name if isinstance(given, (Deferred, Composed)) else given.__name__

    @property
    def python(self) -> Callable[..., Any] | None:
        """The Python function behind it, if that is known without importing anything."""
        if isinstance(self._given, (Deferred, Composed)):
            return None
        return getattr(self._given, "fn", self._given)

    @property
    def num_parameters(self) -> int | None:
        return None if self.python is None else len(inspect.signature(self.python).parameters)

    @property
    def defaults(self) -> tuple[Any, ...]:
        """Default values of the last parameters."""
        if self.python is None:
            return ()
        parameters = inspect.signature(self.python).parameters.values()
        return tuple(p.default for p in parameters if p.default is not inspect.Parameter.empty)

    @property
    def jitted(self) -> Any:
        """The Triton function; importing Triton happens here."""
        if self._jitted is None:
            with self._lock:
                if self._jitted is None:
                    self._jitted = self._load()
        return self._jitted

    def _load(self) -> Any:
        try:
            import triton
        except ImportError as error:
            raise ImportError(
                f"{self.name}: a kernel needs Triton, which is not installed (pip install triton)"
            ) from error
        given = self._given.load() if isinstance(self._given, (Deferred, Composed)) else self._given
        return triton.jit(given) if inspect.isfunction(given) else given

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter runs it, which it does on CPU tensors too."""
        from triton.runtime.interpreter import InterpretedFunction

        return isinstance(self.jitted, InterpretedFunction)
