"""Who is told of every launch of a Triton kernel, so that a sequence of launches can be written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: called with Triton's compiled kernel, the grid and the values of the kernel's parameters, constants left out, before
#: each launch of any thread; launchers look here at each launch, so that it is empty where nobody listens
listeners: list[Callable[[Any, tuple[int, int, int], Sequence[Any]], None]] = []


def tell(kernel: Any, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
    """Tell all listeners of a launch."""
    for listener in tuple(listeners):
        listener(kernel, grid, values)


def parameters(kernel: Any) -> list[str]:
    """Triton's types of a compiled kernel's parameters, constants left out: ``*fp32``, ``i32``, ``fp32``."""
    return [kind for kind in kernel.src.signature.values() if kind != "constexpr"]
