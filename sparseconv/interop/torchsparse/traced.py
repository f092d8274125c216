"""What a cache keeps while torch traces, and what ends up in an ordinary one after the program has run."""

from __future__ import annotations

from typing import Any, TypeAlias

from sparseconv.geometry.grid import VoxelGrid
from sparseconv.interop.arguments import settled
from sparseconv.torch_private import tracing

#: of `sparseconv.interop.torchsparse.tensor`, which imports this file
TensorCache: TypeAlias = Any


class TracedCache:
    """What a `TensorCache` is in a trace.

    Attributes:
        outer: the cache of the caller that this one stands for, None for one of the trace.
        ordinary: the cache that it became, once somebody asked for it after the program had run.
        cmaps: stride -> (coords, spatial range).
        kmaps: (stride, kernel size, stride of the layer, dilation) -> the plan of the layer.
        grids: stride -> (coords, the grid of them).
    """

    def __init__(self, outer: TensorCache | None) -> None:
        self.outer = outer
        self.ordinary: Any = None
        self.cmaps: dict[Any, Any] = {}
        self.kmaps: dict[Any, Any] = {}
        self.hashmaps: dict[Any, Any] = {}
        self.grids: dict[Any, Any] = {}

    @classmethod
    def of(cls, outer: TensorCache, inner: Any) -> TracedCache:
        """A cache with the coordinates of another one, which stays as it is: looked at anew at each run."""
        made = TracedCache(outer)
        for stride, known in outer.cmaps.items():
            steps: Any = stride
            made.cmaps[settled(steps)] = known if isinstance(known, tuple) else (known, None)
        for stride, held in outer.grids.items():
            given: Any = stride
            steps = settled(given)
            made.grids[steps] = held[0], VoxelGrid(inner(held[0], steps), held[3].batch_size)
        return made

    def left(self, new: Any, own: Any) -> TensorCache:
        """An ordinary cache with what the program made."""
        if self.ordinary is None:
            made = self.ordinary = new() if self.outer is None else self.outer
            for stride, known in self.cmaps.items():
                made.cmaps.setdefault(stride, known)
            for stride, (coords, grid) in self.grids.items():
                if stride not in made.grids:
                    made.grids[stride] = coords, coords._version, own(coords), grid.real
            for key, plan in self.kmaps.items():
                made.kmaps.setdefault(key, plan.real)
        return self.ordinary


def met(caches: Any, inner: Any, new: Any, own: Any) -> Any:
    """A tensor's cache: one of the trace while torch traces, an ordinary one else."""
    is_traced = isinstance(caches, TracedCache)
    if not tracing():
        return caches.left(new, own) if is_traced else caches
    if is_traced:
        return caches if caches.ordinary is None else TracedCache.of(caches.ordinary, inner)
    return TracedCache.of(caches, inner)
