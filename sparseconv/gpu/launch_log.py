"""Who is told of every launch of a Triton kernel, so that a sequence of launches can be written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: told of each launch of any thread: Triton's compiled kernel, or the name of what is none, the grid, and the values of
#: the kernel's parameters without constants. Launchers look here first, so it is empty where nobody listens
listeners: list[Callable[[Any, tuple[int, int, int], Sequence[Any]], None]] = []


def tell(kernel: Any, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
    """Tell all listeners of a launch."""
    for listener in tuple(listeners):
        listener(kernel, grid, values)


def parameters(kernel: Any) -> list[str]:
    """Triton's types of a compiled kernel's parameters, constants left out: ``*fp32``, ``i32``, ``fp32``."""
    return [kind for kind in kernel.src.signature.values() if kind != "constexpr"]
